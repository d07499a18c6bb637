"""What a checkpoint is served as, one class per task."""

from collections.abc import Mapping
from pathlib import Path

import transformers
from transformers import PretrainedConfig

from ..checkpoints import TensorSpec
from ..checkpoints.plain.sentence_modules import find_sentence_home
from ..checkpoints.storage.paths import read_json_if_any
from ..errors import ModelError
from ..request import TASKS
from .base import Task, TaskSource
from .classification import VALUE_HEAD, Reward, TextClassification, TextPairClassification
from .generation import GenerationTask, Text2TextGeneration, TextGeneration, TextGenerationWithPast
from .masks import FillMask
from .pooling import FeatureExtraction
from .signals import (
    AudioClassification,
    AudioFeatureExtraction,
    ImageClassification,
    ImageFeatureExtraction,
    SpeechRecognition,
)
from .spans import QuestionAnswering
from .text import Answer, TextTask
from .tokens import TokenClassification

__all__ = [
    "Answer",
    "Task",
    "TaskSource",
    "TextTask",
    "build_task",
    "find_task_name",
    "may_read_text",
    "must_read_text",
]

_TASKS: Mapping[str, type[Task]] = {
    task.name: task
    for task in (
        FeatureExtraction,
        TextClassification,
        TextPairClassification,
        TokenClassification,
        QuestionAnswering,
        FillMask,
        Reward,
        TextGeneration,
        TextGenerationWithPast,
        Text2TextGeneration,
        ImageClassification,
        ImageFeatureExtraction,
        AudioClassification,
        SpeechRecognition,
        AudioFeatureExtraction,
    )
}
assert tuple(_TASKS) == tuple(TASKS), "Bug: the command line names other tasks than there are"

# Ending of the trained class's name → the task that it is for: of texts, images and sounds.
_TEXT_ENDINGS = {
    "ForSequenceClassification": TextClassification.name,
    "ForTokenClassification": TokenClassification.name,
    "ForQuestionAnswering": QuestionAnswering.name,
    "ForMaskedLM": FillMask.name,
    "ForCausalLM": TextGeneration.name,
    "LMHeadModel": TextGeneration.name,
    "ForConditionalGeneration": Text2TextGeneration.name,
    "MTModel": Text2TextGeneration.name,
    "Model": FeatureExtraction.name,
}
_IMAGE_ENDINGS = {
    "ForImageClassification": ImageClassification.name,
    "Model": ImageFeatureExtraction.name,
    "Backbone": ImageFeatureExtraction.name,
}
_AUDIO_ENDINGS = {
    "ForSequenceClassification": AudioClassification.name,
    "ForAudioClassification": AudioClassification.name,
    "ForCTC": SpeechRecognition.name,
    "Model": AudioFeatureExtraction.name,
}
_ENDINGS = {
    "input_ids": _TEXT_ENDINGS,
    "pixel_values": _IMAGE_ENDINGS,
    "input_values": _AUDIO_ENDINGS,
    "input_features": _AUDIO_ENDINGS,
}


def find_task_name(directory: Path, config: PretrainedConfig, specs: Mapping[str, TensorSpec]) -> str:
    """Return the name of the task that the checkpoint was trained for.

    Args:
        directory: The checkpoint's folder.
        config: The checkpoint's configuration.
        specs: Names, shapes and dtypes of its tensors.

    Raises:
        ModelError: It cannot be determined.
    """
    if VALUE_HEAD in specs:
        return Reward.name
    if find_sentence_home(directory) is not None:
        return FeatureExtraction.name
    if _is_cross_encoder(directory, config):
        return TextPairClassification.name
    for architecture in config.architectures or ():
        main_input = getattr(getattr(transformers, architecture, None), "main_input_name", "input_ids")
        for ending, name in _ENDINGS.get(main_input, {}).items():
            if architecture.endswith(ending):
                return name
    raise ModelError(
        f"what {directory} is to be served as cannot be determined",
        expected="an architecture that ends in " + ", ".join({**_TEXT_ENDINGS, **_IMAGE_ENDINGS, **_AUDIO_ENDINGS}),
        got=", ".join(config.architectures or ()) or "none in config.json",
        remedy="pass --task " + ", ".join(TASKS),
    )


def must_read_text(name: str) -> bool:
    """Tell whether the task `name` cannot be served without a tokenizer."""
    return issubclass(_TASKS[name], TextTask)


def may_read_text(name: str) -> bool:
    """Tell whether the task `name` can make use of a tokenizer."""
    return issubclass(_TASKS[name], (TextTask, GenerationTask))


def build_task(name: str, source: TaskSource) -> Task:
    """Return the task `name`, built from the checkpoint and ready to be exported.

    Raises:
        ModelError: The weights do not fit the task, or an option belongs to another one.
    """
    for option, tasks in source.options.belonging.items():
        if name not in tasks:
            raise ModelError(
                f"--{option} does not apply to {name}",
                expected="it with " + ", ".join(tasks),
                got=f"--task {name}",
                remedy=f"leave out --{option}",
            )
    task: type = _TASKS[name]
    built: Task = task(source)
    return built


def _is_cross_encoder(directory: Path, config: PretrainedConfig) -> bool:
    """Tell whether Sentence-Transformers recorded that this model scores pairs."""
    recorded = read_json_if_any(directory / "config_sentence_transformers.json")
    named = isinstance(recorded, Mapping) and recorded.get("model_type") == "CrossEncoder"
    keys = ("sentence_transformers", "sbert_ce_default_activation_function")
    return named or any(getattr(config, key, None) for key in keys)
