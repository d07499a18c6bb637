"""Files of a tokenizer that say different things, and what transformers makes of them otherwise than they say."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import Replace, Sequence
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    AlbertConfig,
    AlbertTokenizer,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    DebertaV2Config,
    GPTNeoXConfig,
    GPTNeoXTokenizer,
    LlamaConfig,
    LlamaTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    RobertaConfig,
    RobertaTokenizer,
    XLMRobertaConfig,
)

from export.errors import CheckpointError, VocabularyError
from export.tasks.texts.encoding import QuestionEncoder
from export.weights.tokenizer import load_tokenizer, warn_of_own_steps
from export.weights.tokenizer_agreement import warn_of_types


def test_a_cased_vocabulary_is_not_lowercased_because_nothing_says_otherwise(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    assert load_tokenizer(tmp_path, BertConfig()).tokenize("Cat") == ["cat"]
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "Cat"]))
    with pytest.raises(VocabularyError, match="keeps capitals: .* has 1 tokens with capitals, .* with --base"):
        load_tokenizer(tmp_path, BertConfig())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(VocabularyError, match="keeps capitals: .* has 1 tokens with capitals, .* with --base"):
        load_tokenizer(tmp_path, BertConfig())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    assert load_tokenizer(tmp_path, BertConfig()).tokenize("Cat") == ["Cat"]


@pytest.mark.parametrize("lowers", [False, True])
def test_files_that_do_not_agree_on_capitals_are_refused_with_what_makes_them_agree(
    lowers: bool, tmp_path: Path
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "Cat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertConfig(vocab_size=7).save_pretrained(tmp_path)
    BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lowers).save_pretrained(tmp_path)
    said = tmp_path / "tokenizer_config.json"
    right = ["cat" if lowers else "Cat"]
    assert load_tokenizer(tmp_path, BertConfig()).tokenize("Cat") == right
    content = json.loads(said.read_text())
    said.write_text(json.dumps(content | {"do_lower_case": not lowers}))
    with pytest.raises(VocabularyError, match=r"do not agree on '\w+': expected what tokenizer.json makes of it, "):
        load_tokenizer(tmp_path, BertConfig())
    said.write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": lowers}))
    assert load_tokenizer(tmp_path, BertConfig()).tokenize("Cat") == right
    said.unlink()
    if lowers:
        assert load_tokenizer(tmp_path, BertConfig()).tokenize("Cat") == right
        return
    with pytest.raises(VocabularyError, match="do not agree on 'C"):
        load_tokenizer(tmp_path, BertConfig())


SETTINGS = {
    "accents": (BertTokenizer, {"strip_accents": False}, "'Über naïve café'"),
    "Chinese": (BertTokenizer, {"tokenize_chinese_chars": False}, "'中文字'"),
    "a space in front": (RobertaTokenizer, {"add_prefix_space": True}, "'Hello World'"),
}


def test_tokens_are_those_that_tokenizer_json_makes_where_transformers_leaves_a_step_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As transformers 5 does of a normalizer beside the usual one, which every release before it had applied."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, content["normalizer"]]}
    path.write_text(json.dumps(content))
    told, text = Tokenizer.from_file(str(path)), "\uff28ello \ufb01sh™ 2²"
    told.no_padding()
    tokenizer = load_tokenizer(folder)
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != told.encode(text).ids
    assert tokenizer(text)["input_ids"] == told.encode(text).ids
    served = QuestionEncoder(tokenizer, 32).build_server_tokenizer()
    assert served.encode(text).ids == told.encode(text).ids


@pytest.mark.parametrize(
    ("types", "said", "has_types"),
    [
        (2, {}, True),
        (1, {}, False),
        (2, {"model_input_names": ["input_ids"]}, False),
        # It was saved by 5.
        (2, {"backend": "tokenizers"}, False),
    ],
)
def test_the_second_text_of_a_pair_has_its_type_where_tokenizer_json_gives_it_one(
    types: int, said: dict[str, object], has_types: bool, checkpoint: Path, tmp_path: Path
) -> None:
    """Of a tokenizer of no class, transformers 5 leaves the types out that releases before it give to the model."""
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    BertConfig(type_vocab_size=types).save_pretrained(tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"} | said
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    date(tmp_path, "4.57.1")
    tokenizer = load_tokenizer(tmp_path)
    assert ("token_type_ids" in tokenizer("a", "b")) == has_types
    # Saved again it has as many.
    tokenizer.save_pretrained(tmp_path)
    assert ("token_type_ids" in load_tokenizer(tmp_path)("a", "b")) == has_types


def date(folder: Path, release: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"transformers_version": release}))


def test_spaces_in_front_of_a_prompt_are_the_tokens_that_tokenizer_json_makes(tmp_path: Path) -> None:
    """Llama's as it was converted before transformers 5, whose spaces become one token less there."""
    vocabulary = {token: place for place, token in enumerate(["<unk>", "<s>", "</s>", "▁", "x", "▁x"])}
    LlamaTokenizer(vocab=vocabulary, merges=[("▁", "x")]).save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    content |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    path.write_text(json.dumps(content))
    told = Tokenizer.from_file(str(path))
    for text in ("x", "  x", " x x"):
        assert load_tokenizer(tmp_path).tokenize(text) == told.encode(text, add_special_tokens=False).tokens


def test_a_tokenizer_beside_the_tokens_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    (folder / "vocab.txt").write_text("\n".join(sorted(words, key=words.get)) + "\n")
    load_tokenizer(folder)
    # A list that is older by a few tokens is the same model's.
    (folder / "vocab.txt").write_text("\n".join(sorted(words, key=words.get)[:-100]) + "\nmore\n")
    load_tokenizer(folder)
    content["model"]["vocab"] = words | {word: place ^ 1 for word, place in words.items() if 200 <= place < 30000}
    path.write_text(json.dumps(content))
    with pytest.raises(
        VocabularyError, match=r"are of several models: .* got others for 2\d+ of 30\d+, such as .*copy"
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tokenizer_that_transformers_makes_otherwise_for_want_of_its_settings_is_refused(
    setting: str, tmp_path: Path, checkpoint: Path
) -> None:
    kind, settings, text = SETTINGS[setting]
    if kind is BertTokenizer:
        kind.from_pretrained(checkpoint, **settings).save_pretrained(tmp_path)
    else:
        letters = [*ByteLevel.alphabet(), "Ġx"]
        vocabulary = {token: place for place, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters])}
        kind(vocab=vocabulary, merges=[("Ġ", "x")], **settings).save_pretrained(tmp_path)
    (BertConfig() if kind is BertTokenizer else RobertaConfig()).save_pretrained(tmp_path)
    ids = {text: AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] for text in ("Über", "中文", "x")}
    assert {text: load_tokenizer(tmp_path)(text)["input_ids"] for text in ids} == ids
    pair = load_tokenizer(tmp_path)("x", "x")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(
        VocabularyError, match=f"do not agree on {text}: .* or for want of it; copy tokenizer_config"
    ) as refusal:
        load_tokenizer(tmp_path)
    # As the remedy says, where nobody has the file any more.
    said = str(refusal.value)
    (tmp_path / "tokenizer_config.json").write_text(said[said.rindex("{") : said.rindex("}") + 1])
    assert load_tokenizer(tmp_path)("x", "x") == pair
    assert load_tokenizer(tmp_path).mask_token == kind.from_pretrained(tmp_path).mask_token
    assert {text: load_tokenizer(tmp_path)(text)["input_ids"] for text in ids} == ids


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_a_tokenizer_of_no_class_is_taken_as_it_is_whatever_the_architecture_has_usually(
    named: str, tmp_path: Path
) -> None:
    """transformers 5 makes Qwen2's own of it, which cuts numbers into digits."""
    letters = {token: place for place, token in enumerate(["<end>", *ByteLevel.alphabet(), "23"])}
    trained = Tokenizer(BPE(letters, [("2", "3")]))
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>").save_pretrained(tmp_path)
    Qwen2Config(vocab_size=300).save_pretrained(tmp_path)
    said = tmp_path / "tokenizer_config.json"
    content = json.loads(said.read_text())
    said.write_text(json.dumps(content | {"tokenizer_class": named}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.tokenize("23"), tokenizer.eos_token) == (["23"], "<end>")
    said.write_text(json.dumps(content | {"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(VocabularyError, match="do not agree on 'a-b, c. 1,234'") as refusal:
        load_tokenizer(tmp_path)
    told = str(refusal.value)
    said.write_text(told[told.rindex("{") : told.rindex("}") + 1])
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.tokenize("23"), tokenizer.eos_token) == (["23"], "<end>")


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_a_sentencepiece_file_alone_is_refused_with_the_package_that_reads_it(name: str, tmp_path: Path) -> None:
    kinds = {"tokenizer.model": "LlamaTokenizer", "spiece.model": "T5Tokenizer"}
    settings = {"tokenizer_class": kinds.get(name, "XLMRobertaTokenizer")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    # A first piece, and then nothing that anyone reads.
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\xff")
    with pytest.raises(
        CheckpointError, match=r"needs the package sentencepiece: .*; pip install sentencepiece==\S+ bes"
    ):
        load_tokenizer(tmp_path)
    # Of tiktoken, whose files may have the same name.
    (tmp_path / name).write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(CheckpointError, match="cannot be loaded: .* got .*tiktoken"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "config"), [("sentencepiece.bpe.model", XLMRobertaConfig()), ("spm.model", DebertaV2Config())]
)
def test_a_sentencepiece_file_beside_config_json_alone_is_a_tokenizer(
    name: str, config: PretrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\xff")
    with pytest.raises(CheckpointError, match="needs the package sentencepiece: "):
        load_tokenizer(tmp_path)


TRAIN = """
import sys
import sentencepiece

texts = [f"hello {word} world a b x... 1/2 trained models are served" for word in ("big", "small", "new")] * 50
with open(sys.argv[1], "wb") as file:
    options = {"vocab_size": 60, "model_type": sys.argv[2], "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, **options)
"""


@pytest.mark.parametrize(
    ("name", "kind", "config"),
    [("spm.model", "unigram", DebertaV2Config()), ("tokenizer.model", "bpe", LlamaConfig())],
)
def test_what_is_made_of_a_sentencepiece_file_cuts_texts_as_that_does_or_is_refused(
    name: str, kind: str, config: PretrainedConfig, tmp_path: Path
) -> None:
    """transformers 5 leaves the normalizer out of DeBERTa-v2's, and the mark of a first word's beginning of Llama's."""
    pytest.importorskip("sentencepiece", reason="`pip install sentencepiece==0.2.1`")
    # In a process of its own: it does not go with torch's.
    subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / name), kind], check=True)
    config.save_pretrained(tmp_path)
    if kind == "bpe":
        with pytest.raises(VocabularyError, match="is another: expected what SentencePiece makes of 'hello world', ▁"):
            load_tokenizer(tmp_path)
        return
    tokenizer = load_tokenizer(tmp_path)
    for text in ("hello world", "a\u00a0b x\u2026"):
        assert tokenizer.tokenize(text) == tokenizer.tokenize(text.replace("\u00a0", " ").replace("\u2026", "..."))


def change_file(folder: Path, change: Callable[[Tokenizer], None]) -> Tokenizer:
    """Change tokenizer.json and nothing beside it, as whoever changes the tokenizer in training and saves it."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    change(tokenizer)
    tokenizer.save(path)
    return tokenizer


def frame_by_itself(tokenizer: Tokenizer) -> None:
    special = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [SEP] [SEP]:1 $B:1", special_tokens=special
    )


def replace_quotes(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = Sequence([Replace("’", "'"), tokenizer.normalizer])


def cut_long_words(tokenizer: Tokenizer) -> None:
    content = json.loads(tokenizer.to_str())
    tokenizer.model = WordPiece(content["model"]["vocab"], unk_token="[UNK]", max_input_chars_per_word=20)


@pytest.mark.parametrize("change", [frame_by_itself, replace_quotes, cut_long_words])
def test_every_step_of_tokenizer_json_is_taken(
    change: Callable[[Tokenizer], None], checkpoint: Path, tmp_path: Path
) -> None:
    """transformers 5 makes those of BERT's class anew."""
    BertTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    BertConfig().save_pretrained(tmp_path)
    text = "it’s internationalinternational"
    before = load_tokenizer(tmp_path)(text, text)
    told = change_file(tmp_path, change).encode(text, text)
    made = load_tokenizer(tmp_path)(text, text)
    assert (made["input_ids"], made["token_type_ids"]) == (told.ids, told.type_ids)
    assert made["input_ids"] != before["input_ids"]


def test_steps_of_ones_own_that_transformers_does_not_load_are_told_of(checkpoint: Path, tmp_path: Path) -> None:
    BertTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    BertConfig().save_pretrained(tmp_path)
    assert warn_of_own_steps(tmp_path, BertConfig()) == ()
    change_file(tmp_path, replace_quotes)
    (told,) = warn_of_own_steps(tmp_path, BertConfig())
    assert told.startswith(
        f"tokens are made by normalizer of {tmp_path / 'tokenizer.json'}, where transformers 5 makes "
    )
    # As it says.
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert warn_of_own_steps(tmp_path, BertConfig()) == ()
    assert load_tokenizer(tmp_path).tokenize("x’s") == ["x", "’", "s"]


@pytest.mark.parametrize(
    ("is_older", "release", "told"), [(True, "4.57.1", "a token type"), (True, "5.0.0", "none"), (False, "5.0.0", "")]
)
def test_the_second_text_of_a_pair_has_its_type_where_its_class_had_one_when_the_model_was_trained(
    is_older: bool, release: str, told: str, tmp_path: Path
) -> None:
    """Before transformers 5 ALBERT's handed the types to the model."""
    pieces = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁", "x"]
    AlbertTokenizer(vocab=[(piece, -1.0) for piece in pieces]).save_pretrained(tmp_path)
    AlbertConfig(vocab_size=7).save_pretrained(tmp_path)
    date(tmp_path, release)
    said = tmp_path / "tokenizer_config.json"
    content = json.loads(said.read_text())
    if is_older:
        del content["backend"]
        said.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    made = tokenizer("x", "x")
    types = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("x", "x").type_ids
    assert types[-1] == 1
    has_types = is_older and release < "5"
    assert made.get("token_type_ids") == (types if has_types else None)
    warnings = warn_of_types(tmp_path, tokenizer)
    assert [warning.startswith(f"the second text of a pair has {told} ") for warning in warnings] == [True] * is_older
    if is_older:
        # As it says.
        names = json.loads(warnings[0].partition('"model_input_names": ')[2].partition("]")[0] + "]")
        said.write_text(json.dumps(content | {"model_input_names": names}))
        assert ("token_type_ids" in load_tokenizer(tmp_path)("x", "x")) != has_types
        assert warn_of_types(tmp_path, tokenizer) == ()


def test_settings_that_have_tokenizer_json_taken_as_it_is_leave_a_pair_its_types(tmp_path: Path) -> None:
    pieces = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁", "x"]
    AlbertTokenizer(vocab=[(piece, -1.0) for piece in pieces]).save_pretrained(tmp_path)
    AlbertConfig(vocab_size=7).save_pretrained(tmp_path)
    date(tmp_path, "4.57.1")
    said = tmp_path / "tokenizer_config.json"
    content = json.loads(said.read_text())
    del content["backend"]
    said.write_text(json.dumps(content))

    def double(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = Replace("x", "xx")

    pair = change_file(tmp_path, double).encode("x", "x")
    with pytest.raises(VocabularyError, match="do not agree on 'Hello World'") as refusal:
        load_tokenizer(tmp_path)
    told = str(refusal.value)
    said.write_text(told[told.rindex("{") : told.rindex("}") + 1])
    made = load_tokenizer(tmp_path)("x", "x")
    assert (made["input_ids"], made["token_type_ids"]) == (pair.ids, pair.type_ids)


def test_an_end_that_settings_give_or_take_is_refused_where_tokenizer_json_says_otherwise(tmp_path: Path) -> None:
    """Releases before 5 go by the settings of this class, and whoever trained by what the file was saved with."""
    letters = {token: place for place, token in enumerate(["<end>", *ByteLevel.alphabet()])}
    GPTNeoXTokenizer(vocab=letters, merges=[], unk_token="<end>", bos_token="<end>", eos_token="<end>").save_pretrained(
        tmp_path
    )
    GPTNeoXConfig(vocab_size=257).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("x").tokens() == ["x"]

    def end(tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = TemplateProcessing(single="$A <end>", pair="$A $B:1", special_tokens=[("<end>", 0)])

    change_file(tmp_path, end)
    said = tmp_path / "tokenizer_config.json"
    said.write_text(json.dumps(json.loads(said.read_text()) | {"add_bos_token": True, "add_eos_token": False}))
    with pytest.raises(
        VocabularyError, match="do not agree on what stands around a text: expected .*'x <end>'"
    ) as refusal:
        load_tokenizer(tmp_path)
    told = str(refusal.value)
    said.write_text(told[told.rindex("{") : told.rindex("}") + 1])
    assert load_tokenizer(tmp_path)("x").tokens() == ["x", "<end>"]
