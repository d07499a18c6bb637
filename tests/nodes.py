"""One run's files as its nodes keep them: each in a folder of its own, what is not a rank's own on all of them."""

import re
import shutil
from pathlib import Path

# What is one rank's, part's or layer's own.
_OWN = re.compile(r".*(zero_pp_rank_\d+|rank_?\d+|layer_\d+-model_\d+|__\d+_\d+\.distcp).*")


def spread_over_nodes(folder: Path, to: Path, nodes: int = 2) -> list[Path]:
    """Return the folders of `nodes` nodes, with copies of the files of `folder`."""
    homes = [to / f"node{index}" for index in range(nodes)]
    turn = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        is_own = _OWN.fullmatch(path.name) is not None
        for home in [homes[turn % nodes]] if is_own else homes:
            place = home / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
        turn += is_own
    return homes
