"""What the gateway reads of a published version: its tokenizer, its chat template, its defaults."""

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2 as pb

from .chat import ChatTemplate
from .errors import refuse
from .tokens import Length, measure, weigh
from .turns import Turns

# Beyond what so many characters of ASCII take, a request is tokenized beside the event loop, which would stand still
# for milliseconds; and so many of them in one turn, which take a tenth of a second.
_AT_ONCE, _IN_TURN = 8192, 128 * 1024

# Characters of a text that are looked at, or so many for each token that the model reads: the server refuses a longer
# one that has no more tokens there.
_BEGINNING, _BEGINNING_OF_TOKEN = 128 * 1024, 32

# How many texts a server writes at a time, and for how many it does where nobody has said it.
_SEQUENCES = "max_num_seqs"
_TEXTS_AT_A_TIME = {"openvino_generate": 64, "vllm": 256}

# Of a vector of 4,096 numbers in 16 bits.
_UNIT_WITHIN = 1e-2

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Published:
    """The files of one version.

    Attributes:
        tokenizer: Its tokenizer, without cutting.
        most: Tokens that the model reads of a text or a pair at most; None for any number.
        chat: How a conversation becomes a prompt; None where the version does not say it.
        context: Tokens of a prompt and its answer together; 0 where it writes no text.
        texts_at_a_time: Texts that its server writes at a time.
        defaults: Parameters of a request that does not say them.
        has_unit_vectors: Whether the vectors that are recorded of it are of length 1, and so made by the model.
        created: When it was published, in seconds since 1970.
    """

    tokenizer: Tokenizer
    most: int | None
    chat: ChatTemplate | None
    context: int
    texts_at_a_time: int
    defaults: dict[str, Any]
    has_unit_vectors: bool
    created: int

    async def count(self, param: str, rows: Sequence[Row], *, may_cut: bool, turns: Turns, caller: str) -> int:
        """Return how many tokens the model reads of all rows together.

        A text that is in several rows, as a query is beside each of its documents, is tokenized once.

        Args:
            param: What the caller calls the rows.
            rows: A text or a pair each.
            may_cut: Whether the caller takes an answer to the beginning of a text that is too long.
            turns: Those of all whose texts are tokenized, by what these weigh.
            caller: Who asks.

        Raises:
            ApiError: A row is too long and may not be cut, or no token of the model's stands for what it holds, or its
                turn does not come.
        """
        known: set[str] = set()
        sizes = []
        for row in rows:
            sizes.append(sum(weigh(text[: self._beginning]) for text in row if text not in known))
            known.update(row)
        lengths: dict[str, Length] = {}
        if sum(sizes) <= _AT_ONCE:
            return self._count(param, rows, 0, may_cut, lengths)
        tokens = had = 0
        for part in _cut(sizes):
            size = sum(sizes[part])
            count = partial(asyncio.to_thread, self._count, param, rows[part], part.start, may_cut, lengths)
            tokens += await turns.run(caller, had, size, count)
            had += size
        return tokens

    @property
    def _beginning(self) -> int:
        return max(_BEGINNING, _BEGINNING_OF_TOKEN * (self.most or 0))

    def _count(self, param: str, rows: Sequence[Row], start: int, may_cut: bool, lengths: dict[str, Length]) -> int:
        """Return the tokens of some rows; `lengths` has those of texts that were tokenized, and gets the others'."""
        self._measure(param, {text for row in rows for text in row} - lengths.keys(), lengths)
        tokens = 0
        for index, row in enumerate(rows, start):
            # The texts of a pair are tokenized each on its own, and cut together.
            of_row = [lengths[text] for text in row]
            is_whole = all(length.is_whole for length in of_row)
            if self.most is None and not is_whole:
                raise refuse(
                    param,
                    f"{param}[{index}] is too long",
                    expected=f"at most {_BEGINNING} characters, and as many tokens",
                    got="more",
                    remedy="cut it",
                )
            found = self.tokenizer.num_special_tokens_to_add(len(row) > 1) + sum(length.tokens for length in of_row)
            read = found if self.most is None else min(found, self.most)
            if read < found and not may_cut:
                raise refuse(
                    param,
                    f"{param}[{index}] is too long for the model",
                    expected=f"at most {self.most} tokens",
                    got=str(found) if is_whole else f"{found} in its beginning",
                    remedy="cut it, or pass truncate_prompt_tokens -1 (truncate true on TEI's paths)",
                )
            tokens += read
        return tokens

    def _measure(self, param: str, texts: Iterable[str], lengths: dict[str, Length]) -> None:
        most = _BEGINNING if self.most is None else self.most
        beginnings: dict[str, list[str]] = {}
        for text in texts:
            beginnings.setdefault(text[: self._beginning], []).append(text)
        try:
            for beginning, length in measure(self.tokenizer, beginnings, most):
                for text in beginnings[beginning]:
                    is_whole = length.is_whole and len(beginning) == len(text)
                    lengths[text] = Length(length.tokens, is_whole)
        # The library raises plain Exception for a text that its model has no token for.
        except Exception as exc:
            raise refuse(param, f"{param} cannot be tokenized", expected="text", got=f"'{exc}'") from None


def _cut(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield the rows that are tokenized at once, at least one at a time."""
    start = held = 0
    for row, size in enumerate(sizes):
        if row > start and held + size > _IN_TURN:
            yield slice(start, row)
            start, held = row, 0
        held += size
    yield slice(start, len(sizes))


def read_published(repository: Path, name: str, version: str) -> Published:
    """Return the files of a version, wherever the kind of its model keeps them (docs/contracts.md).

    Raises:
        OSError: They are not there.
        ValueError: They cannot be read.
    """
    folder = repository / name / version
    steps = repository / f"{name}_preprocess" / version / "tokenizer.json"
    path = steps if steps.is_file() else folder / "tokenizer.json"
    content = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(content)
    # Plain Exception again.
    except Exception as exc:
        raise ValueError(f"{path}: {exc}") from exc
    most = (tokenizer.truncation or {}).get("max_length")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    said = _read_json(folder / "generation.json")
    return Published(
        tokenizer=tokenizer,
        most=most,
        chat=_read_chat(folder) if said else None,
        context=said.get("context", 0),
        texts_at_a_time=_read_texts_at_a_time(folder),
        defaults=said.get("defaults", {}),
        has_unit_vectors=_has_unit_vectors(folder / "golden.json"),
        created=int(folder.stat().st_mtime),
    )


def _read_texts_at_a_time(folder: Path) -> int:
    """Return what the backend was told, of CPUs in the model's configuration, of GPUs beside the weights."""
    path = folder.parent / "config.pbtxt"
    try:
        config = text_format.Parse(
            path.read_text("utf-8") if path.is_file() else "", pb.ModelConfig(), allow_unknown_field=True
        )
        said = _read_json(folder / "model.json").get(_SEQUENCES) or config.parameters[_SEQUENCES].string_value
        return int(said or _TEXTS_AT_A_TIME.get(config.backend, 64))
    except (text_format.ParseError, TypeError, ValueError) as exc:
        raise ValueError(f"{path}: {exc}") from exc


def _has_unit_vectors(path: Path) -> bool:
    try:
        outputs = [each for sample in _read_json(path).get("samples", []) for each in sample["outputs"]]
        vectors = [each["data"] for each in outputs if each["name"] == "EMBEDDING" and each["shape"][0] == 1]
        lengths = [math.hypot(*vector) for vector in vectors]
    except (LookupError, TypeError) as exc:
        raise ValueError(f"{path}: recorded answers that are none") from exc
    return bool(lengths) and all(abs(length - 1) < _UNIT_WITHIN for length in lengths)


def _read_chat(folder: Path) -> ChatTemplate | None:
    """Return the template as transformers finds it: a file of its own, or a field of the tokenizer's settings."""
    settings = _read_json(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    text = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(text, list):
        text = {entry["name"]: entry["template"] for entry in text}.get("default")
    if not text:
        return None
    special = {name: value for name, value in settings.items() if name.endswith("_token")}
    return ChatTemplate(
        text,
        {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in special.items()
            if isinstance(value, (str, dict))
        },
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
