"""What becomes of one kind of input, in however many processes: texts to ids, pictures to pixels, sounds to samples.

A step imports what it needs when it is made: one of pictures holds no tokenizers in memory.
"""

import io
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from request_values import read_values
from sent_file import FileError, SentFile

Array = npt.NDArray[Any]


class TextStep:
    """TEXT, or TEXT and TEXT_PAIR, to token ids.

    Args:
        path: The `tokenizer.json`.
        config: Configuration of the model, whose inputs are columns of text.
        tensor_names: Names of the tensors to make.
        described: Whether a long text is read in windows (`has_windows`), and how long the longest is (`longest`).

    Attributes:
        refusal: The error of a row that cannot be used.
        encode: Rows to what each became, or its refusal.
        stack: What rows became to tensors.
        read_rows: A request to its rows.
        name: Name of the input, or of the first one, for messages.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], tensor_names: Sequence[str], described: Mapping[str, Any]
    ) -> None:
        from texts import RequestTexts
        from tokenization import TextTokenizer, read_lengths, read_unknown_id
        from truncation import TextError

        self.refusal = TextError
        has_windows = described["has_windows"]
        tokenizer = TextTokenizer(
            path,
            tensor_names,
            has_windows=has_windows,
            lengths=read_lengths(config),
            unknown_id=read_unknown_id(config),
        )
        texts = RequestTexts(config, has_windows=has_windows)
        self.encode, self.stack, self.read_rows = tokenizer.encode, tokenizer.stack, texts.read_rows
        self._input_names = texts.names
        self.name = texts.names[0]
        self._longest = described.get("longest", 1)

    def measure(self, made: Any) -> Hashable:
        """Return what two rows have in common that are stacked without padding."""
        return (len(made.windows), max(len(window.ids) for window in made.windows))

    def recall(self, made: Sequence[Any]) -> dict[str, Array]:
        """Return the inputs of these rows, by name, each [rows, 1]."""
        return {
            name: np.array([[row.texts[index].encode()] for row in made], dtype=np.object_)
            for index, name in enumerate(self._input_names)
        }

    def list_samples(self) -> list[Any]:
        """Return rows to warm up with: the longest that there is, and the shortest."""
        return [(*["a"] * (len(self._input_names) - 1), text) for text in ("a " * self._longest, "a")]


class FileStep:
    """A step of encoded files, the one input of a model; attributes are those of `TextStep`.

    Args:
        reader: Makes tensors of files.
        config: Configuration of the model.
    """

    refusal = FileError

    def __init__(self, reader: Any, config: Mapping[str, Any]) -> None:
        (self.name,) = (tensor["name"] for tensor in config["input"])
        self.encode, self.stack = reader.encode, reader.stack

    def read_rows(self, request: Any) -> list[SentFile]:
        """Return the files of a request.

        Raises:
            FileError: There is none.
        """
        values = read_values(request, self.name, self.refusal)
        return [self.send(bytes(value), row) for row, value in enumerate(values)]

    def send(self, content: bytes, row: int = 0) -> SentFile:
        """Return a file as if a client had sent it."""
        return SentFile(content, self.name, row)

    def recall(self, made: Sequence[Any]) -> dict[str, Array]:
        """See `TextStep`. No answer is made of the file itself."""
        return {}


class PictureStep(FileStep):
    """IMAGE to pixels. Arguments are those of `TextStep`, with a `picture.json`."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], tensor_names: Sequence[str], described: Mapping[str, Any]
    ) -> None:
        # As above.
        from pictures import PictureReader

        reader = PictureReader(path, tensor_names, max_threads=count_threads(config))
        super().__init__(reader, config)
        self._samples = reader.samples

    def measure(self, made: Any) -> Hashable:
        """See `TextStep`. Pictures of one bucket are of one size."""
        shape: Hashable = made.pixels.shape
        return shape

    def list_samples(self) -> list[Any]:
        """See `TextStep`."""
        from PIL import Image

        files = [io.BytesIO() for _ in self._samples]
        for file, size in zip(files, self._samples, strict=True):
            Image.new("RGB", size).save(file, "JPEG")
        return [self.send(file.getvalue()) for file in files]


class SoundStep(FileStep):
    """AUDIO to samples. Arguments are those of `TextStep`, with a `sound.json`."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], tensor_names: Sequence[str], described: Mapping[str, Any]
    ) -> None:
        # As above.
        from sounds import SoundReader

        super().__init__(SoundReader(path, tensor_names, max_threads=count_threads(config)), config)

    def measure(self, made: Any) -> Hashable:
        """See `TextStep`. Sounds are never padded."""
        return len(made.samples)

    def list_samples(self) -> list[Any]:
        """See `TextStep`. A second of silence."""
        import soundfile

        file = io.BytesIO()
        soundfile.write(file, np.zeros(16_000, dtype=np.float32), 16_000, format="WAV")
        return [self.send(file.getvalue())]


def count_threads(config: Mapping[str, Any]) -> int:
    """Return an instance's share of the cores: one that takes all of them holds up the others."""
    instances: int = sum(group["count"] for group in config["instance_group"])
    return max(1, len(os.sched_getaffinity(0)) // instances)


# What lies in the version folder → what is made of it.
STEPS: Mapping[str, Any] = {"tokenizer.json": TextStep, "picture.json": PictureStep, "sound.json": SoundStep}


def open_step(
    folder: Path, config: Mapping[str, Any], tensor_names: Sequence[str], described: Mapping[str, Any]
) -> Any:
    """Return the step that a version folder holds the file of.

    Raises:
        ValueError: It holds none of them.
    """
    file = next((name for name in STEPS if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(
            f"{folder} does not say what clients send: expected one of {', '.join(STEPS)} in it, got none; put it "
            "back, or export the model again"
        )
    return STEPS[file](folder / file, config, tensor_names, described)
