"""How a checkpoint has texts written: its `generation_config.json`, or else `config.json`, as far as it is followed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from ...checkpoints.storage.paths import has_file, refuse_spoiled_texts
from ...errors import ModelError

# What a request may say and is taken from the file where it does not, as transformers names it → the parameter, and
# what stands for nothing.
_DEFAULTS: Mapping[str, tuple[str, float]] = {
    "min_new_tokens": ("min_tokens", 0),
    "repetition_penalty": ("repetition_penalty", 1.0),
}
_SAMPLING: Mapping[str, tuple[str, float]] = {
    "temperature": ("temperature", 1.0),
    "top_p": ("top_p", 1.0),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
}
# As many as in vLLM.
_MAX_TOKENS = 16

# Of how many `generate` draws where a checkpoint that draws does not say it, or says null.
_TOP_K = 50

# Parameters that change which text is the likeliest.
GREEDY_PARAMETERS = frozenset(name for name, _ in _DEFAULTS.values())

# What transformers or the engine reads of it → what it may be.
_TYPES: Sequence[tuple[Sequence[str], str, tuple[type, ...]]] = (
    (("eos_token_id",), "a token's number, or a list of them", (int,)),
    (("do_sample",), "true or false", (bool,)),
    (
        ("max_new_tokens", "min_new_tokens", "max_length", "top_k", "num_beams", "num_beam_groups",
         "num_return_sequences", "no_repeat_ngram_size"),
        "a whole number",
        (int,),
    ),
    (
        ("temperature", "top_p", "min_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
        "a number",
        (int, float),
    ),
)  # fmt: skip

# Beyond which nothing is written, or no request is taken: always, and where texts are drawn.
_BOUNDS: Mapping[str, tuple[float, float]] = {"min_new_tokens": (0, 1 << 30), "repetition_penalty": (0.01, 100)}
_BOUNDS_OF_DRAWING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.001, 100),
    "top_p": (1e-6, 1),
    "top_k": (-1, 1 << 30),
    "min_p": (0, 0.999),
}

# What is followed here, or says nothing of which text is written: what comes beside it, how it is computed, by which
# guesses it comes sooner, and what only beams look at, which are told of themselves. Each release of transformers has
# settings of its own, so whatever else is set is told.
_FOLLOWED = frozenset(
    {
        *("eos_token_id", "do_sample", "max_new_tokens", *_DEFAULTS, *_SAMPLING),
        *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
        # Scores that are no numbers are refused.
        *("renormalize_logits", "remove_invalid_values"),
        *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"),
    }
)

# Only drawing looks at them.
_OF_DRAWING = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")

# Numbers that stand for nothing.
_IDLE: Mapping[str, float] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

# Of a long value, such as the tokens of a language.
_MOST_SHOWN = 60


def find_generation_file(directory: Path) -> Path:
    """Return the file that says how texts are written: that of its own, or the configuration where there is none."""
    path = directory / "generation_config.json"
    return path if has_file(path) else directory / "config.json"


def read_generation_config(directory: Path, config: PretrainedConfig) -> GenerationConfig:
    """Return how the checkpoint has texts written; where nothing says, what its configuration knows.

    Raises:
        ModelError: What says it is damaged, or holds what no request would be answered with.
    """
    path = find_generation_file(directory)
    refuse_spoiled_texts(directory, [path.name])
    try:
        if path.name == "config.json":
            made = GenerationConfig.from_model_config(config)
            # Settings of texts are none of its own any more; in the file they may stand, where there is one.
            said = _read_file(directory, path.name, _from_model_config=True).to_dict() if has_file(path) else {}
            for name, value in said.items():
                if getattr(made, name, None) is None:
                    setattr(made, name, value)
        else:
            made = _read_file(directory, path.name)
    # transformers compares and calls what it reads: of a wrong type, any error may come.
    except Exception as exc:
        raise ModelError(
            f"{path} cannot be read",
            expected="what transformers saves",
            got=" ".join(str(exc).split())[:200].rstrip(".:;"),
            remedy="copy it again, or remove it" if path.name != "config.json" else "copy it again",
        ) from exc
    _check_values(path, made)
    return made


def _read_file(directory: Path, name: str, **options: Any) -> GenerationConfig:
    made: GenerationConfig = GenerationConfig.from_pretrained(directory, name, local_files_only=True, **options)
    return made


def _check_values(path: Path, config: GenerationConfig) -> None:
    """Refuse values of a wrong type or size, which transformers reads without a word and the engine fails on.

    Raises:
        ModelError: There is one.
    """
    for names, expected, kinds in _TYPES:
        for name in names:
            value = getattr(config, name, None)
            listed = value if name == "eos_token_id" and isinstance(value, list) else [value]
            # In Python, a truth value is a number as well.
            if any(each is not None and (isinstance(each, bool) != (kinds == (bool,)) or not isinstance(each, kinds))
                   for each in listed):  # fmt: skip
                raise ModelError(
                    f"{name} in {path} cannot be used", expected=expected, got=repr(value), remedy="correct it"
                )
    for name, (least, most) in {**_BOUNDS, **(_BOUNDS_OF_DRAWING if config.do_sample else {})}.items():
        value = getattr(config, name, None)
        # No comparison holds of what is no number.
        if value is not None and not least <= value <= most:
            raise ModelError(
                f"{name} in {path} cannot be used",
                expected=f"{least} to {most}",
                got=repr(value),
                remedy="correct it",
            )


def read_defaults(config: GenerationConfig) -> dict[str, Any]:
    """Return what a request is answered with where it says nothing, by the names of its parameters."""
    defaults: dict[str, Any] = {
        "max_tokens": config.max_new_tokens or _MAX_TOKENS,
        "temperature": 1.0 if config.do_sample else 0.0,
    }
    for name, (parameter, idle) in {**_DEFAULTS, **(_SAMPLING if config.do_sample else {})}.items():
        value = getattr(config, name, None)
        if value is not None and value != idle:
            # A whole number stands for one that need not be.
            defaults[parameter] = type(idle)(value)
    if config.do_sample and config.top_k is None:
        defaults["top_k"] = _TOP_K
    return defaults


def list_unfollowed(config: GenerationConfig, context: int) -> list[str]:
    """Return what the checkpoint says of its texts and no request is answered with, each setting with its value.

    Args:
        config: How the checkpoint has texts written.
        context: How many tokens prompt and answer may have together.
    """
    said = {name: value for name, value in config.to_dict().items() if name[0] != "_" and name not in _FOLLOWED}
    if not config.do_sample:
        said = {name: value for name, value in said.items() if name not in _OF_DRAWING}
    # Prompt and answer together: of no effect beside a length of the answer, or where no more fits anyway.
    if config.max_new_tokens is not None or (config.max_length or context) >= context:
        said.pop("max_length", None)
    return [f"{name} {_show(value)}" for name, value in sorted(said.items()) if _is_set(name, value)]


def _is_set(name: str, value: Any) -> bool:
    # A token may have the number 0.
    is_left_out = value is None or value is False or value in ("", [], {})
    return not is_left_out and not (name in _IDLE and value == _IDLE[name])


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
