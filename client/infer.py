"""Ask a running server about texts or pictures: `python client/infer.py --url localhost:8000 --text "Hello"`.

One file without siblings, so that it runs from any folder and can be copied next to other code.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

# gRPC would write its own account of a failure beside our sentence.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

try:
    import numpy as np
    import numpy.typing as npt
    import tritonclient.grpc
    import tritonclient.http
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype
except ImportError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(
        f"error: {missing.name} is not installed for {sys.executable}; pip install 'tritonclient[http,grpc]' numpy."
    )

# For whoever asks the same server again and again.
DEFAULT_URLS = {
    "http": os.environ.get("MODELYARD_URL", "localhost:8000"),
    "grpc": os.environ.get("MODELYARD_GRPC_URL", "localhost:8001"),
}

_USUAL_PORTS = {"http": 8000, "grpc": 8001}

# For telling what listens where no answer came from: how long, and how much of its metrics is looked at.
_LOOK_TIMEOUT_S = 3.0
_LOOK_BYTES = 1 << 16
# RFC 9113, section 3.4: what a client begins with, an empty SETTINGS frame, and the type of frame that answers it.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = b"\x04"

# What a model of pictures calls its input, and the files of a folder that are sent to it.
_IMAGE = "IMAGE"
_PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff")

# What a model that generates text calls its input.
PROMPT = "text_input"

# RFC 9110, section 5: a token, and visible characters with blanks between.
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*([!-~]+(?: +[!-~]+)*)")

# What the reader types: a command where this was installed, else this file, which may be a copy.
_IS_INSTALLED = __package__ == "modelyard.client"
_COMMAND = "modelyard infer" if _IS_INSTALLED else f"python {sys.argv[0]}"
_SERVE = "modelyard serve" if _IS_INSTALLED else "python -m server"

_EXAMPLES = f"""
examples:
  {_COMMAND} --url localhost:8000 --text "A cat sleeps." "A kitten naps."
  {_COMMAND} --url localhost:8000 --text "Who wrote it?" --pair "It was written by Ada Lovelace."
  {_COMMAND} --url localhost:8001 --protocol grpc --file sentences.txt
  {_COMMAND} --model writer --prompt "Once upon a time" --stream
  printf 'one\\ntwo\\n' | {_COMMAND} --file - --json
  {_COMMAND} --model image_classification --image photo.jpg --output annotated.png
  {_COMMAND} --model image_classification --image photos/ 'more/*.png' --json
  {_COMMAND} --url https://models.example:8443 --header @token.txt --text "Hello"

A token is best kept in a file with a line such as "Authorization: Bearer TOKEN": what stands on a command line can be
read by everyone on this machine.

MODELYARD_URL and MODELYARD_GRPC_URL, where they are set, are used without --url.

exit codes: 0 answered, 1 refused or no answer (one sentence on stderr), 2 wrong usage
"""


class ClientError(Exception):
    """Why there is no answer, in one sentence: what and where, expected, got, remedy.

    Attributes:
        is_refusal: Whether the server took the request and refused what it holds.
    """

    is_refusal = False

    def __init__(self, what: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        facts = ", ".join(f"{word} {fact}" for word, fact in (("expected", expected), ("got", got)) if fact)
        super().__init__(what + (f": {facts}" if facts else "") + (f"; {remedy}" if remedy else "") + ".")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, as its metadata describe it.

    Attributes:
        name: Name by which the server knows it.
        version: Version that answers; the newest where the server serves several.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        takes_texts: Whether each input is one string a row.
        max_batch_size: Rows that one request may hold.
    """

    name: str
    version: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    takes_texts: bool
    max_batch_size: int

    @property
    def takes_pairs(self) -> bool:
        """Whether every text goes with a second one."""
        return len(self.inputs) == 2


class Connection:
    """A server over HTTP or gRPC; the two clients of tritonclient differ in little that matters here."""

    def __init__(
        self,
        url: str,
        protocol: str,
        timeout_s: float,
        *,
        tls: bool = False,
        ca: Path | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare to ask; nothing is sent yet.

        Args:
            url: host:port; https:// in front of it asks for TLS.
            protocol: `http` or `grpc`.
            timeout_s: Seconds to wait for each answer.
            tls: Whether to encrypt, and to refuse a server that cannot prove its name.
            ca: PEM file with the certificates to trust; without it those that this machine, or gRPC, trusts.
            headers: Headers to send with every request, such as a token.

        Raises:
            ClientError: `ca` holds no certificates.
        """
        self.url = url.split("://", 1)[-1].rstrip("/")
        self.protocol = protocol
        self.timeout_s = timeout_s
        self._tls = tls or url.startswith("https://")
        self._ca = ca
        self._library: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        if ca:
            _check_certificates(ca)
        if protocol == "http":
            self._headers = dict(headers or {})
            self._client: Any = tritonclient.http.InferenceServerClient(
                self.url,
                connection_timeout=timeout_s,
                network_timeout=timeout_s,
                ssl=self._tls,
                # Without this it looks for the system's certificates in one place only.
                ssl_options={"ca_certs": str(ca) if ca else None},
            )
        else:
            # gRPC knows names in lower case alone.
            self._headers = {name.lower(): value for name, value in (headers or {}).items()}
            self._client = tritonclient.grpc.InferenceServerClient(
                self.url, ssl=self._tls, root_certificates=str(ca) if ca else None
            )

    def find_model(self, name: str | None) -> Model:
        """Return the model named, or the one ensemble there is, which takes a text or a pair of them.

        Raises:
            ClientError: There is no such model, or not exactly one ensemble, or the server does not answer, or the
                model takes something else.
        """
        model = self.describe_model(name or self._find_ensemble())
        if not model.takes_texts or len(model.inputs) > 2:
            raise ClientError(
                f"{model.name} takes no texts",
                expected="one or two inputs of one string a row",
                got=", ".join(model.inputs),
                remedy="ask the ensemble it belongs to",
            )
        return model

    def describe_model(self, name: str) -> Model:
        """Return the model of that name, whatever it takes.

        Raises:
            ClientError: There is no such model, or the server does not answer.
        """
        metadata = self._call("get_model_metadata", name)
        config = self._call("get_model_config", name)
        # The gRPC client wraps the configuration once more.
        config = config.get("config", config)
        inputs = metadata["inputs"]
        return Model(
            name=name,
            version=max(metadata["versions"], key=int),
            inputs=tuple(tensor["name"] for tensor in inputs),
            outputs=tuple(tensor["name"] for tensor in metadata["outputs"]),
            # gRPC spells numbers as text.
            takes_texts=all((t["datatype"], [*map(int, t["shape"])]) == ("BYTES", [-1, 1]) for t in inputs),
            max_batch_size=int(config.get("max_batch_size", 0)) or 1,
        )

    def infer(
        self, model: Model, texts: list[bytes], *, pairs: list[bytes] | None = None, binary: bool = True
    ) -> dict[str, npt.NDArray[Any]]:
        """Return output name → answers, one row a text, asking in batches as large as the model takes.

        Args:
            model: Whom to ask.
            texts: UTF-8.
            pairs: The second text of each, where the model takes pairs.
            binary: Over HTTP, whether tensors travel as bytes behind the JSON or inside it.

        Returns:
            Where one text has more answers than another, the shorter rows are filled up with empty texts, scores of
            0 and places of -1, as the server does within a batch.

        Raises:
            ClientError: The server refuses a text or does not answer.
        """
        _check_pairs(model, texts, pairs)
        # The first input takes the texts, the second one, where there is one, their partners.
        columns = {
            name: np.array(values, dtype=np.object_).reshape(-1, 1)
            for name, values in zip(model.inputs, (texts, pairs or []), strict=False)
        }
        answers: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in model.outputs}
        for start in range(0, len(texts), model.max_batch_size):
            batch = {name: values[start : start + model.max_batch_size] for name, values in columns.items()}
            for name, values in self.infer_tensors(model, batch, binary=binary).items():
                answers[name].append(values)
        return {name: _join(arrays) for name, arrays in answers.items()}

    def infer_tensors(
        self, model: Model, inputs: Mapping[str, npt.NDArray[Any]], *, binary: bool = True
    ) -> dict[str, npt.NDArray[Any]]:
        """Return output name → values, in one request.

        Args:
            model: Whom to ask.
            inputs: Name → values, the batch first where the model has one; strings as objects.
            binary: Whether tensors travel as bytes, as `infer` takes it.

        Raises:
            ClientError: The server refuses or does not answer.
        """
        encoding = {} if self.protocol == "grpc" else {"binary_data": binary}
        tensors = []
        for name, values in inputs.items():
            tensor = self._library.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
            tensor.set_data_from_numpy(values, **encoding)
            tensors.append(tensor)
        outputs = [self._library.InferRequestedOutput(name, **encoding) for name in model.outputs]
        result = self._call("infer", model.name, tensors, model_version=model.version, outputs=outputs)
        return {name: result.as_numpy(name) for name in model.outputs}

    def write(
        self, name: str, inputs: Mapping[str, npt.NDArray[Any]], *, is_streamed: bool = True
    ) -> Generator[str, None, None]:
        """Yield what a model writes, in pieces as they come; a generator that is closed frees its place there.

        Args:
            name: Whom to ask, a model that generates text.
            inputs: Name → its one value, as `text_input`.
            is_streamed: Whether there are several pieces.

        Raises:
            ClientError: The server refuses or does not answer.
        """
        asked = {**inputs, "stream": np.array([is_streamed])}
        with self._explained():
            yield from (self._write_over_grpc if self.protocol == "grpc" else self._write_over_http)(name, asked)

    def _write_over_grpc(self, name: str, inputs: Mapping[str, npt.NDArray[Any]]) -> Iterator[str]:
        tensors = []
        for tensor_name, values in inputs.items():
            tensors.append(self._library.InferInput(tensor_name, [1], np_to_triton_dtype(values.dtype)))
            tensors[-1].set_data_from_numpy(values)
        came: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        # Without that header an error comes with its sentence alone, and without its status.
        headers = {**self._headers, "triton_grpc_error": "true"}
        self._client.start_stream(lambda result, error: came.put((result, error)), headers=headers)
        try:
            self._client.async_stream_infer(name, tensors, enable_empty_final_response=True)
            is_last = False
            while not is_last:
                try:
                    result, error = came.get(timeout=self.timeout_s)
                except queue.Empty:
                    raise TimeoutError from None
                if error is not None:
                    raise error
                is_last = result.get_response().parameters["triton_final_response"].bool_param
                piece = result.as_numpy("text_output")
                if piece is not None:
                    yield _decode(piece[0])
        finally:
            self._client.stop_stream(cancel_requests=True)

    def _write_over_http(self, name: str, inputs: Mapping[str, npt.NDArray[Any]]) -> Iterator[str]:
        # tritonclient knows no `generate`.
        if self._tls:
            trusted = ssl.create_default_context(cafile=self._ca)
            connection: HTTPConnection = HTTPSConnection(self.url, timeout=self.timeout_s, context=trusted)
        else:
            connection = HTTPConnection(self.url, timeout=self.timeout_s)
        ending = "generate_stream" if inputs["stream"][0] else "generate"
        asked = {
            key: _decode(values[0]) if values.dtype == object else values[0].item() for key, values in inputs.items()
        }
        try:
            connection.request(
                "POST",
                f"/v2/models/{quote(name)}/{ending}",
                json.dumps(asked).encode(),
                {**self._headers, "Content-Type": "application/json"},
            )
            response = connection.getresponse()
            for line in response:
                if not (text := line.removeprefix(b"data: ").strip()):
                    continue
                event = json.loads(text)
                if "error" in event:
                    raise InferenceServerException(event["error"], status=str(response.status))
                yield event["text_output"]
        finally:
            connection.close()

    def _find_writer(self) -> str:
        statistics = self._call("get_inference_statistics")["model_stats"]
        names = sorted({entry["name"] for entry in statistics})
        inputs = {name: self._call("get_model_metadata", name)["inputs"] for name in names}
        writers = [name for name in names if any(tensor["name"] == PROMPT for tensor in inputs[name])]
        if len(writers) == 1:
            return str(writers[0])
        raise ClientError(
            f"there is not exactly one model that generates text at {self.url}",
            expected="one",
            got=", ".join(writers) or "none",
            remedy="choose with --model",
        )

    def find_writer(self, name: str | None) -> str:
        """Return the name of the model that generates text: the one named, or the one there is.

        Raises:
            ClientError: There is none, or not exactly one, or the one that is named takes no prompt.
        """
        found = name or self._find_writer()
        inputs = self.describe_model(found).inputs
        if PROMPT not in inputs:
            raise ClientError(
                f"{found} generates no text",
                expected=f"an input {PROMPT}",
                got=", ".join(inputs),
                remedy="ask with --text",
            )
        return found

    def _find_ensemble(self) -> str:
        statistics = self._call("get_inference_statistics")["model_stats"]
        names = sorted({entry["name"] for entry in statistics})
        ensembles = [name for name in names if self._call("get_model_metadata", name)["platform"] == "ensemble"]
        if len(ensembles) == 1:
            return str(ensembles[0])
        raise ClientError(
            f"there is not exactly one ensemble at {self.url}",
            expected="one",
            got=", ".join(ensembles) or "none",
            remedy="choose with --model",
        )

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of tritonclient."""
        options["headers"] = self._headers
        if self.protocol == "grpc":
            options["client_timeout"] = self.timeout_s
            if method != "infer":
                options["as_json"] = True
        with self._explained():
            return getattr(self._client, method)(*arguments, **options)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Put every way in which asking fails into one sentence."""
        try:
            yield
        except InferenceServerException as exc:
            raise self._explain(exc) from exc
        except TimeoutError as exc:
            raise self._explain_timeout() from exc
        except ssl.SSLCertVerificationError as exc:
            raise self._explain_distrust(exc.verify_message) from exc
        except OSError as exc:
            raise self._explain_unreachable(exc.strerror or str(exc)) from exc
        # The peer speaks no HTTP or hung up in the middle, or what it says is no JSON.
        except (HTTPException, ValueError) as exc:
            raise self._explain_unreachable("another answer than KServe's") from exc

    def _explain(self, exc: InferenceServerException) -> ClientError:
        status, message = str(exc.status()), " ".join(str(exc.message()).split())
        if "DEADLINE_EXCEEDED" in status or message == "timed out":
            return self._explain_timeout()
        if match := re.search(r"CERTIFICATE_VERIFY_FAILED: [^:;]+|Hostname Verification Check failed", message):
            return self._explain_distrust(match[0].split(": ")[-1])
        # What stands in front of a server answers in its own words, and so does another port than the one meant.
        if "while decoding the response" in message:
            if stranger := self._explain_stranger():
                return stranger
            message = f"HTTP {status} " + " ".join(re.sub(r"<[^>]*>", " ", str(exc.debug_details())).split())[:200]
        if status in ("401", "403") or "UNAUTHENTICATED" in status or "PERMISSION_DENIED" in status:
            return ClientError(
                f"{self.url} lets nobody in without leave",
                expected="a token that it knows and a call that it allows",
                got=f"'{message.rstrip('.')}'",
                remedy="pass the token with --header",
            )
        # gRPC reports a server that is not there as it reports one that refuses for now.
        if "UNAVAILABLE" in status and "connect" in message:
            return self._explain_unreachable(message.rsplit(": ", 1)[-1])
        if "unknown model" in message:
            return ClientError(
                message.rstrip("."), expected=f"a model that {self.url} serves", remedy="choose with --model"
            )
        refusal = ClientError(f"the server refused the request: {message.rstrip('.')}")
        refusal.is_refusal = status == "400" or "INVALID_ARGUMENT" in status
        return refusal

    def _explain_timeout(self) -> ClientError:
        return ClientError(
            f"no answer from {self.url}",
            expected=f"one within {self.timeout_s:g} s",
            got="none",
            remedy="raise --timeout",
        )

    def _explain_distrust(self, reason: str) -> ClientError:
        return ClientError(
            f"the server at {self.url} is not trusted",
            expected=f"a certificate of that name from an authority in {self._ca or 'the default ones'}",
            got=f"'{reason}'",
            remedy="pass the authority's certificate with --ca",
        )

    def _explain_unreachable(self, reason: str) -> ClientError:
        return self._explain_stranger() or ClientError(
            f"no server can be reached at {self.url} over {self.protocol}",
            expected="one to listen there",
            got=f"'{reason}'",
            remedy=f"start it with `{_SERVE}`, or correct --url and --protocol",
        )

    def _explain_stranger(self) -> ClientError | None:
        """Return what to say where another of the server's ports was asked than the one that was meant."""
        found = None if self._tls else _identify_port(self.url, min(self.timeout_s, _LOOK_TIMEOUT_S))
        other = {"HTTP": "http", "gRPC": "grpc"}.get(found or "")
        if found is None or other == self.protocol:
            return None
        ours = {"http": "HTTP", "grpc": "gRPC"}[self.protocol]
        return ClientError(
            f"{self.url} is another port than the one meant",
            expected=f"the server's {ours} port",
            got=f"its {found} port",
            remedy=f"pass the {ours} port with --url ({_USUAL_PORTS[self.protocol]} unless the server was told another)"
            + (f", or ask with --protocol {other}" if other else ""),
        )


def _identify_port(url: str, timeout_s: float) -> str | None:
    """Return which port of a server listens at `url`: HTTP, gRPC, metrics or status; None where it is none of them."""
    try:
        status, text = _get(url, "/metrics", timeout_s)
        if status == 200:
            return "status" if "modelyard_" in text else "metrics" if "nv_" in text else None
        return "HTTP" if _get(url, "/v2/health/live", timeout_s)[0] == 200 else None
    except (OSError, HTTPException):
        return "gRPC" if _speaks_http2(url, timeout_s) else None


def _get(url: str, path: str, timeout_s: float) -> tuple[int, str]:
    connection = HTTPConnection(url, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(_LOOK_BYTES).decode("utf-8", errors="replace")
    finally:
        connection.close()


def _speaks_http2(url: str, timeout_s: float) -> bool:
    host, _, port = url.rpartition(":")
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection,
    ):
        connection.sendall(_HTTP2_PREFACE)
        return connection.recv(9)[3:4] == _HTTP2_SETTINGS
    return False


def _check_pairs(model: Model, texts: list[bytes], pairs: list[bytes] | None) -> None:
    if model.takes_pairs and len(pairs or ()) != len(texts):
        raise ClientError(
            f"{model.name} takes pairs",
            expected=f"a second text for each of {len(texts)}",
            got=str(len(pairs or ())),
            remedy="pass as many --pair as --text",
        )
    if pairs and not model.takes_pairs:
        raise ClientError(f"{model.name} takes single texts", expected="no --pair", got=str(len(pairs)))


def _join(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the rows of all batches, each filled up to the most answers that one has."""
    shape = np.array([array.shape[1:] for array in arrays]).max(axis=0)
    filling: Any = {"O": b"", "f": 0.0}.get(arrays[0].dtype.kind, -1)
    padded = [
        np.pad(
            array,
            [(0, 0), *((0, most - got) for most, got in zip(shape, array.shape[1:], strict=True))],
            constant_values=filling,
        )
        for array in arrays
    ]
    return np.concatenate(padded)


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args()
    if arguments.image:
        return _run(lambda: _ask_pictures(arguments))
    if arguments.prompt is not None:
        return _run(lambda: _ask_writer(arguments))
    return _run(lambda: _ask_texts(arguments))


def _run(ask: Callable[[], int]) -> int:
    try:
        return ask()
    except ClientError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130


def _connect(arguments: argparse.Namespace) -> Connection:
    return Connection(
        arguments.url or DEFAULT_URLS[arguments.protocol],
        arguments.protocol,
        arguments.timeout,
        tls=arguments.tls,
        ca=arguments.ca,
        headers=_read_headers(arguments.header),
    )


def _ask_texts(arguments: argparse.Namespace) -> int:
    if arguments.output:
        raise ClientError("--output has no effect", expected="--image", got="texts", remedy="leave it out")
    if arguments.stream or arguments.parameters != "{}":
        flag = "--stream" if arguments.stream else "--parameters"
        raise ClientError(f"{flag} has no effect", expected="--prompt", got="texts", remedy="leave it out")
    texts = _collect_texts(arguments)
    # One second text goes with every first one, such as one context with many questions.
    pairs = [_encode(text) for text in arguments.pair] * (len(texts) if len(arguments.pair) == 1 else 1)
    connection = _connect(arguments)
    model = connection.find_model(arguments.model)
    start = time.perf_counter()
    answers = connection.infer(model, texts, pairs=pairs)
    seconds = time.perf_counter() - start
    shown = [_decode(text) for text in texts]
    shown_pairs = [_decode(text) for text in pairs]
    if arguments.json:
        print(json.dumps(_to_json(model, shown, shown_pairs, answers), ensure_ascii=False))  # noqa: T201
    else:
        head = f"{model.name}, version {model.version}, at {connection.url} over {connection.protocol}"
        print(f"{head}: {len(texts)} texts in {seconds * 1000:.1f} ms\n")  # noqa: T201
        print("\n".join(_to_table(shown, answers)))  # noqa: T201
    return 0


@dataclass(frozen=True, kw_only=True)
class PictureAnswer:
    """What became of one picture.

    Attributes:
        path: Its file.
        answers: Output name → its values, without the batch.
        refusal: Why there are none.
    """

    path: Path
    answers: Mapping[str, npt.NDArray[Any]]
    refusal: str = ""


def _ask_pictures(arguments: argparse.Namespace) -> int:
    """Ask about every picture, print the answers, and return 0 where none was refused."""
    if arguments.text or arguments.pair or arguments.file:
        raise ClientError("--image goes alone", expected="no texts beside it", got="--text, --pair or --file")
    paths = _collect_images(arguments.image)
    if arguments.output and len(paths) != 1:
        raise ClientError("--output takes one picture", expected="one --image", got=str(len(paths)))
    draw = _import_drawing() if arguments.output else None
    connection = _connect(arguments)
    model = connection.find_model(arguments.model)
    if model.inputs != (_IMAGE,):
        raise ClientError(
            f"{model.name} takes no pictures",
            expected=f"the input {_IMAGE}",
            got=", ".join(model.inputs),
            remedy="choose with --model",
        )
    start = time.perf_counter()
    found: list[PictureAnswer] = []
    for first in range(0, len(paths), model.max_batch_size):
        found += _ask_batch(connection, model, paths[first : first + model.max_batch_size])
        if len(paths) > model.max_batch_size:
            print(f"{len(found)} of {len(paths)} pictures", file=sys.stderr)  # noqa: T201
    seconds = time.perf_counter() - start
    refused = [answer for answer in found if answer.refusal]
    if arguments.json:
        print(json.dumps(_to_picture_json(model, found), ensure_ascii=False))  # noqa: T201
    else:
        head = f"{model.name}, version {model.version}, at {connection.url} over {connection.protocol}"
        print(f"{head}: {len(paths)} pictures in {seconds * 1000:.1f} ms\n")  # noqa: T201
        answered = [answer for answer in found if not answer.refusal]
        if answered:
            columns = {name: _join([answer.answers[name][None] for answer in answered]) for name in model.outputs}
            print("\n".join(_to_table([str(answer.path) for answer in answered], columns)))  # noqa: T201
    for answer in refused:
        print(f"error: {answer.path}: {answer.refusal}", file=sys.stderr)  # noqa: T201
    if draw and not refused:
        draw(found[0], Path(arguments.output))
    return 1 if refused else 0


def _ask_batch(connection: Connection, model: Model, paths: list[Path]) -> list[PictureAnswer]:
    """Return what became of pictures that are asked about in one request; one by one where one of them is refused."""
    pictures = np.empty((len(paths), 1), dtype=np.object_)
    for row, path in enumerate(paths):
        try:
            pictures[row, 0] = path.read_bytes()
        except OSError as exc:
            raise ClientError(
                f"{path} cannot be read", expected="a picture", got=f"'{exc.strerror}'", remedy="correct --image"
            ) from exc
    try:
        answers = connection.infer_tensors(model, {_IMAGE: pictures})
    except ClientError as exc:
        if not exc.is_refusal:
            raise
        if len(paths) > 1:
            return [answer for path in paths for answer in _ask_batch(connection, model, [path])]
        return [PictureAnswer(path=paths[0], answers={}, refusal=str(exc))]
    return [
        PictureAnswer(path=path, answers={name: values[row] for name, values in answers.items()})
        for row, path in enumerate(paths)
    ]


def _collect_images(given: list[str]) -> list[Path]:
    """Return the files that are named, lie in a folder that is named, or match a pattern, in order."""
    found: list[Path] = []
    for text in given:
        path = Path(text)
        if path.is_dir():
            found += sorted(entry for entry in path.iterdir() if entry.suffix.lower() in _PICTURE_SUFFIXES)
        elif path.exists() or not set("*?[") & set(text):
            found.append(path)
        else:
            root = Path(path.anchor)
            found += sorted(entry for entry in root.glob(str(path.relative_to(root))) if entry.is_file())
    if not found:
        raise ClientError(
            "there is no picture to send",
            expected="files of " + ", ".join(_PICTURE_SUFFIXES),
            got=f"none in {', '.join(given)}",
            remedy="correct --image",
        )
    return found


def _import_drawing() -> Callable[[PictureAnswer, Path], None]:
    """Return what draws answers onto a picture; the one thing that needs Pillow, which the client goes without.

    Raises:
        ClientError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont, ImageOps
    except ImportError as exc:
        raise ClientError(
            "--output cannot draw", expected="Pillow", got="none for this Python", remedy="pip install pillow"
        ) from exc

    def draw(answer: PictureAnswer, path: Path) -> None:
        image: Any = ImageOps.exif_transpose(Image.open(answer.path)).convert("RGB")
        canvas = ImageDraw.Draw(image)
        size = max(12, min(image.size) // 24)
        font = ImageFont.load_default(size)
        if "LABEL" in answer.answers:
            values = zip(answer.answers["LABEL"], answer.answers["SCORE"], strict=True)
            text = "\n".join(f"{score:.3f} {_decode(label)}" for label, score in values)
            place = (size // 2, size // 2)
            canvas.rectangle(canvas.multiline_textbbox(place, text, font=font), fill="black")
            canvas.multiline_text(place, text, fill="white", font=font)
        try:
            image.save(path)
        except (OSError, ValueError) as exc:
            raise ClientError(
                f"{path} cannot be written", expected="a name such as annotated.png", got=f"'{exc}'"
            ) from exc

    return draw


def _ask_writer(arguments: argparse.Namespace) -> int:
    others = [flag for flag in ("text", "pair", "file", "output") if getattr(arguments, flag)]
    if others:
        raise ClientError(f"--{others[0]} has no effect", expected="--prompt alone", got="both", remedy="leave it out")
    connection = _connect(arguments)
    name = connection.find_writer(arguments.model)
    inputs = {PROMPT: [_encode(arguments.prompt)], "sampling_parameters": [_encode(arguments.parameters)]}
    asked: dict[str, Any] = {key: np.array(value, dtype=np.object_) for key, value in inputs.items()}
    pieces = []
    with contextlib.closing(
        connection.write(name, asked | {"exclude_input_in_output": np.array([True])}, is_streamed=arguments.stream)
    ) as written:
        for piece in written:
            pieces.append(piece)
            if not arguments.json:
                print(piece, end="", flush=True)  # noqa: T201
    content = {"model": name, "prompt": arguments.prompt, "text": "".join(pieces)}
    print(json.dumps(content, ensure_ascii=False) if arguments.json else "")  # noqa: T201
    return 0


def _to_picture_json(model: Model, found: list[PictureAnswer]) -> dict[str, Any]:
    rows = [
        {"image": str(answer.path)}
        | ({"error": answer.refusal} if answer.refusal else {})
        | {name: _to_plain(values) for name, values in answer.answers.items()}
        for answer in found
    ]
    return {"model": model.name, "version": model.version, "results": rows}


def _collect_texts(arguments: argparse.Namespace) -> list[bytes]:
    texts = [_encode(text) for text in arguments.text]
    if arguments.file:
        try:
            content = sys.stdin.buffer.read() if arguments.file == "-" else Path(arguments.file).read_bytes()
        except OSError as exc:
            raise ClientError(
                f"{arguments.file} cannot be read",
                expected="a file with one text a line",
                got=f"'{exc.strerror}'",
                remedy="correct --file",
            ) from exc
        texts += [line.rstrip(b"\r") for line in content.removesuffix(b"\n").split(b"\n")] if content else []
    # A blank line among others is a text as well: answers stay beside the lines that they belong to.
    if not any(text.strip() for text in texts):
        raise ClientError(
            "there is no text to send",
            expected="--text or lines in --file",
            got="nothing but blanks" if texts else "neither",
        )
    return texts


def _check_certificates(path: Path) -> None:
    """Refuse a file that holds no certificates, in a sentence; the two clients fail over it in ways of their own."""
    try:
        ssl.create_default_context(cafile=path)
    except OSError as exc:
        raise ClientError(
            f"{path} cannot be used",
            expected="certificates in PEM",
            got=f"'{exc.strerror or exc}'",
            remedy="correct --ca",
        ) from exc


def _read_headers(given: list[str]) -> dict[str, str]:
    """Return the headers that `--header` names, as curl's option of that name takes them.

    Args:
        given: `NAME: VALUE` each, or `@FILE` with such lines.

    Raises:
        ClientError: A file cannot be read or a line is not a header; its text, which may be a token, is not repeated.
    """
    headers = {}
    for text in given:
        lines, where = [text], "--header"
        if text.startswith("@"):
            where = text[1:]
            try:
                lines = Path(where).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as exc:
                raise ClientError(
                    f"{where} cannot be read",
                    expected="a file with one header a line",
                    got=f"'{exc}'",
                    remedy="correct --header",
                ) from exc
        for line in filter(None, map(str.strip, lines)):
            match = _HEADER.fullmatch(line)
            if match is None:
                raise ClientError(
                    f"{where} holds no header", expected="NAME: VALUE in printable ASCII", got="another text"
                )
            headers[match[1]] = match[2]
    return headers


def _encode(text: str) -> bytes:
    # What is no UTF-8 on the command line goes out as the bytes it came in, and the server says what it thinks of it.
    return text.encode("utf-8", errors="surrogateescape")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def _to_json(model: Model, texts: list[str], pairs: list[str], answers: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    rows = [
        {"text": text}
        | ({"pair": pairs[index]} if pairs else {})
        | {name: _to_plain(array[index]) for name, array in answers.items()}
        for index, text in enumerate(texts)
    ]
    return {"model": model.name, "version": model.version, "results": rows}


def _to_plain(values: npt.NDArray[Any]) -> list[Any]:
    return [_to_plain(value) if isinstance(value, np.ndarray) else _to_value(value) for value in values]


def _to_value(value: Any) -> Any:
    return _decode(value) if isinstance(value, bytes) else value.item()


def _to_table(texts: list[str], answers: dict[str, npt.NDArray[Any]]) -> list[str]:
    if list(answers) == ["EMBEDDING"]:
        return _to_similarity_table(texts, answers["EMBEDDING"])
    return _to_answer_table(texts, answers)


def _to_answer_table(texts: list[str], answers: dict[str, npt.NDArray[Any]]) -> list[str]:
    """Return one line an answer: the text, then what was found in it, best first or in the order of the text."""
    headings: list[str] = [
        name for name in ("SCORE", "REWARD", "START", "END", "LABEL", "ANSWER", "TOKEN") if name in answers
    ]
    rows = ["".join(f"{name:>9}" if name not in _WORDS else f"  {name:<24}" for name in headings).rstrip()]
    for index, text in enumerate(texts):
        rows.append(f"\n{index + 1:>4}  {_shorten(text)}")
        columns = [answers[name][index].reshape(-1) for name in headings]
        found = [line for line in zip(*columns, strict=True) if not _is_absent(headings, line)]
        rows += ["".join(_format(name, value) for name, value in zip(headings, line, strict=True)) for line in found]
        if not found:
            rows.append("           nothing found")
    return rows


_NUMBERS = ("SCORE", "REWARD")
_WORDS = ("LABEL", "ANSWER", "TOKEN")


def _is_absent(headings: list[str], line: tuple[Any, ...]) -> bool:
    """Tell whether an answer only fills up a row that has fewer than another."""
    values = dict(zip(headings, line, strict=True))
    return values.get("START") == -1 or ("TOKEN" in values and values["TOKEN"] == b"" and values["SCORE"] == 0)


def _format(name: str, value: Any) -> str:
    if name in _WORDS:
        return f"  {_shorten(_decode(value)):<24}".rstrip()
    return f"{value:9.4f}" if name in _NUMBERS else f"{value:>9}"


def _to_similarity_table(texts: list[str], embeddings: npt.NDArray[np.float32]) -> list[str]:
    """Return the cosine of every pair while that fits a terminal, else each text's nearest other one."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosines = unit @ unit.T
    title = f"{embeddings.shape[1]} values a text; cosine similarities:"
    if len(texts) <= 8:
        rows = [f"{title}\n", "    " + "".join(f"{index + 1:>7}" for index in range(len(texts))) + "  text"]
        for index, text in enumerate(texts):
            rows.append(
                f"{index + 1:>4}" + "".join(f"{value:7.3f}" for value in cosines[index]) + f"  {_shorten(text)}"
            )
        return rows
    np.fill_diagonal(cosines, -np.inf)
    rows = [f"{title}\n", f"{'':>4}{'nearest':>9}{'cosine':>8}  text"]
    for index, text in enumerate(texts):
        nearest = int(cosines[index].argmax())
        rows.append(f"{index + 1:>4}{nearest + 1:>9}{cosines[index, nearest]:8.3f}  {_shorten(text)}")
    return rows


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description="Ask a running server about texts or pictures.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", help=f"host:port of the server (default: {DEFAULT_URLS['http']}, over gRPC {DEFAULT_URLS['grpc']})"
    )
    parser.add_argument("--protocol", choices=tuple(DEFAULT_URLS), default="http", help="default: %(default)s")
    parser.add_argument("--tls", action="store_true", help="encrypt, as https:// in front of the URL asks for as well")
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="certificates to trust, PEM (default: those that are trusted anyway)"
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="to send with every request, such as a token; @FILE reads headers from a file, one a line",
    )
    parser.add_argument("--model", help="model to ask (default: the one ensemble there is)")
    parser.add_argument("--text", nargs="+", action="extend", default=[], metavar="T", help="one or more texts")
    parser.add_argument(
        "--pair",
        nargs="+",
        action="extend",
        default=[],
        metavar="T",
        help="the second text of each, such as the context of a question; one alone goes with every text",
    )
    parser.add_argument(
        "--image",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="encoded pictures: files, folders or patterns; they are sent as they are",
    )
    parser.add_argument("--output", metavar="FILE", help="draw the answers onto the one picture, and save that")
    parser.add_argument("--prompt", metavar="T", help="a text to go on from, of a model that generates text")
    parser.add_argument("--stream", action="store_true", help="print what is written as it comes")
    parser.add_argument(
        "--parameters",
        default="{}",
        metavar="JSON",
        help='how it is written, such as \'{"max_tokens": 100, "temperature": 0.7}\' (default: as the model has it)',
    )
    parser.add_argument("--file", help="file with one text a line; - reads standard input")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all values")
    return parser


if __name__ == "__main__":
    sys.exit(main())
