"""A conversation as one prompt: the checkpoint's own template, in a sandbox, as transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from .errors import ApiError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what the assistant says for whoever trains; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what stands inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter of that name escapes what HTML would read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals |= {"raise_exception": _refuse, "strftime_now": _now}


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        text: In Jinja.
        special: Name → text of the tokens that it may write, such as `bos_token`.

    Raises:
        ValueError: It is not Jinja.
    """

    def __init__(self, text: str, special: Mapping[str, str]) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(text)
        except jinja2.TemplateError as exc:
            raise ValueError(f"the chat template cannot be read: {exc}") from exc
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt after which the assistant's answer is written.

        Args:
            messages: Each with `role` and `content`.

        Raises:
            ApiError: The template refuses them.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        # A template may fail as any program may.
        except Exception as exc:
            message = f"the model's chat template refuses these messages: {' '.join(str(exc).split())[:300]}"
            raise ApiError(400, message, param="messages") from None
