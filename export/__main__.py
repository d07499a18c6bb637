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
from export.request import TASKS, AddedToken, ExportRequest

if TYPE_CHECKING:
    from export.pipeline import ExportResult
    from export.verify import VerificationReport

_CHECKOUT = Path(__file__).resolve().parent.parent

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
    run.add_argument("--task", choices=TASKS, default=TASKS[0], help="what it is served as (default: %(default)s)")
    run.add_argument(
        "--repository",
        type=Path,
        default=_CHECKOUT / "model_repository",
        metavar="DIR",
        help="Triton model repository (default: model_repository of this checkout)",
    )
    run.add_argument(
        "--add-special-token",
        type=_parse_added_token,
        nargs="+",
        action="extend",
        default=[],
        metavar="TOKEN=DESCRIPTION",
        help="special tokens to add, each starting as the mean of its description's embeddings",
    )
    run.add_argument("--tag", help="which checkpoint of several in the folder (default: the trainer's own latest)")
    run.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer, where the checkpoint's own has none",
    )
    run.add_argument("--allow-non-finite", action="store_true", help="let NaN and infinite weights through")
    run.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    run.set_defaults(command=_run)
    inspect_checkpoint.add_parser(verbs)
    consolidate.add_parser(verbs)
    return parser


def _parse_added_token(text: str) -> AddedToken:
    token, separator, description = text.partition("=")
    if not separator or not token.strip() or not description.strip():
        raise argparse.ArgumentTypeError(f"expected TOKEN=DESCRIPTION, got {text!r}")
    return AddedToken(token=token, description=description)


def _run(arguments: argparse.Namespace) -> int:
    # Takes seconds, for it imports torch and transformers.
    from export.pipeline import STEPS, run_export

    console = Console(stderr=True)
    request = ExportRequest(
        checkpoint=arguments.checkpoint,
        tag=arguments.tag,
        base=arguments.base,
        allow_non_finite=arguments.allow_non_finite,
        name=arguments.name,
        task=arguments.task,
        repository=arguments.repository,
        added_tokens=tuple(arguments.add_special_token),
    )
    result = run_export(request, Progress(console, STEPS), lambda report: _print_report(report, console))
    if arguments.json:
        print(json.dumps(_to_json(result), indent=2))  # noqa: T201
    else:
        _print_summary(result, arguments.repository, Console(highlight=False, soft_wrap=True))
    return 0


def _print_report(report: "VerificationReport", console: Console) -> None:
    table = Table(title=f"ONNX Runtime {report.versions['onnxruntime']} against torch {report.versions['torch']}, fp32")
    table.add_column("case")
    for heading in ("rows", "tokens", "max abs error", "min cosine"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for case in report.cases:
        verdict = "ok" if case.passed else "[bold red]FAILED[/]"
        figures = (str(case.rows), str(case.seq_len), f"{case.max_abs_error:.1e}", f"{case.min_cosine:.8f}")
        # A case may bear a token in brackets, which is no style.
        table.add_row(case.name.replace("[", r"\["), *figures, verdict)
    bounds = report.to_json()["tolerances"]
    table.caption = f"bounds: {bounds['max_abs_error']:.0e} on vectors of length 1, cosine {bounds['min_cosine']}"
    console.print(table)


def _print_summary(result: "ExportResult", repository: Path, console: Console) -> None:
    source, publication, worst = result.source, result.publication, result.report.worst
    vocabulary = f"{source.rows_after} rows"
    if source.tokens_added:
        vocabulary += f" ({source.rows_before} before; added {', '.join(source.tokens_added)})"
    written = {
        "created": f"version {publication.version}, new",
        "switched": f"version {publication.version}, which was there already and is served again",
        "unchanged": f"version {publication.version} already holds exactly this; nothing was written",
    }[publication.outcome]
    lines = {
        "checkpoint": f"{source.checkpoint.format_name}, {source.parameters / 1e6:.1f} M parameters",
        "vocabulary": vocabulary,
        "pooling": str(source.pooling),
        "text": f"up to {source.signature.max_length} tokens, longer is truncated",
        "model": f"{result.model_bytes / 1e6:.1f} MB ONNX, fp32, for Triton {result.report.target}",
        "equal to": f"the checkpoint within {worst.max_abs_error:.1e}, cosine >= {worst.min_cosine:.7f}, "
        f"in {len(result.report.cases)} cases",
        "published": f"{publication.ensemble} in {repository}, {written}",
        "report": str(publication.report_file),
    }
    if source.left_out:
        lines["left out"] = list_some(source.left_out)
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
            "rows_before": source.rows_before,
            "rows_after": source.rows_after,
            "tokens_added": source.tokens_added,
        },
        "pooling": asdict(source.pooling),
        "max_length": source.signature.max_length,
        "left_out": source.left_out,
        "model_bytes": result.model_bytes,
        "report": result.report.to_json(),
        "publication": asdict(publication) | {"report_file": str(publication.report_file)},
    }


if __name__ == "__main__":
    sys.exit(main())
