"""The gate of weights that another engine runs: what is published is, bit for bit, what the checkpoint holds."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from ..artefacts import Artefacts, hash_file
from ..engines.engine import Engine
from ..engines.vllm_engine import DTYPES
from ..errors import VerificationError
from ..targets import Target
from ..tasks.base import Task
from ..tasks.texts.text_generation import TextGeneration
from ..weights.weights_folder import find_differing
from .tolerances import Tolerances
from .verify import CaseResult, VerificationReport

# Two best scores that are nearer than this, in parts of the largest, may change places in another engine. A GPU adds up
# in another order, and bf16 rounds by 1 in 256.
_CLEAR = {"fp32": 2e-3, "bf16": 5e-2}

_EXPORT_AGAIN = "export it again"


def verify_weights(
    *,
    task: Task,
    files: Artefacts,
    target: Target,
    tolerances: Tolerances | None = None,
    engine: Engine,
    precision: str,
    on_case: Callable[[str], None] = lambda name: None,
) -> VerificationReport:
    """Compare a folder of weights with the checkpoint: its tensors, its configuration and its tokenizer.

    What it would answer is not tried: the engine does not run here. The texts that torch writes are recorded, for the
    check through the server.

    Args:
        task: The source of truth.
        files: What the export wrote.
        target: Triton release whose server is to run the files.
        tolerances: What a report is judged by; there is nothing between equal and refused.
        engine: What is to run the files.
        precision: That of the weights.
        on_case: Called with the name of each case before it runs.

    Raises:
        VerificationError: A tensor differs, or transformers reads texts or the configuration otherwise.
    """
    assert isinstance(task, TextGeneration), "Bug: weights of another task"
    folder = files.graph.parent
    texts = task.check_files(files)
    results = []
    for name, check in (("weights, bit for bit", _check_weights), ("texts, as ids", _check_tokenizer)):
        on_case(name)
        rows = check(task, files, DTYPES[precision])
        errors = {key: float(key.startswith("min_")) for key in (tolerances.bounds if tolerances else task.tolerances)}
        results.append(CaseResult(name=name, rows=rows, seq_len=0, errors=errors, passed=True))
    _check_config(task, folder)
    return VerificationReport(
        sha256={path.name: hash_file(path) for path in sorted(files.all)},
        cases=results,
        golden=task.build_golden_above(_CLEAR[precision]),
        tolerances=tolerances.bounds if tolerances else task.tolerances,
        texts_tokenized=texts,
        target=target.release,
        versions={name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
        | {engine.name: "not run"},
    )


def _check_weights(task: TextGeneration, files: Artefacts, dtype: str) -> int:
    weights = task.weights
    if name := find_differing(weights, files.graph.parent, dtype):
        raise VerificationError(
            f"the weights that were written are not the checkpoint's: {name}",
            expected=f"its bits in {dtype}",
            got="others",
            remedy=_EXPORT_AGAIN,
        )
    return len(weights.specs())


def _check_tokenizer(task: TextGeneration, files: Artefacts, _: str) -> int:
    # As vLLM may: with transformers 5 it takes the class of some architectures, such as Qwen2, whatever is written.
    tokenizer = AutoTokenizer.from_pretrained(files.graph.parent, local_files_only=True, trust_remote_code=False)
    for text in task.texts:
        wanted, found = task.tokenizer(text)["input_ids"], tokenizer(text)["input_ids"]
        if wanted != found:
            alike = [one == other for one, other in zip(wanted, found, strict=False)]
            at = [*alike, False].index(False)
            raise VerificationError(
                f"the tokenizer that was written reads {text[:40]!r} differently from the checkpoint's",
                expected=f"ids {wanted[at : at + 12]} from place {at} on",
                got=f"ids {found[at : at + 12]}",
                remedy="save the tokenizer with the transformers release that is installed here, or, where the model "
                "was trained with what tokenizer.json says, pass --engine openvino-genai, which goes by that",
            )
    return len(task.texts)


def _check_config(task: TextGeneration, folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        wanted, found = (getattr(each.get_text_config(), name, None) for each in (task.model.config, config))
        if wanted != found:
            raise VerificationError(
                f"the configuration that was written has another {name}",
                expected=str(wanted),
                got=str(found),
                remedy=_EXPORT_AGAIN,
            )
