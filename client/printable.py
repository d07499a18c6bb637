"""What may be shown on a terminal. Imports nothing that takes a while."""

import re

# What is not for printing, but for the ends of lines and tabulators, and what turns the order of letters around
# (Unicode Standard Annex 9, explicit directional formatting).
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def make_printable(text: str) -> str:
    """Return a text with escapes, as JSON has them, in place of what a terminal obeys."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
