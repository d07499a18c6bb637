"""`python -m export`: the command line."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from export import consolidate, inspect_checkpoint
from export.errors import ExportError, list_some
from export.progress import Progress
from export.request import AGGREGATIONS, POOLINGS, TASKS, UNUSED_ROWS, AddedToken
from export.settings import build_request, read_settings

if TYPE_CHECKING:
    from export.pipeline import ExportResult
    from export.verify import VerificationReport

_EXAMPLES = """
examples:
  python -m export run ./all-MiniLM-L6-v2 --name sentence_embedding
  python -m export run ./checkpoint --name tickets --repository /srv/models \\
      --add-special-token "[ENT_START]=start of entity" "[ENT_END]=end of entity"
  python -m export run ./checkpoint --name tickets --json > result.json

exit codes: 0 published or already there, 1 refused (one sentence on stderr, nothing written), 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(stderr=True)
    try:
        return int(arguments.command(arguments))
    except ExportError as exc:
        console.print(f"error: {exc}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("error: interrupted; everything is as it was.", style="red", soft_wrap=True)
        return 130


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    # The same way out as Ctrl-C, so that what was begun is undone.
    raise KeyboardInterrupt


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export", description="From a trained checkpoint to a verified version in a Triton repository."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run = verbs.add_parser(
        "run",
        help="checkpoint to published version",
        description="Read a checkpoint, export it to ONNX, prove the two equal, and publish it for Triton.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="what the trainer or save_pretrained left")
    run.add_argument("--name", required=True, help="name that clients will use")
    run.add_argument("--task", choices=TASKS, help="what it is served as (default: what it was trained for)")
    run.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="Triton model repository (default: model_repository of this checkout)",
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
    _add_vocabulary_options(run.add_argument_group("options of the vocabulary"))
    _add_task_options(run.add_argument_group("options of some tasks"))
    run.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    run.set_defaults(command=_run)
    inspect_checkpoint.add_parser(verbs)
    consolidate.add_parser(verbs)
    return parser


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
    # Takes seconds, for it imports torch and transformers.
    from export.pipeline import STEPS, run_export

    console = Console(stderr=True)
    request = build_request(vars(arguments), read_settings(arguments.config) if arguments.config else {})
    result = run_export(request, Progress(console, STEPS), lambda report: _print_report(report, console))
    if arguments.json:
        print(json.dumps(_to_json(result), indent=2))  # noqa: T201
    else:
        _print_summary(result, request.repository, Console(highlight=False, soft_wrap=True))
    return 0


def _print_report(report: "VerificationReport", console: Console) -> None:
    from export.comparison import describe_errors

    table = Table(title=f"ONNX Runtime {report.versions['onnxruntime']} against torch {report.versions['torch']}, fp32")
    # What was tried and what came of it is never broken over lines, nor cut.
    table.add_column("case", no_wrap=True)
    # On the 80 columns of a log there is no room for more; the report has every figure.
    shown = [key for key in report.tolerances if key != "max_relative_length_error"]
    for heading in ("rows", "tokens", *(key.replace("_", " ") for key in shown)):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for case in report.cases:
        verdict = "ok" if case.passed else "[bold red]FAILED[/]"
        figures = [f"{case.errors[key]:.8f}" if key.startswith("min_") else f"{case.errors[key]:.1e}" for key in shown]
        # A case may bear a token in brackets, which is no style.
        table.add_row(case.name.replace("[", r"\["), str(case.rows), str(case.seq_len), *figures, verdict)
    table.caption = f"bounds: {describe_errors(report.tolerances, bounds=True)}"
    console.print(table)


def _print_summary(result: "ExportResult", repository: Path, console: Console) -> None:
    from export.comparison import describe_errors

    source, publication, worst = result.source, result.publication, result.report.worst
    rows = source.rows
    vocabulary = f"{rows.after} rows"
    if rows.added:
        vocabulary += f" ({rows.before} before; added {', '.join(rows.added)})"
    elif rows.after != rows.before:
        vocabulary += f" ({rows.before} before)"
    if rows.unused:
        vocabulary += f", {rows.unused} beyond the tokenizer"
    if rows.recorded != rows.before:
        vocabulary += f"; config.json said {rows.recorded}"
    written = {
        "created": f"version {publication.version}, new",
        "switched": f"version {publication.version}, which was there already and is served again",
        "unchanged": f"version {publication.version} already holds exactly this; nothing was written",
    }[publication.outcome]
    lines = {
        "checkpoint": f"{source.checkpoint.format_name}, {source.parameters / 1e6:.1f} M parameters",
        "vocabulary": vocabulary,
        "served as": f"{source.task.name}: {source.task.description}",
        "text": f"up to {source.signature.max_length} tokens, longer is truncated",
        "model": f"{result.model_bytes / 1e6:.1f} MB ONNX, fp32, for Triton {result.report.target}",
        "equal to": f"the checkpoint in {len(result.report.cases)} cases, at worst {describe_errors(worst.errors)}",
        "published": f"{publication.ensemble} in {repository}, {written}",
        "report": str(publication.report_file),
    }
    if source.adapters:
        lines["adapters"] = ", ".join(str(folder) for folder in source.adapters)
    if source.task.left_out:
        lines["left out"] = list_some(source.task.left_out)
    console.print()
    for label, text in lines.items():
        console.print(f"{label:>10}  {text}", markup=False)
    console.print(f"\nNext: python -m server --repository {repository}", markup=False)


def _to_json(result: "ExportResult") -> dict[str, Any]:
    source, publication = result.source, result.publication
    return {
        "checkpoint": source.checkpoint.format_name,
        "parameters": source.parameters,
        "vocabulary": {
            "rows_before": source.rows.before,
            "rows_after": source.rows.after,
            "rows_unused": source.rows.unused,
            "rows_in_config": source.rows.recorded,
            "tokens": source.rows.tokens,
            "tokens_added": source.rows.added,
            "tables": source.rows.tables,
            "sha256": source.rows.sha256,
        },
        "task": source.task.name,
        "served_as": source.task.description,
        "contract": {
            "inputs": source.signature.contract.texts,
            "outputs": [tensor.name for tensor in source.signature.contract.answers],
        },
        "adapters": [str(folder) for folder in source.adapters],
        "max_length": source.signature.max_length,
        "left_out": source.task.left_out,
        "model_bytes": result.model_bytes,
        "report": result.report.to_json(),
        "publication": asdict(publication) | {"report_file": str(publication.report_file)},
    }


if __name__ == "__main__":
    sys.exit(main())
