"""What Sentence-Transformers wrote beside each of its modules, as far as it changes a text's vector. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import normalizers

from ...checkpoints.plain.sentence_modules import (
    MODULES_FILE,
    RECORD_FILE,
    SETTINGS_FILE,
    SentenceModule,
    find_sentence_home,
    read_sentence_modules,
    read_transformer_settings,
)
from ...checkpoints.storage.paths import has_file, read_json_if_any
from ...errors import ModelError

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# Pooling.py of release 6: `pooling_mode` → what it is called here; and of those before: `pooling_mode_*`.
_MODES = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
}
_FLAGGED_MODES = {
    "mean_tokens": "mean",
    "cls_token": "cls",
    "lasttoken": "last",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
}
_FLAG = "pooling_mode_"

# What the modules are wired to, which release 6 records: anything else is another computation.
_TRANSFORMER_WIRES = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
_TEXT_WIRES = {"method": "forward", "method_output_name": "last_hidden_state"}
_VECTOR_WIRES = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
    "use_residual": False,
}
# What the settings of a processor may be for beside texts.
_OTHER_MODALITIES = ("image", "audio", "video")


def read_settings(path: Path) -> Mapping[str, Any]:
    """Return what a module's file says; nothing where there is none, as older releases wrote none for some."""
    settings = read_json_if_any(path)
    return settings if isinstance(settings, Mapping) else {}


def read_mode(directory: Path, folder: Path) -> str:
    """Return how `Pooling` makes one vector of a text's tokens, as `PoolingSettings` names it.

    Where the file records nothing that is the mean, as Sentence-Transformers takes it to be.

    Args:
        directory: The checkpoint.
        folder: Where it keeps the module.

    Raises:
        ModelError: It is not known, or several at once, which stand one behind the other in a longer vector.
    """
    path = folder / SETTINGS_FILE
    settings = read_settings(path)
    if not any(key.startswith("pooling_mode") or key.endswith("embedding_dimension") for key in settings):
        raise ModelError(
            f"{path}, which {MODULES_FILE} names, does not say what it is for",
            expected="how the vectors of a text's tokens become one",
            got="none of that" if has_file(path) else "no such file",
            remedy="copy it from where the model was trained or published, with the other folders",
        )
    recorded = settings.get("pooling_mode")
    if recorded is None:
        known = _FLAGGED_MODES
        modes = [key.removeprefix(_FLAG) for key, on in settings.items() if key.startswith(_FLAG) and on]
        modes = modes or ["mean_tokens"]
    else:
        known = _MODES
        modes = [str(mode) for mode in recorded] if isinstance(recorded, list) else [str(recorded)]
    if len(modes) != 1 or modes[0] not in known:
        raise ModelError(
            f"the pooling of {directory} is not exported",
            expected="one of " + ", ".join(known),
            got=", ".join(modes) or "none",
            remedy="export a checkpoint that is pooled one of these ways",
        )
    _check_prompts(directory, settings)
    return known[modes[0]]


def find_default_prompt(directory: Path) -> str:
    """Return what Sentence-Transformers puts in front of every text that it is given without a prompt."""
    recorded = read_settings((find_sentence_home(directory) or directory) / RECORD_FILE)
    prompts, name = recorded.get("prompts"), recorded.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, Mapping) and isinstance(name, str) else None
    return prompt if isinstance(prompt, str) else ""


def list_left_out_prompts(directory: Path) -> tuple[str, ...]:
    """Return the names of prompts whose tokens Sentence-Transformers leaves out of the vectors of texts behind them."""
    pooling = next((module for module in read_sentence_modules(directory) or () if module.kind == "Pooling"), None)
    if pooling is None or read_settings(pooling.folder / SETTINGS_FILE).get("include_prompt", True):
        return ()
    prompts = read_settings((find_sentence_home(directory) or directory) / RECORD_FILE).get("prompts")
    return tuple(str(name) for name, text in prompts.items() if text) if isinstance(prompts, Mapping) else ()


def find_recorded_width(directory: Path) -> int:
    """Return to how many numbers Sentence-Transformers cuts every vector of the model; 0 where it does not.

    Release 6 records it where the model was given one (sentence_transformers, SentenceTransformer.py, `truncate_dim`).
    """
    recorded = read_settings((find_sentence_home(directory) or directory) / RECORD_FILE).get("truncate_dim")
    return recorded if type(recorded) is int and recorded > 0 else 0


def _check_prompts(directory: Path, pooling: Mapping[str, Any]) -> None:
    # Clients can send a prompt as a part of the text, but not have its tokens left out of the vector.
    prompt = find_default_prompt(directory)
    if pooling.get("include_prompt", True) or not prompt:
        return
    raise ModelError(
        f"the pooling of {directory} leaves out the prompt that stands in front of every text, which is not exported",
        expected="include_prompt true, or no default_prompt_name",
        got=f"include_prompt false, and the prompt {prompt!r}",
        remedy="export a checkpoint that pools all tokens",
    )


def lower_texts(directory: Path, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Have a tokenizer lower its texts first where Sentence-Transformers does.

    As release 6 has it, so that a written-out [MASK] stays one (sentence_transformers, base/modules/transformer.py);
    releases before 6 lowered it as well.
    """
    settings = read_transformer_settings(directory) if find_sentence_home(directory) else {}
    if tokenizer is None or settings.get("do_lower_case") is not True:
        return
    if tokenizer.tokenize("TWO Words") != tokenizer.tokenize("two words"):
        backend = tokenizer.backend_tokenizer
        own = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def check_transformer(directory: Path) -> None:
    """Refuse a `Transformer` that makes something else than the last layer's vectors of the text as it is.

    Raises:
        ModelError: It does.
    """
    settings = read_transformer_settings(directory)
    _check_wires(directory, settings, _TRANSFORMER_WIRES)
    modalities = settings.get("modality_config")
    if isinstance(modalities, Mapping):
        _check_wires(directory, modalities.get("text") or {}, _TEXT_WIRES, must_say=True)
    asked = settings.get("processing_kwargs")
    changed = [key for key, value in asked.items() if value] if isinstance(asked, Mapping) else []
    if changed := [key for key in changed if key not in _OTHER_MODALITIES]:
        raise ModelError(
            f"{directory} has its texts tokenized in a way that is not exported",
            expected="no processing_kwargs for texts",
            got=", ".join(changed),
            remedy="export a checkpoint whose tokenizer itself holds these settings",
        )


def check_vector_module(module: SentenceModule) -> None:
    """Refuse a module behind the pooling that is wired otherwise than from the text's vector to the text's vector.

    Raises:
        ModelError: It is.
    """
    _check_wires(module.folder, read_settings(module.folder / "config.json"), _VECTOR_WIRES)


def _check_wires(
    where: Path, settings: Mapping[str, Any], wires: Mapping[str, object], *, must_say: bool = False
) -> None:
    """Refuse settings that differ from `wires`; those that are not there are the usual ones, unless they `must` be."""
    said = {key: settings.get(key, None if must_say else usual) for key, usual in wires.items()}
    if different := [key for key, usual in wires.items() if said[key] != usual]:
        raise ModelError(
            f"what Sentence-Transformers computes with {where} is not exported",
            expected=", ".join(f"{key} {_show(wires[key])}" for key in different),
            got=", ".join(f"{key} {_show(said[key])}" for key in different),
            remedy="export a checkpoint with these settings",
        )


def _show(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
