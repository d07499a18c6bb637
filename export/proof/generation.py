"""The gate of text generation: the scores of every token first, then the texts that the engine writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..artefacts import Artefacts
from ..engines.engine import Engine
from ..engines.openvino_generation import BLOCK_TOKENS, OpenVINOGeneration
from ..targets import Target
from ..tasks.base import Task
from ..tasks.cases import Array
from ..tasks.comparison import PERPLEXITY_RISE, TENSOR_TOLERANCES, is_within
from ..tasks.texts.text_generation import Continuation, TextGeneration
from .tolerances import Tolerances
from .verify import CaseResult, VerificationReport, verify

_PERPLEXITY = "perplexity of real text"

# Beyond this, in parts of the largest, scores are those of another precision.
EXACT = TENSOR_TOLERANCES["max_relative_error"]


def verify_generation(
    *,
    task: Task,
    files: Artefacts,
    target: Target,
    tolerances: Tolerances | None = None,
    engine: Engine,
    on_case: Callable[[str], None] = lambda name: None,
) -> VerificationReport:
    """Compare a decoder with the checkpoint: its scores as `verify` does, then the texts that are written with it.

    Every prompt is gone on from with the likeliest token each time, all of them at once, with room for all and with so
    little that some must be put off and taken up again. The tokens must be those of transformers' own `generate`.
    Another one is accepted only where the reference's two best scores lie closer than the scores were found to be off,
    and the report says so.

    Args:
        task: The source of truth.
        files: What the export wrote.
        target: Triton release whose server is to run the files.
        tolerances: What the cases are judged by.
        engine: What runs the files.
        on_case: Called with the name of each case before it runs.

    Raises:
        VerificationError: As of `verify`.
        EngineError: The engine fails.
    """
    assert isinstance(task, TextGeneration), "Bug: texts of another task"
    assert isinstance(engine, OpenVINOGeneration), "Bug: texts of another engine"
    report = verify(task=task, files=files, target=target, tolerances=tolerances, engine=engine, on_case=on_case)
    bounds = report.tolerances
    on_case(_PERPLEXITY)
    report = replace(report, cases=[*report.cases, _compare_perplexity(task, files, target, engine, bounds)])
    # Of random tokens, which are not judged in every precision, scores may be further off than is allowed.
    error = min(
        max(case.errors["max_relative_error"] for case in report.cases), bounds.get("max_relative_error", np.inf)
    )
    if error > EXACT:
        report = replace(report, golden={**report.golden, **task.build_golden_above(2 * error)})
    reference = task.write_reference()
    prompts, longest = [made.prompt for made in reference], max(len(made.written) for made in reference)
    # Room for every prompt alone but not for all with what is written after them.
    needed = [-(-(len(made.prompt) + len(made.written)) // BLOCK_TOKENS) for made in reference]
    scarce = max(max(needed) + 1, sum(needed) // 2)
    for name, blocks in (("texts, all at once", 0), (f"texts, all at once in {scarce} blocks", scarce)):
        on_case(name)
        written = engine.generate(files.graph.parent, prompts, longest, blocks=blocks)
        report = replace(report, cases=[*report.cases, _judge(name, reference, written, error, report.tolerances)])
    return report


def _compare_perplexity(
    task: TextGeneration, files: Artefacts, target: Target, engine: OpenVINOGeneration, bounds: Mapping[str, float]
) -> CaseResult:
    """Return how much larger the perplexity of real text is in the engine than in the checkpoint, as a case."""
    windows = task.list_windows()
    wanted, had = 0.0, 0.0
    with engine.open(files.graph, target) as runner:
        for window in windows:
            ids = np.array([window], dtype=np.int64)
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            (scores,) = runner.run(["logits_with_past"], feeds)
            with torch.no_grad():
                expected, _ = task.module(*(torch.from_numpy(feed) for feed in feeds.values()))
            wanted, had = wanted + _find_loss(expected.numpy(), ids), had + _find_loss(scores, ids)
    count = sum(len(window) - 1 for window in windows)
    rise = float(np.exp((had - wanted) / count) - 1) if count else 0.0
    errors = {"max_relative_error": 0.0, "min_cosine": 1.0, "min_label_agreement": 1.0, PERPLEXITY_RISE: rise}
    size = max(map(len, windows), default=0)
    return CaseResult(
        name=_PERPLEXITY, rows=len(windows), seq_len=size, errors=errors, passed=is_within(errors, bounds)
    )


def _find_loss(scores: Array, ids: Array) -> float:
    """Return how unlikely each token is after those before it, as the sum of the logarithms, without sign."""
    likely = torch.log_softmax(torch.from_numpy(scores[0, :-1].astype(np.float64)), dim=-1)
    return -float(likely[torch.arange(len(likely)), torch.from_numpy(ids[0, 1:])].sum())


def _judge(
    name: str,
    reference: Sequence[Continuation],
    written: Sequence[Sequence[int]],
    error: float,
    bounds: Mapping[str, float],
) -> CaseResult:
    """Return how texts compare, as a case: the share that is equal, and the widest margin at which one was not.

    Args:
        name: Name of the case.
        reference: What transformers wrote.
        written: What the engine wrote.
        error: How far scores were found to be off, in parts of the largest.
        bounds: What the report is judged by.
    """
    equal, accepted, widest = 0, 0, 0.0
    for made, tokens in zip(reference, written, strict=True):
        place = _find_difference(made.written, tokens)
        if place is None:
            equal += 1
        # Two scores that are both off by this much meet.
        elif place < len(made.margins) and made.margins[place] <= 2 * error:
            accepted += 1
            widest = max(widest, made.margins[place] / 2)
    agreement = (equal + accepted) / len(written)
    errors = {
        "max_relative_error": widest,
        "min_cosine": 1.0,
        "min_label_agreement": agreement,
        PERPLEXITY_RISE: 0.0,
    }
    return CaseResult(
        name=f"{name}, {accepted} otherwise where two tokens are as likely" if accepted else name,
        rows=len(reference),
        seq_len=max(len(made.prompt) + len(made.written) for made in reference),
        errors=errors,
        passed=is_within(errors, bounds),
    )


def _find_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first place at which two texts differ, or None."""
    for place in range(max(len(wanted), len(got))):
        if list(wanted[place : place + 1]) != list(got[place : place + 1]):
            return place
    return None
