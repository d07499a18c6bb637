"""The pure half of the backend `python_preprocess`; the other half is tested where it runs, inside tritonserver."""

import random
from pathlib import Path

import pytest
from harness import Exported, load_backend
from tokenizers import Tokenizer, models, pre_tokenizers, processors

tokenization = load_backend("python_preprocess", "tokenization")


def test_a_file_without_truncation_or_padding_is_refused(tmp_path: Path, exported: Exported) -> None:
    tokenizer = Tokenizer.from_file(str(exported.tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="sets no padding or no truncation"):
        tokenization.TextTokenizer(tmp_path / "tokenizer.json", ["input_ids"])


def test_an_output_that_no_tokenizer_makes_is_refused(exported: Exported) -> None:
    with pytest.raises(ValueError, match="a tokenizer does not make scores"):
        tokenization.TextTokenizer(exported.tokenizer_file, ["input_ids", "scores"])


def build_unigram_without_unknown(path: Path) -> Path:
    """Write a tokenizer that fails as a whole batch on a character it has no token for."""
    tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("b", -1.0)]))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    tokenizer.save(str(path))
    return path


def test_a_text_that_fails_the_whole_batch_is_refused_alone(tmp_path: Path) -> None:
    tokenizer = tokenization.TextTokenizer(build_unigram_without_unknown(tmp_path / "tokenizer.json"), ["input_ids"])
    good, bad, empty, long = tokenizer.encode([("ab",), ("axb",), ("",), ("ababab",)])
    assert good.windows[0].ids == [0, 1]
    assert isinstance(bad, tokenization.TextError)
    assert "TEXT cannot be tokenised" in str(bad)
    assert str(empty) == tokenization.NO_TOKEN
    assert long.windows[0].ids == [0, 1, 0, 1]
    assert tokenizer.stack([good, long])["input_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]


def test_a_request_is_padded_to_the_first_length_that_holds_it(tmp_path: Path) -> None:
    path = build_unigram_without_unknown(tmp_path / "tokenizer.json")
    tokenizer = tokenization.TextTokenizer(path, ["input_ids", "attention_mask"], lengths=[2, 3])
    one, two, three, four = tokenizer.encode([("a",), ("ab",), ("aba",), ("abab",)])
    sizes = [tokenizer.stack(rows)["input_ids"].shape for rows in ([one], [two], [one, three], [four, one])]
    assert sizes == [(1, 2), (1, 2), (2, 3), (2, 4)], "one that is longer than all of them stays as long as it is"
    assert tokenizer.stack([one])["attention_mask"].tolist() == [[1, 0]]


@pytest.mark.parametrize("text", ["32,,64", "0", "32 64", "x", "-1"])
def test_lengths_that_are_no_numbers_are_refused(text: str) -> None:
    config = {"parameters": {"modelyard_lengths": {"string_value": text}}}
    with pytest.raises(ValueError, match="modelyard_lengths is wrong: expected numbers as in 32,64,128, got"):
        tokenization.read_lengths(config)
    assert tokenization.read_lengths({"parameters": {"modelyard_lengths": {"string_value": "64,32"}}}) == [32, 64]


def test_what_the_tokenizer_does_not_split_into_words_is_never_cut(tmp_path: Path) -> None:
    tokenizer = tokenization.TextTokenizer(build_unigram_without_unknown(tmp_path / "tokenizer.json"), ["input_ids"])
    whole, endless = tokenizer.encode([("ab" * (1 << 16),), ("ab" * (1 << 16) + "a",)])
    assert whole.windows[0].ids == [0, 1, 0, 1]
    assert str(endless) == (
        "a text is too long: expected at most 131072 characters of what cannot be cut before it is read, got 131073; "
        "cut it at the 4 tokens that the model reads"
    )


def test_a_text_without_tokens_lets_no_other_past_the_bound(tmp_path: Path) -> None:
    tokenizer = tokenization.TextTokenizer(build_unigram_without_unknown(tmp_path / "tokenizer.json"), ["input_ids"])
    # The library refuses both beginnings at once.
    unknown, endless, good = tokenizer.encode([("x" * 200,), ("ab" * (1 << 16) + "a",), ("ab" * 100,)])
    assert "TEXT cannot be tokenised" in str(unknown)
    assert str(endless).startswith("a text is too long: expected at most 131072 characters")
    assert good.windows[0].ids == [0, 1, 0, 1]


def test_a_pair_is_cut_only_where_the_longer_text_stays_the_longer(exported: Exported) -> None:
    tokenizer = Tokenizer.from_file(str(exported.tokenizer_file))
    shortening = tokenization.Shortening(tokenizer)
    tokens = tokenizer.truncation["max_length"]
    short, long = "a cat " * 3, "a cat sleeps " * 8 * tokens
    ((first, second),) = shortening.shorten([(short, long)])
    assert first == short
    assert second == long[: 8 * tokens]
    # Which of two long ones is the longer is told by the whole of both.
    beginning, more = long[: 8 * tokens], long[: 16 * tokens]
    assert shortening.shorten([(long, long), (long, long + "!"), (long + "!", long)]) == [
        *[(beginning, beginning)] * 2,
        (more, beginning),
    ]
    (refused,) = shortening.shorten([(long * tokens, long * tokens)])
    assert str(refused).startswith("a text is too long: expected at most 131072 characters")


@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize("tokens", [8, 9])
@pytest.mark.parametrize("kind", ["words", "no words"])
def test_of_two_long_texts_nothing_is_made_that_is_truncated(
    kind: str, tokens: int, direction: str, exported: Exported, tmp_path: Path
) -> None:
    """The library makes each window of the rest of the one beside each of the other: of 2 x 20,000 characters, 8 GB."""
    whole = Tokenizer.from_file(str(exported.tokenizer_file))
    if kind == "no words":
        whole = Tokenizer(models.Unigram([("<s>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5), ("aab", -1.6)]))
        whole.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 0)])
        whole.enable_padding()
    whole.enable_truncation(tokens, direction=direction)
    whole.save(str(tmp_path / "tokenizer.json"))
    whole.no_padding()
    tokenizer = tokenization.TextTokenizer(tmp_path / "tokenizer.json", ["input_ids"])
    generator = random.Random(tokens)
    pairs = []
    for _ in range(60):
        first, second = ("".join(generator.choices("ab", k=generator.choice([2, 30, 60, 61, 90]))) for _ in range(2))
        pairs.append((" ".join(first), " ".join(second)) if kind == "words" else (first, second))
    for (first, second), row in zip(pairs, tokenizer.encode(pairs), strict=True):
        wanted, (got,) = whole.encode(first, second), row.windows
        for name in ("ids", "type_ids", "attention_mask", "special_tokens_mask"):
            assert getattr(got, name) == getattr(wanted, name), (first, second)
        assert len(got.overflowing) < 100
    (row,) = tokenizer.encode([("ab" * 1000, "ba" * 1000)])
    assert not row.windows[0].overflowing


@pytest.mark.parametrize("tokens", [24, 25])
def test_two_long_texts_of_a_pair_are_truncated_as_they_would_be_uncut(exported: Exported, tokens: int) -> None:
    tokenizer, generator = Tokenizer.from_file(str(exported.tokenizer_file)), random.Random(tokens)
    tokenizer.no_padding()
    tokenizer.enable_truncation(tokens)
    shortening = tokenization.Shortening(tokenizer)
    words = [
        "word",
        "and",
        "é",
        "x.y,z;;",
        "12345678901",
        "unbelievableness",
        "https://a.b/c?d=e&f",
        "[SEP]",
        "日本語日本",
        "a",
        "b",
    ]
    for _ in range(40):
        first, second = (generator.sample(words, generator.choice([1, 2, 5])) for _ in range(2))
        rows = [" ".join(generator.choices(each, k=generator.choice([20, 60, 61]))) for each in (first, second)]
        (cut,) = shortening.shorten([(rows[0], rows[1])])
        (wanted, got) = tokenizer.encode(*rows), tokenizer.encode(*cut)
        assert (got.ids, got.type_ids) == (wanted.ids, wanted.type_ids)
    # Uncut, each of them would be a thousand windows, and each pair of these is made.
    long = "a cat sleeps " * 10_000
    ((first, second),) = shortening.shorten([(long, long)])
    assert len(first) < 1000 and len(second) < 1000


def test_decoding_names_the_row_and_the_byte() -> None:
    assert tokenization.decode_text("é".encode(), 0) == "é"
    with pytest.raises(tokenization.TextError, match="TEXT row 3 is not UTF-8: .* got 0xc3 at byte 1"):
        tokenization.decode_text(b"a\xc3", 3)


def test_windows_share_less_where_a_long_first_text_leaves_less(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    saved = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    saved.pre_tokenizer = pre_tokenizers.Whitespace()
    saved.enable_truncation(16, stride=8, strategy="only_second")
    saved.enable_padding()
    saved.save(str(path))
    tokenizer = tokenization.TextTokenizer(path, ["input_ids"], has_windows=True)

    def starts(row: "tokenization.TokenizedRow") -> list[int]:
        # Where the second text's first token in each window begins, in words of two characters.
        return [window.offsets[window.ids.index(1)][0] // 2 for window in row.windows]

    rows = [("a " * size, "b " * 20) for size in (7, 8, 12, 13, 16)] + [("a " * 13, "b " * 3)]
    roomy, half, quarter, less, full, fits = tokenizer.encode(rows)
    assert starts(roomy) == [*range(12)]
    assert starts(half) == [0, 4, 8, 12]
    assert starts(quarter) == [*range(0, 18, 2)]
    assert str(less).startswith(
        "TEXT leaves too little room for TEXT_PAIR, which is read in parts: expected at least 4"
    )
    assert str(full).startswith("TEXT leaves no room for TEXT_PAIR: expected fewer than 16 tokens")
    assert starts(fits) == [0], "what fits beside it needs no overlap"
