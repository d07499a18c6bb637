"""Text that is written: completions and chat, whole or as server-sent events."""

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from .bodies import Chat, Completions, Message, Sampling, read_prompts
from .call import Call, Reply
from .errors import ApiError, refuse
from .texts import dump
from .turns import Share
from .upstream import GENERATION, GOES_ON, Served, Upstream, gather

# Which go to the server as they are.
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "max_tokens"),
)
_DONE = b"data: [DONE]\n\n"


@dataclass
class Written:
    """What came of one prompt.

    Attributes:
        texts: Of each answer.
        reasons: Why each ended; None before.
        prompt_tokens: That were read.
        completion_tokens: That were written.
    """

    texts: list[str]
    reasons: list[str | None]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class _Piece:
    """What is new of one answer."""

    index: int
    text: str
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is asked of a model, for one prompt or several.

    Attributes:
        call: Whose request it is.
        served: The model.
        share: What it takes of the texts that the model writes at a time.
        parameters: How it is to write.
    """

    call: Call
    served: Served
    share: Share
    parameters: Mapping[str, Any]

    def begin(self) -> Written:
        """Return the account of a prompt of which nothing is written yet."""
        number = self.parameters.get("n") or 1
        return Written([""] * number, [None] * number)


class Writing:
    """The operations.

    Args:
        upstream: Who is asked.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def complete(self, call: Call, asked: Completions) -> Reply:
        """Go on from a prompt, or from each of several."""
        prompts = read_prompts(asked.prompt)
        served = self._upstream.find_of(asked.model, (GENERATION,))
        parameters = _read_sampling(asked, served)
        if asked.stream and len(prompts) > 1:
            raise refuse("prompt", "a stream has one prompt", expected="one", got=str(len(prompts)))
        answer = _Answer("text_completion", "text_completion", f"cmpl-{call.id}", served.name, asked)
        return await self._reply(call, served, prompts, parameters, answer)

    async def chat(self, call: Call, asked: Chat) -> Reply:
        """Go on with a conversation."""
        served = self._upstream.find_of(asked.model, (GENERATION,))
        if served.files.chat is None:
            raise ApiError(
                400,
                f"{served.name} has no chat template: expected one in its version; ask /v1/completions.",
                param="model",
            )
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            raise refuse(
                "max_tokens", "the length is given twice", expected="max_completion_tokens", got="max_tokens as well"
            )
        prompt = served.files.chat.render([_read_message(message) for message in asked.messages])
        parameters = _read_sampling(asked, served)
        # An answer ends where the model ends it, and not after the few tokens of a completion.
        parameters["max_tokens"] = asked.max_completion_tokens or asked.max_tokens or served.files.context
        # The template has written them.
        parameters["add_special_tokens"] = False
        answer = _Answer("chat.completion", "chat.completion.chunk", f"chatcmpl-{call.id}", served.name, asked)
        return await self._reply(call, served, [prompt], parameters, answer)

    async def _reply(
        self, call: Call, served: Served, prompts: list[str], parameters: Mapping[str, Any], answer: "_Answer"
    ) -> Reply:
        share = self._upstream.open_share(served, call.caller)
        request = _Request(call=call, served=served, share=share, parameters=parameters)
        if not answer.asked.stream:
            return answer.render(await gather(self._write_all(request, prompt) for prompt in prompts))
        events = self._stream(request, prompts[0], answer)
        # What is refused is refused with a status of its own: nothing is sent before the first piece is there.
        first = await anext(events)
        return _join(first, events)

    async def _write_all(self, request: _Request, prompt: str) -> Written:
        written = request.begin()
        async with contextlib.aclosing(self._hear(request, prompt, written)) as pieces:
            async for _ in pieces:
                pass
        return written

    async def _stream(self, request: _Request, prompt: str, answer: "_Answer") -> AsyncGenerator[bytes, None]:
        written = request.begin()
        async with contextlib.aclosing(self._hear(request, prompt, written)) as pieces:
            first: list[_Piece] = await anext(pieces, [])
            for event in answer.render_start(len(written.texts)):
                yield event
            for piece in first:
                yield answer.render_piece(piece)
            async for news in pieces:
                for piece in news:
                    yield answer.render_piece(piece)
        if answer.tells_usage:
            yield answer.render_usage(written)
        yield _DONE

    async def _hear(self, request: _Request, prompt: str, written: Written) -> AsyncGenerator[list[_Piece], None]:
        """Yield what is new, and keep account of it."""
        call, served = request.call, request.served
        answers = self._upstream.write(served, prompt, request.parameters, share=request.share, headers=call.tracing)
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    written.prompt_tokens = answer["num_input_tokens"][0]
                    written.completion_tokens += sum(answer["num_output_tokens"])
                    yield _take(answer, written)
        finally:
            call.use(served.name, "prompt", written.prompt_tokens)
            call.use(served.name, "completion", written.completion_tokens)


def _take(answer: Mapping[str, list[Any]], written: Written) -> list[_Piece]:
    pieces = []
    for index, (text, reason) in enumerate(zip(answer["text_output"], answer["finish_reason"], strict=True)):
        ended = reason if reason != GOES_ON and written.reasons[index] is None else None
        if text or ended:
            written.texts[index] += text
            written.reasons[index] = written.reasons[index] or ended
            pieces.append(_Piece(index, text, ended))
    return pieces


async def _join(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for event in events:
            yield event
    except ApiError as exc:
        # The status is sent already.
        yield _event(exc.to_openai()[1])
    finally:
        await events.aclose()


class _Answer:
    """How one answer is spelled.

    Args:
        whole: What OpenAI calls a whole answer.
        piece: What it calls a piece of one.
        number: Its id.
        model: Who wrote it.
        asked: What was asked for.
    """

    def __init__(self, whole: str, piece: str, number: str, model: str, asked: Sampling) -> None:
        self.asked = asked
        self._whole, self._piece, self._is_chat = whole, piece, isinstance(asked, Chat)
        self._head = {"id": number, "created": int(time.time()), "model": model}
        options = asked.stream_options
        if options is not None and not asked.stream:
            raise refuse("stream_options", "stream_options has no effect", expected="stream true", got="a whole answer")
        self.tells_usage = bool(options and options.include_usage)

    def render(self, results: list[Written]) -> bytes:
        """Return a whole answer."""
        choices: list[dict[str, Any]] = []
        for written in results:
            for text, reason in zip(written.texts, written.reasons, strict=True):
                said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
                choices.append({"index": len(choices), **said, "logprobs": None, "finish_reason": reason})
        return dump({**self._head, "object": self._whole, "choices": choices, "usage": _count(results)})

    def render_start(self, number: int) -> list[bytes]:
        """Return what comes before the text: in a chat, who speaks."""
        if not self._is_chat:
            return []
        return [
            self._render([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for index in range(number)
        ]

    def render_piece(self, piece: _Piece) -> bytes:
        """Return what is new of one of the answers."""
        said: dict[str, Any] = {"text": piece.text}
        if self._is_chat:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        return self._render([{"index": piece.index, **said, "logprobs": None, "finish_reason": piece.reason}])

    def render_usage(self, written: Written) -> bytes:
        """Return the last event, which has no text."""
        return self._render([], _count([written]))

    def _render(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        told = {"usage": usage} if self.tells_usage else {}
        return _event({**self._head, "object": self._piece, "choices": choices, **told})


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + dump(content) + b"\n\n"


def _count(results: list[Written]) -> dict[str, int]:
    prompt = sum(written.prompt_tokens for written in results)
    completion = sum(written.completion_tokens for written in results)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _read_sampling(asked: Sampling, served: Served) -> dict[str, Any]:
    """Return the parameters as the server takes them."""
    parameters = {name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None}
    # OpenAI's default, unless the checkpoint has one of its own: 0 stands where it says nothing of drawing.
    parameters.setdefault("temperature", served.files.defaults.get("temperature") or 1)
    return parameters


def _read_message(message: Message) -> dict[str, str]:
    """Return a message as templates know it: they have no developer, and texts in one piece."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text} | ({"name": message.name} if message.name else {})
