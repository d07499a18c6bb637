"""What a checkpoint will be served as, as far as its files tell without transformers. Needs no torch.

Nothing is guessed: where the files leave it open there are several tasks, or no contract.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.plain.sentence_modules import (
    RECORD_FILE,
    SentenceModule,
    find_sentence_home,
    read_sentence_modules,
)
from ..checkpoints.plain.tokenizer_files import has_tokenizer
from ..checkpoints.plain.value_model import VALUE_HEAD
from ..checkpoints.storage.paths import read_json_if_any
from ..errors import ModelError
from .table import IMAGES, SOUNDS, TASKS, TEXTS
from .texts.sentence_settings import read_mode, read_settings

# The types of models that take texts alone, and whose vectors are as wide as `hidden_size` says.
_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "electra", "albert", "modernbert", "deberta-v2")
# Those that take texts alone.
_READERS = (*_ENCODERS, "distilbert", "gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "bloom")

# Type of model → what a module of one's own in its place has to be.
_NOT_EXPORTED = {
    # Their attention is cut into as many windows as a text fills, in a loop of Python: the exporter stops at it, and a
    # trace would make the number a constant.
    **dict.fromkeys(("longformer", "led"), "that computes the attention whole"),
    # Its positions relative to each other are laid out by the text's length: the exporter stops at that as well, and a
    # trace answers wrongly.
    "xlnet": "that torch.export takes at any length",
}

# BigBirds, which attend to the texts that are long enough in blocks, unless they say otherwise.
_IN_BLOCKS = ("big_bird", "bigbird_pegasus")
# What transformers takes where their configuration says nothing.
_BLOCK_SIZE, _RANDOM_BLOCKS, _BIGBIRD_POSITIONS = 64, 3, 4096

# What transformers takes where a configuration names no labels, and what is answered where nothing else is asked for.
_USUAL_LABELS = 2
_TOP_K = 5

# A tensor that clients see: its name, its type as Triton calls it, and its dimensions without the batch.
Described = tuple[str, str, tuple[int, ...]]

# Where in a text an answer stands.
_PLACES = (("START", "INT64"), ("END", "INT64"))

# Task → what clients send; of the others one text.
_SENT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("text-pair-classification", "question-answering"), ("TEXT", "TEXT_PAIR")),
    **dict.fromkeys(("image-classification",), ("IMAGE",)),
    **dict.fromkeys(("audio-classification",), ("AUDIO",)),
}


def reads_pairs(name: str) -> bool:
    """Tell whether clients of the task `name` send two texts at once."""
    return "TEXT_PAIR" in _SENT.get(name, ())


# What clients of a model that writes text send, of which the first is not optional, and get; none has a batch.
WRITER_INPUTS: tuple[Described, ...] = (
    ("text_input", "STRING", (1,)),
    ("stream", "BOOL", (1,)),
    ("sampling_parameters", "STRING", (1,)),
    ("exclude_input_in_output", "BOOL", (1,)),
    ("return_finish_reason", "BOOL", (1,)),
    ("return_num_input_tokens", "BOOL", (1,)),
    ("return_num_output_tokens", "BOOL", (1,)),
)
WRITER_OUTPUTS: tuple[Described, ...] = (
    ("text_output", "STRING", (-1,)),
    ("finish_reason", "STRING", (-1,)),
    ("num_input_tokens", "UINT32", (1,)),
    ("num_output_tokens", "UINT32", (-1,)),
)

# Class of a layer behind the pooling → where its configuration says how wide a vector it takes and makes.
_WIDTHS = {"Dense": ("in_features", "out_features"), "LayerNorm": ("dimension", "dimension")}


def check_architecture(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse an architecture that is known not to become a graph.

    Args:
        directory: Folder of the configuration.
        config: What it says.

    Raises:
        ModelError: It is one.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _NOT_EXPORTED:
        raise ModelError(
            f"the attention of the architecture of {directory} cannot be exported",
            expected="one that docs/architectures.md lists",
            got=model_type,
            remedy="train one of those for texts as long, such as modernbert, or pass --factory with a module of "
            f"your own {_NOT_EXPORTED[model_type]}",
        )
    if model_type in _IN_BLOCKS and config.get("attention_type", "block_sparse") == "block_sparse":
        _check_blocks(directory, config)


def _check_blocks(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse a BigBird that reads texts so long that it attends to them in blocks.

    From the first shorter text on transformers has it attend to all of every text (modeling_big_bird.py, BigBirdModel),
    so that what a long one is answered depends on what was read before: the proof would hold for one of both alone.

    Raises:
        ModelError: It does.
    """

    def read(name: str, usual: int) -> int:
        value = config.get(name, usual)
        return value if isinstance(value, int) else usual

    whole = (5 + 2 * read("num_random_blocks", _RANDOM_BLOCKS)) * read("block_size", _BLOCK_SIZE)
    positions = read("max_position_embeddings", _BIGBIRD_POSITIONS)
    if positions > whole:
        raise ModelError(
            f"{directory} attends to texts of more than {whole} tokens in blocks, which is not exported",
            expected="attention_type original_full",
            got=f"block_sparse, and positions for {positions} tokens",
            remedy=f"set attention_type in config.json to original_full: texts of up to {whole} tokens are answered "
            "alike, and longer ones otherwise",
        )


def is_sentence_model(directory: Path, tensors: Collection[str]) -> bool:
    """Tell whether Sentence-Transformers recorded what the model is pooled with.

    Release 6 lists the modules of a cross-encoder as well, which pools nothing.
    """
    is_listed = find_sentence_home(directory) is not None
    return is_listed and VALUE_HEAD not in tensors and not _is_saved_as_cross_encoder(directory)


def is_cross_encoder(directory: Path, config: Mapping[str, Any]) -> bool:
    """Tell whether Sentence-Transformers recorded that the model scores pairs.

    Args:
        directory: Folder of the checkpoint.
        config: What its configuration says.
    """
    keys = ("sentence_transformers", "sbert_ce_default_activation_function")
    return _is_saved_as_cross_encoder(directory) or any(config.get(key) for key in keys)


def _is_saved_as_cross_encoder(directory: Path) -> bool:
    recorded = read_json_if_any(directory / RECORD_FILE)
    return isinstance(recorded, Mapping) and recorded.get("model_type") == "CrossEncoder"


def foresee_tasks(directory: Path, config: Mapping[str, Any], tensors: Collection[str]) -> list[str]:
    """Return the names of the tasks of which one will be found; none where nothing tells.

    Which input an architecture takes is known here of some alone, so several may remain.

    Args:
        directory: Folder of the configuration.
        config: What it says.
        tensors: Names of the checkpoint's tensors.
    """
    if is_sentence_model(directory, tensors):
        return ["feature-extraction"]
    if is_cross_encoder(directory, config):
        return ["text-pair-classification"]
    if VALUE_HEAD in tensors:
        return ["reward"]
    architectures = list_names(config.get("architectures"))
    if config.get("model_type") in _READERS:
        found = (names for each in architectures if (names := list_for_architecture(each, *TEXTS)))
        return [choose_served(names, directory) for names in found][:1]
    inputs = (*TEXTS, *IMAGES, *SOUNDS)
    return list(
        dict.fromkeys(name for each in architectures for kind in inputs for name in list_for_architecture(each, kind))
    )


def list_names(architectures: Any) -> list[str]:
    """Return the names that `architectures` of a configuration holds; one alone is one, and no list of letters."""
    return [architectures] if isinstance(architectures, str) else [str(each) for each in architectures or ()]


def list_for_architecture(architecture: str, main_input: str) -> list[str]:
    """Return the tasks that models of a class are trained for.

    Args:
        architecture: Name of the class.
        main_input: What transformers calls its main input.
    """
    endings: dict[str, list[str]] = {}
    for entry in TASKS.values():
        for ending in entry.architectures if main_input in entry.inputs else ():
            if architecture.endswith(ending):
                endings.setdefault(ending, []).append(entry.name)
    return endings[max(endings, key=len)] if endings else []


def choose_served(names: Sequence[str], directory: Path) -> str:
    """Return the first of these tasks that the checkpoint in `directory` has everything for."""
    served = (name for name in names if not TASKS[name].must_read_text or has_tokenizer(directory))
    return next(served, names[0])


def foresee_contract(
    name: str, directory: Path, config: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Sequence[Described], Sequence[Described]] | None:
    """Return what clients will send and get of the task `name`; None where that takes the model to tell.

    Args:
        name: The task.
        directory: Folder of the configuration.
        config: What it says.
        options: Option of any task → what was asked for, or None.
    """
    if name == "text-generation":
        return WRITER_INPUTS, WRITER_OUTPUTS
    answers = _foresee_answers(name, directory, config, options["top_k"])
    if not answers:
        return None
    return [(sent, "STRING", (1,)) for sent in _SENT.get(name, ("TEXT",))], answers


def _foresee_answers(name: str, directory: Path, config: Mapping[str, Any], top_k: int | None) -> list[Described]:
    labels, words = _count_labels(config), config.get("vocab_size")
    if name in ("text-classification", "text-pair-classification") and labels:
        dims = (min(top_k or labels, labels),)
        return [("LABEL", "STRING", dims), ("SCORE", "FP32", dims)]
    if name in ("image-classification", "audio-classification") and labels:
        dims = (min(top_k or _TOP_K, labels),)
        return [("LABEL", "STRING", dims), ("SCORE", "FP32", dims)]
    if name == "token-classification":
        return [(key, kind, (-1,)) for key, kind in (("LABEL", "STRING"), ("SCORE", "FP32"), *_PLACES)]
    if name == "question-answering":
        return [(key, kind, (top_k or 1,)) for key, kind in (("ANSWER", "STRING"), ("SCORE", "FP32"), *_PLACES)]
    if name == "fill-mask" and isinstance(words, int) and words > (top_k or _TOP_K) + 1:
        return [(key, kind, (-1, top_k or _TOP_K)) for key, kind in (("TOKEN", "STRING"), ("SCORE", "FP32"))]
    if name == "reward":
        return [("REWARD", "FP32", (1,))]
    width = _find_width(directory, config) if name == "feature-extraction" else 0
    return [("EMBEDDING", "FP32", (width,))] if width else []


def check_pooling(directory: Path) -> None:
    """Refuse a `Pooling` that is not exported, before what stands behind it is held against its vectors.

    Args:
        directory: Folder of the checkpoint.

    Raises:
        ModelError: There is one.
    """
    for module in read_sentence_modules(directory) or ():
        if module.kind == "Pooling":
            read_mode(directory, module.folder)


def check_layers(directory: Path, width: int) -> None:
    """Refuse a layer behind the pooling that takes vectors of another width than it is given.

    Args:
        directory: Folder of the checkpoint.
        width: How wide a pooled vector is; 0 where that is not known.

    Raises:
        ModelError: There is one.
    """
    for module in _list_layers(directory):
        said = read_settings(module.folder / "config.json")
        takes, makes = _WIDTHS[module.kind]
        taken, made = said.get(takes), said.get(makes)
        if width and isinstance(taken, int) and taken != width:
            raise ModelError(
                f"{module.folder} does not fit the vectors that it is given",
                expected=f"{takes} {width}, as wide as they are",
                got=f"{takes} {taken}",
                remedy="copy the folder again with all its modules, or train this one for the model",
            )
        width = made if isinstance(made, int) else 0


def find_hidden_width(config: Mapping[str, Any]) -> int:
    """Return how wide the vectors of a text's tokens are; 0 where the configuration alone does not tell."""
    width = config.get("hidden_size") if config.get("model_type") in _ENCODERS else None
    return width if isinstance(width, int) else 0


def _list_layers(directory: Path) -> list[SentenceModule]:
    return [module for module in read_sentence_modules(directory) or () if module.kind in _WIDTHS]


def _count_labels(config: Mapping[str, Any]) -> int:
    """Return how many labels a configuration names; 0 where it says two things."""
    named, counted = config.get("id2label"), config.get("num_labels")
    counts = {len(named)} if isinstance(named, Mapping) else set()
    counts |= {counted} if isinstance(counted, int) else set()
    return (counts or {_USUAL_LABELS}).pop() if len(counts) < 2 else 0


def _find_width(directory: Path, config: Mapping[str, Any]) -> int:
    """Return how wide a text's vector is; 0 where that is not certain."""
    layers = _list_layers(directory)
    if not layers:
        return find_hidden_width(config)
    width = read_settings(layers[-1].folder / "config.json").get(_WIDTHS[layers[-1].kind][1])
    return width if isinstance(width, int) else 0
