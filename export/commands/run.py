"""The verb `run`: a checkpoint to a published version."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from ..options import add_options, build_request, read_options
from ..progress import Progress
from ..repository.lock import check_destination
from ..targets import find_target
from ..tasks.table import TASKS
from .verb import Verbs, add_verb

_EXAMPLES = (
    "./all-MiniLM-L6-v2 --name sentence_embedding",
    "./checkpoint --name tickets --repository /srv/models \\\n"
    '      --add-special-token "[ENT_START]=start of entity" "[ENT_END]=end of entity"',
    "./checkpoint --name tickets --precision int8 --target 25.08",
    "--factory model.py:build --inputs inputs.json --name scores",
    "./checkpoint --name tickets --json > result.json",
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
        "checkpoint",
        type=Path,
        nargs="?",
        metavar="CHECKPOINT",
        help="folder that a trainer or save_pretrained left (optional with --factory)",
    )
    parser.add_argument("--name", required=True, help="name that clients will use")
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON with the same options, named as below")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the verb and report the result. Raises what `run_export` raises."""
    request = build_request(vars(arguments), read_options(arguments.config) if arguments.config else {})
    # Told at once: what follows takes seconds to import torch and transformers, and then minutes to export.
    check_destination(request.repository, request.name)
    find_target(request.target)

    from ..pipeline import run_export
    from .summary import print_report, print_summary, to_json

    console = Console(stderr=True)
    result = run_export(request, Progress(console), partial(print_report, console))
    if arguments.json:
        sys.stdout.write(json.dumps(to_json(result), indent=2) + "\n")
    else:
        print_summary(result, request.repository, Console(highlight=False, soft_wrap=True))
    return 0
