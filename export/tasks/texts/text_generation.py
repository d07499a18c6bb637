"""text-generation: a prompt in, the text that goes on from it out."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from ...artefacts import Artefacts
from ...checkpoints import StateDict
from ...checkpoints.storage.paths import read_json_beside
from ...errors import ModelError, VerificationError
from ...signature import BATCH, SEQ_LEN, STRING, Contract, ModelSignature, TensorSignature
from ...weights.torch_model import load_model
from ...weights.transforms import LeaveOut
from ..base import TaskSource
from ..cases import Case, Outputs, Row
from ..comparison import PERPLEXITY_RISE, TENSOR_TOLERANCES
from ..foreseen import WRITER_INPUTS, WRITER_OUTPUTS, Described
from ..golden import build_sample
from ..tensors import InputRules, SizeRange, ValueRule
from .generation import DecoderModule, GenerationTask, find_cache_shapes
from .generation_settings import (
    GREEDY_PARAMETERS,
    find_generation_file,
    list_unfollowed,
    read_defaults,
    read_generation_config,
)
from .text import read_verification_texts


def _describe(tensors: Sequence[Described]) -> tuple[TensorSignature, ...]:
    """Return the tensors of clients, of which all but the first are optional."""
    kinds: Mapping[str, Any] = {"STRING": STRING, "BOOL": torch.bool, "UINT32": torch.uint32}
    return tuple(
        TensorSignature(
            name=name,
            dtype=kinds[kind],
            dims=tuple("answers" if dim == -1 else dim for dim in dims),
            is_optional=(name, kind, dims) != tensors[0],
        )
        for name, kind, dims in tensors
    )


# What Triton's vLLM backend takes and gives, of one request (vllm_backend 8de0c148, src/model.py).
CONTRACT = Contract(inputs=_describe(WRITER_INPUTS), outputs=_describe(WRITER_OUTPUTS), preprocess=None)

# What the backend reads of a version besides the model and the tokenizer.
GENERATION_FILE = "generation.json"

# Prompts whose greedy continuation is proven and kept, how long they may be, and how many tokens are written.
_PROMPTS = 8
_PROMPT_TOKENS = 48
_WRITTEN_TOKENS = 32

# Answers of random tokens that are compared as texts.
_DECODED = 256

# Two best scores that are nearer than this, in parts of the largest, may change places between two that are both right.
_CLEAR = 2 * TENSOR_TOLERANCES["max_relative_error"]

# What transformers writes of how it read a tokenizer.
_OF_THIS_MACHINE = ("backend", "is_local", "local_files_only")

# Real text whose perplexity is measured, in pieces of so many tokens.
_WINDOWS = 16
_WINDOW_TOKENS = 128

# Rows beside one another are tried up to this many tokens, one row up to more: the scores of a vocabulary are large.
_LONGEST_IN_BATCH = 64
_LONGEST = 512


class TextGeneration(GenerationTask):
    """A decoder with its tokenizer, which the engine runs step by step.

    Attributes:
        model: What the checkpoint holds.
        weights: Its tensors, under the checkpoint's own names, in fp32.
        directory: The folder of its configuration.
        context: How many tokens prompt and answer may have together.
        generation_config: How the checkpoint has texts written.
        texts: Texts that the server's tokenizer must read as transformers' does.
        prompts: Those that are gone on from.
    """

    form = "decoder"
    tokenizer_use = "required"
    tolerances: ClassVar[Mapping[str, float]] = {**GenerationTask.tolerances, PERPLEXITY_RISE: 1e-3}

    def __init__(self, source: TaskSource) -> None:
        assert source.tokenizer is not None, "Bug: text generation without a tokenizer"
        self.model, self.unused_tensors = load_model(source.config, source.weights, AutoModelForCausalLM)
        self.weights: StateDict = LeaveOut(source=source.weights, names=frozenset(self.unused_tensors))
        self.directory = source.directory
        self.tokenizer = source.tokenizer
        self.added_tokens = source.added_tokens
        self.cache_shapes = find_cache_shapes(self.model)
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self.context = _find_context(self.model.config.get_text_config(), source.max_length)
        self.generation_config = read_generation_config(source.directory, self.model.config)
        # Trainers that save no configuration of transformers' know it of the tokenizer alone.
        if not self.ends:
            self.generation_config.eos_token_id = self.tokenizer.eos_token_id
        # `generate` fills in from it what it is not told, such as what an old config.json says beside the file above.
        self.model.generation_config = GenerationConfig()
        self.module = _TwiceModule(DecoderModule(self.model)).eval()
        dims = (BATCH, SEQ_LEN)
        names = ("logits", "logits_with_past")
        self.signature = ModelSignature(
            inputs=tuple(
                TensorSignature(name=name, dtype=torch.int64, dims=dims) for name in ("input_ids", "attention_mask")
            ),
            outputs=tuple(
                TensorSignature(name=name, dtype=torch.float32, dims=(*dims, self.vocabulary)) for name in names
            ),
            contract=CONTRACT,
        )
        self.tensors = InputRules(
            rules={
                "input_ids": ValueRule(kind="integers", low=0, high=self.vocabulary),
                "attention_mask": ValueRule(kind="mask"),
            },
            sizes={SEQ_LEN: SizeRange(largest=min(self.context, _LONGEST))},
            padded=(SEQ_LEN,),
        )
        self.texts = read_verification_texts() + [f"{token} between words {token}" for token in self.added_tokens]
        room = max(1, min(_PROMPT_TOKENS, self.context - _WRITTEN_TOKENS))
        shortened = [self._shorten(text, room) for text in self.texts]
        # Those with the added tokens, which come last, are among them.
        self.prompts = [text for text in (*shortened[: _PROMPTS - 2], *shortened[-2:]) if self._read(text)]
        self._written: list[Continuation] = []

    def _read(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def _shorten(self, text: str, room: int) -> str:
        """Return the beginning of a text that is at most `room` tokens."""
        while text and len(self._read(text)) > room:
            text = text[: min(len(text) - 1, len(text) * room // len(self._read(text)))]
        return text

    @property
    def ends(self) -> list[int]:
        """Tokens that end a text."""
        said = self.generation_config.eos_token_id
        ends = [] if said is None else [said] if isinstance(said, int) else said
        return sorted({end for end in ends if 0 <= end < self.vocabulary})

    @property
    def description(self) -> str:
        """See `Task`."""
        return f"text of prompts, {self.context} tokens with their answers, from a vocabulary of {self.vocabulary}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `Task`."""
        return (*super().warnings, *self._warn_of_ends(), *self._warn_of_settings())

    def _warn_of_ends(self) -> tuple[str, ...]:
        if self.ends:
            return ()
        return (
            "Neither generation_config.json nor config.json nor the tokenizer says which token ends a text, so every "
            "answer goes on to max_tokens; write eos_token_id into one of them.",
        )

    def _warn_of_settings(self) -> tuple[str, ...]:
        said = list_unfollowed(self.generation_config, self.context)
        if not said:
            return ()
        file = find_generation_file(self.directory).name
        return (
            f"{file} says {', '.join(said)}, and what is served writes its texts without it, otherwise than "
            "transformers' generate: remove it from there if that is meant, or ask with the parameters that "
            "docs/generation.md names.",
        )

    @property
    def defaults(self) -> Mapping[str, Any]:
        """What a request is answered with where it says nothing, by the names of its parameters."""
        return read_defaults(self.generation_config)

    @property
    def greedy_defaults(self) -> Mapping[str, Any]:
        """Those of them that tell which text is written where the likeliest token is taken every time."""
        return {name: value for name, value in self.defaults.items() if name in GREEDY_PARAMETERS}

    @property
    def model_files(self) -> Mapping[str, bytes]:
        """What lies beside the model's file, by name: configuration, tokenizer, template of a chat."""
        config = self.model.config.to_dict() | {"use_cache": True, "torch_dtype": "float32"}
        files = {
            "config.json": _to_bytes({key: value for key, value in config.items() if not key.startswith("_")}),
            "generation_config.json": _to_bytes(self.generation_config.to_diff_dict()),
            GENERATION_FILE: _to_bytes({"context": self.context, "ends": self.ends, "defaults": self.defaults}),
        }
        with tempfile.TemporaryDirectory(prefix="modelyard-tokenizer-") as folder:
            self.tokenizer.save_pretrained(folder)
            files |= {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
        served = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        served.no_truncation()
        served.no_padding()
        # The context is the engine's limit: what is longer is refused, not cut.
        return files | {"tokenizer.json": served.to_str(pretty=True).encode()}

    def list_weights_files(self, dtype: str) -> Mapping[str, bytes]:
        """Return what lies beside the weights where another engine reads them, by name.

        It may have an older transformers: so the configuration is the checkpoint's own, with what older ones read, and
        the class of the tokenizer one that all of them have.

        Args:
            dtype: The type of the weights, such as `bfloat16`.
        """
        config = read_json_beside(self.directory / "config.json") or self.model.config.to_dict()
        # What is written is not quantized, whatever the checkpoint says of itself.
        config.pop("quantization_config", None)
        config |= {"architectures": [type(self.model).__name__], "dtype": dtype, "torch_dtype": dtype}
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        text |= {"vocab_size": self.vocabulary}
        rope = text.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:
            text.setdefault("rope_theta", rope["rope_theta"])
            if rope.get("rope_type", "default") != "default":
                text.setdefault("rope_scaling", rope)
        files = {name: content for name, content in self.model_files.items() if name != GENERATION_FILE}
        tokenizer = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name in _OF_THIS_MACHINE:
            tokenizer.pop(name, None)
        return files | {"config.json": _to_bytes(config), "tokenizer_config.json": _to_bytes(tokenizer)}

    def build_cases(self) -> Iterator[Case]:
        """See `Task`. Real texts and random tokens, alone and in batches of unequal lengths."""
        real = [_to_row(self._read(text)) for text in self.prompts]
        yield Case(name="prompts one by one", rows=real, batch_size=1, is_real=True)
        yield Case(name="prompts in one batch, padded left", rows=real, batch_size=len(real), padding_side="left",
                   is_real=True)  # fmt: skip
        sizes = self.tensors.sizes[SEQ_LEN].list_sizes()
        random = np.random.default_rng(0)
        for size in sizes:
            yield Case(name=f"seq_len {size}", rows=[self._make_row({SEQ_LEN: size}, random)], batch_size=1)
        short = [size for size in sizes if size <= _LONGEST_IN_BATCH]
        rows = [self._make_row({SEQ_LEN: size}, random) for size in short]
        yield Case(name="unequal lengths, padded left", rows=rows, batch_size=len(rows), padding_side="left")
        yield Case(name="unequal lengths, padded right", rows=rows, batch_size=len(rows))

    def check_files(self, files: Artefacts) -> int:
        """See `Task`."""
        path = next(path for path in files.model if path.name == "tokenizer.json")
        served = Tokenizer.from_file(str(path))
        for text in self.texts:
            want, got = self.tokenizer(text)["input_ids"], served.encode(text).ids
            if got != want:
                raise VerificationError(
                    f"the server's tokenizer reads {text[:40]!r} differently from transformers",
                    expected=f"ids {want[:12]}",
                    got=f"ids {got[:12]}",
                    remedy="save the tokenizer with the transformers release that the checkpoint was trained with",
                )
        self._check_decoding(served)
        return len(self.texts)

    def _check_decoding(self, served: Tokenizer) -> None:
        """Refuse a tokenizer whose tokens are another text where they are served, which the recorded texts may be not.

        Raises:
            VerificationError: They are.
        """
        random = np.random.default_rng(0)
        made = random.choice(sorted(self.tokenizer.get_vocab().values()), (_DECODED, _WRITTEN_TOKENS)).tolist()
        for tokens in [*map(self._read, self.texts), *made]:
            want = self.decode(tokens)
            got = served.decode([token for token in tokens if token not in self.ends], skip_special_tokens=True)
            if got != want:
                unlike = (at for at in range(min(len(want), len(got))) if want[at] != got[at])
                start = max(0, next(unlike, min(len(want), len(got))) - 20)
                raise VerificationError(
                    "the server's tokenizer writes the same tokens differently from transformers",
                    expected=repr(want[start : start + 40]),
                    got=repr(got[start : start + 40]),
                    remedy="say false for clean_up_tokenization_spaces in tokenizer_config.json if it says true, or "
                    "save the tokenizer with the transformers release that the checkpoint was trained with",
                )

    def write_reference(self) -> "list[Continuation]":
        """Return what transformers' own `generate` writes after each prompt, the likeliest token every time."""
        if not self._written:
            self._written = [self._continue(text) for text in self.prompts]
        return self._written

    def _continue(self, text: str) -> "Continuation":
        prompt, defaults = self._read(text), self.greedy_defaults
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(1, min(_WRITTEN_TOKENS, self.context - len(prompt))),
            eos_token_id=self.ends or None,
            pad_token_id=(self.ends or [0])[0],
            min_new_tokens=defaults.get("min_tokens"),
            repetition_penalty=defaults.get("repetition_penalty"),
            use_cache=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        ids = torch.tensor([prompt])
        # Its annotation takes what `nn.Module` may hold for a tensor.
        model: Any = self.model
        with torch.no_grad():
            made: Any = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        written = made.sequences[0, len(prompt) :].tolist()
        margins = []
        for scores in made.scores:
            best, finite = scores[0].topk(2).values, scores[0][scores[0].isfinite()]
            if not len(finite):
                raise ModelError(
                    "the checkpoint scores no token",
                    expected="scores that are finite",
                    got=f"none after {text[:40]!r}",
                    remedy="check the numbers in config.json, such as those of rope_parameters, and the weights",
                )
            # In parts of the largest score, as the errors of scores are counted.
            margins.append(float((best[0] - best[1]) / finite.abs().max()))
        return Continuation(text=text, prompt=prompt, written=written, margins=margins)

    def build_golden(self) -> dict[str, Any]:
        """See `Task`. Prompts, and what transformers writes after them up to where it prefers no token clearly.

        Raises:
            ModelError: It prefers none from the first one on.
        """
        return self.build_golden_above(_CLEAR)

    def build_golden_above(self, margin: float) -> dict[str, Any]:
        """Return the same, up to where two best scores are nearer than `margin`, in parts of the largest.

        Raises:
            ModelError: They are from the first token on.
        """
        samples = []
        for made in self.write_reference():
            clear = next((at for at, best in enumerate(made.margins) if best <= margin), len(made.written))
            if clear:
                samples.append(self._build_sample(made.text, made.written[:clear]))
        if not samples:
            raise ModelError(
                "the checkpoint prefers no token to others",
                expected=f"two best scores that differ by more than {margin:g} of the largest",
                got=f"none after {len(self.prompts)} prompts",
                remedy="check that the weights were trained",
            )
        return {"decoupled": True, "tolerances": {"max_abs_error": 0.0}, "samples": samples}

    def _build_sample(self, text: str, written: Sequence[int]) -> dict[str, Any]:
        # Said of each: another server has other defaults.
        said = {"max_tokens": len(written), "temperature": 0.0, **self.greedy_defaults}
        if "min_tokens" in said:
            said["min_tokens"] = min(said["min_tokens"], len(written))
        asked = {"text_input": [text], "sampling_parameters": [json.dumps(said)], "exclude_input_in_output": [True]}
        return build_sample(CONTRACT, asked, {"text_output": [self.decode(written)]})

    def decode(self, written: Sequence[int]) -> str:
        """Return tokens as text, without special ones and those that end it."""
        kept = [token for token in written if token not in self.ends]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True))

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`. The scores without and with a past, each as one; perplexity is a case of its own.

        Two tokens count as one where they are as near as fp32 may be off, whatever else is allowed.
        """
        wanted, had = ([(part,) for row in rows for part in row] for rows in (expected, got))
        exact = {name: min(value, self.tolerances[name]) for name, value in bounds.items() if name.startswith("max_")}
        return super().compare(wanted, had, exact) | {PERPLEXITY_RISE: 0.0}

    def list_windows(self) -> list[list[int]]:
        """Return real texts as tokens, in pieces of one length, for the perplexity."""
        tokens = [token for text in read_verification_texts() for token in self._read(text)]
        size = min(self.context, _WINDOW_TOKENS, len(tokens))
        return [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)][:_WINDOWS]


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What transformers writes after a prompt.

    Attributes:
        text: The prompt.
        prompt: The same as token ids.
        written: The tokens after it.
        margins: For each of them, how far its score lay above the next best, in parts of the largest score.
    """

    text: str
    prompt: list[int]
    written: list[int]
    margins: list[float]


class _TwiceModule(nn.Module):
    """The scores of a whole text, for a file that makes them in two ways."""

    def __init__(self, module: DecoderModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, [batch, seq_len, vocabulary], fp32, twice; both inputs [batch, seq_len], int64."""
        logits: Tensor = self.module(input_ids, attention_mask)
        return logits, logits


def _find_context(config: PretrainedConfig, max_length: int) -> int:
    """Return how many tokens are served: no more than a layer looks back, which paged attention does not limit."""
    window = getattr(config, "sliding_window", None)
    return min(max_length, window) if isinstance(window, int) and window > 0 else max_length


def _to_row(ids: Sequence[int]) -> Row:
    return {"input_ids": np.array(ids, dtype=np.int64), "attention_mask": np.ones(len(ids), dtype=np.int64)}


def _to_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
