"""Prompts on the command line: what a model writes after one, whole or as it comes."""

import contextlib
import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ClientError, UsageError
from ..streams import PROMPT, check_parameters
from .connection import Connection
from .ending import answer


def _read_parameters(text: str) -> dict[str, Any]:
    """Return what `--parameters` says.

    Raises:
        UsageError: It is not a JSON object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UsageError(
            "--parameters is not a JSON object",
            expected="such as '{\"max_tokens\": 20}'",
            got=text[:40],
            remedy="correct it",
        )
    return content


def ask_writer(arguments: Namespace, connect: Callable[[], Connection]) -> int:
    """Print what a model writes after a prompt, and return 0."""
    others = [flag for flag in ("text", "pair", "file", "column", "output") if getattr(arguments, flag)]
    if others:
        raise ClientError(f"--{others[0]} has no effect", expected="--prompt alone", got="both", remedy="leave it out")
    check_parameters(_read_parameters(arguments.parameters))
    connection = connect()
    name = connection.find_writer(arguments.model)
    inputs = {
        PROMPT: [arguments.prompt.encode("utf-8", errors="surrogateescape")],
        "sampling_parameters": [arguments.parameters.encode()],
    }
    asked: dict[str, Any] = {key: np.array(value, dtype=np.object_) for key, value in inputs.items()}
    pieces = []
    with contextlib.closing(
        connection.write(name, asked | {"exclude_input_in_output": np.array([True])}, is_streamed=arguments.stream)
    ) as written:
        for piece in written:
            pieces.append(piece)
            if not arguments.json:
                answer(piece, end="", flush=True)
    content = {"model": name, "prompt": arguments.prompt, "text": "".join(pieces)}
    answer(json.dumps(content, ensure_ascii=False) if arguments.json else "")
    return 0
