"""The parity gate: the ONNX file, run by the target's ONNX Runtime, against the module that the checkpoint gave."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch

from ..artefacts import Artefacts, hash_file
from ..engines.engine import Run, Runner
from ..engines.table import ONNXRUNTIME, Engine
from ..errors import EngineError, RuntimeFailure, VerificationError
from ..graph.files import Feed
from ..signature import ModelSignature
from ..targets import Target
from ..tasks.base import Task
from ..tasks.cases import Array, Batch, Case, Outputs, Row, join_rows, read_sizes
from ..tasks.comparison import (
    Distribution,
    describe_bounds,
    describe_errors,
    is_bounded_below,
    is_judged,
    is_within,
    measure_outputs,
)
from .recording import Recording, Seen, record_answers
from .tolerances import Tolerances

# The module's answers are kept for the next case with the same row, up to this size.
_KEPT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case that was tried: `rows` rows of at most `seq_len` tokens, or whatever the longest symbolic axis counts.

    Attributes:
        errors: The worst among the rows, by the names of the task's tolerances.
        passed: Whether every error is within its tolerance; NaN is not.
        outputs: Output → how far it is off, by every measure that has a meaning for it.
        scores: How far scores are off that are made of the outputs; None where none are made one by one.
    """

    name: str
    rows: int
    seq_len: int
    errors: Mapping[str, float]
    passed: bool
    outputs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scores: float | None = None

    @property
    def error(self) -> float:
        """The largest difference, as the task counts it."""
        return next(value for name, value in self.errors.items() if not is_bounded_below(name))

    def to_json(self) -> dict[str, Any]:
        """Return everything in one object, the errors beside the name."""
        plain = {"name": self.name, "rows": self.rows, "seq_len": self.seq_len, "passed": self.passed}
        return plain | dict(self.errors) | {"outputs": {name: dict(values) for name, values in self.outputs.items()}}


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """What was compared and found. Made only by `verify`; `publish` demands one that names the very bytes.

    Attributes:
        sha256: File name → hash of the bytes that were verified.
        cases: Everything that was tried.
        golden: Inputs and answers, the checkpoint's own wherever the file gives them, for a running server's check;
            empty where a case failed.
        tolerances: Error → bound that every case must keep.
        texts_tokenized: Texts whose ids were equal in transformers and in the server's tokenizer.
        target: The Triton release.
        versions: Distribution → version of what made and ran the file.
        distribution: Output → how its differences are distributed over all cases.
        accepted_worse: Why bounds are wider than the usual ones, and which.
        precision: What another precision than fp32 costs and gains.
        runtime_peak_bytes: The most memory that ONNX Runtime's process held.
        engines: How fast the engines were that could be chosen, where one was.
        refused_warmup: Why the graph does not run a row of zeros, with which instances would be warmed up; empty where
            it does.
        recording: What the golden answers leave out, or hold in place of the checkpoint's; empty where they do not.
        own_padding: How far the module's own answers for rows that are padded are from those for the rows alone, where
            a case failed and these alone are out of bounds; empty otherwise.
    """

    sha256: dict[str, str]
    cases: list[CaseResult]
    golden: Mapping[str, Any]
    tolerances: Mapping[str, float]
    texts_tokenized: int
    target: str
    versions: dict[str, str] = field(default_factory=dict)
    distribution: Mapping[str, Distribution] = field(default_factory=dict)
    accepted_worse: Mapping[str, Any] | None = None
    precision: Mapping[str, Any] | None = None
    runtime_peak_bytes: int = 0
    engines: Mapping[str, Any] | None = None
    refused_warmup: str = ""
    recording: str = ""
    own_padding: str = ""

    @property
    def passed(self) -> bool:
        """Whether every case is within the tolerances."""
        return all(case.passed for case in self.cases)

    @property
    def worst(self) -> CaseResult:
        """A failed case before any other, then the one with the largest error; NaN counts as the largest."""
        return max(self.cases, key=lambda case: (not case.passed, math.inf if math.isnan(case.error) else case.error))

    @property
    def judged(self) -> Sequence[CaseResult]:
        """The cases that were judged: in a lossy precision those that no client sends are not, and may be far off."""
        return [case for case in self.cases if is_judged(case.to_json(), self.tolerances)]

    @property
    def worst_errors(self) -> dict[str, float]:
        """Error → the worst in any case that was judged by it; of those that failed, where any did."""
        cases = [case for case in self.cases if not case.passed] or self.judged or self.cases
        return {
            key: (min if is_bounded_below(key) else max)(case.errors[key] for case in cases) for key in cases[0].errors
        }

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
            "distribution": {name: counted.to_json() for name, counted in self.distribution.items()},
            **({"accepted_worse": dict(self.accepted_worse)} if self.accepted_worse else {}),
            **({"precision": dict(self.precision)} if self.precision else {}),
            **({"engines": dict(self.engines)} if self.engines else {}),
        }


def verify(
    *,
    task: Task,
    files: Artefacts,
    target: Target,
    tolerances: Tolerances | None = None,
    engine: Engine = ONNXRUNTIME,
    on_case: Callable[[str], None] = lambda name: None,
    arrange: Callable[[Feed], Feed] = lambda feed: feed,
) -> VerificationReport:
    """Compare the ONNX file with the task's module, at every shape that matters. Does not judge.

    Expected values come from the torch module. Most rows it runs alone and without padding, on the ids that
    transformers' own tokenizer makes: so an error of the graph, of its mask, of batching or of the server's tokenizer
    all show.

    Args:
        task: The source of truth.
        files: What the export wrote.
        target: Triton release whose server is to run the files.
        tolerances: What the cases are judged by; the task's own for fp32 if left out. Whatever is not judged must at
            least be finite.
        engine: What runs the file.
        on_case: Called with the name of each case before it runs.
        arrange: Makes the file's inputs of a padded batch, where it takes others than the module.

    Raises:
        VerificationError: The server's tokenizer makes other ids than transformers', or the graph fails on a case.
        RuntimeFailure: The target's engine cannot be fetched, or cannot load the file.
    """
    judged = tolerances or Tolerances(bounds=task.tolerances)
    bounds = judged.bounds
    cases = list(task.build_cases())
    real_inputs_only = judged.real_inputs_only and any(case.is_real for case in cases)
    texts_tokenized = task.check_files(files)
    results: list[CaseResult] = []
    kept: list[CaseResult] = []
    distribution = {tensor.name: Distribution() for tensor in task.signature.outputs}
    reference = Reference(task)
    with engine.open(files.graph, target) as runner:
        for case in cases:
            on_case(case.name)
            applied = bounds if case.is_real or not real_inputs_only else {}
            run = partial(_run_arranged, runner, arrange)
            results.append(_run_case(case, reference, run, bounds, applied, distribution))
            if applied:
                kept.append(results[-1])
        recording = Recording(golden={})
        failed = [case for case, result in zip(cases, results, strict=True) if not result.passed]
        own_padding = _describe_own_padding(failed, reference, bounds)
        # What is refused is not asked of a server.
        if not failed:
            seen = _find_seen(task, bounds, kept)
            recording = record_answers(task, judged, seen, partial(_run_arranged, runner, arrange))
            # What an engine builds has scales of its own, which were measured before.
            if judged.shares_scales and not engine.builds:
                recording = recording.asked_alone()
        peak_bytes = runner.peak_bytes
        # The last thing it is asked for: it may abort.
        refused_warmup = _try_warmups(task.signature, runner, arrange)
    return VerificationReport(
        sha256={path.name: hash_file(path) for path in sorted(files.all)},
        cases=results,
        golden=recording.golden,
        tolerances=bounds,
        texts_tokenized=texts_tokenized,
        target=target.release,
        versions={name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "onnx")}
        | dict(runner.versions),
        distribution=distribution,
        accepted_worse=judged.accepted,
        runtime_peak_bytes=peak_bytes,
        refused_warmup=refused_warmup,
        recording=recording.note,
        own_padding=own_padding,
    )


def _find_way(report: VerificationReport, *, is_lossy: bool) -> str:
    """Return what there is besides; a graph in fp32 is equal or wrong, but where nothing could be equal."""
    if report.own_padding:
        return (
            f"; in torch the checkpoint itself answers a row otherwise where padding stands beside it "
            f"({report.own_padding}), so pass --factory with its module, whose rows are never padded then"
        )
    return "" if not is_lossy else ", and ask for less with --tolerance and --accept-worse, or pass --precision fp32"


def require_passed(report: VerificationReport, *, is_lossy: bool) -> None:
    """Refuse files that are not equal to the checkpoint.

    Args:
        report: How they compare.
        is_lossy: Whether they are in another precision than fp32.

    Raises:
        VerificationError: Says in how many cases, and how far off the worst is.
    """
    failed = [case for case in report.cases if not case.passed]
    if failed:
        judged = {name: error for name, error in report.worst.errors.items() if name in report.tolerances}
        raise VerificationError(
            f"the ONNX model is not equal to the checkpoint in {len(failed)} of {len(report.cases)} cases, "
            f"worst in {report.worst.name!r}",
            expected=describe_bounds(report.tolerances),
            got=describe_errors(judged or report.worst.errors, report.tolerances),
            remedy="nothing was published; see every case in the table above" + _find_way(report, is_lossy=is_lossy),
        )


def _find_seen(task: Task, bounds: Mapping[str, float], kept: Sequence[CaseResult]) -> Seen:
    """Return how far a file was off in the cases that were judged, in the unit of the answers where that is known."""
    contract = task.signature.contract
    keys = [key for key in (*task.tolerances, "max_abs_error") if not is_bounded_below(key)]
    errors = [case.error for case in kept if math.isfinite(case.error)]
    main = next(key for key in task.tolerances if not is_bounded_below(key))
    room = bounds[main] / max(errors) if main in bounds and errors and max(errors) > 0 else 1.0
    if "max_relative_length_error" in task.tolerances:
        # Vectors are compared at length 1, as they are in the cases.
        answers = {key: max((case.errors[key] for case in kept), default=0.0) for key in keys}
    elif contract is None or contract.postprocess is None:
        # Integers have no distance: where they differ, their difference says nothing of the scores.
        numeric = [tensor.name for tensor in task.signature.outputs if tensor.torch_dtype.is_floating_point]
        answers = {
            key: max((float(case.outputs[name].get(key, 0.0)) for case in kept for name in numeric), default=0.0)
            for key in keys
        }
    else:
        scores = [case.scores for case in kept if case.scores is not None]
        answers = {"max_abs_error": max(scores)} if scores else {}
    return Seen(answers=answers, room=max(1.0, room))


class Reference:
    """The module that an export is compared with, asked once for each row."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._kept: dict[int, tuple[Row, Outputs]] = {}

    def answer_row(self, row: Row) -> Outputs:
        """Return the outputs for one row alone, without any padding; each without batch."""
        known = self._kept.get(id(row))
        if known is None:
            batch = join_rows([row], self.task.signature, {})
            known = (row, batch.cut(self.task.signature.outputs, self._run(batch))[0])
            if sum(output.nbytes for output in known[1]) <= _KEPT_BYTES:
                # With the row itself, so that its id stays its own.
                self._kept[id(row)] = known
        return known[1]

    def answer_batch(self, batch: Batch) -> list[Outputs]:
        """Return the outputs for rows in the padded batch in which the graph sees them."""
        return batch.cut(self.task.signature.outputs, self._run(batch))

    def _run(self, batch: Batch) -> list[Array]:
        inputs = (torch.from_numpy(np.ascontiguousarray(batch.feeds[t.name])) for t in self.task.signature.inputs)
        with torch.no_grad():
            outputs = self.task.module(*inputs)
        return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


def _describe_own_padding(failed: Sequence[Case], reference: Reference, bounds: Mapping[str, float]) -> str:
    """Return how far padding moves the module's own answers in the first failed case in which it does too far.

    Convolutions over tokens see what stands beside them, whatever the mask says: ConvBERT's and YOSO's do.
    """
    task = reference.task
    for case in failed:
        if case.padded_reference:
            continue
        alone, padded = [], []
        for rows in case.batches:
            batch = join_rows(rows, task.signature, task.padding_values, case.padding_side)
            alone += [reference.answer_row(row) for row in rows]
            padded += reference.answer_batch(batch)
        errors = task.compare(alone, padded, bounds)
        # Weights that are not numbers answer nothing, padded or not.
        if all(map(math.isfinite, errors.values())) and not is_within(errors, bounds):
            return f"{describe_errors(errors, bounds)} in {case.name!r}"
    return ""


def _run_arranged(runner: Runner, arrange: Callable[[Feed], Feed], names: Sequence[str], feed: Feed) -> list[Any]:
    return runner.run(names, arrange(feed))


def _try_warmups(signature: ModelSignature, runner: Runner, arrange: Callable[[Feed], Feed]) -> str:
    """Return why the graph does not run the rows of zeros that instances are warmed up with; empty where it does.

    Not every graph does: one may look something up that zeros do not name.
    """
    names = [tensor.name for tensor in signature.outputs]
    for label, sizes in signature.list_warmups().items():
        known = dict.fromkeys((symbol for tensor in signature for symbol in tensor.symbols), 1) | dict(sizes)
        # Arranged as tokens, not as padding that may be left out, and then made zeros as a server makes them.
        ones = {t.name: torch.ones(t.resolve_dims(known), dtype=t.torch_dtype).numpy() for t in signature.inputs}
        feed = {name: np.zeros_like(each) if name in ones else each for name, each in arrange(ones).items()}
        try:
            runner.run(names, feed)
        except (RuntimeFailure, EngineError) as exc:
            return f"{label}: {str(exc).rstrip('.')}"
    return ""


def _run_case(
    case: Case,
    reference: Reference,
    run: Run,
    bounds: Mapping[str, float],
    applied: Mapping[str, float],
    distribution: Mapping[str, Distribution],
) -> CaseResult:
    task = reference.task
    names = [tensor.name for tensor in task.signature.outputs]
    expected: list[Outputs] = []
    got: list[Outputs] = []
    for rows in case.batches:
        batch = join_rows(rows, task.signature, task.padding_values, case.padding_side)
        try:
            outputs = run(names, batch.feeds)
        except (RuntimeFailure, EngineError) as exc:
            raise VerificationError(
                f"the graph fails on the case {case.name!r}",
                got=str(exc).rstrip("."),
                remedy="where a shape is named, the model's own code probably fixed a dimension",
            ) from exc
        got += batch.cut(task.signature.outputs, outputs)
        expected += (
            reference.answer_batch(batch) if case.padded_reference else [reference.answer_row(row) for row in rows]
        )
    per_output = _measure(names, expected, got, distribution)
    errors = task.compare(expected, got, bounds)
    is_finite = all(np.isfinite(output).all() for outputs in got for output in outputs if output.dtype.kind == "f")
    return CaseResult(
        name=case.name,
        rows=len(case.rows),
        seq_len=max(max(read_sizes(task.signature, row).values(), default=1) for row in case.rows),
        errors=errors,
        passed=is_finite and is_within(errors, applied),
        outputs=per_output,
        scores=task.measure_scores(expected, got),
    )


def _measure(
    names: Sequence[str],
    expected: Sequence[Outputs],
    got: Sequence[Outputs],
    distribution: Mapping[str, Distribution],
) -> dict[str, Mapping[str, float]]:
    measured: dict[str, Mapping[str, float]] = {}
    for index, name in enumerate(names):
        want, have = [row[index] for row in expected], [row[index] for row in got]
        measured[name] = measure_outputs(want, have)
        distribution[name].add(want, have)
    return measured
