"""The server's tokenizer against transformers' own, on thousands of real and adversarial texts."""

import json
import random
from pathlib import Path

import pytest
from harness import load_backend
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from client.bench import read_corpus
from export.errors import VerificationError, VocabularyError
from export.tasks.texts.encoding import Question, QuestionEncoder
from export.weights.tokenizer import add_tokens, load_tokenizer
from export.weights.vocabulary_options import AddedToken

tokenization = load_backend("python_preprocess", "tokenization")

TEXTS = 5_000
ADDED = [AddedToken(token="[ENT]"), AddedToken(token="<|sep|>"), AddedToken(token="Foo", special=False)]

# What tokenizers have been seen to disagree on.
PIECES = [
    "[ENT]", "[ent]", "<|sep|>", "Foo", "foo", "FOO", "[MASK]", "<mask>", "[", "]", "<|", "word", "Straße", "İstanbul",
    "ﬁn", "naïve", "nai\u0308ve", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308",
    "😀", "مرحبا", "שלום", "\u202eabc\u202c", "今日は", "한국어", "ไทย", "हिन्दी", "\x00", "\x07", "\x1b[0m", "\x7f",
    "\u00a0", "\u200b", "\u200d", "\ufeff", "\ufffd", "\u2028", "\t", "\n", "\r\n",
    " ", "  ", "", "'s", "'LL", "don't",
    "1234567890", "3.14", "a_b", "##ing", "▁", "Ġ", "</s>", "<unk>", "𝕏", "e\u0301\u0301",
]  # fmt: skip


def build_texts() -> list[str]:
    """Return real paragraphs and made-up ones, the same ones every time."""
    generator = random.Random(0)
    real = read_corpus()
    texts = dict.fromkeys(real[: TEXTS // 2])
    while len(texts) < TEXTS:
        pieces = [generator.choice(PIECES) for _ in range(generator.randrange(1, 12))]
        if generator.random() < 0.3:
            pieces.insert(generator.randrange(len(pieces)), generator.choice(real)[: generator.randrange(1, 200)])
        text = generator.choice(["", " "]).join(pieces)
        texts[generator.choice([str, str.upper, str.lower, str.swapcase])(text)] = None
    return [*texts]


def train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(read_corpus()[:1500], trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=["input_ids"], **special)


def build_byte_level() -> PreTrainedTokenizerFast:
    """As RoBERTa's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=alphabet))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", mask_token="<mask>")


def build_bpe() -> PreTrainedTokenizerFast:
    """As the early ones of GPT and of translation models: words with an end mark, and an unknown token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["<unk>", "<pad>"]
    train(tokenizer, trainers.BpeTrainer(vocab_size=1500, special_tokens=special, end_of_word_suffix="</w>"))
    return wrap(tokenizer, unk_token="<unk>", pad_token="<pad>")


def build_unigram() -> PreTrainedTokenizerFast:
    """As XLM-RoBERTa's and T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    train(tokenizer, trainers.UnigramTrainer(vocab_size=1500, special_tokens=special, unk_token="<unk>"))
    template = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
    tokenizer.post_processor = processors.TemplateProcessing(**template, special_tokens=[("<s>", 0), ("</s>", 2)])
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return build_texts()


@pytest.fixture(scope="module")
def tokenizers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    """Return one of each kind, saved, loaded as a checkpoint's is, and with tokens added."""
    made = {"byte-level": build_byte_level(), "BPE": build_bpe(), "Unigram": build_unigram()}
    loaded = {"WordPiece": load_tokenizer(checkpoint)}
    for name, tokenizer in made.items():
        directory = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(directory)
        loaded[name] = load_tokenizer(directory)
    for tokenizer in loaded.values():
        add_tokens(tokenizer, ADDED)
    return loaded


KINDS = ("WordPiece", "BPE", "Unigram", "byte-level")


def check(encoder: QuestionEncoder, questions: list[Question], directory: Path) -> None:
    """Hold the very code that the server runs, on the very file it loads, to transformers' ids."""
    path = directory / "tokenizer.json"
    encoder.build_server_tokenizer().save(str(path))
    served = tokenization.TextTokenizer(path, ["input_ids"], has_windows=encoder.stride is not None)
    rows = served.encode([(q.text,) if q.pair is None else (q.text, q.pair) for q in questions])
    for question, row, wanted in zip(questions, rows, encode_all(encoder, questions), strict=True):
        if isinstance(row, tokenization.TextError):
            assert wanted == [[]], question
        else:
            assert [window.ids for window in row.windows] == wanted, question


def encode_all(encoder: QuestionEncoder, questions: list[Question]) -> list[list[list[int]]]:
    """Return the windows of each question, by transformers alone; thousands at once are much faster than one by one."""
    if encoder.stride is not None:
        return [[row["input_ids"] for row in encoder.encode(question)] for question in questions]
    texts, pairs = [q.text for q in questions], [q.pair for q in questions]
    second = None if None in pairs else pairs
    made = encoder.tokenizer(texts, second, truncation=True, max_length=encoder.max_length)
    return [[ids] for ids in made["input_ids"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ids_on_thousands_of_texts(
    kind: str, texts: list[str], tokenizers: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    assert len(set(texts)) == TEXTS
    check(QuestionEncoder(tokenizers[kind], 128), [Question(text=text) for text in texts], tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ids_of_long_texts_that_are_cut_before_they_are_tokenised(
    kind: str, texts: list[str], tokenizers: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    generator = random.Random(1)
    encoder = QuestionEncoder(tokenizers[kind], 24)
    shortening = tokenization.Shortening(encoder.build_server_tokenizer())
    # For pairs, transformers takes time with the square of their lengths.
    for count, pieces, is_paired in ((150, 40, False), (30, 8, True)):
        made = [generator.choice(["", " "]).join(generator.sample(texts, pieces))[: 90 * pieces] for _ in range(count)]
        cut = [row[0] for row in shortening.shorten([(text,) for text in made])]
        assert sum(len(short) < len(text) for short, text in zip(cut, made, strict=True)) > 0.8 * count
        pairs = [made[-index] if is_paired else None for index in range(count)]
        check(encoder, [Question(text=text, pair=pair) for text, pair in zip(made, pairs, strict=True)], tmp_path)
    pairs = [Question(text=question[:20], pair=text) for question, text in zip(texts[:30], made, strict=True)]
    check(encoder, [*pairs, *(Question(text=q.pair or "", pair=q.text) for q in pairs)], tmp_path)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ids_for_pairs_and_either_truncation(
    kind: str, side: str, texts: list[str], tokenizers: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    tokenizer = tokenizers[kind]
    questions = [Question(text=a, pair=b) for a, b in zip(texts[1000:3000:2], texts[4000:2000:-2], strict=True)]
    tokenizer.truncation_side = side
    try:
        check(QuestionEncoder(tokenizer, 24), questions, tmp_path)
    finally:
        tokenizer.truncation_side = "right"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_windows_of_long_contexts(
    kind: str, texts: list[str], tokenizers: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    contexts = [" ".join(texts[index : index + 5]) for index in range(0, 1000, 5)]
    questions = [Question(text="What is it?", pair=context) for context in contexts]
    check(QuestionEncoder(tokenizers[kind], 48, stride=16), questions, tmp_path)


def test_a_tokenizer_that_only_differs_in_an_added_token_is_found_out(
    texts: list[str], tokenizers: dict[str, PreTrainedTokenizerBase]
) -> None:
    encoder = QuestionEncoder(tokenizers["byte-level"], 128)
    content = json.loads(encoder.build_server_tokenizer().to_str())
    for token in content["added_tokens"]:
        if token["content"] == "Foo":
            token["single_word"] = True
    with pytest.raises(VerificationError, match="the server's tokenizer reads .* differently from transformers"):
        encoder.check_agrees(Tokenizer.from_str(json.dumps(content)), [Question(text=text) for text in texts])


def test_a_slow_tokenizer_is_converted_where_that_is_possible(
    checkpoint: Path, texts: list[str], tmp_path: Path
) -> None:
    real = AutoTokenizer.from_pretrained(checkpoint)
    words = sorted(real.get_vocab(), key=real.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    converted = load_tokenizer(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    assert converted(texts[:500])["input_ids"] == real(texts[:500], truncation=False)["input_ids"]


def test_a_tokenizer_that_cannot_be_converted_is_refused_with_its_kind(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(VocabularyError, match="got ByT5Tokenizer, which transformers converts to none; write one"):
        load_tokenizer(tmp_path)


def test_marians_tokenizer_is_refused_alike_without_the_package_that_reads_it(tmp_path: Path) -> None:
    """With sentencepiece transformers reads it, and converts it to none."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "</s>": 1, "<pad>": 2}))
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(
        VocabularyError, match="converts to none; write one that gives the same ids .* for a task of ten"
    ):
        load_tokenizer(tmp_path)
