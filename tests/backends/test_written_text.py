"""The text of an answer, piece by piece, against what transformers makes of all its tokens."""

import random
from pathlib import Path

import pytest
from harness import load_backend
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainers.writers import SPECIAL, build_bpe_with_bytes
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from client.bench import read_corpus

text_decoder = load_backend("openvino_generate", "text_decoder")
written_text = load_backend("openvino_generate", "written_text")


def build_unigram() -> Tokenizer:
    """As XGLM's and T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    train(tokenizer, trainers.UnigramTrainer(vocab_size=600, special_tokens=SPECIAL, unk_token="<unk>"))
    return tokenizer


def build_byte_level() -> Tokenizer:
    """As GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet))
    return tokenizer


def build_words() -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    train(tokenizer, trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL))
    return tokenizer


def build_marked_ends() -> Tokenizer:
    """As GPT's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder()
    train(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, end_of_word_suffix="</w>"))
    return tokenizer


def build_replaced_whole() -> Tokenizer:
    """One that replaces in the whole text, of which no piece is sure before the last."""
    tokenizer = build_bpe_with_bytes()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 3, 0)]
    )
    return tokenizer


def build_nothing() -> Tokenizer:
    """One without a decoder: tokens with a blank between them."""
    tokenizer = build_words()
    tokenizer.decoder = None
    return tokenizer


KINDS = {
    "BPE with bytes": build_bpe_with_bytes,
    "Unigram": build_unigram,
    "byte-level": build_byte_level,
    "WordPiece": build_words,
    "BPE with end marks": build_marked_ends,
    "replaced whole": build_replaced_whole,
    "no decoder": build_nothing,
}


def train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> None:
    tokenizer.train_from_iterator(read_corpus()[:300], trainer)


def save(tokenizer: Tokenizer, folder: Path) -> tuple[PreTrainedTokenizerBase, Tokenizer]:
    """Return it as transformers and as the server read it."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip
    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


def write(decoder: object, tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    """Return the pieces that a caller is sent of these tokens."""
    written, pieces = written_text.WrittenText(decoder, stops), []
    for token in tokens:
        written.add(token)
        pieces.append(written.take())
    written.finish()
    return [*pieces, written.take()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_any_tokens_are_the_text_of_all_of_them(kind: str, tmp_path: Path) -> None:
    reference, served = save(KINDS[kind](), tmp_path)
    decoder = text_decoder.TextDecoder(served)
    size, generator = len(reference), random.Random(0)
    written = [reference(text)["input_ids"] for text in read_corpus()[:50]]
    for _ in range(1500):
        # Bytes come in runs, as the first tokens of the vocabulary, and some tokens are none.
        highest = [min(size, 262), size + 20]
        written.append([generator.randrange(generator.choice(highest)) for _ in range(generator.randrange(40))])
    for tokens in written:
        assert "".join(write(decoder, tokens)) == reference.decode(tokens, skip_special_tokens=True), tokens


def test_bytes_wait_for_the_last_of_them_and_words_for_nothing(tmp_path: Path) -> None:
    reference, served = save(build_bpe_with_bytes(), tmp_path)
    decoder = text_decoder.TextDecoder(served)

    def number(*tokens: str) -> list[int]:
        return [served.token_to_id(token) for token in tokens]

    assert write(decoder, number("▁", "a", "<0xC3>", "<0xA9>", "b", "<0x00>")) == ["", "a", "", "", "éb", "", "\x00"]
    # A byte that belongs to no character makes signs for none of those before it, whatever is left out between them.
    broken = number("a", "<0x41>", "<0xC3>", "<0xA9>", "<s>", "<0xE6>", "b")
    assert write(decoder, broken) == ["a", "", "", "", "", "", "\ufffd" * 4 + "b", ""]
    assert reference.decode(broken, skip_special_tokens=True) == "a" + "\ufffd" * 4 + "b"
    assert write(decoder, number("a", "<0x0A>", "b", "c"), ("\n",)) == ["a", "", "", "", ""]
