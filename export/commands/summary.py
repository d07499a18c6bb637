"""What `run` prints: the table of each proof, the summary, and the same for programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..engines.fastest import EngineChoice
from ..engines.table import ENGINES
from ..errors import list_some
from ..graph.conversion import PrecisionReport
from ..locations import name_command
from ..pipeline import ExportResult
from ..proof.report_page import PAGE_FILE
from ..proof.verify import VerificationReport
from ..repository.publication import Publication
from ..signature import SEQ_LEN, WINDOWS, ModelSignature
from ..stages import Stage
from ..tasks.comparison import describe_bounds, describe_errors, format_error, is_judged
from ..weights.vocabulary_rows import VocabularyRows
from .verb import choose_next


def print_report(console: Console, report: VerificationReport, stage: Stage) -> None:
    """Print what a stage's files were tried on, and the errors."""
    runtime = f"{stage.engine.title} {report.versions[stage.engine.name]}"
    table = Table(title=f"{runtime} against torch {report.versions['torch']}, {stage.precision.name}")
    # Nothing is cut, and where something has to be broken over lines, it is the name of a case.
    table.add_column("case", overflow="fold")
    # On the 80 columns of a terminal there is no room for more; the report has every figure.
    shown = [key for key in report.tolerances if key != "max_relative_length_error"]
    breaks = 1 if len(shown) <= 2 else -1
    # Pictures and rows of numbers have none.
    has_tokens = any(case.seq_len > 1 for case in report.cases)
    sizes = ["rows", "tokens"] if has_tokens else ["rows"]
    for heading in (*sizes, *("\n".join(key.replace("_", " ").rsplit(" ", breaks)) for key in shown)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for case in report.cases:
        # What no client sends is tried in every precision, and judged in fp32 alone.
        verdict = "[bold red]FAILED[/]"
        if case.passed:
            verdict = "ok" if is_judged(case.to_json(), report.tolerances) else "not judged"
        figures = [format_error(key, case.errors[key], report.tolerances[key]) for key in shown]
        # A case may hold a token in brackets, which is not a style.
        counts = [str(case.rows), str(case.seq_len)] if has_tokens else [str(case.rows)]
        table.add_row(case.name.replace("[", r"\["), *counts, *figures, verdict)
    table.caption = f"bounds: {describe_bounds(report.tolerances)}"
    console.print(table)


def print_summary(result: ExportResult, repository: Path, console: Console) -> None:
    """Print what was published, how equal it is to the checkpoint, and what to do next."""
    source, publication, report = result.source, result.publication, result.report
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
        "left out": list_some(source.task.unused_tensors) if source.task.unused_tensors else "",
        "served as": f"{source.task.name}: {source.task.description}",
        "text": _describe_text(signature),
        "together": "requests of any lengths" if signature.is_ragged else "",
        "tried": source.task.tested_sizes,
        "model": f"{result.model_bytes / 1e6:.1f} MB, {result.precision}, "
        f"{result.engine} of Triton {result.target.release}",
        "engine": _describe_choice(result.choice) if result.choice else "",
        "beside fp32": _describe_precision(result.conversion) if result.conversion else "",
        "equal to": f"the checkpoint in {len(report.judged)} cases, at worst "
        f"{describe_errors(report.worst_errors, report.tolerances)}",
        "accepted": (report.accepted_worse or {}).get("reason", ""),
        "published": f"{publication.name} in {repository}, {written}",
        "active": _describe_active(publication),
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
    console.print(f"\nNext: {_name_next(publication, repository, ENGINES[result.engine].elsewhere)}", markup=False)


def to_json(result: ExportResult) -> dict[str, Any]:
    """Return the same and more for programs."""
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
        "left_out": task.unused_tensors,
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


def _describe_text(signature: ModelSignature) -> str:
    if SEQ_LEN not in signature.longest:
        return ""
    longest = signature.longest[SEQ_LEN]
    if any(WINDOWS in tensor.symbols for tensor in signature.inputs):
        return f"question and context in windows of up to {longest} tokens, however long the context is"
    return f"up to {longest} tokens, longer is truncated"


def _describe_active(publication: Publication) -> str:
    if publication.active == publication.version:
        return ""
    return f"not this version but {publication.active}" if publication.active else "no version yet"


def _name_next(publication: Publication, repository: Path, elsewhere: str) -> str:
    if publication.active == publication.version:
        if elsewhere:
            return elsewhere.replace("NAME", publication.name)
        new = publication.report_file.parent if publication.outcome == "created" else None
        return name_command(choose_next(repository, new), "--repository", repository)
    return name_command("activate", publication.name, publication.version, "--repository", repository)


def _describe_precision(report: PrecisionReport) -> str:
    parts = [
        str(report.quality),
        f"{report.size_ratio:.2f} of the size",
        f"{report.speed.ratio:.2f} times as fast on CPU",
    ]
    parts += [f"{len(report.kept_fp32)} nodes in fp32"] if report.kept_fp32 else []
    return ", ".join(parts)


def _describe_choice(choice: EngineChoice) -> str:
    return f"the fastest for a text or row alone on one thread, CPU time: {choice.describe()}"


def _describe_memory(result: ExportResult) -> str:
    own, child = result.peak_bytes
    weights = 4 * result.source.parameters
    text = f"{own / 1e6:.0f} MB at most"
    # OpenVINO runs in the process of the export.
    text += f", and {child / 1e6:.0f} MB in ONNX Runtime's process beside it" if child else ""
    # Of a small model, nearly all of it is torch and transformers themselves.
    return f"{text}; {(own + child) / weights:.1f} times the fp32 weights" if weights > 1e9 else text


def _describe_rows(rows: VocabularyRows) -> str:
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
