"""The command `modelyard`: one table of verbs, each of which a module of one part carries out."""

from . import interruption

# Loading the rest takes a while, of which nobody wants a traceback. Only the command imports this.
interruption.leave_at_once()

import difflib
import importlib.util
import os
import runpy
import signal
import sys
from dataclasses import dataclass

from . import __version__
from .standard_streams import prepare


@dataclass(frozen=True, kw_only=True)
class Verb:
    """What follows `modelyard` on the command line.

    Attributes:
        name: The word that is typed.
        help: One line for the list of verbs.
        module: The module that is run, as `python -m` runs it.
        words: Arguments that are put in front of the reader's own.
        extra: The extra of the distribution that brings what the verb needs.
        needs: Modules of other distributions without which it cannot begin.
    """

    name: str
    help: str
    module: str
    words: tuple[str, ...] = ()
    extra: str
    needs: tuple[str, ...]


_WEIGHTS = ("rich", "zlib_ng", "tokenizers")
_CLIENT = ("numpy", "tritonclient", "platformdirs")


def _name_repository_verb(name: str, help: str) -> Verb:  # noqa: A002
    """Return a verb on what is published already, which needs no torch."""
    needs = (*_WEIGHTS, "tritonclient", "jinja2")
    return Verb(name=name, help=help, module="modelyard.export", words=(name,), extra="export", needs=needs)


# Heading → the verbs below it, in the order of a model's life.
VERBS = {
    "From a checkpoint to a repository": (
        Verb(
            name="inspect",
            help="say what a checkpoint is and holds, without reading its weights",
            module="modelyard.export",
            words=("inspect",),
            extra="export",
            needs=_WEIGHTS,
        ),
        Verb(
            name="consolidate",
            help="write a training checkpoint as a Hugging Face folder",
            module="modelyard.export",
            words=("consolidate",),
            extra="export",
            needs=_WEIGHTS,
        ),
        Verb(
            name="run",
            help="export a checkpoint, prove the file equal to it, and publish it",
            module="modelyard.export",
            words=("run",),
            extra="export",
            needs=(*_WEIGHTS, "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tritonclient", "jinja2"),
        ),
        Verb(
            name="lint",
            help="say what is wrong with any Triton repository, without a server",
            module="modelyard.export",
            words=("lint",),
            extra="export",
            needs=(*_WEIGHTS, "onnx", "tritonclient"),
        ),
    ),
    "Versions": (
        _name_repository_verb("versions", "list published versions, show one, or tell how two differ"),
        _name_repository_verb("activate", "make a published version the one that is served, forth or back"),
        _name_repository_verb("promote", "copy a proven version into another repository"),
        _name_repository_verb("prune", "remove old versions; never the active one, nor one that is served"),
        _name_repository_verb("remove", "remove a model with all its versions; running servers unload it"),
        _name_repository_verb("verify-repository", "hash every published file and compare it with what was proven"),
    ),
    "Serving": (
        Verb(
            name="serve",
            help="serve a repository with tritonserver until Ctrl-C or SIGTERM",
            module="modelyard.server",
            words=("serve",),
            extra="server",
            needs=("platformdirs", "tokenizers"),
        ),
        Verb(
            name="check",
            help="ask a running server for the answers that were verified",
            module="modelyard.server",
            words=("check",),
            extra="server",
            needs=("platformdirs",),
        ),
        Verb(
            name="doctor",
            help="say what this machine lacks to serve",
            module="modelyard.server",
            words=("doctor",),
            extra="server",
            needs=("platformdirs",),
        ),
        Verb(
            name="tune",
            help="measure how a published model is best served on this machine",
            module="modelyard.export",
            words=("tune",),
            extra="all",
            needs=(*_WEIGHTS, "tritonclient", "jinja2", "pytriton"),
        ),
        Verb(
            name="gateway",
            help="answer clients of OpenAI's API with the models of a running server",
            module="modelyard.gateway",
            extra="gateway",
            needs=(
                *_CLIENT,
                "fastapi",
                "uvicorn",
                "uvloop",
                "httptools",
                "orjson",
                "jinja2",
                "tokenizers",
                "prometheus_client",
            ),
        ),
    ),
    "Asking": (
        Verb(
            name="infer",
            help="send texts to a running server",
            module="modelyard.client.infer",
            extra="client",
            needs=_CLIENT,
        ),
        Verb(
            name="parity",
            help="repeat the verification through a running server",
            module="modelyard.client.parity",
            extra="client",
            needs=_CLIENT,
        ),
        Verb(
            name="bench",
            help="measure a running server with perf_analyzer",
            module="modelyard.client.bench",
            extra="client",
            needs=_CLIENT,
        ),
    ),
}

_EXAMPLES = """\
examples:
  modelyard run ./all-MiniLM-L6-v2 --name sentence_embedding --repository models
  modelyard serve --repository models
  modelyard infer --url localhost:8000 --text "A cat sleeps." "A kitten naps."

`modelyard VERB --help` tells a verb's options, with examples of its own.
"""


# What was asked for was done, and its answer could not be written; the parts have the same.
EXIT_UNANSWERED = 5


def main() -> int:
    """Run the command line and return the exit code."""
    prepare()
    # The part decides what Ctrl-C does from then on.
    interruption.leave_at_once()
    try:
        try:
            return _carry_out()
        finally:
            # Not on the way out of Python, which would tell of it in lines of its own.
            _flush()
    except _UnansweredError as exc:
        _drop(sys.stdout.fileno())
        if isinstance(exc.__cause__, BrokenPipeError):
            # Its reader, perhaps `head`, has left. The exit code is a shell's for that.
            return 128 + signal.SIGPIPE
        return _refuse(
            f"the answer cannot be written: expected a standard output that takes it, got '{exc}'; send it elsewhere.",
            EXIT_UNANSWERED,
        )


class _UnansweredError(Exception):
    """Nothing takes what was printed, for this reason."""


def _carry_out() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("-h", "--help", "help"):
        _print(describe_verbs())
        return 0
    if word == "--version":
        _print(f"modelyard {__version__}")
        return 0
    verbs = {verb.name: verb for group in VERBS.values() for verb in group}
    if word not in verbs:
        near = difflib.get_close_matches(word, verbs, n=1)
        remedy = f"did you mean {near[0]}" if near else "`modelyard --help` lists them"
        return _refuse(f"there is no verb {word!r}: expected one of {', '.join(verbs)}; {remedy}.", 2)
    verb = verbs[word]
    missing = [name for name in verb.needs if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(
            f"`modelyard {verb.name}` cannot run in {sys.prefix}: expected what modelyard[{verb.extra}] brings, got an "
            f"environment without {', '.join(missing)}; pip install 'modelyard[{verb.extra}]'.",
            1,
        )
    sys.argv[1:2] = verb.words
    # As `python -m`, so that each part keeps its own first line of work, such as what Ctrl-C does while torch loads.
    runpy.run_module(verb.module, run_name="__main__", alter_sys=True)
    return 0


def describe_verbs() -> str:
    """Return the help: the verbs in their groups, then examples."""
    lines = ["usage: modelyard VERB [options]", "", "From a trained checkpoint to a verified Triton server.", ""]
    for heading, group in VERBS.items():
        lines += [f"{heading}:", *(f"  {verb.name:<19}{verb.help}" for verb in group), ""]
    return "\n".join([*lines, "options:", "  --version    print the version", "", _EXAMPLES]).rstrip()


def _refuse(sentence: str, code: int) -> int:
    # What ends is no other thing for a word about it that nobody takes.
    try:
        print(f"error: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        _drop(sys.stderr.fileno())
    return code


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except OSError as exc:
        raise _UnansweredError(exc.strerror) from exc


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError as exc:
        raise _UnansweredError(exc.strerror) from exc


def _drop(descriptor: int) -> None:
    """Throw away what is still to be written: Python would try once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


if __name__ == "__main__":
    sys.exit(main())
