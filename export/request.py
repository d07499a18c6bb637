"""What a user can ask the export for. Imports nothing heavy, so that `--help` answers at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Task → what clients get, for `--help`.
TASKS = {
    "feature-extraction": "one vector a text",
    "text-classification": "labels and scores of a text",
    "text-pair-classification": "labels and scores of a pair of texts; the score of a cross-encoder",
    "token-classification": "entities with their places in the text",
    "question-answering": "the part of a context that answers a question",
    "fill-mask": "the likeliest tokens for each mask",
    "reward": "the score of a reward model",
    "text-generation": "tensors: the scores of the next token at every token of a text",
    "text-generation-with-past": "tensors: the same with keys and values of the tokens before, for one token a step",
    "text2text-generation": "tensors: the same of an encoder and a decoder",
    "image-classification": "tensors: the scores of an image's labels",
    "image-feature-extraction": "tensors: the last hidden states of an image",
    "audio-classification": "tensors: the scores of a sound's labels",
    "automatic-speech-recognition": "tensors: the scores of the characters at every frame of a sound",
    "audio-feature-extraction": "tensors: the last hidden states of a sound",
}

# The Triton release whose tritonserver the wheel carries.
DEFAULT_RELEASE = "24.10"

UNUSED_ROWS = ("keep", "cut")
POOLINGS = ("mean", "cls", "last")
AGGREGATIONS = ("none", "simple", "first", "average", "max")


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What can be asked of a task; None is what the checkpoint says, or the task's default.

    Attributes:
        top_k: How many answers a text gets at most.
        aggregation: How tokens become entities, as transformers' pipeline names it.
        pooling: How token vectors become one.
        normalize: Whether that vector is scaled to length 1.
    """

    top_k: int | None = None
    aggregation: str | None = None
    pooling: str | None = None
    normalize: bool | None = None

    @property
    def belonging(self) -> dict[str, tuple[str, ...]]:
        """Each option that was given → the tasks that it means something to."""
        classifiers = ("text-classification", "text-pair-classification")
        known = {
            "top_k": (*classifiers, "question-answering", "fill-mask"),
            "aggregation": ("token-classification",),
            "pooling": ("feature-extraction",),
            "normalize": ("feature-extraction",),
        }
        return {name.replace("_", "-"): tasks for name, tasks in known.items() if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token that the export adds.

    Attributes:
        token: Its text, such as `[ENT_START]`.
        initializer: What its rows start as: `zeros`, `copy:TOKEN`, `mean:DESCRIPTION` (of the description's tokens),
            `mean` (of the whole table) or `random`. Anything else is a description.
        special: Whether it keeps its case and is never split, as transformers' `add_special_tokens` makes it;
            otherwise as `add_tokens` does.
    """

    token: str
    initializer: str = "mean"
    special: bool = True


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """What becomes of the tokenizer and the rows that belong to it.

    Attributes:
        added_tokens: In this order, which is the order of their ids.
        unused_rows: Whether rows beyond the tokenizer stay (`keep`) or go (`cut`).
        pad_to_multiple_of: What the number of rows is padded to, with rows that are the table's mean.
        seed: Of `random` rows.
        allow_other_tokenizer: Whether a tokenizer is taken that seems to belong to another model.
    """

    added_tokens: tuple[AddedToken, ...] = ()
    unused_rows: str = "keep"
    pad_to_multiple_of: int = 1
    seed: int = 0
    allow_other_tokenizer: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The options of `python -m export run`.

    Attributes:
        checkpoint: Folder that a trainer or `save_pretrained` left.
        name: That clients will use.
        repository: The Triton model repository.
        tag: Which checkpoint of several in the folder; the trainer's own choice where None.
        base: Folder with configuration and tokenizer; the checkpoint's own where None.
        allow_non_finite: Whether NaN and infinite weights are let through the reader.
        task: What the checkpoint is served as; None finds it out.
        task_options: How it is served.
        vocabulary: What becomes of the tokenizer and its rows.
        adapters: Folders of adapters, merged in this order.
        lora_scaling: DeepSpeed-Chat's, for the low-rank updates inside a checkpoint of its.
        target: The Triton release that is to serve it.
        precision: Of the published file.
        engine: What runs it.
        tolerances: Error → another bound for the verification than the usual one.
        accept_worse: Why a wider bound is accepted.
        factory: Function that builds the module, where it is no model of transformers.
        inputs: File that describes that module's inputs and outputs.
    """

    checkpoint: Path | None
    name: str
    repository: Path
    tag: str | None = None
    base: Path | None = None
    allow_non_finite: bool = False
    task: str | None = None
    task_options: TaskOptions = TaskOptions()
    vocabulary: VocabularyOptions = VocabularyOptions()
    adapters: tuple[Path, ...] = ()
    lora_scaling: float | None = None
    target: str = DEFAULT_RELEASE
    precision: str = "fp32"
    engine: str = "onnxruntime"
    tolerances: Mapping[str, float] = field(default_factory=dict)
    accept_worse: str | None = None
    factory: str | None = None
    inputs: Path | None = None
