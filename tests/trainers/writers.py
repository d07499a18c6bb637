"""Small decoders with a byte-level BPE trained on the spot, whose texts wander instead of repeating one token."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from export.tasks.texts.text import read_verification_texts

END = "<|endoftext|>"
SPECIAL = ["<unk>", "<s>", "</s>"]
# Long enough that a text is surely not at its end when its reader leaves.
CONTEXT = 4096


def train_bpe() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 600 tokens, most of which are less than a character in most scripts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Nothing that is edited now and then: another vocabulary would be another model, and other texts.
    tokenizer.train_from_iterator(read_verification_texts(), trainer)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    names = {"eos_token": END, "bos_token": END, "unk_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


def build_bpe_with_bytes() -> Tokenizer:
    """Return one as Llama 2's and Mistral's: SentencePiece's BPE, which writes as bytes what it has no token for."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    marked = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=marked, max_token_length=8, show_progress=False)
    tokenizer.train_from_iterator(read_verification_texts(), trainer)
    # To be trained beside it, bytes are special ones, which a text leaves out.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(content))


def build_writer(kind: str, vocabulary: int) -> PreTrainedModel:
    """Return a model of random weights, the same every time."""
    torch.manual_seed(0)
    common = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    if kind == "gpt2":
        config = GPT2Config(**common, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3)
        return GPT2LMHeadModel(config).eval()
    if kind == "opt":
        config = OPTConfig(**common, **sizes, ffn_dim=128, word_embed_proj_dim=64, init_std=0.3)
        return OPTForCausalLM(config).eval()
    more = {"intermediate_size": 128, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**common, **sizes, **more)).eval()


def save_writer(kind: str, directory: Path, added: Sequence[str] = ()) -> Path:
    """Save one with its tokenizer, to which tokens were added before it was made, and return the folder."""
    tokenizer = train_bpe()
    tokenizer.add_tokens(list(added))
    build_writer(kind, len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_writer_of_bytes(directory: Path) -> Path:
    """Save a Llama with a tokenizer as its first ones had, and return its folder."""
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_bpe_with_bytes(), **names)
    model = build_writer("llama", len(tokenizer))
    for config in (model.config, model.generation_config):
        config.update({"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id})
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def train_megatron_writer(directory: Path) -> Path:
    """Train Megatron-DeepSpeed's GPT-2 on 2 x 2 ranks of tensors and pipeline, and return what they left.

    Beside it lies the tokenizer as Megatron takes it: a vocabulary and its merges.
    """
    variant = "p2t2_writer"
    script = Path(__file__).with_name("train_megatron.py")
    subprocess.run([sys.executable, script, directory, variant], check=True, timeout=300, stdout=subprocess.DEVNULL)
    checkpoint = directory / variant
    saved = train_bpe().backend_tokenizer.model.save(str(checkpoint))
    for path in map(Path, saved):
        shutil.move(path, path.with_name(f"gpt2-{path.name}"))
    return checkpoint


def save_trained_writer(directory: Path, steps: int = 120) -> Path:
    """Save a Llama that has learned the verification texts, as sure of the next token as a model of use is."""
    torch.manual_seed(0)
    tokenizer = train_bpe()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    ids = torch.tensor([token for text in read_verification_texts() for token in tokenizer(text)["input_ids"]])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


# The tokens of the vocabulary that `write_bpe` writes.
BYTES = [*"abcdefgh", "Ġ", "ab", "Ġa"]


def write_bpe(folder: Path, special: list[str], names: tuple[str, str] = ("vocab.json", "merges.txt")) -> Path:
    """Write a byte-level vocabulary as GPT-2's and OPT's tokenizers save it, and nothing that says whose it is."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate([*special, *BYTES])}
    (folder / names[0]).write_text(json.dumps(vocabulary))
    (folder / names[1]).write_text("#version: 0.2\na b\nĠ a\n")
    return folder
