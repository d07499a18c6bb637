"""The verb `run`: a checkpoint to a published version."""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from modelyard.free_memory import read_free_memory

from ..checkpoints import StoredCheckpoint, join_folders, open_checkpoint
from ..engines.table import AUTO
from ..errors import ExportError, SettingsError, escape_controls
from ..fetching import fetch_all, join_addresses
from ..foresight import check_foreseen
from ..locations import name_command
from ..options import ExportRequest, add_options, build_request, read_options
from ..options_file import OPTIONS_FILE
from ..progress import Progress
from ..repository.lock import check_destination
from ..targets import find_target
from ..tasks.table import TASKS
from .memory_estimates import estimate_memory
from .standard_streams import write_answer
from .verb import Verbs, add_verb, choose_next, open_console

if TYPE_CHECKING:
    from ..identity import SameVersion

_EXAMPLES = (
    "./all-MiniLM-L6-v2 --name sentence_embedding",
    "./checkpoint --name tickets --repository /srv/models \\\n"
    '      --add-special-token "[ENT_START]=start of entity" "[ENT_END]=end of entity"',
    "./checkpoint --name tickets --precision int8 --target 25.08",
    "./checkpoint --name tickets --instances 4 --priority-levels 2 --max-queue-size 64",
    "./checkpoint --name tickets --config serving.toml",
    "--factory model.py:build --inputs inputs.json --name scores",
    "./checkpoint --name tickets --json > result.json",
    "sentence-transformers/all-MiniLM-L6-v2@main --name sentence_embedding",
    "s3://models/tickets/2024-06 --name tickets",
    "./node0/run ./node1/run --base ./model --name tickets",
)


def add_parser(verbs: "Verbs[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "run",
        run,
        help="export a checkpoint, prove the file equal to it, and publish it",
        description="Read a checkpoint, export it to ONNX, prove the two equal, and publish it for Triton.",
        examples=_EXAMPLES,
        succeeded="published or already there",
        more="\n".join(["tasks:", *(f"  {entry.name:<29} {entry.help}" for entry in TASKS.values())]),
    )
    parser.add_argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="folder that a trainer or save_pretrained left, or the folders of all nodes; or OWNER/NAME@REVISION of "
        "the hub, s3://, gs:// or https:// (optional with --factory)",
    )
    parser.add_argument("--name", required=True, help="name that clients will use")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the same options, named as below with _: JSON, or TOML with tables [default] and [models.NAME] "
        f"(default: {OPTIONS_FILE} of the working directory, if there is one)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    parser.add_argument("--again", action="store_true", help="export even where a version was made of the same already")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb and report the result. Raises what `run_export` raises."""
    console = open_console()
    # Before anything is fetched: a mistake in the file is told at once.
    settings = read_options(arguments.config, arguments.name, partial(_tell, console))
    fetched = fetch_all(arguments.checkpoints, partial(_tell, console))
    checkpoint = join_folders([each.path for each in fetched]) if fetched else None
    request = build_request(vars(arguments) | {"checkpoint": checkpoint, "address": join_addresses(fetched)}, settings)
    _refuse_beside([each.path for each in fetched], request.repository)
    # Told at once: what follows takes seconds to import torch and transformers, and then minutes to export.
    check_destination(request.repository, request.name, partial(_tell, console))
    find_target(request.target)

    from ..identity import find_same_version

    same = None if arguments.again else find_same_version(request)
    if same:
        _print_same(same, as_json=arguments.json)
        return 0
    stored = _open(request)
    check_foreseen(request, stored)
    if stored:
        _warn_of_memory(console, request, stored)

    from ..pipeline import run_export
    from .summary import print_report, print_summary, to_json

    result = run_export(request, Progress(console), partial(print_report, console))
    if arguments.json:
        text = json.dumps(to_json(result), indent=2) + "\n"
    else:
        # Written as a whole, so that what keeps it from being written is told as such.
        page = io.StringIO()
        shown = Console(file=page, force_terminal=sys.stdout.isatty() or None, highlight=False, soft_wrap=True)
        print_summary(result, request.repository, shown)
        text = page.getvalue()
    publication = result.publication
    write_answer(text, _say_published(publication.name, publication.version, request.repository))
    return 0


def _refuse_beside(folders: Sequence[Path], repository: Path) -> None:
    """Refuse to publish into what is read: the next reader would find models in it that are none of its files.

    Raises:
        SettingsError: The repository is a folder of the checkpoint.
    """
    for folder in folders:
        if os.path.realpath(folder) == os.path.realpath(repository):
            raise SettingsError(
                f"{repository} is the checkpoint",
                expected="a repository in another folder",
                got="the same",
                remedy="pass another --repository",
            )


def _open(request: ExportRequest) -> StoredCheckpoint | None:
    """Return the checkpoint, None where there is none that can be read."""
    try:
        return open_checkpoint(request.checkpoint, tag=request.tag, base=request.base) if request.checkpoint else None
    except ExportError:
        # What is wrong with it is told by the export itself, which knows about all options.
        return None


def _warn_of_memory(console: Console, request: ExportRequest, checkpoint: StoredCheckpoint) -> None:
    """Say so where the export is expected to take more memory than there is. It may still pass: nothing is refused."""
    free = read_free_memory()
    if free is None:
        return
    try:
        estimates = estimate_memory(checkpoint)
    except ExportError:
        # Told by the export as well.
        return
    # Unless told otherwise the first engine is taken; `auto` tries all.
    names = list(estimates) if request.engine == AUTO else [request.engine or next(iter(estimates))]
    tried = [estimates.get(name, {}) for name in names]
    # What has not been measured is not warned of.
    needed = max((held.get(request.precision, {}).get("export_bytes", 0) for held in tried), default=0)
    if needed > free:
        _tell(
            console,
            f"Warning: this export in {request.precision} is expected to hold {needed / 1e9:.1f} GB of memory at most, "
            f"and {free / 1e9:.1f} GB are free here; give it more, or it may be killed.",
        )


def _tell(console: Console, sentence: str) -> None:
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _say_published(name: str, number: int, repository: Path) -> str:
    return f"version {number} of {name} is published in {repository}"


def _print_same(same: "SameVersion", *, as_json: bool) -> None:
    """Print that the export would lead to a version that is there; for programs with its report."""
    from ..proof.report_page import PAGE_FILE
    from ..repository.contents import REPORT_FILE

    version = same.version
    warnings = [str(each) for each in version.read_publication().get("warnings", [])]
    done = _say_published(version.name, version.number, version.repository)
    if as_json:
        publication = {
            "name": version.name,
            "version": version.number,
            "active": same.active,
            "outcome": same.outcome,
            "report_file": str(version.folder / REPORT_FILE),
        }
        content = {
            "checkpoint": same.origin,
            "missing": list(same.missing),
            "warnings": warnings,
            "report": version.read_report(),
            "publication": publication,
        }
        write_answer(json.dumps(content, indent=2) + "\n", done)
        return
    is_active = same.active == version.number
    written = {
        "unchanged": "already holds exactly this; nothing was written (--again exports anyway)",
        "switched": "holds exactly this and is served again (--again exports anyway)",
    }[same.outcome]
    facts = {
        "checkpoint": same.origin,
        "missing": "; ".join(same.missing),
        "unchanged": "checkpoint, tokenizer, options and tools are those of the lock, by their hashes",
        "published": f"{version.name} in {version.repository}, version {version.number} {written}",
        "active": "" if is_active else f"not this version but {same.active}" if same.active else "no version yet",
        "report": str(version.folder / PAGE_FILE),
    }
    lines = [f"{label:>11}  {text}" for label, text in facts.items() if text]
    then = (choose_next(version.repository, None),) if is_active else ("activate", version.name, version.number)
    lines += [line for warning in warnings for line in ("", f"Warning: {warning}")]
    lines += ["", f"Next: {name_command(*then, '--repository', version.repository)}"]
    write_answer("".join(escape_controls(line) + "\n" for line in lines), done)
