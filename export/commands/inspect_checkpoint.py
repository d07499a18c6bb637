"""The verb `inspect`: what a checkpoint is and holds, without reading its tensors. Needs no torch."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoints import StoredCheckpoint, join_folders, open_checkpoint
from ..checkpoints.plain.documents import check_documents
from ..checkpoints.plain.sentence_modules import tell_missing_settings
from ..checkpoints.storage.paths import find_linked, read_json_beside
from ..errors import ModelError, escape_controls
from ..fetching import fetch_all
from ..tasks.foreseen import check_architecture
from .memory_estimates import estimate_memory
from .standard_streams import write_answer
from .verb import Verbs, add_verb, count, say

# Measured on two cores with a warm page cache, see `tests/bench_consolidate.py`: what it stays below, the start, and
# the bytes of weights and of their second copies.
_CONSOLIDATE_MEMORY_BYTES = 100 * 10**6
_CONSOLIDATE_BASE_S = 0.15
_CONSOLIDATE_BYTES_PER_S = 4.0e9
# Of all-MiniLM-L6-v2 (91 MB) and a BERT-base (438 MB): 34 and 74 s of one core.
_EXPORT_BASE_S = 24.0
_EXPORT_BYTES_PER_S = 8.7e6

# How the names of transformers' classes end that score every word of the vocabulary.
_WORD_HEADS = (
    *("ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForMaskedLM", "ForPreTraining"),
    *("ForConditionalGeneration", "MTModel", "EncoderDecoderModel"),
)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the files say, as far as they say it; None or empty where they do not.

    Attributes:
        tensors: Name → dtype and shape, in the order of the model; tied names included.
        tied: Groups of names that share one tensor, the holder first.
        tied_by: What else says that output and input embeddings are one, where the files hold them once.
        dtypes: Name of the type → number of tensors.
        parameters: Elements of floating-point tensors that are not buffers, tied ones once.
        total_bytes: Bytes of weights, tied ones once.
        not_exported: Why `run` refuses the architecture; empty where it does not, as far as that is known beforehand.
        memory: Engine → precision → bytes that an export and an instance hold (`estimate_memory`); empty where there
            is no export.
        missing: What a whole checkpoint of this format would have and this one lacks or cannot show.
    """

    directory: str
    format: str
    trainer: str | None
    world_size: int | None
    stage: int | None
    step: int | None
    parameters: int
    total_bytes: int
    dtypes: dict[str, int]
    tied: list[list[str]]
    tied_by: str
    missing: list[str]
    files: list[str]
    estimates: dict[str, float]
    not_exported: str
    memory: dict[str, dict[str, dict[str, Any]]]
    tensors: dict[str, dict[str, object]]


def inspect_checkpoint(directory: Path, *, tag: str | None = None) -> Inspection:
    """Return what the checkpoint in `directory` is and holds; reads directories, pickles and headers only.

    Raises:
        CheckpointError: It is not a checkpoint that we read, or files are missing, damaged or of different saves.
    """
    checkpoint = open_checkpoint(directory, tag=tag)
    check_documents(checkpoint.directory, may_lead_outside=True)
    owned = checkpoint.owned()
    groups: dict[str, list[str]] = {}
    for name, holder in checkpoint.tied.items():
        groups.setdefault(holder, [holder]).append(name)
    facts, not_exported = checkpoint.facts, _find_refusal(checkpoint)
    return Inspection(
        directory=str(directory),
        format=checkpoint.format_name,
        trainer=facts.trainer,
        world_size=facts.world_size,
        stage=facts.stage,
        step=facts.step,
        parameters=sum(
            tensor.numel
            for name, tensor in owned.items()
            if tensor.dtype.is_floating_point and name not in checkpoint.buffer_names
        ),
        total_bytes=sum(tensor.nbytes for tensor in owned.values()),
        dtypes=dict(Counter(tensor.dtype.name for tensor in checkpoint.tensors.values())),
        tied=list(groups.values()),
        tied_by=_find_tie(checkpoint),
        missing=[*facts.missing, *tell_missing_settings(checkpoint.directory)],
        files=[str(find_linked(path)) for path in checkpoint.weight_files],
        estimates=_estimate(checkpoint, is_exported=not not_exported),
        not_exported=not_exported,
        memory={} if not_exported else estimate_memory(checkpoint),
        tensors={
            name: {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
            for name, tensor in checkpoint.tensors.items()
        },
    )


def _find_tie(checkpoint: StoredCheckpoint) -> str:
    """Return who says that the head is the embeddings, which then are in the files once."""
    recorded = read_json_beside(checkpoint.directory / "config.json")
    if _says_tied(checkpoint.config or {}):
        return "the head is the embeddings, as the trainer's arguments say"
    return "the head is the embeddings, as config.json says" if _says_tied(recorded) else ""


def _says_tied(config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration ties a head to the embeddings.

    transformers writes `tie_word_embeddings` for models too that have no such head.
    """
    named = config.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    has_head = not architectures or any(name.endswith(_WORD_HEADS) for name in architectures)
    return config.get("tie_word_embeddings") is True and has_head


def _find_refusal(checkpoint: StoredCheckpoint) -> str:
    """Return the sentence in which `run` refuses the architecture; empty where it does not."""
    config = read_json_beside(checkpoint.directory / "config.json") or checkpoint.config or {}
    try:
        check_architecture(checkpoint.directory, config)
    except ModelError as exc:
        return str(exc)
    return ""


def _estimate(checkpoint: StoredCheckpoint, *, is_exported: bool) -> dict[str, float]:
    owned = checkpoint.owned().values()
    total_bytes = sum(tensor.nbytes for tensor in owned)
    fp32_bytes = sum(tensor.numel * 4 if tensor.dtype.is_floating_point else tensor.nbytes for tensor in owned)
    copies = sum(tensor.nbytes for group in checkpoint.copies for tensor in group.values())
    estimates = {
        "consolidate_memory_bytes": _CONSOLIDATE_MEMORY_BYTES,
        "consolidate_s": round(_CONSOLIDATE_BASE_S + (total_bytes + copies) / _CONSOLIDATE_BYTES_PER_S, 1),
    }
    if is_exported:
        estimates["export_s"] = round(_EXPORT_BASE_S + fp32_bytes / _EXPORT_BYTES_PER_S, 1)
    return estimates


def format_inspection(found: Inspection, *, lists_tensors: bool = False) -> str:
    """Return the inspection as lines of text for a reader; below it, where asked for, every tensor."""
    shapes = [f"  {name}  {entry['dtype']} {entry['shape']}" for name, entry in found.tensors.items()]
    estimates = found.estimates
    rows = [
        ("format", found.format),
        ("trainer", found.trainer or "not recorded"),
        ("ranks", _or_unknown(found.world_size)),
        ("ZeRO stage", _or_unknown(found.stage)),
        ("step", _or_unknown(found.step)),
        (
            "tensors",
            f"{len(found.tensors)}: "
            + ", ".join(f"{n} {dtype}" for dtype, n in found.dtypes.items())
            + ("" if lists_tensors else " (--tensors lists them)"),
        ),
        ("parameters", f"{found.parameters:,}"),
        ("weights", f"{found.total_bytes / 1e9:.3f} GB in {count(len(found.files), 'file')}"),
        ("tied", "; ".join(" = ".join(group) for group in found.tied) or found.tied_by or "none in the files"),
        ("missing", "; ".join(found.missing) or "nothing"),
        (
            "consolidate",
            f"about {estimates['consolidate_s']:.1f} s, {estimates['consolidate_memory_bytes'] / 1e9:.1f} GB of memory",
        ),
        ("export", found.not_exported or f"about {estimates['export_s']:.0f} s in fp32"),
        *(("memory", line) for line in _format_memory(found.memory)),
    ]
    shown = shapes if lists_tensors else []
    lines = [found.directory, *(f"{label:12} {text}" for label, text in rows), *shown]
    return "\n".join(map(escape_controls, lines)) + "\n"


def _format_memory(memory: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return a line for each engine and precision; none where there is no export."""
    if not memory:
        return []
    return [
        f"{engine} {precision}: {_format_held(held)}"
        for engine, precisions in memory.items()
        for precision, held in precisions.items()
    ] + ["other engines and precisions have not been measured, nor has TensorRT's workspace"]


def _format_held(held: dict[str, Any]) -> str:
    """Return what is known of one engine and precision, in a line."""
    parts = []
    if "export_bytes" in held:
        parts += [
            f"{held['export_bytes'] / 1e9:.1f} GB to export",
            f"{held['instance_bytes'] / 1e9:.2f} GB an instance",
        ]
    if "instance_used_bytes" in held:
        used = f"{held['instance_used_bytes'] / 1e9:.2f} GB once texts have used every token"
        parts.append(f"{used}, without what they are computed in")
    if "kv_pool_bytes" in held:
        parts.append(f"up to {held['kv_pool_bytes'] / 1e9:.2f} GB of keys and values beside the model")
    doubts = ["drawn through 2 sizes only"] if held.get("sizes") == 2 else []
    doubts += [f"as of a {held['as_of']}: none of this architecture has been measured"] if "as_of" in held else []
    return "; ".join(parts) + (f" ({'; '.join(doubts)})" if doubts else "")


def _or_unknown(value: int | None) -> str:
    return "not recorded" if value is None else str(value)


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "inspect",
        run,
        help="say what a checkpoint is and holds, without reading its tensors",
        description="Say what a training checkpoint is and holds. Reads hardly any tensor data, runs nothing from it.",
        examples=(
            "./zero3_run",
            "./node0/run ./node1/run",
            "./zero3_run --tag global_step1000",
            "./zero3_run --json | jq .missing",
            "sentence-transformers/all-MiniLM-L6-v2",
        ),
        succeeded="told",
    )
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIRECTORY",
        help="folder or file of the checkpoint, as the trainer left it, or the folders of all nodes; or "
        "OWNER/NAME@REVISION of the hub, s3://, gs:// or https://",
    )
    parser.add_argument(
        "--tag", help="checkpoint to read, where DIRECTORY holds several (default: the one that its file latest names)"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its dtype and shape")
    parser.add_argument("--json", action="store_true", help="write JSON for programs instead of text")


def run(args: argparse.Namespace) -> int:
    """Run the verb and write what was found. Raises what `inspect_checkpoint` raises."""
    if len(args.directories) == 1 and _is_published(Path(args.directories[0])):
        return _run_published(Path(args.directories[0]), as_json=args.json)
    fetched = fetch_all(args.directories, say)
    found = inspect_checkpoint(join_folders([each.path for each in fetched]), tag=args.tag)
    found = replace(found, directory=", ".join(each.address or str(each.path) for each in fetched))
    text = format_inspection(found, lists_tensors=args.tensors)
    write_answer(json.dumps(asdict(found), indent=2) + "\n" if args.json else text)
    return 0


def _is_published(directory: Path) -> bool:
    """Tell whether it is the folder of a model in a repository."""
    names = ("config.pbtxt", "inactive-config.pbtxt")
    return any((directory / name).is_file() for name in names)


def _run_published(directory: Path, *, as_json: bool) -> int:
    from .published import describe_model, format_model

    told = describe_model(directory)
    write_answer(json.dumps(told, indent=2) + "\n" if as_json else format_model(told))
    return 0
