"""`python -m export`: the command line."""

from . import interruption

if __name__ == "__main__":
    # Loading the rest takes a while, of which nobody wants a traceback.
    interruption.leave_at_once()

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .commands import consolidate, inspect_checkpoint
from .engines import ENGINES
from .errors import ExportError, list_some
from .graph.precisions import PRECISIONS
from .locations import PROGRAM, REPOSITORY, name_command
from .progress import Progress
from .request import AGGREGATIONS, DEFAULT_RELEASE, POOLINGS, TASKS, UNUSED_ROWS, AddedToken
from .settings import build_request, read_settings
from .targets import find_target

if TYPE_CHECKING:
    from .graph.conversion import PrecisionReport
    from .pipeline import ExportResult
    from .proof.verify import VerificationReport
    from .stages import Stage
    from .weights.vocabulary_rows import VocabularyRows

_EXAMPLES = f"""
examples:
  {name_command("run")} ./all-MiniLM-L6-v2 --name sentence_embedding
  {name_command("run")} ./checkpoint --name tickets --repository /srv/models \\
      --add-special-token "[ENT_START]=start of entity" "[ENT_END]=end of entity"
  {name_command("run")} ./checkpoint --name tickets --precision int8 --target 25.08
  {name_command("run")} --factory model.py:build --inputs inputs.json --name scores
  {name_command("run")} ./checkpoint --name tickets --json > result.json

exit codes: 0 published or already there, 1 refused (one sentence on stderr, nothing written), 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    console = Console(stderr=True)
    try:
        interruption.raise_again()
        arguments = _build_parser().parse_args(argv)
        signal.signal(signal.SIGTERM, _interrupt)
        code = int(arguments.command(arguments))
        sys.stdout.flush()
        return code
    except ExportError as exc:
        return _refuse(console, str(exc))
    except KeyboardInterrupt:
        console.print("error: interrupted; everything is as it was.", style="red", soft_wrap=True)
        return 130
    except BrokenPipeError:
        # Whoever read the answer, `head` perhaps, went away; what was asked for is done. As a shell tells it.
        _drop_answer()
        return 128 + signal.SIGPIPE
    # What no reader foresaw: rights taken away, a disk that fails or is full. A bug of our own is no OSError.
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        if not _can_answer():
            where = "the answer cannot be written: "
            _drop_answer()
        return _refuse(console, str(ExportError(f"{where}{exc.strerror or exc}")))


def _refuse(console: Console, sentence: str) -> int:
    console.print(f"error: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 1


def _can_answer() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _drop_answer() -> None:
    """Throw away what is still to be written to stdout: Python would try once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    # The same way out as Ctrl-C, so that what was begun is undone.
    raise KeyboardInterrupt


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="From a trained checkpoint to a verified version in a Triton repository."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run = verbs.add_parser(
        "run",
        help="checkpoint to published version",
        description="Read a checkpoint, export it to ONNX, prove the two equal, and publish it for Triton.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        metavar="CHECKPOINT",
        help="what the trainer or save_pretrained left (may be left out with --factory)",
    )
    run.add_argument("--name", required=True, help="name that clients will use")
    run.add_argument(
        "--task",
        choices=TASKS,
        metavar="TASK",
        help=f"what it is served as (default: what it was trained for): {', '.join(TASKS)}",
    )
    run.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help=f"Triton model repository (default: {REPOSITORY})",
    )
    run.add_argument("--config", type=Path, metavar="FILE", help="JSON with the same options, named as below")
    run.add_argument(
        "--adapter",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="LoRA adapters to merge, each the folder that peft saved, one after another",
    )
    run.add_argument("--tag", help="which checkpoint of several in the folder (default: the trainer's own latest)")
    run.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer, where the checkpoint's own has none",
    )
    run.add_argument("--allow-non-finite", action="store_true", help="let NaN and infinite weights through")
    run.add_argument(
        "--lora-scaling",
        type=float,
        metavar="S",
        help="lora_scaling of DeepSpeed-Chat, to merge its LoRA",
    )
    _add_proof_options(run.add_argument_group("options of the graph and its proof"))
    _add_vocabulary_options(run.add_argument_group("options of the vocabulary"))
    _add_task_options(run.add_argument_group("options of some tasks"))
    run.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    run.set_defaults(command=_run)
    inspect_checkpoint.add_parser(verbs)
    consolidate.add_parser(verbs)
    return parser


def _add_proof_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--target", metavar="RELEASE", help=f"Triton release that is to serve it (default: {DEFAULT_RELEASE})"
    )
    group.add_argument("--precision", choices=PRECISIONS, help="of the published file (default: fp32)")
    group.add_argument("--engine", choices=ENGINES, help="what runs it (default: onnxruntime)")
    group.add_argument(
        "--tolerance",
        type=_parse_tolerance,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="another bound for the verification, such as max_abs_error=1e-6; a wider one needs --accept-worse",
    )
    group.add_argument("--accept-worse", metavar="REASON", help="accept wider bounds; the report bears the reason")
    group.add_argument(
        "--factory",
        metavar="ENTRY",
        help="function that builds the module, as package.module:function or file.py:function; it is run",
    )
    group.add_argument(
        "--inputs", type=Path, metavar="FILE", help="JSON that describes that module's inputs and outputs"
    )


def _parse_tolerance(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}") from None


def _add_task_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--top-k", type=_parse_count, metavar="N", help="answers a text gets at most")
    group.add_argument("--aggregation", choices=AGGREGATIONS, help="how tokens become entities (default: simple)")
    group.add_argument("--pooling", choices=POOLINGS, help="how token vectors become one (default: as recorded)")
    group.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to length 1 (default: as recorded)"
    )


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _add_vocabulary_options(group: "argparse._ArgumentGroup") -> None:
    for name, kind in (("--add-special-token", "kept in their case and never split"), ("--add-token", "ordinary")):
        group.add_argument(
            name,
            type=_parse_added_token,
            nargs="+",
            action="extend",
            default=[],
            metavar="TOKEN=INITIALIZER",
            help=f"tokens to add, {kind}; each starts as zeros, mean, random, copy:TOKEN or the mean of a description",
        )
    group.add_argument("--pad-vocab-to-multiple-of", type=_parse_count, metavar="N", help="pad the number of rows")
    group.add_argument("--unused-rows", choices=UNUSED_ROWS, help="rows beyond the tokenizer (default: keep)")
    group.add_argument("--seed", type=int, help="of random rows (default: 0)")
    group.add_argument(
        "--allow-other-tokenizer",
        action="store_true",
        default=None,
        help="take a tokenizer whose special ids or vocabulary are others than config.json says",
    )


def _parse_added_token(text: str) -> AddedToken:
    token, separator, initializer = text.partition("=")
    if not separator or not token.strip() or not initializer.strip():
        raise argparse.ArgumentTypeError(f"expected TOKEN=INITIALIZER, got {text!r}")
    return AddedToken(token=token, initializer=initializer)


def _run(arguments: argparse.Namespace) -> int:
    from .repository.lock import check_destination

    request = build_request(vars(arguments), read_settings(arguments.config) if arguments.config else {})
    # Told at once: what follows takes seconds to import torch and transformers, and then minutes to export.
    check_destination(request.repository, request.name)
    find_target(request.target)

    from .pipeline import run_export

    console = Console(stderr=True)
    result = run_export(request, Progress(console), partial(_print_report, console))
    if arguments.json:
        print(json.dumps(_to_json(result), indent=2))  # noqa: T201
    else:
        _print_summary(result, request.repository, Console(highlight=False, soft_wrap=True))
    return 0


def _print_report(console: Console, report: "VerificationReport", stage: "Stage") -> None:
    from .tasks.comparison import describe_bounds, is_bounded_below

    runtime = f"{stage.engine.title} {report.versions[stage.engine.name]}"
    table = Table(title=f"{runtime} against torch {report.versions['torch']}, {stage.precision.name}")
    # What was tried and what came of it is never broken over lines, nor cut.
    table.add_column("case", no_wrap=True)
    # On the 80 columns of a log there is no room for more; the report has every figure.
    shown = [key for key in report.tolerances if key != "max_relative_length_error"]
    for heading in ("rows", "tokens", *(key.replace("_", " ") for key in shown)):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for case in report.cases:
        verdict = "ok" if case.passed else "[bold red]FAILED[/]"
        figures = [f"{case.errors[key]:.8f}" if is_bounded_below(key) else f"{case.errors[key]:.1e}" for key in shown]
        # A case may bear a token in brackets, which is no style.
        table.add_row(case.name.replace("[", r"\["), str(case.rows), str(case.seq_len), *figures, verdict)
    table.caption = f"bounds: {describe_bounds(report.tolerances)}"
    console.print(table)


def _print_summary(result: "ExportResult", repository: Path, console: Console) -> None:
    from .proof.report_page import PAGE_FILE
    from .signature import SEQ_LEN
    from .tasks.comparison import describe_errors

    source, publication, worst = result.source, result.publication, result.report.worst
    written = {
        "created": f"version {publication.version}, new",
        "switched": f"version {publication.version}, which was there already and is served again",
        "unchanged": f"version {publication.version} already holds exactly this; nothing was written",
    }[publication.outcome]
    signature = source.task.signature
    facts = {
        "checkpoint": f"{source.origin}, {source.parameters / 1e6:.1f} M parameters",
        "missing": "; ".join(source.missing),
        "adapters": ", ".join(str(folder) for folder in source.adapters),
        "vocabulary": _describe_rows(source.rows) if source.rows else "",
        "left out": list_some(source.task.left_out) if source.task.left_out else "",
        "served as": f"{source.task.name}: {source.task.description}",
        "text": f"up to {signature.longest[SEQ_LEN]} tokens, longer is truncated"
        if SEQ_LEN in signature.longest
        else "",
        "tried": source.task.tried,
        "model": f"{result.model_bytes / 1e6:.1f} MB, {result.precision}, "
        f"{result.engine} of Triton {result.target.release}",
        "beside fp32": _describe_precision(result.conversion) if result.conversion else "",
        "equal to": f"the checkpoint in {len(result.report.cases)} cases, at worst {describe_errors(worst.errors)}",
        "published": f"{publication.name} in {repository}, {written}",
        "report": str(publication.report_file.with_name(PAGE_FILE)),
        "memory": _describe_memory(result),
    }
    lines = {label: text for label, text in facts.items() if text}
    console.print()
    for label, text in lines.items():
        console.print(f"{label:>11}  {text}", markup=False)
    for warning in source.task.warnings:
        console.print(f"\n[bold yellow]Warning:[/] {escape(warning)}")
    for note in result.notes:
        console.print(f"\nNote: {note}", markup=False)
    console.print(f"\nNext: {name_command('serve')} --repository {repository}", markup=False)


def _describe_precision(report: "PrecisionReport") -> str:
    parts = [
        str(report.quality),
        f"{report.size_ratio:.2f} of the size",
        f"{report.speed.ratio:.2f} times as fast on CPU",
    ]
    parts += [f"{len(report.kept)} nodes in fp32"] if report.kept else []
    return ", ".join(parts)


def _describe_memory(result: "ExportResult") -> str:
    own, child = result.peak_bytes
    weights = 4 * result.source.parameters
    text = f"{own / 1e6:.0f} MB at most, {child / 1e6:.0f} MB in ONNX Runtime's own process"
    # Of a small model, nearly all of it is torch and transformers themselves.
    return f"{text}; {(own + child) / weights:.1f} times the fp32 weights" if weights > 1e9 else text


def _describe_rows(rows: "VocabularyRows") -> str:
    text = f"{rows.after} rows"
    if rows.added:
        text += f" ({rows.before} before; added {', '.join(rows.added)})"
    elif rows.after != rows.before:
        text += f" ({rows.before} before)"
    if rows.unused:
        text += f", {rows.unused} beyond the tokenizer"
    if rows.recorded != rows.before:
        text += f"; config.json said {rows.recorded}"
    return text


def _to_json(result: "ExportResult") -> dict[str, Any]:
    from .signature import SEQ_LEN

    source, publication = result.source, result.publication
    task, rows = source.task, source.rows
    signature = task.signature
    # What clients see of it.
    contract = signature.contract or signature
    content: dict[str, Any] = {
        "checkpoint": source.origin,
        "parameters": source.parameters,
        "task": task.name,
        "served_as": task.description,
        "contract": {
            "inputs": [tensor.name for tensor in contract.inputs],
            "outputs": [tensor.name for tensor in contract.outputs],
        },
        "missing": list(source.missing),
        "adapters": [str(folder) for folder in source.adapters],
        "left_out": task.left_out,
        "target": result.target.release,
        "model_bytes": result.model_bytes,
        "peak_bytes": {"export": result.peak_bytes[0], "onnxruntime": result.peak_bytes[1]},
        "warnings": list(task.warnings),
        "notes": list(result.notes),
        "report": result.report.to_json(),
        "publication": asdict(publication) | {"report_file": str(publication.report_file)},
    }
    if SEQ_LEN in signature.longest:
        content["max_length"] = signature.longest[SEQ_LEN]
    if rows:
        content["vocabulary"] = {
            "rows_before": rows.before,
            "rows_after": rows.after,
            "rows_unused": rows.unused,
            "rows_in_config": rows.recorded,
            "tokens": rows.tokens,
            "tokens_added": rows.added,
            "tables": rows.tables,
            "sha256": rows.sha256,
        }
    return content


if __name__ == "__main__":
    sys.exit(main())
