"""Tasks about pictures: encoded files in, labels or vectors out, decoding and scaling in front of the graph."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForImageClassification

from ...artefacts import LEAN, MODEL, POSTPROCESS, PREPROCESS
from ...errors import ModelError
from ...signature import BATCH, STRING, Contract, TensorSignature
from ..base import TaskSource
from ..cases import Outputs, Row
from ..comparison import LOGIT_TOLERANCES
from ..golden import build_sample
from ..labels import choose_function, read_labels
from ..signals import SignalTask
from ..steps import POSTPROCESS_BACKEND, POSTPROCESS_FILE, PREPROCESS_BACKEND, describe_lean
from ..tensors import TensorTask, infer_outputs
from .answers import TOP_K, Answers, LabelAnswers
from .preparation import Preparation, find_preparation
from .samples import build_pictures, count_golden, describe_pictures, read_pictures

IMAGE = "IMAGE"
PIXEL_MASK = "pixel_mask"
PICTURE_FILE = "picture.json"

# Of all pictures that a model is tried on: of those of 512 x 512 all, of larger ones those that are recorded alone.
_MOST_PIXELS = 32 * 512 * 512


class PictureTask(TensorTask):
    """A task about pictures.

    Attributes:
        preparation: What is done to a picture in front of the graph.
        answers: What is made of the graph's outputs behind it.
        tried_on: The pictures of the proof, in words; empty for drawn ones.
    """

    is_ensemble = True
    has_lean = True

    preparation: Preparation
    answers: Answers
    tried_on: str

    def infer_outputs(self, inputs: tuple[TensorSignature, ...], names: Sequence[str]) -> tuple[TensorSignature, ...]:
        """See `TensorTask`.

        Raises:
            ModelError: The model takes no pictures of the recipe's size.
        """
        try:
            return infer_outputs(self.module, inputs, names, self.tensors)
        # What transformers and torch raise where a picture has another size than the weights were trained on.
        except (ValueError, RuntimeError) as exc:
            sizes = self.preparation.recipe.described_sizes
            raise ModelError(
                f"the model takes no pictures of {sizes}, which {self.preparation.origin} makes",
                expected="the size that it was trained on",
                got=str(exc).splitlines()[0].rstrip(".") if str(exc) else type(exc).__name__,
                remedy="correct --preprocess, or the preprocessor_config.json beside the weights",
            ) from exc

    def serve_pictures(self, preparation: Preparation, answers: Answers, given: Sequence[Path] | None = None) -> None:
        """Stand the two steps around the graph, whose module and signature are there.

        Args:
            preparation: What is done to a picture in front of it.
            answers: What is made of its outputs.
            given: Files and folders of pictures to try it on; None for drawn ones.

        Raises:
            ModelError: The recipe does not say what the checkpoint's own preprocessing does.
            SettingsError: There are no pictures, or one of them is not a picture.
        """
        if preparation.recipe.pad and PIXEL_MASK not in {tensor.name for tensor in self.signature.inputs}:
            raise ModelError(
                f"{preparation.origin} pads pictures, and the model is not told where",
                expected=f"a model that takes {PIXEL_MASK}, or a recipe of one size",
                got=f"pictures of every shape in {' x '.join(map(str, preparation.recipe.pad))}",
                remedy='pass --preprocess FILE, such as {"mode": "exact", "size": [512, 864]} with the mean and '
                "deviation of the processor",
            )
        most = max(count_golden(), _MOST_PIXELS // math.prod(preparation.recipe.height_and_width))
        tried = build_pictures()[:most] if given is None else read_pictures(given, most)
        preparation.check(build_pictures())
        preparation.check(tried)
        self.preparation, self.answers, self.tried_on = preparation, answers, describe_pictures(given, len(tried))
        self.tensors = replace(self.tensors, samples=[self._prepare(content) for content in tried])
        contract = Contract(
            inputs=(TensorSignature(name=IMAGE, dtype=STRING, dims=(BATCH, 1)),),
            outputs=answers.outputs,
            preprocess=PREPROCESS_BACKEND,
            postprocess=None if answers.postprocess is None else POSTPROCESS_BACKEND,
            carried=answers.carried,
            has_files=True,
        )
        self.signature = replace(answers.sign(self.signature), contract=contract)

    def find_dims(self, source: TaskSource) -> tuple[str | int, ...]:
        """See `SignalTask`. As large as the recipe makes pictures."""
        return (BATCH, 3, *self.preparation.recipe.height_and_width)

    @property
    def description(self) -> str:
        """See `Task`."""
        sizes = self.preparation.recipe.described_sizes
        return f"{self.answers.description}; pictures by {self.preparation.origin} at {sizes}{self.tried_on}"

    @property
    def postprocess(self) -> Mapping[str, Any] | None:
        """What `postprocess.json` tells the step behind the graph; None where there is no such step."""
        return self.answers.postprocess

    @property
    def step_files(self) -> Mapping[str, Mapping[str, bytes]]:
        """See `Task`."""
        files: dict[str, Mapping[str, bytes]] = {PREPROCESS: {PICTURE_FILE: self.preparation.recipe.to_json()}}
        if self.answers.model_files:
            files[MODEL] = self.answers.model_files
        if self.postprocess is not None:
            text = json.dumps(self.postprocess, ensure_ascii=False) + "\n"
            files[POSTPROCESS] = {POSTPROCESS_FILE: text.encode()}
        if self.signature.contract and self.signature.contract.is_lean:
            files[LEAN] = describe_lean(self.signature)
        return files

    def build_golden(self) -> dict[str, Any]:
        """See `Task`. The answers to one picture of each kind; to others, where none of these tells anything."""
        contract = self.signature.contract
        assert contract is not None, "Bug: a task about pictures without an ensemble"
        telling: list[Mapping[str, Any]] = []
        blank: list[Mapping[str, Any]] = []
        for place, content in enumerate(build_pictures()):
            if place >= count_golden() and telling:
                break
            outputs, geometry = self._ask(content), self.preparation.find_geometry(content)
            if not self.answers.is_clear(outputs, geometry):
                continue
            answer = self.answers.answer(outputs, geometry)
            kept = telling if self.answers.is_telling(answer) else blank
            kept.append(build_sample(contract, {IMAGE: content}, answer))
        # The first is what a server is asked before it counts as ready.
        samples = (telling + blank)[: count_golden()]
        if not samples:
            raise ModelError(
                "the model's answers to every picture that it is tried on hang on the last digits",
                expected="one that does not",
                got=self.answers.description,
                remedy="export trained weights",
            )
        return {"tolerances": dict(self.answers.tolerances), "samples": samples}

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`."""
        return self.answers.compare(expected, got, bounds)

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float | None:
        """See `Task`."""
        return self.answers.measure_scores(expected, got)

    @property
    def widest_answer(self) -> float:  # type: ignore[override]
        """See `Task`."""
        return self.answers.widest

    def answer(self, content: bytes) -> Mapping[str, Any]:
        """Return what the checkpoint answers to an encoded picture."""
        return self.answers.answer(self._ask(content), self.preparation.find_geometry(content))

    def _prepare(self, content: bytes) -> Row:
        pixels, *others = (tensor.name for tensor in self.signature.inputs)
        row = {pixels: np.ascontiguousarray(self.preparation.read(content))}
        return row | {name: self.preparation.find_mask(content) for name in others}

    def _ask(self, content: bytes) -> Sequence[torch.Tensor]:
        row = self._prepare(content)
        with torch.no_grad():
            outputs = self.module(*(torch.from_numpy(row[tensor.name])[None] for tensor in self.signature.inputs))
        return outputs if isinstance(outputs, tuple) else (outputs,)


class ImageLabels(PictureTask, SignalTask):
    """The labels of a picture."""

    auto_class = AutoModelForImageClassification
    output = "logits"
    tolerances: ClassVar[Mapping[str, float]] = LOGIT_TOLERANCES

    def __init__(self, source: TaskSource) -> None:
        self.preparation = find_preparation(
            source.directory, source.options.get("preprocess"), "image-classification-tensors"
        )
        super().__init__(source)
        labels = read_labels(source.config, must_differ=False)
        self.top_k = min(source.options.get("top_k") or TOP_K, len(labels))
        answers = LabelAnswers(labels, choose_function(source.config), self.top_k)
        self.serve_pictures(self.preparation, answers, source.options.get("pictures"))
