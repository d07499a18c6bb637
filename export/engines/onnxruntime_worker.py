"""Runs ONNX files for `onnxruntime_process`, in a process of its own.

Called as `python -I onnxruntime_worker.py IN OUT THREADS [FOLDER]`, it speaks through the file descriptors IN and OUT:
a request, then its answer, each a header in JSON and raw arrays. It imports numpy and, from FOLDER where one is given,
ONNX Runtime; nothing of this package.
"""

import contextlib
import json
import os
import select
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import onnxruntime

# The length of the header, in front of it.
_LENGTH_BYTES = 4

Arrays = Sequence["np.ndarray[Any, Any]"]


def write_message(file: BinaryIO, header: Mapping[str, Any], arrays: Arrays = ()) -> None:
    """Write `header` and `arrays` of any shape, empty ones included, and any numeric dtype or bool. No copy is made.

    Raises:
        TypeError: An array holds Python objects, which cannot be sent as bytes.
    """
    shapes = []
    for array in arrays:
        if array.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be sent")
        shapes.append([array.dtype.str, list(array.shape)])
    text = json.dumps({**header, "arrays": shapes}).encode()
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for array in arrays:
        # The bytes themselves: a memoryview of an empty array, or of one without dimensions, cannot be cast.
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.flush()


def read_message(file: BinaryIO) -> "tuple[dict[str, Any], list[np.ndarray[Any, Any]]]":
    """Read what `write_message` wrote; each array is read into the memory that it is returned in.

    Raises:
        EOFError: The other side is gone.
    """
    length = int.from_bytes(_read(file, _LENGTH_BYTES), "little")
    header = json.loads(_read(file, length))
    arrays = []
    for dtype, shape in header.pop("arrays"):
        array = np.empty(shape, np.dtype(dtype))
        _read_into(file, array.reshape(-1).view(np.uint8).data)
        arrays.append(array)
    return header, arrays


def _read(file: BinaryIO, size: int) -> bytes:
    data = bytearray(size)
    _read_into(file, memoryview(data))
    return bytes(data)


def _read_into(file: BinaryIO, buffer: memoryview) -> None:
    # A buffered reader's `readinto` stops short only at the end of the stream.
    if file.readinto(buffer) < len(buffer):  # type: ignore[attr-defined]
        raise EOFError


class _Worker:
    """The models that are loaded, by number."""

    def __init__(self, runtime: Any, threads: int) -> None:
        self._runtime = runtime
        self._threads = threads
        self._sessions: dict[int, onnxruntime.InferenceSession] = {}

    def answer(self, request: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Do what `request` asks; whatever goes wrong becomes the answer."""
        try:
            if request["do"] == "load":
                return self._load(request["model"], request["path"]), ()
            if request["do"] == "run":
                return self._run(
                    request["model"], request["outputs"], dict(zip(request["inputs"], arrays, strict=True))
                )
            del self._sessions[request["model"]]
        # ONNX Runtime raises one class per kind of fault, without a common base of its own.
        except Exception as exc:
            return {"error": str(exc).strip() or type(exc).__name__}, ()
        return {}, ()

    def _load(self, model: int, path: str) -> dict[str, Any]:
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        # Threads that wait for work by spinning would take the processor from who compares the answers.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = self._runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._sessions[model] = session
        return {
            "inputs": [[item.name, item.type, item.shape] for item in session.get_inputs()],
            "outputs": [[item.name, item.type, item.shape] for item in session.get_outputs()],
        }

    def _run(
        self, model: int, outputs: Sequence[str], feeds: "Mapping[str, np.ndarray[Any, Any]]"
    ) -> tuple[dict[str, Any], Arrays]:
        values = self._sessions[model].run(list(outputs), dict(feeds))
        for name, value in zip(outputs, values, strict=True):
            if not isinstance(value, np.ndarray) or value.dtype.hasobject:
                raise TypeError(f"the output {name} is not a tensor of numbers")
        return {}, values


def _end_with_the_other_side(requests: BinaryIO) -> None:
    """End this process when nobody holds the other end of the pipe any more, even in the middle of a model's run."""
    hangup = select.poll()
    # No event is asked for: a hang-up of the other side is always reported.
    hangup.register(requests, 0)
    hangup.poll()
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Answer requests until the other side closes its end."""
    with open(int(arguments[0]), "rb") as requests, open(int(arguments[1]), "wb") as answers:  # noqa: PTH123
        threading.Thread(target=_end_with_the_other_side, args=[requests], daemon=True).start()
        sys.path[:0] = arguments[3:]
        try:
            import onnxruntime
        # A wheel of another platform, or damaged.
        except Exception as exc:
            write_message(answers, {"error": f"{type(exc).__name__}: {exc}"})
            return
        worker = _Worker(onnxruntime, threads=int(arguments[2]))
        write_message(answers, {"onnxruntime": onnxruntime.__version__})
        with contextlib.suppress(EOFError):
            while True:
                write_message(answers, *worker.answer(*read_message(requests)))


if __name__ == "__main__":
    main(sys.argv[1:])
