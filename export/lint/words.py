"""The word that was probably meant."""

import difflib
from collections.abc import Iterable


def find_nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like `word`, empty where none is."""
    by_lower = {each.lower(): each for each in sorted(known, reverse=True)}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    # Of several the one that it is the largest part of.
    containing = sorted((each for each in by_lower if word and word.lower() in each), key=len)
    return by_lower[(near or containing or [""])[0]] if near or containing else ""
