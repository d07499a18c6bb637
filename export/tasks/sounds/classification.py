"""Tasks about sounds: encoded files in, labels out, decoding and resampling in front of the graph."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForAudioClassification

from ...artefacts import LEAN, MODEL, POSTPROCESS, PREPROCESS
from ...signature import BATCH, STRING, Contract, TensorSignature
from ..base import TaskSource
from ..cases import Outputs
from ..comparison import LOGIT_TOLERANCES, MAX_LOGIT_ERROR, compare_logits
from ..golden import build_sample
from ..labels import choose_function, read_labels
from ..pictures.answers import TOP_K, LabelAnswers
from ..signals import SHORTEST_WAVEFORM, SignalTask
from ..steps import POSTPROCESS_BACKEND, POSTPROCESS_FILE, PREPROCESS_BACKEND, describe_lean
from .recipe import find_sound_preparation
from .samples import build_sounds

AUDIO = "AUDIO"
SOUND_FILE = "sound.json"

# Places are answered in pictures alone.
_NOWHERE = (0.0,) * 6


class AudioLabels(SignalTask):
    """The labels of a sound.

    Attributes:
        preparation: What is done to a sound in front of the graph.
        answers: What is made of the graph's outputs behind it.
    """

    is_ensemble = True
    has_lean = True
    auto_class = AutoModelForAudioClassification
    output = "logits"
    tolerances: ClassVar[Mapping[str, float]] = LOGIT_TOLERANCES

    def __init__(self, source: TaskSource) -> None:
        self.preparation = find_sound_preparation(source.directory, "audio-classification-tensors", SHORTEST_WAVEFORM)
        super().__init__(source)
        labels = read_labels(source.config, must_differ=False)
        self.top_k = min(source.options.get("top_k") or TOP_K, len(labels))
        self.answers = LabelAnswers(labels, choose_function(source.config), self.top_k)
        (given,) = self.signature.inputs
        samples = [{given.name: self.preparation.read(content)} for content in build_sounds()]
        self.tensors = replace(self.tensors, samples=samples)
        contract = Contract(
            inputs=(TensorSignature(name=AUDIO, dtype=STRING, dims=(BATCH, 1)),),
            outputs=self.answers.outputs,
            preprocess=PREPROCESS_BACKEND,
            postprocess=POSTPROCESS_BACKEND,
            has_files=True,
        )
        self.signature = replace(self.answers.sign(self.signature), contract=contract)

    @property
    def description(self) -> str:
        """See `Task`."""
        recipe = self.preparation.recipe
        return f"{self.answers.description}; sounds by {self.preparation.origin} at {recipe.sampling_rate} Hz"

    @property
    def postprocess(self) -> Mapping[str, Any]:
        """What `postprocess.json` tells the step behind the graph."""
        return self.answers.postprocess

    @property
    def step_files(self) -> Mapping[str, Mapping[str, bytes]]:
        """See `Task`."""
        files: dict[str, Mapping[str, bytes]] = {
            PREPROCESS: {SOUND_FILE: self.preparation.recipe.to_json()},
            MODEL: self.answers.model_files,
            POSTPROCESS: {POSTPROCESS_FILE: (json.dumps(self.postprocess, ensure_ascii=False) + "\n").encode()},
        }
        if self.signature.contract and self.signature.contract.is_lean:
            files[LEAN] = describe_lean(self.signature)
        return files

    def build_golden(self) -> dict[str, Any]:
        """See `Task`. The answers to one sound of each kind."""
        contract = self.signature.contract
        assert contract is not None, "Bug: a task about sounds without an ensemble"
        samples = [build_sample(contract, {AUDIO: content}, self.answer(content)) for content in build_sounds()]
        return {"tolerances": dict(self.answers.tolerances), "samples": samples}

    def answer(self, content: bytes) -> Mapping[str, Any]:
        """Return what the checkpoint answers to an encoded sound."""
        with torch.no_grad():
            logits = self.module(torch.from_numpy(self.preparation.read(content))[None])
        return self.answers.answer((logits,), _NOWHERE)

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`."""
        wanted, had = [outputs[0] for outputs in expected], [outputs[0] for outputs in got]
        return compare_logits(wanted, had, bounds.get("max_abs_error", MAX_LOGIT_ERROR))

    def measure_scores(self, expected: Sequence[Outputs], got: Sequence[Outputs]) -> float:
        """See `Task`."""
        return self.answers.measure_scores(expected, got)
