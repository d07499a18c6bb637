"""The tasks that a checkpoint can be served as, one entry each. Imports nothing heavy: `--help` answers at once.

How a task is built is in the module of this folder that its entry names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ModelError
from ..option_kinds import COUNT, NUMBER, PATHS, SWITCH, TEXT, Needs, Option

# What transformers calls the main input of a model of texts, of images, of sounds.
TEXTS = ("input_ids",)
IMAGES = ("pixel_values",)
SOUNDS = ("input_values", "input_features")

# How the classes of decoders end.
CAUSAL = ("ForCausalLM", "LMHeadModel")

# What can be asked of some tasks; None is what the checkpoint says, or the task's default.
TOP_K = Option(name="top_k", kind=COUNT, help="largest number of answers for a text, a picture or a sound")
THRESHOLD = Option(
    name="threshold", kind=NUMBER, metavar="SCORE", help="only boxes of a higher score are answered (default: 0.5)"
)
PREPROCESS = Option(
    name="preprocess",
    kind=TEXT,
    metavar="RECIPE",
    help="what is done to pictures: imagenet, or a file (default: preprocessor_config.json)",
)
PICTURES = Option(
    name="pictures",
    kind=PATHS,
    metavar="PATH",
    help="files or folders of pictures such as clients send, which the proof is made on, and int8 with "
    "(default: drawn ones)",
)
AGGREGATION = Option(
    name="aggregation",
    kind=TEXT,
    choices=("none", "simple", "first", "average", "max"),
    help="how tokens become entities, as transformers' pipeline names it (default: simple)",
)
POOLING = Option(
    name="pooling",
    kind=TEXT,
    choices=("mean", "cls", "last", "max", "mean_sqrt_len_tokens", "weightedmean"),
    help="how token vectors become one (default: as recorded)",
)
NORMALIZE = Option(name="normalize", kind=SWITCH, help="scale vectors to length 1 (default: as recorded)")

# A module of the user's own is given pictures by the same options.
_OF_FACTORIES = (PREPROCESS, PICTURES)


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """One way of serving a checkpoint.

    Attributes:
        name: What `--task` takes, and what reports record.
        help: What clients get, for `--help`.
        place: `folder.module:Class` in this folder, whose class is built from the checkpoint.
        inputs: Main inputs, as transformers calls them, of the models that it is for.
        architectures: Endings of the names of classes that were trained for it. Of tasks that share one, the first is
            found that a checkpoint has everything for, such as a tokenizer.
        options: What can be asked of it.
        form: What an engine is given of it, as the class says too.
        steps: What clients send to the steps around its graph; None where there are none.
    """

    name: str
    help: str
    place: str
    inputs: tuple[str, ...] = TEXTS
    architectures: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    form: Literal["graph", "decoder"] = "graph"
    steps: Literal["texts", "files"] | None = None

    @property
    def has_lean(self) -> bool:
        """Whether one process can do what the steps around its graph do, as the class says too."""
        return self.steps is not None

    @property
    def has_lengths(self) -> bool:
        """Whether its first step can pad texts to a few lengths, as the class says too."""
        return self.steps == "texts"

    @property
    def must_read_text(self) -> bool:
        """Whether it cannot be served without a tokenizer, as the class says too."""
        return self.steps == "texts" or self.form == "decoder"


TASKS: Mapping[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        TaskEntry(
            name="feature-extraction",
            help="one vector a text",
            place="texts.pooling:FeatureExtraction",
            architectures=("Model", "TextModelWithProjection"),
            options=(POOLING, NORMALIZE),
            steps="texts",
        ),
        TaskEntry(
            name="text-classification",
            help="labels and scores of a text",
            place="texts.classification:TextClassification",
            architectures=("ForSequenceClassification",),
            options=(TOP_K,),
            steps="texts",
        ),
        TaskEntry(
            name="text-pair-classification",
            help="labels and scores of a pair of texts; the score of a cross-encoder",
            place="texts.classification:TextPairClassification",
            options=(TOP_K,),
            steps="texts",
        ),
        TaskEntry(
            name="token-classification",
            help="entities with their places in the text",
            place="texts.tokens:TokenClassification",
            architectures=("ForTokenClassification",),
            options=(AGGREGATION,),
            steps="texts",
        ),
        TaskEntry(
            name="question-answering",
            help="the part of a context that answers a question",
            place="texts.spans:QuestionAnswering",
            architectures=("ForQuestionAnswering",),
            options=(TOP_K,),
            steps="texts",
        ),
        TaskEntry(
            name="fill-mask",
            help="the likeliest tokens for each mask",
            place="texts.masks:FillMask",
            architectures=("ForMaskedLM",),
            options=(TOP_K,),
            steps="texts",
        ),
        TaskEntry(
            name="reward",
            help="the score of a reward model",
            place="texts.classification:Reward",
            steps="texts",
        ),
        TaskEntry(
            name="text-generation",
            help="text that goes on from a prompt, streamed and batched continuously",
            place="texts.text_generation:TextGeneration",
            architectures=CAUSAL,
            form="decoder",
        ),
        TaskEntry(
            name="text-generation-logits",
            help="tensors: the scores of the next token at every token of a text",
            place="texts.generation:TextGenerationLogits",
            architectures=CAUSAL,
        ),
        TaskEntry(
            name="text-generation-logits-with-past",
            help="tensors: the same with keys and values of the tokens before, for one token a step",
            place="texts.generation:TextGenerationLogitsWithPast",
        ),
        TaskEntry(
            name="text2text-generation",
            help="tensors: the same of an encoder and a decoder",
            place="texts.generation:Text2TextGeneration",
            architectures=("ForConditionalGeneration", "MTModel"),
        ),
        TaskEntry(
            name="image-classification",
            help="labels and scores of a picture, sent as an encoded file",
            place="pictures.images:ImageLabels",
            inputs=IMAGES,
            architectures=("ForImageClassification",),
            options=(TOP_K, PREPROCESS, PICTURES),
            steps="files",
        ),
        TaskEntry(
            name="object-detection",
            help="boxes around what is seen in a picture, sent as an encoded file, with labels and scores",
            place="pictures.detection:ObjectDetection",
            inputs=IMAGES,
            architectures=("ForObjectDetection",),
            options=(TOP_K, THRESHOLD, PREPROCESS, PICTURES),
            steps="files",
        ),
        TaskEntry(
            name="image-segmentation",
            help="which pixel of a picture is of what, as a PNG of its size, sent as an encoded file",
            place="pictures.segmentation:ImageSegmentation",
            inputs=IMAGES,
            architectures=("ForSemanticSegmentation",),
            options=(TOP_K, PREPROCESS, PICTURES),
            steps="files",
        ),
        TaskEntry(
            name="image-embedding",
            help="one vector a picture, sent as an encoded file",
            place="pictures.vectors:ImageEmbedding",
            inputs=IMAGES,
            architectures=("VisionModel", "VisionModelWithProjection"),
            options=(NORMALIZE, PREPROCESS, PICTURES),
            steps="files",
        ),
        TaskEntry(
            name="image-classification-tensors",
            help="tensors: the scores of an image's labels",
            place="signals:ImageClassification",
            inputs=IMAGES,
        ),
        TaskEntry(
            name="image-feature-extraction",
            help="tensors: the last hidden states of an image",
            place="signals:ImageFeatureExtraction",
            inputs=IMAGES,
            architectures=("Model", "Backbone"),
        ),
        TaskEntry(
            name="audio-classification",
            help="labels and scores of a sound, sent as an encoded file",
            place="sounds.classification:AudioLabels",
            inputs=SOUNDS,
            architectures=("ForSequenceClassification", "ForAudioClassification"),
            options=(TOP_K,),
            steps="files",
        ),
        TaskEntry(
            name="audio-classification-tensors",
            help="tensors: the scores of a sound's labels",
            place="signals:AudioClassification",
            inputs=SOUNDS,
        ),
        TaskEntry(
            name="automatic-speech-recognition",
            help="tensors: the scores of the characters at every frame of a sound",
            place="signals:SpeechRecognition",
            inputs=SOUNDS,
            architectures=("ForCTC",),
        ),
        TaskEntry(
            name="audio-feature-extraction",
            help="tensors: the last hidden states of a sound",
            place="signals:AudioFeatureExtraction",
            inputs=SOUNDS,
            architectures=("Model",),
        ),
    )
}


def check_task_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options that belong to other tasks.

    Args:
        name: The task.
        options: Option of any task → what was asked for, or None.

    Raises:
        ModelError: One does.
    """
    own = {option.name for option in TASKS[name].options}
    for option in (option for option, value in options.items() if value is not None):
        if option not in own:
            owners = [other.name for other in TASKS.values() if option in {own.name for own in other.options}]
            flag = "--" + option.replace("_", "-")
            raise ModelError(
                f"{flag} does not apply to {name}",
                expected="it with " + ", ".join(owners),
                got=f"--task {name}",
                remedy=f"leave out {flag}",
            )


def list_task_options() -> list[Option]:
    """Return the options of all tasks, each once, with the tasks that it belongs to in its help."""
    owners: dict[str, list[str]] = {}
    options: dict[str, Option] = {}
    for entry in TASKS.values():
        for option in entry.options:
            options[option.name] = option
            owners.setdefault(option.name, []).append(entry.name)
    return [
        replace(
            option,
            help=f"{option.help}; for {', '.join(owners[name] + ['--factory'] * (option in _OF_FACTORIES))}",
            needs=Needs.NOTHING if option in _OF_FACTORIES else Needs.ARCHITECTURE,
            group="task options",
        )
        for name, option in options.items()
    ]
