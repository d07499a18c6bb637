"""Small random models of every architecture that the export is held to, saved as their users have them."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing
from tokenizers.trainers import WordPieceTrainer
from transformers import PreTrainedTokenizerFast

from export.tasks.texts.text import read_verification_texts

HIDDEN, LAYERS, HEADS, WIDE, VOCABULARY = 64, 2, 4, 128, 640

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
}
_LLAMA = _TEXT | {"num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 2, "eos_token_id": 3}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 160}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDE,
    "decoder_ffn_dim": WIDE,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "bos_token_id": 2,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": 3,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": 16,
    "d_ff": WIDE,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "decoder_start_token_id": 0,
}
_IMAGE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "image_size": 32,
    "patch_size": 8,
}
_SOUND = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 40,
}
_CLIP_TEXT = _TEXT | {"bos_token_id": 2, "eos_token_id": 3, "projection_dim": 32}


@dataclass(frozen=True)
class Architecture:
    """How a model of it is made, and what else than the task it tells by itself it is exported for."""

    model: str
    options: Mapping[str, Any]
    task: str | None = None

    @property
    def reads_text(self) -> bool:
        return getattr(transformers, self.model).main_input_name == "input_ids"


ARCHITECTURES = {
    "bert classification": Architecture("BertForSequenceClassification", _TEXT),
    "bert tokens": Architecture("BertForTokenClassification", _TEXT),
    "bert question answering": Architecture("BertForQuestionAnswering", _TEXT),
    "bert fill-mask": Architecture("BertForMaskedLM", _TEXT),
    "bert features": Architecture("BertModel", _TEXT),
    "roberta classification": Architecture("RobertaForSequenceClassification", _TEXT),
    "xlm-roberta tokens": Architecture("XLMRobertaForTokenClassification", _TEXT),
    "camembert features": Architecture("CamembertModel", _TEXT),
    "distilbert classification": Architecture(
        "DistilBertForSequenceClassification",
        {
            "vocab_size": VOCABULARY,
            "dim": HIDDEN,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": WIDE,
            "max_position_embeddings": 160,
        },
    ),
    "albert classification": Architecture("AlbertForSequenceClassification", _TEXT | {"embedding_size": 32}),
    "electra classification": Architecture("ElectraForSequenceClassification", _TEXT | {"embedding_size": 32}),
    "mpnet features": Architecture("MPNetModel", _TEXT),
    "deberta-v2 classification": Architecture(
        "DebertaV2ForSequenceClassification",
        _TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
    ),
    "deberta classification": Architecture(
        "DebertaForSequenceClassification",
        _TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 32},
    ),
    "modernbert classification": Architecture(
        "ModernBertForSequenceClassification",
        _TEXT | {"local_attention": 16, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
    ),
    "nomic-bert features": Architecture("NomicBertModel", _TEXT),
    "gpt2": Architecture("GPT2LMHeadModel", _GPT2),
    "opt": Architecture(
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": WIDE,
            "max_position_embeddings": 160,
            "word_embed_proj_dim": HIDDEN,
        },
    ),
    "gpt-neo": Architecture(
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 160,
        },
    ),
    "gpt-neox": Architecture("GPTNeoXForCausalLM", _TEXT),
    "gptj": Architecture("GPTJForCausalLM", _GPT2 | {"rotary_dim": 8}),
    "bloom": Architecture(
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "seq_length": 160},
    ),
    "llama": Architecture("LlamaForCausalLM", _LLAMA),
    "llama classification": Architecture("LlamaForSequenceClassification", _LLAMA),
    "mistral": Architecture("MistralForCausalLM", _LLAMA | {"sliding_window": 8}),
    # Its tokenizer class adds an end token of its own.
    "qwen2": Architecture(
        "Qwen2ForCausalLM", _LLAMA | {"vocab_size": VOCABULARY + 8, "bos_token_id": None, "eos_token_id": None}
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", _LLAMA),
    "gemma2": Architecture("Gemma2ForCausalLM", _LLAMA | {"sliding_window": 8}),
    "gemma3": Architecture("Gemma3ForCausalLM", _LLAMA | {"sliding_window": 8}),
    "phi3": Architecture("Phi3ForCausalLM", {key: value for key, value in _LLAMA.items() if key != "head_dim"}),
    "qwen3-moe": Architecture(
        "Qwen3MoeForCausalLM",
        _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "t5 encoder": Architecture("T5ForConditionalGeneration", _T5, "feature-extraction"),
    "t5": Architecture("T5ForConditionalGeneration", _T5),
    "t5 classification": Architecture("T5ForSequenceClassification", _T5),
    "bart": Architecture("BartForConditionalGeneration", _BART),
    "bart classification": Architecture("BartForSequenceClassification", _BART),
    "marian": Architecture("MarianMTModel", _BART),
    "vit classification": Architecture("ViTForImageClassification", _IMAGE),
    "deit classification": Architecture("DeiTForImageClassification", _IMAGE),
    "beit classification": Architecture("BeitForImageClassification", _IMAGE),
    "dinov2 features": Architecture("Dinov2Model", _IMAGE),
    "swin classification": Architecture(
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "resnet classification": Architecture(
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    ),
    "convnext classification": Architecture(
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32},
    ),
    "clip text features": Architecture("CLIPTextModel", _CLIP_TEXT),
    "clip vision features": Architecture("CLIPVisionModel", _IMAGE),
    "wav2vec2 speech": Architecture("Wav2Vec2ForCTC", _SOUND),
    "wav2vec2 sounds": Architecture("Wav2Vec2ForSequenceClassification", _SOUND),
    "wavlm sounds": Architecture("WavLMForSequenceClassification", _SOUND),
    "hubert sounds": Architecture("HubertForSequenceClassification", _SOUND),
    "hubert speech": Architecture("HubertForCTC", _SOUND),
    "ast classification": Architecture(
        "ASTForAudioClassification",
        _IMAGE | {"patch_size": 4, "max_length": 24, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4},
        # Of spectrograms, which the server makes none of.
        "audio-classification-tensors",
    ),
    "whisper encoder": Architecture(
        "WhisperForConditionalGeneration",
        _BART | {"num_mel_bins": 16, "max_source_positions": 40, "max_target_positions": 40, "vocab_size": 200},
        "audio-feature-extraction",
    ),
}

# Decoders whose keys and values go in and out as tensors.
WITH_PAST = ("gpt2", "opt", "gpt-neo", "gpt-neox", "gptj", "bloom", "llama", "mistral", "qwen2", "qwen3", "gemma2",
             "gemma3", "phi3", "qwen3-moe")  # fmt: skip


@functools.cache
def train_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few hundred tokens, so that the scores of a vocabulary take no time."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(read_verification_texts(), trainer)
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)


def save_model(architecture: Architecture, directory: Path, **options: Any) -> None:
    """Save a model of random weights, large enough that an error in any of them shows; `options` go into its config."""
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture.model)
    config = model_class.config_class(**architecture.options, **options)
    config.initializer_range = 0.2
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    if architecture.reads_text:
        train_tokenizer().save_pretrained(directory)
    if model.main_input_name == "pixel_values":
        processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    if model.main_input_name == "input_values" and "conv_dim" in architecture.options:
        extractor = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16_000}
        (directory / "preprocessor_config.json").write_text(json.dumps(extractor))


def build_several(kind: str) -> transformers.PretrainedConfig:
    """Return the configuration of a model of several, of a type that transformers has."""
    parts = ("encoder", "decoder") if kind.endswith("encoder-decoder") else ()
    halves = {"encoder": transformers.ViTConfig() if kind.startswith("vision") else transformers.BertConfig()}
    halves["decoder"] = transformers.BertConfig(is_decoder=True, add_cross_attention=True)
    config: transformers.PretrainedConfig = transformers.CONFIG_MAPPING[kind](**{part: halves[part] for part in parts})
    return config
