"""How texts are counted and told of, without more of their tokens than that takes."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from another_user import as_root
from harness import CHECKOUT
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from gateway.bodies import TeiTokenize
from gateway.call import Call
from gateway.errors import ApiError
from gateway.texts import Texts
from gateway.tokens import measure
from gateway.upstream import Upstream

# One character, which NFKC makes 18 of.
BLESSING = "\ufdfa"


class Watched:
    """A tokenizer that knows how many tokens it held at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.held = tokenizer, 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        encodings = self._tokenizer.encode_batch_fast(texts, **options)
        self.held = max(self.held, sum(map(len, encodings)))
        return encodings

    def num_special_tokens_to_add(self, is_pair: bool) -> int:
        return self._tokenizer.num_special_tokens_to_add(is_pair)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def by_letters() -> Watched:
    """As XLM-R's of what its vocabulary lacks."""
    letters = [chr(code) for code in (*range(33, 127), *range(0x600, 0x700))]
    tokenizer = Tokenizer(models.BPE({"?": 0, **{each: number for number, each in enumerate(letters, 1)}}, []))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Watched(tokenizer)


@pytest.fixture
def by_words() -> Watched:
    """As BERT's, which makes one token of what is longer than a hundred letters."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "x": 1, "##x": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Watched(tokenizer)


def find_lengths(tokenizer: Watched, texts: list[str], most: int) -> dict[str, Any]:
    return dict(measure(cast(Tokenizer, tokenizer), texts, most))


def test_a_text_is_counted_as_it_is_and_a_much_too_long_one_by_its_beginning(by_letters: Watched) -> None:
    texts = ["", "word", "word " * 40_000, BLESSING * 10, f"{' ' * 100_000}é word", f"{BLESSING * 4096}{' ' * 9}x"]
    lengths = find_lengths(by_letters, texts, 1 << 20)
    assert [lengths[text].tokens for text in texts] == [by_letters.count(text) for text in texts]
    assert all(length.is_whole for length in lengths.values())
    for text in ("word " * 40_000, BLESSING * 131_072, " " * 70_000 + BLESSING * 60_000):
        found = find_lengths(by_letters, [text], 64)[text]
        assert found.tokens > 64 and not found.is_whole


def test_of_no_text_far_more_tokens_are_held_than_the_model_reads(by_letters: Watched) -> None:
    for texts in (
        [BLESSING * 131_072],
        [" " * 70_000 + BLESSING * 60_000],
        [f"{BLESSING * 60}{i}" for i in range(2000)],
    ):
        find_lengths(by_letters, texts, 64)
    assert by_letters.held < 100_000


def test_a_text_of_long_words_is_not_taken_for_a_longer_one(by_words: Watched) -> None:
    for words in ("x" * 150, "x" * 99 + "y" * 2, "y" * 101):
        text = f"{words} " * 1000
        for most in (900, 1000):
            length = find_lengths(by_words, [text], most)[text]
            assert (length.tokens > most) == (by_words.count(text) > most)


def ask(tokenizer: Tokenizer, texts: list[str], holds: list[int]) -> list[list[dict[str, Any]]]:
    """Return what is told of texts; `holds` gets what room was asked for."""
    served = SimpleNamespace(files=SimpleNamespace(tokenizer=tokenizer))
    upstream = SimpleNamespace(timeout_s=30, find_of=lambda *_: served)
    call = Call("/tokenize", caller="a")
    call.hold = holds.append
    made = asyncio.run(Texts(cast(Upstream, upstream), ()).tei_tokenize(call, TeiTokenize(inputs=texts)))
    (held,) = holds
    assert len(made) <= held < 3 * len(made)
    told: list[list[dict[str, Any]]] = json.loads(made)
    return told


def test_every_token_is_told_of_and_its_room_taken_before(by_letters: Watched) -> None:
    tokenizer = by_letters._tokenizer
    texts = ["a b", "word " * 1000, "word", "word", f'{BLESSING} é"\\\x01']
    wanted = [
        [
            {"id": number, "text": text, "special": False, "start": start, "stop": stop}
            for number, text, (start, stop) in zip(each.ids, each.tokens, each.offsets, strict=True)
        ]
        for each in tokenizer.encode_batch(texts)
    ]
    assert ask(tokenizer, texts, []) == wanted
    assert ask(tokenizer, [" ", "a"], []) == [[], wanted[0][:1]]


def test_more_tokens_than_are_told_of_are_refused_before_there_are_any(by_letters: Watched) -> None:
    holds: list[int] = []
    with pytest.raises(ApiError, match="inputs is too long: expected at most 131072 tokens, got more; ask in parts"):
        ask(cast(Tokenizer, by_letters), [BLESSING * 5000, BLESSING * 4999], holds)
    assert not holds and by_letters.held < 100_000


_START = """
import os, resource, sys
from gateway.tokens import start_threads
from gateway.errors import GatewayError
os.setresuid(54321, 54321, 54321)
resource.setrlimit(resource.RLIMIT_NPROC, (int(sys.argv[1]),) * 2)
try:
    start_threads()
except GatewayError as exc:
    print(exc)
"""


@as_root
@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (1, "texts cannot be tokenized: expected threads for that, got '"),
        (8, "too few threads may run: expected 12 more to be started, got 5 and 'can't start new thread'"),
    ],
)
def test_threads_that_cannot_be_started_are_told_in_one_sentence(limit: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _START, str(limit)],
        cwd=CHECKOUT,
        env={**os.environ, "RAYON_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(told)
    assert "; raise the limit on threads (ulimit -u" in done.stdout
