"""The server behind the gateway: which models it serves now, and how they are asked."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from .errors import ApiError, refuse_for_now
from .locations import SERVE
from .published import Published, read_published
from .turns import Places, Share, Turns

# Beside this part in a checkout, and installed with it: in both it is `modelyard.client`, which a type checker does not
# see in a checkout.
if TYPE_CHECKING:
    from client import errors as faults
    from client.answers import check_answers
    from client.model import Model
    from client.options import Options, Words
    from client.outputs import Answered, Arrays
    from client.pieces import ask_texts
    from client.session import Session, gather
    from client.streams import PROMPT, listen
else:
    from modelyard.client import errors as faults
    from modelyard.client.answers import check_answers
    from modelyard.client.model import Model
    from modelyard.client.options import Options, Words
    from modelyard.client.outputs import Answered, Arrays
    from modelyard.client.pieces import ask_texts
    from modelyard.client.session import Session, gather
    from modelyard.client.streams import PROMPT, listen

ClientError = faults.ClientError

__all__ = ["GENERATION", "GOES_ON", "ClientError", "Served", "Upstream", "gather"]

_LOOK_INTERVAL_S = 1.0

# Bytes of text that are with the server at a time, which take one of its cores half a second; a text counts for a
# thousand more, as what a model makes of a short one takes its time as well.
_AT_A_TIME, _A_TEXT = 512 * 1024, 1024

# Far more than a server queues: it, not the gateway, says that it has too much to do.
_IN_FLIGHT = 4096

# What a model takes and makes → what it is asked for. Nothing else has a name in these APIs.
_KINDS = {
    (("TEXT",), ("EMBEDDING",)): "embedding",
    (("TEXT",), ("LABEL", "SCORE")): "classification",
    (("TEXT", "TEXT_PAIR"), ("LABEL", "SCORE")): "pair classification",
}
GENERATION = "generation"

# What the server calls the reason of a text that has not ended.
GOES_ON = "None"

# Kind → the task that makes a checkpoint a model of it.
_TASKS = {
    "embedding": "feature-extraction",
    "classification": "text-classification",
    "pair classification": "text-pair-classification",
    GENERATION: "text-generation",
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that can be asked.

    Attributes:
        name: As callers know it.
        version: That was active when it was looked at.
        kind: What it is asked for.
        model: As the server describes it.
        files: As they were published.
    """

    name: str
    version: str
    kind: str
    model: Model
    files: Published


class _Asker:
    """The session as one request has it: each part of it has its turn, and is not cancelled once it is sent.

    tritonserver 2.51 dies of cancels.
    """

    def __init__(self, session: Session, turns: Turns, caller: str) -> None:
        self.options = session.options
        self._session, self._turns, self._caller = session, turns, caller
        self._begun = 0

    async def infer(self, model: Model, inputs: Arrays, *others: Any, **options: Any) -> Answered:
        """Return what a model answers; see `Session.infer`."""
        size = sum(len(text) + _A_TEXT for values in inputs.values() for text in values.flat)
        had, self._begun = self._begun, self._begun + size
        ask = partial(self._session.infer, model, inputs, *others, **options)
        return await self._turns.run(self._caller, had, size, ask)


class Upstream:
    """A server, and what it serves.

    Args:
        url: host:port of its gRPC; https:// in front of it asks for TLS.
        repository: Folder that what it serves was published to.
        timeout_s: Seconds to wait for an answer, and for each piece of a text.
        say: Where it is told what changes.

    Raises:
        ClientError: The address cannot be used.
    """

    def __init__(self, url: str, repository: Path, timeout_s: float, say: Callable[[str], None]) -> None:
        options = Options(
            url=url,
            protocol="grpc",
            timeout_s=timeout_s,
            # Whoever asks may ask again, and knows how long that makes sense.
            retry_s=0,
            in_flight=_IN_FLIGHT,
            words=Words(url="--server", protocol="its gRPC port", timeout="--timeout", serve=SERVE),
        )
        self.url, self.timeout_s = options.address, timeout_s
        self._session = Session(options)
        self._turns = Turns(_AT_A_TIME, timeout_s)
        # Model → its texts that are written at a time.
        self._places: dict[str, Places] = {}
        self._repository, self._say = repository, say
        self._known: dict[tuple[str, str], Served | None] = {}
        self._served: dict[str, Served] = {}
        self._problem = "it has not answered yet"
        self._told: str | None = None
        self._said: set[str] = set()

    @property
    def problem(self) -> str:
        """Why nothing can be asked; empty where it can."""
        return self._problem

    @property
    def models(self) -> list[Served]:
        """All that can be asked, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def find(self, name: str) -> Served:
        """Return the model of that name.

        Raises:
            ApiError: There is none.
        """
        if name in self._served:
            return self._served[name]
        if self._problem and not self._served:
            raise self._refuse_for_now()
        names = ", ".join(sorted(self._served)) or "none"
        raise ApiError(
            404,
            f"there is no model {name[:100]!r}: expected one of {names}.",
            param="model",
            code="model_not_found",
        )

    def find_of(self, name: str | None, kinds: Sequence[str]) -> Served:
        """Return the model of that name, or the one of these kinds, which it must be of.

        Raises:
            ApiError: There is none, it is of another kind, or without a name several are.
        """
        fitting = [served for served in self.models if served.kind in kinds]
        wanted = " or ".join(kinds)
        names = ", ".join(served.name for served in fitting) or "none"
        choice = (
            f"pass one of {names}"
            if fitting
            else f"export one with {' or '.join(f'--task {_TASKS[kind]}' for kind in kinds)}, for none is served"
        )
        if name is None:
            if not fitting and self._problem:
                raise self._refuse_for_now()
            if len(fitting) != 1:
                raise ApiError(
                    400, f"model says nobody: expected one model of {wanted}, got {names}; {choice}.", param="model"
                )
            return fitting[0]
        served = self.find(name)
        if served.kind not in kinds:
            raise ApiError(
                400,
                f"{name} is a model of {served.kind}: expected one of {wanted}; {choice}.",
                param="model",
            )
        return served

    async def follow(self) -> None:
        """Look again and again what the server serves."""
        while True:
            try:
                await self._look()
            except faults.ClientError as exc:
                self._tell(str(exc))
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def ask(
        self,
        served: Served,
        texts: Sequence[str],
        pairs: Sequence[str] = (),
        *,
        caller: str,
        headers: Mapping[str, str],
    ) -> Arrays:
        """Return output name → values, one row a text; `caller` is whose turn it takes.

        Raises:
            ApiError: There is no answer.
        """
        with self._explained():
            asker = _Asker(self._session, self._turns, caller)
            arrays = await ask_texts(asker, served.model, _encode(texts), _encode(pairs), headers=headers)
            check_answers(served.name, arrays)
            return arrays

    def open_share(self, served: Served, caller: str) -> Share:
        """Return what a request is to take of the texts that a model writes at a time."""
        places = self._places.setdefault(served.name, Places(self.timeout_s))
        places.most = served.files.texts_at_a_time
        return Share(places, caller)

    async def write(
        self,
        served: Served,
        prompt: str,
        parameters: Mapping[str, Any],
        *,
        share: Share,
        headers: Mapping[str, str],
    ) -> AsyncGenerator[dict[str, list[Any]], None]:
        """Yield what a model writes as it comes; closed early, it cancels the request.

        Raises:
            ApiError: There is no answer, or it breaks off.
        """
        inputs: dict[str, npt.NDArray[Any]] = {
            PROMPT: np.array(_encode([prompt]), dtype=np.object_),
            "sampling_parameters": np.array([orjson.dumps(parameters)], dtype=np.object_),
            "return_finish_reason": np.array([True]),
            "return_num_input_tokens": np.array([True]),
            "return_num_output_tokens": np.array([True]),
        }
        have_ended = [False] * (parameters.get("n") or 1)
        with self._explained():
            async with (
                share.hold(len(have_ended)),
                contextlib.aclosing(listen(self._session, served.name, inputs, headers=headers)) as answers,
            ):
                async for answer in answers:
                    _check_piece(served.name, answer, have_ended)
                    yield answer
            if not all(have_ended):
                raise faults.GarbledError(
                    f"the text of {served.name} breaks off",
                    expected="why each text ended, in its last piece",
                    got="the end of the answer",
                    remedy="look at the model",
                )

    async def _look(self) -> None:
        there: dict[str, str] = {}
        for name, version in await self._session.list_versions():
            there[name] = max(version, there.get(name, version), key=int)
        for name, version in there.items():
            if (name, version) not in self._known:
                # One that goes meanwhile, or whose files are still to come, is looked at again.
                with contextlib.suppress(faults.ModelError, faults.UnavailableError, OSError, ValueError):
                    self._known[name, version] = await self._read(name, version)
        # A version that comes back is read again.
        self._known = {key: served for key, served in self._known.items() if key in there.items()}
        self._served = {served.name: served for served in self._known.values() if served}
        self._tell(
            ""
            if self._served
            else f"{self.url} serves no model whose files lie in {self._repository}: expected what it serves"
        )

    async def _read(self, name: str, version: str) -> Served | None:
        """Return a model that can be asked; None for what is none."""
        model = await self._session.describe(name)
        kind = GENERATION if PROMPT in model.inputs else _KINDS.get((model.inputs, model.outputs))
        if kind is None:
            return None
        try:
            files = await asyncio.to_thread(read_published, self._repository, name, version)
        except (OSError, ValueError) as exc:
            self._say_once(
                f"{name} is left out: expected the files of its version {version} in {self._repository}, got '{exc}'; "
                "correct --repository"
            )
            raise
        self._say(f"{name}, version {version}, for {kind}")
        return Served(name=name, version=version, kind=kind, model=model, files=files)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _tell(self, problem: str) -> None:
        self._problem = problem
        if problem != self._told:
            self._told = problem
            self._say(f"not ready: {problem}" if problem else "ready")

    def _refuse_for_now(self) -> ApiError:
        return refuse_for_now(
            "the model server cannot be asked now: expected one that serves a model, got none; ask again later."
        )

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except faults.ClientError as exc:
            raise self._explain(exc) from exc

    def _explain(self, exc: faults.ClientError) -> ApiError:
        """Return an error of the client's as a caller is told it, who need not know where the server is."""
        what = exc.what.removeprefix("the server refused the request: ")
        if isinstance(exc, faults.DeadlineError):
            message = f"the model did not answer: expected an answer within {self._session.options.timeout_s:g} s."
            return ApiError(504, message, type="server_error", code="timeout")
        if isinstance(exc, (faults.UnavailableError, faults.UnreachableError)):
            if isinstance(exc, faults.UnreachableError):
                self._say(f"an answer is lost: {exc}")
                what = "the model server cannot be reached; ask again later"
            return refuse_for_now(f"{what}.", is_overload=isinstance(exc, faults.UnavailableError))
        if isinstance(exc, faults.UsageError) or getattr(exc, "is_content", False):
            return ApiError(400, f"{what}.")
        if isinstance(exc, faults.ModelError):
            return ApiError(404, f"{what}.", param="model", code="model_not_found")
        self._say(f"an answer is lost: {exc}")
        return ApiError(502, "the model server failed on this request.", type="server_error", code="bad_gateway")


def _check_piece(name: str, answer: Mapping[str, list[Any]], have_ended: list[bool]) -> None:
    """Refuse a piece that says something else than texts, why they end, and their tokens; note which have ended.

    Args:
        name: Of the model.
        answer: Output name → its values.
        have_ended: Of each text that was asked for.

    Raises:
        GarbledError: It does, or one of them goes on after its end.
    """
    number = len(have_ended)
    are_texts = all(
        len(values := answer.get(output, ())) == number and all(isinstance(value, str) for value in values)
        for output in ("text_output", "finish_reason")
    )
    are_counts = all(
        (values := answer.get(output, ())) and all(isinstance(value, int) and value >= 0 for value in values)
        for output in ("num_input_tokens", "num_output_tokens")
    )
    if not are_texts or not are_counts:
        raise faults.GarbledError(
            f"a piece of {name} cannot be read",
            expected=f"{number} of text_output and of finish_reason, and how many tokens they are",
            got=", ".join(f"{len(values)} of {output}" for output, values in answer.items()) or "nothing",
            remedy="look at the model",
        )
    for index, (text, reason) in enumerate(zip(answer["text_output"], answer["finish_reason"], strict=True)):
        if text and have_ended[index]:
            raise faults.GarbledError(
                f"a text of {name} goes on after its end",
                expected="nothing more of it",
                got=repr(text[:100]),
                remedy="look at the model",
            )
        have_ended[index] |= reason != GOES_ON


def _encode(texts: Sequence[str]) -> list[bytes]:
    # Half a character can be written in JSON, and has no UTF-8: the server refuses it by its row.
    # A query stands beside each of its documents, and is held once.
    encoded = {text: text.encode("utf-8", errors="surrogatepass") for text in set(texts)}
    return [encoded[text] for text in texts]
