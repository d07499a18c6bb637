"""The parity gate: the ONNX file, run by ONNX Runtime, against the torch model that the checkpoint gave."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from export.errors import VerificationError
from export.signature import ModelSignature
from export.targets import Target

FloatArray = npt.NDArray[np.float32]

# fp32 sums in another order differ in the 7th digit; through a dozen layers that stays below 1e-6 on a vector of
# length 1. A wrong weight, mask or pooling is far above 1e-5.
MAX_ABS_ERROR = 1e-5
MIN_COSINE = 0.999999
# Vectors that are not normalised are compared at length 1 above; this holds their lengths together as well.
MAX_RELATIVE_LENGTH_ERROR = 1e-5

# Lengths in tokens that are tried besides the maximum: the two at which axes like to become constants, odd ones, one
# beyond the traced 7, and long ones.
_LENGTHS = (1, 2, 3, 7, 8, 31, 127)

# Texts whose expected answers are kept, to ask a running server for.
_GOLDEN_TEXTS = 16


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case that was tried: `rows` sequences of at most `seq_len` tokens, and the worst error among them."""

    name: str
    rows: int
    seq_len: int
    max_abs_error: float
    min_cosine: float
    max_relative_length_error: float

    @property
    def passed(self) -> bool:
        """Whether every error is within the tolerances; NaN is not."""
        return (
            self.max_abs_error <= MAX_ABS_ERROR
            and self.min_cosine >= MIN_COSINE
            and self.max_relative_length_error <= MAX_RELATIVE_LENGTH_ERROR
        )


@dataclass(frozen=True, kw_only=True)
class GoldenSample:
    """A text and what the checkpoint itself answers to it, fp32, [hidden]."""

    text: str
    expected: list[float]


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """What was compared and found. Made only by `verify`; `publish` demands one that names the very bytes.

    Attributes:
        sha256: File name → hash of the bytes that were verified.
        cases: Everything that was tried.
        golden: Texts and expected answers, for the same check through a running server.
        texts_tokenized: Texts whose ids were equal in transformers and in the server's tokenizer.
        target: The Triton release.
        versions: Distribution → version of what made and ran the file.
    """

    sha256: dict[str, str]
    cases: list[CaseResult]
    golden: list[GoldenSample]
    texts_tokenized: int
    target: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every case is within the tolerances."""
        return all(case.passed for case in self.cases)

    @property
    def worst(self) -> CaseResult:
        """The case with the largest error; NaN counts as the largest."""
        return max(self.cases, key=lambda case: math.inf if math.isnan(case.max_abs_error) else case.max_abs_error)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the golden samples, which have a file of their own."""
        content = asdict(self)
        del content["golden"]
        content["passed"] = self.passed
        content["tolerances"] = tolerances()
        return content


def tolerances() -> dict[str, float]:
    """Return the bounds that every case must keep."""
    return {
        "max_abs_error": MAX_ABS_ERROR,
        "min_cosine": MIN_COSINE,
        "max_relative_length_error": MAX_RELATIVE_LENGTH_ERROR,
    }


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Token ids of some rows, run as batches of `batch_size`, padded to the longest of each batch."""

    name: str
    rows: list[list[int]]
    batch_size: int


def verify(
    *,
    module: nn.Module,
    signature: ModelSignature,
    model_file: Path,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_file: Path,
    added_tokens: Sequence[str],
    target: Target,
    on_case: Callable[[str], None] = lambda name: None,
) -> VerificationReport:
    """Compare `model_file` with `module` on real text, at every shape that matters. Does not judge: see `passed`.

    Expected values come from the torch module, one row at a time and without padding, on the ids that transformers'
    own tokenizer makes. So an error of the graph, of its mask, of batching or of the server's tokenizer all show.

    Args:
        module: The source of truth, fp32, in eval mode.
        signature: Of both.
        model_file: The ONNX file.
        tokenizer: As the checkpoint came, with the added tokens.
        tokenizer_file: The `tokenizer.json` that the server will load.
        added_tokens: Tokens that the export added, to be tried one by one.
        target: Whose ONNX Runtime this must be.
        on_case: Called with the name of each case before it runs.

    Raises:
        VerificationError: The server's tokenizer makes other ids than transformers', or ONNX Runtime is not the
            target's, or cannot run the file.
    """
    _check_runtime(target)
    texts = read_verification_texts() + [f"{token} between words {token}" for token in added_tokens]
    check_tokenizers_agree(tokenizer, Tokenizer.from_file(str(tokenizer_file)), texts, signature.max_length)
    session = _open_session(model_file)
    results = []
    for case in _build_cases(tokenizer, texts, added_tokens, signature.max_length):
        on_case(case.name)
        results.append(_run_case(case, module, session, signature, tokenizer))
    golden_texts = texts[: _GOLDEN_TEXTS - 2] + texts[-2:]
    ids = _tokenize(tokenizer, golden_texts, signature.max_length)
    golden = [
        GoldenSample(text=text, expected=[float(x) for x in _run_torch(module, row, signature)])
        for text, row in zip(golden_texts, ids, strict=True)
    ]
    return VerificationReport(
        sha256={path.name: hash_file(path) for path in sorted([*model_file.parent.iterdir(), tokenizer_file])},
        cases=results,
        golden=golden,
        texts_tokenized=len(texts),
        target=target.release,
        versions={
            name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "onnx", "onnxruntime")
        },
    )


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


def check_tokenizers_agree(
    tokenizer: PreTrainedTokenizerBase, served: Tokenizer, texts: Sequence[str], max_length: int
) -> None:
    """Refuse a server tokenizer that makes other ids than transformers does.

    Raises:
        VerificationError: Naming the first text on which they differ.
    """
    for text, ids in zip(texts, _tokenize(tokenizer, texts, max_length), strict=True):
        got = served.encode(text).ids
        if got != ids:
            raise VerificationError(
                f"the server's tokenizer reads {text[:40]!r} otherwise than transformers",
                expected=f"ids {ids[:12]}",
                got=f"ids {got[:12]}",
                remedy="save the tokenizer with the transformers release that the checkpoint was trained with",
            )


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


def _build_cases(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], added_tokens: Sequence[str], max_length: int
) -> Iterator[_Case]:
    sentences = _tokenize(tokenizer, texts, max_length)
    flow = [token_id for row in sentences for token_id in row]
    flow *= -(-max_length // len(flow))
    lengths = sorted({length for length in _LENGTHS if length < max_length} | {max_length})
    for length in lengths:
        yield _Case(name=f"{length} tokens" if length > 1 else "1 token", rows=[flow[:length]], batch_size=1)
    yield _Case(name="mixed lengths in one batch", rows=[flow[:n] for n in lengths], batch_size=len(lengths))
    yield _Case(name="sentences one by one", rows=sentences, batch_size=1)
    yield _Case(name="sentences in one batch", rows=sentences, batch_size=len(sentences))
    # Neighbours and padding of another batch must change nothing: the same rows in another order, eight at a time.
    yield _Case(name="sentences in batches of 8", rows=sentences[::-1], batch_size=8)
    for token in added_tokens:
        rows = _tokenize(
            tokenizer, [token, f"{token} at the start", f"in the {token} middle, in a longer one"], max_length
        )
        yield _Case(name=f"new token {token}", rows=rows, batch_size=len(rows))


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
    return ids


def _run_case(
    case: _Case,
    module: nn.Module,
    session: onnxruntime.InferenceSession,
    signature: ModelSignature,
    tokenizer: PreTrainedTokenizerBase,
) -> CaseResult:
    expected = np.stack([_run_torch(module, row, signature) for row in case.rows])
    batches = [case.rows[start : start + case.batch_size] for start in range(0, len(case.rows), case.batch_size)]
    try:
        got = np.concatenate([_run_onnx(session, rows, signature, tokenizer) for rows in batches])
    # As above: no common base class.
    except Exception as exc:
        raise VerificationError(
            f"ONNX Runtime cannot run the graph on the case {case.name!r}",
            got=str(exc).strip().split("\n", 1)[0],
            remedy="a dimension was probably fixed by the model's own code",
        ) from exc
    return CaseResult(
        name=case.name,
        rows=len(case.rows),
        seq_len=max(len(row) for row in case.rows),
        **compare_embeddings(expected, got),
    )


def compare_embeddings(expected: FloatArray, got: FloatArray) -> dict[str, float]:
    """Return the worst errors between two sets of vectors, each scaled to length 1 for the first two.

    Args:
        expected: [rows, hidden], fp32.
        got: The same shape.

    Returns:
        `max_abs_error`, `min_cosine` and `max_relative_length_error`; NaN where `got` holds one.
    """
    if expected.shape != got.shape:
        return {"max_abs_error": math.inf, "min_cosine": -1.0, "max_relative_length_error": math.inf}
    want, have = expected.astype(np.float64), got.astype(np.float64)
    want_length, have_length = np.linalg.norm(want, axis=1), np.linalg.norm(have, axis=1)
    # A vector of length 0 or with a NaN makes every error NaN, which no tolerance admits.
    with np.errstate(all="ignore"):
        want_unit, have_unit = want / want_length[:, None], have / have_length[:, None]
        length_error = np.abs(have_length / want_length - 1.0)
    return {
        "max_abs_error": float(np.abs(want_unit - have_unit).max()),
        "min_cosine": float((want_unit * have_unit).sum(axis=1).min()),
        "max_relative_length_error": float(length_error.max()),
    }


def _run_torch(module: nn.Module, ids: list[int], signature: ModelSignature) -> FloatArray:
    """Return the embedding of one row without any padding, [hidden], fp32."""
    row = torch.tensor([ids], dtype=torch.int64)
    values = {"input_ids": row, "attention_mask": torch.ones_like(row), "token_type_ids": torch.zeros_like(row)}
    with torch.no_grad():
        output = module(*(values[tensor.name] for tensor in signature.inputs))
    embedding: FloatArray = output[0].numpy()
    return embedding


def _run_onnx(
    session: onnxruntime.InferenceSession,
    rows: list[list[int]],
    signature: ModelSignature,
    tokenizer: PreTrainedTokenizerBase,
) -> FloatArray:
    """Return the embeddings of `rows` as one batch padded to the longest, [rows, hidden], fp32."""
    longest = max(len(row) for row in rows)
    ids = np.full((len(rows), longest), tokenizer.pad_token_id or 0, dtype=np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(longest - len(row), None) if tokenizer.padding_side == "left" else slice(0, len(row))
        ids[index, place] = row
        mask[index, place] = 1
    values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    output: FloatArray = session.run(None, {tensor.name: values[tensor.name] for tensor in signature.inputs})[0]
    return output
