"""The parity gate: the ONNX file, run by ONNX Runtime, against the torch model that the checkpoint gave."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer

from export.artefacts import Artefacts
from export.comparison import is_within
from export.encoding import Question, Row
from export.errors import VerificationError
from export.signature import SEQ_LEN, WINDOWS
from export.targets import Target
from export.tasks import Outputs, Task

# Lengths in tokens that are tried besides the maximum: the two at which axes like to become constants, odd ones, one
# beyond the traced 7, and long ones.
_LENGTHS = (1, 2, 3, 7, 8, 31, 127)

# Texts whose expected answers are kept, to ask a running server for.
_GOLDEN_TEXTS = 16


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case that was tried: `rows` sequences of at most `seq_len` tokens.

    Attributes:
        errors: The worst among the rows, by the names of the task's tolerances.
        passed: Whether every error is within its tolerance; NaN is not.
    """

    name: str
    rows: int
    seq_len: int
    errors: Mapping[str, float]
    passed: bool

    @property
    def max_abs_error(self) -> float:
        """The largest difference, as the task counts it."""
        return self.errors["max_abs_error"]

    def to_json(self) -> dict[str, Any]:
        """Return everything in one flat object."""
        return {"name": self.name, "rows": self.rows, "seq_len": self.seq_len, "passed": self.passed, **self.errors}


@dataclass(frozen=True, kw_only=True)
class GoldenSample:
    """A text, or a pair, and what the checkpoint itself answers to it.

    Attributes:
        text: The first text.
        expected: Every value of the output that is compared by number, flat.
        pair: The second text, where the task takes pairs.
        others: Output name → every value of the other outputs, flat.
    """

    text: str
    expected: list[float]
    pair: str | None = None
    others: Mapping[str, list[Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what a `golden.json` holds of it; what does not apply is left out."""
        content: dict[str, Any] = {"text": self.text, "expected": self.expected}
        if self.pair is not None:
            content["pair"] = self.pair
        return content | ({"others": dict(self.others)} if self.others else {})


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """What was compared and found. Made only by `verify`; `publish` demands one that names the very bytes.

    Attributes:
        sha256: File name → hash of the bytes that were verified.
        cases: Everything that was tried.
        golden: Texts and expected answers, for the same check through a running server.
        golden_output: The output that is compared by number there.
        golden_tolerances: And how far it may be off.
        tolerances: Error → bound that every case must keep.
        texts_tokenized: Texts whose ids were equal in transformers and in the server's tokenizer.
        target: The Triton release.
        versions: Distribution → version of what made and ran the file.
    """

    sha256: dict[str, str]
    cases: list[CaseResult]
    golden: list[GoldenSample]
    golden_output: str
    golden_tolerances: Mapping[str, float]
    tolerances: Mapping[str, float]
    texts_tokenized: int
    target: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every case is within the tolerances."""
        return all(case.passed for case in self.cases)

    @property
    def worst(self) -> CaseResult:
        """A failed case before any other, then the one with the largest error; NaN counts as the largest."""
        return max(
            self.cases,
            key=lambda case: (not case.passed, math.inf if math.isnan(case.max_abs_error) else case.max_abs_error),
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything but the golden samples, which have a file of their own."""
        return {
            "sha256": self.sha256,
            "cases": [case.to_json() for case in self.cases],
            "texts_tokenized": self.texts_tokenized,
            "target": self.target,
            "versions": self.versions,
            "passed": self.passed,
            "tolerances": dict(self.tolerances),
        }


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Some sequences, run as batches of `batch_size`, padded to the longest of each batch.

    With `as_windows` each batch is one row of several windows.
    """

    name: str
    rows: list[Row]
    batch_size: int
    as_windows: bool = False


def verify(
    *,
    task: Task,
    files: Artefacts,
    added_tokens: Sequence[str],
    target: Target,
    on_case: Callable[[str], None] = lambda name: None,
) -> VerificationReport:
    """Compare the ONNX file with the task's module on real text, at every shape that matters. Does not judge.

    Expected values come from the torch module, one row at a time and without padding, on the ids that transformers'
    own tokenizer makes. So an error of the graph, of its mask, of batching or of the server's tokenizer all show.

    Args:
        task: The source of truth.
        files: What the export wrote.
        added_tokens: Tokens that the export added, to be tried one by one.
        target: Whose ONNX Runtime this must be.
        on_case: Called with the name of each case before it runs.

    Raises:
        VerificationError: The server's tokenizer makes other ids than transformers', or ONNX Runtime is not the
            target's, or cannot run the file.
    """
    _check_runtime(target)
    texts = read_verification_texts() + [f"{token} between words {token}" for token in added_tokens]
    questions = task.build_questions(texts)
    task.encoder.check_agrees(Tokenizer.from_file(str(files.tokenizer)), questions)
    session = _open_session(files.graph)
    results = []
    for case in _build_cases(task, questions, added_tokens):
        on_case(case.name)
        results.append(_run_case(case, task, session))
    output = next(tensor.name for tensor in task.signature.contract.answers if tensor.dtype == torch.float32)
    return VerificationReport(
        sha256={path.name: hash_file(path) for path in sorted(files.all)},
        cases=results,
        golden=_answer_golden(task, questions, output),
        golden_output=output,
        golden_tolerances=task.golden_tolerances,
        tolerances=task.tolerances,
        texts_tokenized=len(questions),
        target=target.release,
        versions={
            name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "onnx", "onnxruntime")
        },
    )


def _answer_golden(task: Task, questions: Sequence[Question], output: str) -> list[GoldenSample]:
    """Return what the checkpoint answers to the first questions and the last two, one with numbers first.

    A server asks the first one when it starts; an answer of nothing but zeros would prove little.
    """
    samples = []
    for question in [*questions[: _GOLDEN_TEXTS - 2], *questions[-2:]]:
        answer = dict(task.answer(question))
        samples.append(
            GoldenSample(
                text=question.text,
                pair=question.pair,
                expected=[float(value) for value in answer.pop(output)],
                others=answer,
            )
        )
    return sorted(samples, key=lambda sample: not any(sample.expected))


def read_verification_texts() -> list[str]:
    """Return the sentences that every export is checked on: several languages and scripts, short to long."""
    return resources.files("export").joinpath("verification_texts.txt").read_text(encoding="utf-8").splitlines()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of the file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _check_runtime(target: Target) -> None:
    if onnxruntime.__version__ != target.onnxruntime_version:
        raise VerificationError(
            f"this ONNX Runtime is not the one of Triton {target.release}",
            expected=target.onnxruntime_version,
            got=str(onnxruntime.__version__),
            remedy=f"pip install onnxruntime=={target.onnxruntime_version}",
        )


def _open_session(model_file: Path) -> onnxruntime.InferenceSession:
    try:
        return onnxruntime.InferenceSession(str(model_file), providers=["CPUExecutionProvider"])
    # ONNX Runtime raises one class per kind of fault, without a common base of its own.
    except Exception as exc:
        raise VerificationError(
            f"ONNX Runtime cannot load {model_file.name}", got=str(exc).strip().split("\n", 1)[0]
        ) from exc


def _build_cases(task: Task, questions: Sequence[Question], added_tokens: Sequence[str]) -> Iterator[_Case]:
    encoder, max_length = task.encoder, task.signature.max_length
    windows = [encoder.encode(question) for question in questions]
    sentences = [row for rows in windows for row in rows]
    flow = [token_id for row in sentences for token_id in row["input_ids"]]
    flow *= -(-max_length // len(flow))
    lengths = sorted({length for length in _LENGTHS if length < max_length} | {max_length})
    flows = [_build_row(flow[:length]) for length in lengths]
    for length, row in zip(lengths, flows, strict=True):
        yield _Case(name=f"{length} tokens" if length > 1 else "1 token", rows=[row], batch_size=1)
    yield _Case(name="mixed lengths in one batch", rows=flows, batch_size=len(lengths))
    yield _Case(name="sentences one by one", rows=sentences, batch_size=1)
    yield _Case(name="sentences in one batch", rows=sentences, batch_size=len(sentences))
    # Neighbours and padding of another batch must change nothing: the same rows in another order, eight at a time.
    yield _Case(name="sentences in batches of 8", rows=sentences[::-1], batch_size=8)
    if WINDOWS in task.signature.inputs[0].dims:
        rows = max(windows, key=len)
        yield _Case(name="windows of one text", rows=rows, batch_size=len(rows), as_windows=True)
    for token in added_tokens:
        texts = [token, f"{token} at the start", f"in the {token} middle, in a longer one"]
        rows = [row for question in task.build_questions(texts) for row in encoder.encode(question)]
        yield _Case(name=f"new token {token}", rows=rows, batch_size=len(rows))


def _build_row(ids: list[int]) -> Row:
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}


def _run_case(case: _Case, task: Task, session: onnxruntime.InferenceSession) -> CaseResult:
    expected = [run_torch(task, row) for row in case.rows]
    batches = [case.rows[start : start + case.batch_size] for start in range(0, len(case.rows), case.batch_size)]
    try:
        got = [outputs for rows in batches for outputs in _run_onnx(session, rows, task, as_windows=case.as_windows)]
    # As above: no common base class.
    except Exception as exc:
        raise VerificationError(
            f"ONNX Runtime cannot run the graph on the case {case.name!r}",
            got=str(exc).strip().split("\n", 1)[0],
            remedy="a dimension was probably fixed by the model's own code",
        ) from exc
    errors = task.compare(expected, got)
    return CaseResult(
        name=case.name,
        rows=len(case.rows),
        seq_len=max(len(row["input_ids"]) for row in case.rows),
        errors=errors,
        passed=is_within(errors, task.tolerances),
    )


def run_torch(task: Task, row: Row) -> Outputs:
    """Return the module's outputs for one sequence without any padding, each without batch and windows."""
    shape = [1] * (len(task.signature.inputs[0].dims) - 1) + [-1]
    with torch.no_grad():
        outputs = task.module(*(torch.tensor(row[tensor.name]).reshape(shape) for tensor in task.signature.inputs))
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(output.numpy()[(0,) * (len(shape) - 1)] for output in several)


def _run_onnx(session: onnxruntime.InferenceSession, rows: list[Row], task: Task, *, as_windows: bool) -> list[Outputs]:
    """Return the graph's outputs for `rows` as one batch padded to the longest, each cut to its row's own tokens."""
    signature, tokenizer = task.signature, task.tokenizer
    longest = max(len(row["input_ids"]) for row in rows)
    filling = {"input_ids": tokenizer.pad_token_id or 0}
    places = []
    values = {t.name: np.full((len(rows), longest), filling.get(t.name, 0), dtype=np.int64) for t in signature.inputs}
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        place = slice(longest - length, None) if tokenizer.padding_side == "left" else slice(0, length)
        places.append(place)
        for name, array in values.items():
            array[index, place] = row[name]
    has_windows = len(signature.inputs[0].dims) > 2
    if has_windows:
        values = {name: array[None] if as_windows else array[:, None] for name, array in values.items()}
    outputs = session.run([tensor.name for tensor in signature.outputs], values)
    if has_windows:
        outputs = [output[0] if as_windows else output[:, 0] for output in outputs]
    return [
        tuple(
            output[index, place] if SEQ_LEN in tensor.dims else output[index]
            for tensor, output in zip(signature.outputs, outputs, strict=True)
        )
        for index, place in enumerate(places)
    ]
