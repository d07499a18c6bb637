"""From configuration and weights to the torch model, strictly: every weight is placed, or the load is refused."""

import copy
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from ..checkpoints import StateDict, TensorSpec
from ..checkpoints.storage.paths import has_file, read_json_beside, refuse_spoiled_texts
from ..checkpoints.wrapper_names import find_holder, name_holder
from ..errors import CheckpointError, ModelError, list_some
from .several_models import refuse_for_texts

# What a checkpoint may hold beyond the model that is exported: the heads of another task, the pooler of a model whose
# embedding is not pooled by it, and buffers that older transformers releases saved and newer ones compute.
_HEAD_NAMES = (
    "cls",
    "lm_head",
    "classifier",
    "pre_classifier",
    "score",
    "qa_outputs",
    "pooler",
    "vocab_projector",
    "vocab_transform",
    "vocab_layer_norm",
    "v_head",
)
_COMPUTED_BUFFERS = ("position_ids", "token_type_ids", "masked_bias", "attn.bias", "inv_freq")

# Of what a folder holds instead of a configuration, so many names are told.
_MAX_LISTED = 8

_PLAIN_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_config(
    directory: Path, recorded: Mapping[str, Any] | None = None, *, weights: Path | None = None
) -> PretrainedConfig:
    """Return the model's configuration.

    Args:
        directory: The folder with `config.json`.
        recorded: What a checkpoint of another trainer says of its shape, used where there is no `config.json`.
        weights: The folder of the weights, where `directory` may be another, which `--base` names.

    Raises:
        CheckpointError: `config.json` is missing, damaged, or of an architecture that transformers does not have.
    """
    path = directory / "config.json"
    is_there = has_file(path)
    if not is_there and recorded is not None:
        derived: PretrainedConfig = AutoConfig.for_model(**recorded)
        return derived
    if not is_there:
        raise _find_no_config(directory, weights or directory)
    refuse_spoiled_texts(directory, [path.name])
    _refuse_own_code(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # Each architecture checks its values in its own way, and some compute with them: any error may come.
    except Exception as exc:
        raise CheckpointError(
            f"{path} cannot be read",
            expected="a configuration that transformers knows",
            got=_tell_value(exc),
            remedy="correct that in config.json or copy it again, or export with a transformers release that has this "
            "architecture",
        ) from exc
    _check_unchecked(path, config)
    # Answers are texts, and a number may be a name; from here on it is written as one.
    if isinstance(config.id2label, dict):
        named: dict[Any, Any] = config.id2label
        config.id2label = {key: str(name) if isinstance(name, int | float) else name for key, name in named.items()}
    return config


def _find_no_config(directory: Path, weights: Path) -> CheckpointError:
    """Return why there is no configuration in the folder, which holds the weights or is another for `--base`."""
    if not directory.is_dir():
        return CheckpointError(
            f"{directory} is no folder",
            expected="one with config.json and tokenizer",
            got="a file" if directory.exists() else "none",
            remedy="correct --base",
        )
    found = list_some((entry.name for entry in directory.iterdir()), _MAX_LISTED) or "an empty folder"
    if directory == weights:
        return CheckpointError(
            f"{directory} has no config.json",
            expected="the model's configuration beside the weights",
            got=found,
            remedy="pass the folder of the model that the checkpoint was trained from with --base",
        )
    elsewhere = ", or leave --base out: there is one beside the weights" if has_file(weights / "config.json") else ""
    return CheckpointError(
        f"{directory}, which --base names, has no config.json",
        expected="the configuration of the model that the checkpoint was trained from",
        got=found,
        remedy=f"copy that model's config.json there, or pass its own folder{elsewhere}",
    )


def _refuse_own_code(path: Path) -> None:
    """Refuse an architecture that is Python in the checkpoint: left to choose, transformers asks whether to run it.

    Raises:
        CheckpointError: It is one.
    """
    content = read_json_beside(path)
    named, model_type = content.get("auto_map"), content.get("model_type")
    if isinstance(named, dict) and "AutoConfig" in named and model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"the architecture of {path} is Python in the checkpoint, which is never run",
            expected="a model_type that transformers has",
            got=f"{model_type!r} and auto_map {named['AutoConfig']!r}",
            remedy="export with a transformers release that has it, or copy the module into code of your own that you "
            "trust and pass it with --factory",
        )


def _check_unchecked(path: Path, config: PretrainedConfig) -> None:
    """Refuse values of a wrong type that transformers takes from any configuration, and reads much later.

    Raises:
        CheckpointError: There is one.
    """
    architectures, window = config.architectures or [], getattr(config, "sliding_window", None)
    for name, value, expected, is_right in (
        ("architectures", architectures, "a list of names", all(isinstance(each, str) for each in architectures)),
        ("sliding_window", window, "a number of tokens", window is None or isinstance(window, int)),
    ):
        if not is_right:
            raise CheckpointError(
                f"{name} in {path} cannot be used",
                expected=expected,
                got=repr(value),
                remedy="correct it, or copy config.json again",
            )


def settle_quantization(config: PretrainedConfig, specs: Mapping[str, TensorSpec], directory: Path) -> tuple[str, ...]:
    """Take `quantization_config` out of a configuration whose weights are plain, and return a warning that says so.

    transformers would ask for the library that quantizes, and change the weights with it where it is there.

    Raises:
        ModelError: The weights themselves are quantized.
    """
    said = getattr(config, "quantization_config", None)
    method = said.get("quant_method") if isinstance(said, dict) else None
    by = f" by {method}" if isinstance(method, str) else ""
    # Integers of 64 bits and booleans are buffers; every method keeps its weights in other integers, or in 8 bits.
    # Where nothing is said, bytes may be masks of older releases, and numbers of 8 bits be meant as they are.
    plain = (*_PLAIN_FLOATS, torch.int64, torch.bool)
    packed = [
        name
        for name, spec in specs.items()
        if spec.dtype == torch.int8 or (said is not None and spec.dtype not in plain)
    ]
    if packed:
        raise ModelError(
            f"the weights in {directory} are quantized{by}",
            expected="weights of 16 bits or more, which are proven and quantized here",
            got=f"{str(specs[packed[0]].dtype).removeprefix('torch.')} in {list_some(packed, 3)}",
            remedy="export the checkpoint that was quantized, with --precision int8 if it is to be small",
        )
    if said is None:
        return ()
    del config.quantization_config
    return (
        f"config.json of {directory} says that the weights are quantized{by}, which they are not: they are served as "
        "they are; if they were to be quantized, pass --precision int8, and else take quantization_config out of it.",
    )


def find_input_embedding(config: PretrainedConfig, specs: Mapping[str, TensorSpec]) -> str:
    """Return the checkpoint's name of the input embedding, [rows, hidden].

    Raises:
        ModelError: The checkpoint has no such tensor, or several, or is of several models.
    """
    if not hasattr(config, "vocab_size"):
        refuse_for_texts(config)
    # Some towers of texts, such as MetaClip 2's, are no model of their own to `AutoModel`.
    is_known = type(config) in AutoModel._model_mapping
    model = build_on_meta(make_buildable(config), AutoModel if is_known else find_named_class(config) or AutoModel)
    embedding = _find_input_embedding(model)
    local_name = next(name for name, parameter in model.named_parameters() if parameter is embedding)
    found = [name for name in specs if name == local_name or name.endswith("." + local_name)]
    if len(found) != 1:
        raise ModelError(
            "the checkpoint's input embedding cannot be determined",
            expected=f"one tensor named {local_name}, with or without a prefix",
            got=list_some(found) if found else f"none among {list_some(specs, 5)}",
            remedy="check that config.json belongs to these weights",
        )
    return found[0]


def _find_input_embedding(model: PreTrainedModel) -> Any:
    """Return the table of a text model's tokens.

    Raises:
        ModelError: It has none, as CANINE, which hashes characters.
    """
    try:
        return model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError) as exc:
        raise ModelError(
            f"a model of type {model.config.model_type} is not exported",
            expected="an architecture with one table of tokens",
            got=type(model).__name__,
            remedy="pass --factory with a module of your own around it",
        ) from exc


def find_named_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of transformers that the configuration names first; None where it is not of its kind."""
    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    is_own = isinstance(named, type) and issubclass(named, PreTrainedModel) and named.config_class is type(config)
    return named if is_own else None


def make_buildable(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy from which a model can be built, where its names matter and not its rows.

    Broken trainers write a vocabulary of 0, for which no embedding can be built.
    """
    probe = copy.deepcopy(config)
    if hasattr(config, "vocab_size"):
        probe.vocab_size = max(config.vocab_size or 0, (getattr(config, "pad_token_id", None) or 0) + 1)
    return probe


def find_output_tables(config: PretrainedConfig, specs: Mapping[str, TensorSpec], rows: int, table: str) -> list[str]:
    """Return the checkpoint's names of the output embedding and its bias, each with one row a token.

    They are those of a language-model head, including tied ones that the checkpoint stores a second time, such as the
    input embedding of each half of an encoder-decoder; none where the model has no such head.

    Args:
        config: The checkpoint's configuration.
        specs: Names and shapes of its tensors.
        rows: Rows of the input embedding.
        table: Name of the input embedding, which is left out.
    """
    names: set[str] = set()
    # Marian and others have a decoder of their own among the causal models as well.
    seq2seq_first = getattr(config, "is_encoder_decoder", False)
    others = (AutoModelForMaskedLM, AutoModelForCausalLM)
    for auto_class in (AutoModelForSeq2SeqLM, *others) if seq2seq_first else (*others, AutoModelForSeq2SeqLM):
        if names or type(config) not in auto_class._model_mapping:
            continue
        model = build_on_meta(config, auto_class)
        head = model.get_output_embeddings()
        if head is None:
            continue
        wanted = {id(parameter) for parameter in head.parameters(recurse=False)}
        every = model.named_parameters(remove_duplicate=False)
        names |= {name for name, parameter in every if id(parameter) in wanted}
        # A model that was saved without its head has its names without the prefix.
        names |= {name.removeprefix(f"{model.base_model_prefix}.") for name in names}
    # BERT and its relatives save the bias beside the decoder as well.
    names |= {f"{name.rsplit('.', 2)[0]}.bias" for name in names if name.endswith(".decoder.bias")}
    return sorted(name for name in names - {table} if name in specs and specs[name].shape[:1] == (rows,))


def find_logit_biases(specs: Mapping[str, TensorSpec], rows: int) -> list[str]:
    """Return the checkpoint's names of what BART and its relatives add to the logits: buffers [1, rows].

    transformers grows them by zeros with the embedding (5.23, modeling_bart.py, `_resize_final_logits_bias`).
    """
    return sorted(name for name in specs if name.endswith("final_logits_bias") and specs[name].shape == (1, rows))


def find_output_width(model: PreTrainedModel, output: str = "last_hidden_state") -> int:
    """Return the width of what a text model makes, such as its last hidden states; its configuration does not tell.

    OPT-350m computes in 1024 dimensions, embeds in 512 and ends in a projection to these; others end in `hidden_size`.

    Args:
        model: The model.
        output: What transformers calls it.

    Raises:
        ModelError: It computes nothing of a text alone, such as Marian's, which wants the beginning of another one, or
            of a text of one token, such as a Nystromformer's with fewer landmarks than its segments are long.
    """
    ids = torch.zeros(1, 1, dtype=torch.int64)
    try:
        with torch.no_grad():
            width: int = model(input_ids=ids, attention_mask=torch.ones_like(ids))[output].shape[-1]
    except ValueError as exc:
        raise ModelError(
            f"{type(model).__name__} has no states of a text alone",
            expected="a model that is given a text and nothing else",
            got=f"'{exc}'",
            remedy="save it with its head and pass --task text2text-generation, or pass --factory with its encoder",
        ) from exc
    # Of shapes that do not fit, and of places that are not there.
    except (RuntimeError, IndexError) as exc:
        raise ModelError(
            f"{type(model).__name__} computes nothing of a text of one token, as config.json describes it",
            expected="a model that takes texts of every length up to its limit",
            got=f"'{exc}'",
            remedy="correct config.json, or pass --factory with a module that takes it to a length it computes",
        ) from exc
    return width


def build_on_meta(config: PretrainedConfig, auto_class: Any = AutoModel) -> PreTrainedModel:
    """Return the architecture on the meta device: names and shapes, no memory.

    Args:
        config: The checkpoint's configuration.
        auto_class: transformers' `AutoModel`, one of its kind with a head, or an architecture itself.

    Raises:
        ModelError: transformers cannot build it.
    """
    _check_has_class(config, auto_class)
    is_architecture = isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel)
    # The classes of architectures run no code of a checkpoint, and are not told.
    build = auto_class._from_config if is_architecture else partial(auto_class.from_config, trust_remote_code=False)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = build(config, attn_implementation="eager")
        # Without memory the first releases of transformers 5 leave it.
        model.tie_weights()
    # Values are looked up in tables, divided by and taken for sizes: any error may come.
    except Exception as exc:
        raise ModelError(
            "the architecture cannot be built",
            expected="a configuration that transformers builds a model from",
            got=_tell_value(exc),
            remedy="correct that value in config.json, or use the config.json that the checkpoint was trained with",
        ) from exc
    return model


def _check_has_class(config: PretrainedConfig, auto_class: Any) -> None:
    """Refuse an architecture that transformers has no class of this kind for, which it says in a list of them all.

    Raises:
        ModelError: It is one.
    """
    known = getattr(auto_class, "_model_mapping", None)
    if known is not None and type(config) not in known:
        raise ModelError(
            f"a model of type {config.model_type} cannot be built for this task",
            expected=f"an architecture that transformers has in {auto_class.__name__}",
            got=type(config).__name__,
            remedy="pass the --task it was trained for",
        )


def load_model(
    config: PretrainedConfig, weights: StateDict, auto_class: Any = AutoModel, without: tuple[str, ...] = ()
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model with `weights` in it, ready to be traced, and the names of the tensors it has no place for.

    Eager attention, because its graph is correct for every architecture and every mask that was tried; `use_cache`
    off, because a cache is not an output here.

    Args:
        config: The checkpoint's configuration, already as large as the vocabulary.
        weights: The checkpoint's tensors, in fp32.
        auto_class: The class that `build_on_meta` takes.
        without: Names, or beginnings of names, of further parts that the checkpoint may have and the model need not.

    Raises:
        ModelError: A weight is missing, has another shape, or belongs to no part of this architecture.
    """
    config.use_cache = False
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    empty = build_on_meta(config, auto_class)
    try:
        # With output_loading_info it returns a pair, which its annotation does not say.
        loaded: Any = type(empty).from_pretrained(
            None,
            config=config,
            state_dict={name: weights.read(name) for name in weights.specs()},
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError) as exc:
        raise ModelError(
            "the weights do not fit the architecture",
            expected=f"the shapes that config.json describes for {type(empty).__name__}",
            got=_first_mismatch(weights, empty) or _first_line(exc),
            remedy="use the config.json that the checkpoint was trained with",
        ) from exc
    model: PreTrainedModel = loaded[0]
    info: Mapping[str, Any] = loaded[1]
    _check_loading_info(empty, info, without)
    unused = sorted(info["unexpected_keys"])
    # The other ways of running experts choose them by data-dependent loops or by operators that ONNX does not have.
    model.set_experts_implementation("batched_mm")
    return model.eval().requires_grad_(False), unused


def _check_loading_info(model: PreTrainedModel, info: Mapping[str, Any], without: tuple[str, ...]) -> None:
    architecture = type(model).__name__
    # The pooler of a model without a head is not part of what is served.
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if missing:
        front = find_holder(missing, info["unexpected_keys"])
        raise ModelError(
            f"the checkpoint lacks weights of {architecture}",
            expected="every parameter",
            got=f"none for {list_some(missing)}",
            remedy=name_holder(front)
            if front
            else "use the config.json that it was trained with, pass the --task it was trained for, or save it again "
            "with every parameter, frozen ones as well",
        )
    unplaced = [name for name in info["unexpected_keys"] if not _may_be_left_out(name, model.base_model_prefix)]
    unplaced = [name for name in unplaced if not name.startswith(without)]
    if unplaced:
        raise ModelError(
            f"the checkpoint has weights that {architecture} has no place for",
            expected="only its parameters, or the heads of a task",
            got=list_some(unplaced),
            remedy="use the config.json that the checkpoint was trained with",
        )


def _may_be_left_out(name: str, base_model_prefix: str) -> bool:
    local_name = name.removeprefix(f"{base_model_prefix}.")
    return local_name.split(".", 1)[0] in _HEAD_NAMES or name.endswith(_COMPUTED_BUFFERS)


def _first_mismatch(weights: StateDict, model: PreTrainedModel) -> str:
    """Say which tensor has another shape than the architecture wants, or return an empty string."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong: Iterable[str] = (
        f"{name} {list(spec.shape)} where {list(expected[local])} belongs"
        for name, spec in weights.specs().items()
        for local in (name, name.removeprefix(f"{model.base_model_prefix}."))
        if local in expected and expected[local] != spec.shape
    )
    return next(iter(wrong), "")


def _tell_value(exc: BaseException) -> str:
    """Return what is wrong with a value of a configuration, as far as an error of transformers says."""
    if isinstance(exc, StrictDataclassFieldValidationError):
        # Its first line names the field alone, as the cause does again; of several types it lists every failure.
        said, _, _ = str(exc.__cause__).partition(". Errors:")
        return re.sub(r"<class '(\w+)'>", r"\1", said)
    if isinstance(exc, KeyError):
        return f"{exc}, which it does not know"
    return _first_line(exc) or type(exc).__name__


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().split("\n", 1)[0].rstrip(".")
