"""Triton Python-based backend `openvino_generate`: `text_input` to `text_output`, decoupled, batched continuously.

A model of this backend has no code of its own. Its version folder holds the model as OpenVINO has it, `tokenizer.json`
and `generation.json`; its tensors and parameters are those of Triton's vLLM backend.
"""

# tritonserver's stub looks into it at the first answer, which would wait 20 ms for it there.
import asyncio  # noqa: F401
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from engine import Engine
from generation import RETURNED, Answer, Generation, refuse
from generation_metrics import Metrics
from generation_parameters import RequestError, read_parameters
from request_inputs import decode, read_input
from text_decoder import TextDecoder
from tokenizers import Tokenizer
from written_text import WrittenText

# Characters for each token that there is room for, of the beginning of a prompt that is looked at first, and how much
# longer the next one is.
_BEGINNING_CHARACTERS, _GROWTH = 8, 8


class TritonPythonModel:
    """The one instance of one version; Triton calls `initialize` once, then `execute` with every request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the version and start its engine.

        Args:
            args: Triton's arguments, with the path of the model and its configuration as JSON.
        """
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        said = json.loads((folder / "generation.json").read_text(encoding="utf-8"))
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._decoder = TextDecoder(self._tokenizer)
        self._defaults = said["defaults"]
        self._context = said["context"]
        self._engine = Engine(
            folder,
            config["default_model_filename"],
            {name: value["string_value"] for name, value in config["parameters"].items()},
            context=self._context,
            ends=frozenset(said["ends"]),
            metrics=Metrics({"model": args["model_name"], "version": args["model_version"]}),
        )

    def execute(self, requests: list[Any]) -> None:
        """Take in requests; they are answered through their senders.

        Args:
            requests: Of one caller each.
        """
        for request in requests:
            sender = request.get_response_sender()
            if not self._engine.take_place():
                limit = self._engine.limit
                message = f"the queue is full: expected less than {limit} requests at work, got more; ask again later"
                refuse(sender, message, pb_utils.TritonError.UNAVAILABLE)
                continue
            try:
                self._engine.add(self._read(request, sender))
            except RequestError as exc:
                self._engine.give_place()
                refuse(sender, str(exc), pb_utils.TritonError.INVALID_ARG)

    def finalize(self) -> None:
        """Stop the engine, and let go of it: its metrics are tritonserver's, which has none for them after this."""
        self._engine.stop()
        del self._engine

    def _read(self, request: Any, sender: Any) -> Generation:
        """Return what a request asks for.

        Raises:
            RequestError: It cannot be answered.
        """
        given = read_input(request, "sampling_parameters")
        parameters = read_parameters(
            None if given is None else decode("sampling_parameters", given),
            json.loads(request.parameters() or "{}"),
            self._defaults,
        )
        prompt = decode("text_input", read_input(request, "text_input"))
        ids = self._tokenize(prompt, add_special_tokens=parameters.add_special_tokens)
        room = self._engine.room - len(ids)
        is_streamed = bool(read_input(request, "stream"))
        excludes = read_input(request, "exclude_input_in_output")
        if is_streamed and excludes is not None and not excludes:
            raise RequestError("exclude_input_in_output is false: expected true beside stream, which sends what is new")
        return Generation(
            sender=sender,
            ids=ids,
            config=self._engine.configure(parameters, min(parameters.max_tokens, room)),
            answers=[
                Answer(WrittenText(self._decoder, parameters.stop), parameters.choose_seed(index))
                for index in range(parameters.n)
            ],
            parameters=parameters,
            is_streamed=is_streamed,
            # As the vLLM backend does: a whole answer begins with the prompt unless it is told not to.
            prefix=prompt if not is_streamed and not excludes else "",
            returned=frozenset(name for name in RETURNED if read_input(request, f"return_{name}")),
        )

    def _tokenize(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a prompt that leaves room for an answer.

        Of one that is far too long the beginning tells as much: the whole of 1 MB takes a second, in which no other
        request is taken in.

        Raises:
            RequestError: There is no room for it, or it has no tokens.
        """
        length = _BEGINNING_CHARACTERS * self._engine.room
        while length < len(prompt):
            # Where it is cut, a beginning may have a few tokens more than they are in the whole.
            if (count := len(self._encode(prompt[:length], add_special_tokens))) > 2 * self._engine.room:
                raise self._refuse_length(f"more than {count // 2}")
            length *= _GROWTH
        ids = self._encode(prompt, add_special_tokens)
        if not ids:
            raise RequestError("text_input has no tokens: expected at least 1, got an empty text")
        if len(ids) >= self._engine.room:
            raise self._refuse_length(str(len(ids)))
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _refuse_length(self, got: str) -> RequestError:
        limit = "model's context" if self._engine.room == self._context else "pool of keys and values"
        return RequestError(
            f"text_input is too long for the {limit}: expected at most {self._engine.room - 1} tokens, got {got}; "
            f"cut the text"
        )
