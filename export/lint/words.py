"""The word that was probably meant."""

import difflib
from collections.abc import Iterable


def find_nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like `word`, empty where none is."""
    by_lower = {each.lower(): each for each in sorted(known, reverse=True)}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    containing = [each for each in by_lower if word and word.lower() in each]
    # Of several one that ends with it, as `input_ids` does with `ids`, and the one that it is the largest part of.
    containing.sort(key=lambda each: (not each.endswith(word.lower()), len(each)))
    return by_lower[(near or containing or [""])[0]] if near or containing else ""
