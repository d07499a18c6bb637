"""The verb `consolidate`: any checkpoint that we read, as a Hugging Face folder of safetensors."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints import join_folders
from ..consolidation.consolidate import DTYPES, consolidate
from ..errors import SettingsError
from ..fetching import fetch_all
from ..options import add_vocabulary_options, build_vocabulary_options
from .verb import Verbs, add_verb, answer, say

if TYPE_CHECKING:
    from ..consolidation.fitted import Fit

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that `5GB`, `300 MB` or `1000` stand for; units of 1000, as in `save_pretrained`.

    Raises:
        argparse.ArgumentTypeError: `text` is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 5GB or 300MB")
    return int(size)


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "consolidate",
        run,
        help="write a training checkpoint as a Hugging Face folder of safetensors",
        description="Write a training checkpoint's weights as safetensors, bit for bit, with config and tokenizer.",
        examples=(
            "./zero3_run ./model",
            "./zero3_run ./model --tag global_step1000",
            "./zero3_run ./model --dtype bfloat16 --max-shard-size 2GB",
            "./node0/run ./node1/run --output ./model",
            "s3://runs/zero3/checkpoint-500 ./model",
            "./megatron_run ./model --base ./gpt2",
            './run ./model --add-special-token "[ENT_START]=start of entity" "[ENT_END]=end of entity"',
        ),
        succeeded="written",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="DIRECTORY",
        help="folder or file of the checkpoint, as the trainer left it, or the folders of all nodes; or "
        "OWNER/NAME@REVISION of the hub, s3://, gs:// or https://; and without --output, the folder to make as "
        "the last one",
    )
    parser.add_argument("--output", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument(
        "--tag", help="checkpoint to read, where DIRECTORY holds several (default: the one that its file latest names)"
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer, where the checkpoint's own has none",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="cast the weights (default: as they are)")
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default="5GB",
        metavar="SIZE",
        help="largest size of a file, such as 300MB (default: 5GB)",
    )
    parser.add_argument("--allow-non-finite", action="store_true", help="accept NaN and infinite weights")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    add_vocabulary_options(parser)


def _tell_apart(paths: list[str], output: Path | None) -> tuple[list[str], Path]:
    """Return the folders of the checkpoint, and the folder to make.

    Raises:
        SettingsError: Nothing says which is the folder to make, or a folder that is to be made is there.
    """
    if output is not None:
        return paths, output
    if len(paths) == 1:
        raise SettingsError("there is no folder to write to", expected="DIRECTORY OUT, or --output OUT", got=paths[0])
    if len(paths) > 2 and Path(paths[-1]).exists():
        raise SettingsError(
            f"{paths[-1]} cannot be made",
            expected="a new folder as the last one",
            got="something there",
            remedy="name the folder to make with --output, if it is a part of the checkpoint",
        )
    return paths[:-1], Path(paths[-1])


def _refuse_inside(folders: Sequence[Path], out: Path) -> None:
    """Refuse to change what is read: another reader of the folder would find two models in it.

    Raises:
        SettingsError: The folder to make lies in one of the checkpoint's.
    """
    for folder in folders:
        # `Path.resolve` fails over a link to itself, which is refused where it is written to.
        if folder.is_dir() and folder.resolve() in Path(os.path.realpath(out)).parents:
            raise SettingsError(
                f"{out} lies in the checkpoint",
                expected="a folder outside of it",
                got=f"one in {folder}",
                remedy="choose another place",
            )


def _find_fit(args: argparse.Namespace) -> Fit | None:
    """Return what changes the vocabulary, or None where it stays: then nothing loads torch."""
    options = build_vocabulary_options(vars(args))
    if options is None:
        return None
    from ..weights.fitted_checkpoint import fit_checkpoint

    return partial(fit_checkpoint, options)


def run(args: argparse.Namespace) -> int:
    """Run the verb; write a line on what was done and one on each thing missing. Raises what `consolidate` raises."""
    started = time.monotonic()
    directories, out = _tell_apart(args.paths, args.output)
    folders = [each.path for each in fetch_all(directories, say)]
    _refuse_inside(folders, out)
    done = consolidate(
        join_folders(folders),
        out,
        tag=args.tag,
        base=args.base,
        fit=_find_fit(args),
        dtype=args.dtype,
        max_shard_bytes=args.max_shard_size,
        allow_non_finite=args.allow_non_finite,
        allow_other_tokenizer=bool(args.allow_other_tokenizer),
    )
    tied = f", {done.tied} tied names recorded" if done.tied else ""
    lines = [
        f"{out}: {done.tensors} tensors, {done.total_bytes / 1e9:.3f} GB{tied}, from {done.format_name}, "
        f"in {time.monotonic() - started:.1f} s",
        *(f"missing: {what}" for what in done.missing),
        *(f"warning: {what}" for what in done.warnings),
    ]
    answer(args, {"folder": str(out), **asdict(done)}, lines, f"{out} is written")
    return 0
