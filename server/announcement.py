"""What a server says of itself once it serves: where, and what to ask it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .endpoints import Endpoints
from .following.model_text import read_inputs
from .following.published import Published
from .following.recorded import read_golden
from .following.sums import GOLDEN_FILE
from .locations import name_command

# What `infer` is asked with, by the inputs that a model has; nothing where it must fit the model.
_QUESTIONS = {
    ("TEXT",): '--text "Hello"',
    ("text_input",): '--prompt "Once upon a time"',
    ("TEXT", "TEXT_PAIR"): "",
    ("IMAGE",): "--image photo.jpg",
    ("AUDIO",): "--audio speech.wav",
}
_OWN_FILES = (("IMAGE",), ("AUDIO",))
_RANKS = {inputs: rank for rank, inputs in enumerate(_QUESTIONS)}

# Input of a published model → the option that is given its text.
_OPTIONS = {"TEXT": "--text", "TEXT_PAIR": "--pair"}


def announce(endpoints: Endpoints, repository: Path, models: Sequence[Published]) -> str:
    """Return two lines: the addresses, and a command that asks one of `models`, whose files lie in `repository`."""
    command, own_file = _name_next(endpoints, repository, models)
    host = endpoints.bracketed_host
    aside = f"with a file of yours as {own_file}; " if own_file else ""
    return (
        f"serving HTTP on {host}:{endpoints.http_port}, gRPC on {host}:{endpoints.grpc_port}, "
        f"metrics on {host}:{endpoints.metrics_port}, status on {host}:{endpoints.status_port}\n"
        f"Next: {command}    ({aside}Ctrl-C here stops the server)"
    )


def _name_next(endpoints: Endpoints, repository: Path, models: Sequence[Published]) -> tuple[str, str]:
    """Return a command that asks the model which is asked most easily, and the file that it wants; mostly none.

    One of tensors has nothing that could be typed.
    """
    found = []
    samples = {model.name: _read_sample(repository, model) for model in models}
    if samples and not any(samples.values()):
        # Written by hand: nobody knows what they should answer, and tritonserver what they take.
        return f"curl {shlex.quote(endpoints.told_url)}/v2/models/{shlex.quote(models[0].name)}", ""
    for model in models:
        sample = samples[model.name]
        inputs = _find_inputs(model)
        if inputs in _RANKS and (question := _find_question(inputs, sample)):
            # Words from the sample are answered as well, but say less than a greeting.
            is_sample = question != _QUESTIONS[inputs]
            found.append((inputs in _OWN_FILES, is_sample, _RANKS[inputs], model.name, question))
    if not found:
        ports = ("--http-port", endpoints.http_port, "--status-port", endpoints.status_port)
        return name_command("check", "--repository", repository, *ports), ""
    wants_file, _, _, name, question = min(found)
    named = ("--model", name) if len(models) > 1 else ()
    command = f"{name_command('infer', '--url', endpoints.told_url, *named)} {question}"
    return command, question.split()[-1] if wants_file else ""


def _find_inputs(model: Published) -> tuple[str, ...]:
    """Return what a model must be sent; whoever writes text takes more, none of which is required."""
    inputs = tuple(read_inputs(model.configs[model.name]))
    return ("text_input",) if "text_input" in inputs else inputs


def _find_question(inputs: tuple[str, ...], sample: Mapping[str, Any]) -> str:
    """Return the options of `infer` that ask a model with these inputs; nothing where none is known to be answered."""
    # A model that fills masks refuses a text without one, which its tokenizer writes in its own way.
    fills_masks = inputs == ("TEXT",) and any(tensor["name"] == "TOKEN" for tensor in sample.get("outputs", ()))
    if _QUESTIONS[inputs] and not fills_masks:
        return _QUESTIONS[inputs]
    return " ".join(
        f"{_OPTIONS[tensor['name']]} {shlex.quote(tensor['data'][0])}" for tensor in sample.get("inputs", ())
    )


def _read_sample(repository: Path, model: Published) -> Mapping[str, Any]:
    """Return the first request of a model that was verified, with its answer; nothing where there is none."""
    path = repository / model.name / str(model.version) / GOLDEN_FILE
    try:
        sample: Mapping[str, Any] = read_golden(path)["samples"][0]
    # Nothing was published beside a model of others; and what is damaged was told of when the model was asked.
    except (OSError, ValueError):
        return {}
    return sample
