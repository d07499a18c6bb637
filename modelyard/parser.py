"""The command line of every part: a slip is told in one line."""

import argparse
import contextlib
import difflib
import itertools
import sys
from typing import Any, NoReturn


class VerbParser(argparse.ArgumentParser):
    """Names the verb and the option in what is wrong."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what is typed behind a verb, of which nothing may be left over; see `argparse`."""
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None or {"-h", "--help"} & {*words}:
            return super().parse_known_args(words, namespace)
        # Before argparse tells what is missing, which may be what was mistyped.
        for word in itertools.takewhile(lambda word: word != "--", words):
            self._check_option(word)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            # argparse gives what stands without an option all its places at the first of them.
            empty = [each for each in self._get_positional_actions() if getattr(parsed, each.dest) is each.default]
            remedy = "; put it in front of the options" if empty and not unknown[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Tell wrong usage in one line: the usage may be thirty, in front of the one that matters."""
        # Python 3.10 ends with 1 where nothing takes it.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{self.prog}: error: {message}; see {self.prog} --help\n")
        self.exit(2)

    def _check_option(self, word: str) -> None:
        """Refuse an option that is not there, with the one that was probably meant."""
        name, known = word.partition("=")[0], [each for each in self._option_string_actions if each.startswith("--")]
        # A word with a blank is a text that begins like an option, and a beginning of an option is short for it.
        if name.startswith("--") and " " not in word and not any(each.startswith(name) for each in known):
            near = difflib.get_close_matches(name, known, n=1)
            self.error(f"there is no option {name}" + (f", did you mean {near[0]}" if near else ""))
