"""Options from a file and from the command line, and which of them mean something together."""

import argparse
import codecs
import json
import os
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from export.errors import SettingsError
from export.identity import describe_options
from export.option_kinds import Needs
from export.options import ExportRequest, add_options, build_request, list_options, read_options, spell_options
from export.repository.lockfile import make_plain
from export.serving_options import ServingOptions
from export.weights.vocabulary_options import AddedToken, VocabularyOptions

# One value of each option, on the command line and in a file.
EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "repository": (["--repository", "models"], "models"),
    "no_activate": (["--no-activate"], True),
    "task": (["--task", "fill-mask"], "fill-mask"),
    "adapter": (["--adapter", "one", "two"], ["one", "two"]),
    "tag": (["--tag", "global_step1"], "global_step1"),
    "base": (["--base", "base"], "base"),
    "allow_non_finite": (["--allow-non-finite"], True),
    "lora_scaling": (["--lora-scaling", "2"], 2),
    "target": (["--target", "25.08"], "25.08"),
    "precision": (["--precision", "fp16"], "fp16"),
    "engine": (["--engine", "tensorrt"], "tensorrt"),
    "steps": (["--steps", "lean"], "lean"),
    "lengths": (["--lengths", "64", "32"], [32, 64]),
    "batching": (["--batching", "ragged"], "ragged"),
    "tolerances": (["--tolerance", "max_abs_error=1e-6"], {"max_abs_error": 1e-6}),
    "accept_worse": (["--accept-worse", "a demo"], "a demo"),
    "factory": (["--factory", "model.py:build"], "model.py:build"),
    "inputs": (["--inputs", "inputs.json"], "inputs.json"),
    "add_special_tokens": (["--add-special-token", "[A]=zeros"], {"[A]": "zeros"}),
    "add_tokens": (["--add-token", "b=mean"], {"b": "mean"}),
    "pad_vocab_to_multiple_of": (["--pad-vocab-to-multiple-of", "64"], 64),
    "unused_rows": (["--unused-rows", "cut"], "cut"),
    "seed": (["--seed", "3"], 3),
    "allow_other_tokenizer": (["--allow-other-tokenizer"], True),
    "top_k": (["--top-k", "3"], 3),
    "threshold": (["--threshold", "0.25"], 0.25),
    "aggregation": (["--aggregation", "max"], "max"),
    "pooling": (["--pooling", "cls"], "cls"),
    "normalize": (["--no-normalize"], False),
    "preprocess": (["--preprocess", "imagenet"], "imagenet"),
    "pictures": (["--pictures", "photos", "a.jpg"], ["photos", "a.jpg"]),
    "instances": (["--instances", "4"], 4),
    "threads": (["--threads", "4"], 4),
    "max_queue_size": (["--max-queue-size", "64"], 64),
    "max_queue_delay_microseconds": (["--max-queue-delay-microseconds", "500"], 500),
    "default_timeout_microseconds": (["--default-timeout-microseconds", "20000"], 20000),
    "timeout_action": (["--timeout-action", "delay"], "delay"),
    "priority_levels": (["--priority-levels", "3"], 3),
    "default_priority_level": (["--default-priority-level", "2"], 2),
    "prefetch": (["--prefetch"], True),
    "response_cache": (["--response-cache"], True),
    "warmup": (["--warmup", "16", "8"], [8, 16]),
    "kv_cache_mb": (["--kv-cache-mb", "256"], 256),
    "max_num_seqs": (["--max-num-seqs", "16"], 16),
    "rate_limit": (["--rate-limit", "cores=2"], {"cores": 2}),
}
# What an option has no effect without.
NEEDS = {"default_priority_level": ["--priority-levels", "2"], "seed": ["--add-token", "x=random"]}
FACTORY = ["--factory", "model.py:build", "--inputs", "inputs.json"]


def write(directory: Path, content: Any) -> Path:
    path = directory / "export.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def parse(*words: str, checkpoint: str | None = "c", file: Path | None = None) -> ExportRequest:
    parser = argparse.ArgumentParser()
    add_options(parser)
    arguments = vars(parser.parse_args(words)) | {"checkpoint": checkpoint and Path(checkpoint), "name": "n"}
    return build_request(arguments, read_options(file, "n", print) if file else {})


def test_there_is_an_example_of_every_option() -> None:
    assert {option.name for option in list_options()} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_option_means_the_same_on_the_command_line_and_in_a_file(name: str, tmp_path: Path) -> None:
    words, value = EXAMPLES[name]
    # What an option needs goes with it.
    needs = {"inputs": FACTORY[:2], "factory": FACTORY[2:], **NEEDS}
    also = needs.get(name, [])
    typed = parse(*words, *also)
    assert typed == parse(*also, file=write(tmp_path, {name: value}))
    assert typed != parse(*NEEDS.get(name, ())), "it changes what is asked for"


@pytest.mark.parametrize("name", sorted({*EXAMPLES} - {"repository", "no_activate", "inputs", "factory"}))
def test_what_a_lock_records_is_spelt_as_the_words_that_ask_for_it_again(name: str) -> None:
    words = EXAMPLES[name][0] + NEEDS.get(name, [])
    recorded = make_plain(describe_options(parse(*words)))
    assert make_plain(describe_options(parse(*spell_options(recorded)))) == recorded
    assert spell_options(make_plain(describe_options(parse()))) == []


def test_every_field_of_a_request_is_an_option_or_whole() -> None:
    whole = {"checkpoint", "name", "address", "vocabulary", "serving", "variants", "task_options"}
    for holder in (ExportRequest, VocabularyOptions, ServingOptions):
        for field in fields(holder):
            assert ("options" in field.metadata) != (field.name in whole), field.name


def test_the_command_line_wins_and_adds_its_tokens_to_the_files(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "task": "fill-mask",
            "seed": 3,
            "add_tokens": {"b": "zeros"},
            "add_special_tokens": {"[A]": "mean:start"},
            "adapter": ["first"],
            "tolerances": {"min_cosine": 0.9, "max_abs_error": 1},
        },
    )
    words = ["--seed", "5", "--add-special-token", "[C]=random", "--add-token", "d=a b", "--adapter", "second"]
    request = parse(*words, "--tolerance", "max_abs_error=1e-6", file=path)
    assert request.task == "fill-mask"
    assert request.vocabulary.seed == 5
    # The file's first, special ones before ordinary ones: the order of their ids.
    assert request.vocabulary.added_tokens == (
        AddedToken(token="[A]", initializer="mean:start"),
        AddedToken(token="b", initializer="zeros", special=False),
        AddedToken(token="[C]", initializer="random"),
        AddedToken(token="d", initializer="a b", special=False),
    )
    assert request.adapters == (Path("first"), Path("second"))
    assert request.tolerances == {"min_cosine": 0.9, "max_abs_error": 1e-6}
    assert parse().repository.name == "model_repository"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"taks": "reward"}, "FILE has the unknown option taks: .*, got taks; did you mean task."),
        ({"zzz": 1}, "FILE has the unknown option zzz: .*, got zzz; remove it."),
        ({"task": "chess"}, "task in FILE is unknown: expected one of feature-extraction, .*, got chess."),
        ({"task": "fillmask"}, "task in FILE is unknown: .*, got fillmask; did you mean fill-mask."),
        ({"task": ["reward"]}, r"task in FILE is of another kind: expected a text, got \[\"reward\"\]."),
        ({"task": ""}, 'task in FILE is of another kind: expected a text, got "".'),
        ({"tag": None}, "tag in FILE is of another kind: expected a text, got null."),
        ({"base": 3}, "base in FILE is of another kind: expected a path, got 3."),
        ({"base": "a\0b"}, r"base in FILE is of another kind: expected a path, got .*"),
        ({"adapter": "one"}, 'adapter in FILE is of another kind: expected a list of paths, got "one".'),
        ({"adapter": [1]}, r"adapter in FILE is of another kind: expected a list of paths, got \[1\]."),
        ({"adapter": [["one"]]}, "adapter in FILE is of another kind: expected a list of paths"),
        ({"seed": True}, "seed in FILE is of another kind: expected a whole number, got true."),
        ({"seed": 1.0}, "seed in FILE is of another kind: expected a whole number, got 1.0."),
        ({"top_k": 0}, "top_k in FILE is of another kind: expected a whole number from 1 to 2147483647, got 0."),
        ({"top_k": 10**21}, "top_k in FILE is of another kind: expected a whole number from 1 to 2147483647, got 1"),
        ({"top_k": True}, "top_k in FILE is of another kind: expected a whole number from 1 to 2147483647, got true."),
        ({"threads": 1025}, "threads in FILE is of another kind: expected a whole number from 1 to 1024, got 1025."),
        (
            {"instances": 1025},
            "instances in FILE is of another kind: expected a whole number from 1 to 1024, got 1025.",
        ),
        ({"lora_scaling": True}, "lora_scaling in FILE is of another kind: expected a number, got true."),
        ('{"lora_scaling": NaN}', "lora_scaling in FILE is of another kind: expected a number, got NaN."),
        ({"normalize": 1}, "normalize in FILE is of another kind: expected true or false, got 1."),
        (
            {"allow_non_finite": "x"},
            'allow_non_finite in FILE is of another kind: expected true or false, got "x".',
        ),
        ({"tolerances": {"max_abs_error": True}}, "tolerances in FILE is of another kind: expected bounds, each NAME="),
        ({"tolerances": {"max_abs_error": {"a": [1]}}}, "tolerances in FILE is of another kind: expected bounds, each"),
        ({"tolerances": [1]}, "tolerances in FILE is of another kind: expected bounds, each"),
        ({"add_tokens": {"a": 1}}, "add_tokens in FILE is of another kind: expected tokens, each TOKEN=INITIALIZER"),
        ({"add_tokens": {"a": " "}}, "add_tokens in FILE is of another kind: expected tokens"),
        ({"add_special_tokens": ["[A]"]}, "add_special_tokens in FILE is of another kind: expected tokens"),
        ("[", "FILE cannot be read: expected a JSON file, got Expecting value"),
        ("[" * 100_000, "FILE cannot be read: expected a JSON file, got maximum recursion depth"),
        ("[]", "FILE holds no options: expected an object, got list."),
    ],
)
def test_a_setting_that_means_nothing_is_refused_in_one_sentence(content: Any, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(SettingsError) as refusal:
        read_options(path, "n", print)
    assert re.match(sentence, str(refusal.value).replace(str(path), "FILE")), str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_an_adapter_is_merged_once(tmp_path: Path) -> None:
    path = write(tmp_path, {"adapter": ["first"]})
    for words, got in ((["first"], "it twice"), (["./x/../first"], "first as well")):
        with pytest.raises(
            SettingsError, match=f"the adapter .*first is named twice: expected each .* once, got {got};"
        ):
            parse("--adapter", *words, file=path)


@pytest.mark.parametrize(
    ("words", "got"),
    [
        (["--add-token", "a=zeros", "a=mean"], "'zeros', ordinary and 'mean', ordinary"),
        (["--add-token", "a=zeros", "--add-special-token", "a=zeros"], "'zeros', special and 'zeros', ordinary"),
    ],
)
def test_a_token_is_added_once(words: list[str], got: str) -> None:
    with pytest.raises(
        SettingsError, match=f"the token 'a' is to be added twice: expected each token once.*got {got};"
    ):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--top-k", "0"], "argument --top-k: expected a whole number from 1 to 2147483647, got '0'"),
        (["--threads", "1025"], "argument --threads: expected a whole number from 1 to 1024, got '1025'"),
        (["--instances", "100000"], "argument --instances: expected a whole number from 1 to 1024, got '100000'"),
        (["--seed", "1.5"], "argument --seed: expected a whole number, got '1.5'"),
        (["--lora-scaling", "inf"], "argument --lora-scaling: expected a number, got 'inf'"),
        (["--base", ""], "argument --base: expected a path, got ''"),
        (["--tolerance", "max_abs_error"], "argument --tolerance: expected bounds, each NAME=VALUE"),
        (["--add-token", "[A]"], "argument --add-token: expected tokens, each TOKEN=INITIALIZER"),
        (["--add-token", "<==mean"], "each TOKEN=INITIALIZER with one = on the command line"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
    ],
)
def test_a_word_that_means_nothing_is_wrong_usage(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*words)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


IDLE = [option for option in list_options() if option.needs is Needs.ARCHITECTURE]


@pytest.mark.parametrize("option", IDLE, ids=[option.name for option in IDLE])
@pytest.mark.parametrize("checkpoint", [None, "c"])
def test_an_option_of_a_known_architecture_is_refused_beside_a_factory(
    option: Any, checkpoint: str | None, tmp_path: Path
) -> None:
    words, value = EXAMPLES[option.name]
    sentence = (
        f"{option.flag} has no effect beside --factory: expected a checkpoint that transformers builds the model of, "
        "got --factory model.py:build; leave it out."
    )
    for typed, file in ((words, None), ([], write(tmp_path, {option.name: value}))):
        with pytest.raises(SettingsError) as refusal:
            parse(*FACTORY, *typed, checkpoint=checkpoint, file=file)
        assert str(refusal.value) == sentence


def test_these_are_all_that_a_factory_takes_no_notice_of() -> None:
    assert {option.name for option in IDLE} == {
        *("task", "adapter", "base", "lora_scaling", "top_k", "threshold", "aggregation", "pooling", "normalize"),
        *("add_special_tokens", "add_tokens", "pad_vocab_to_multiple_of", "unused_rows", "seed"),
        *("allow_other_tokenizer", "lengths", "batching"),
    }


@pytest.mark.parametrize("words", [["--seed", "0"], ["--unused-rows", "keep"], ["--normalize"]])
def test_what_is_given_as_it_would_be_anyway_is_refused_too(words: list[str]) -> None:
    with pytest.raises(SettingsError, match=f"{words[0]} has no effect beside --factory"):
        parse(*FACTORY, *words)


def test_a_flag_that_is_not_turned_on_and_an_empty_list_ask_for_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, {"allow_other_tokenizer": False, "allow_non_finite": False, "adapter": [], "add_tokens": {}})
    assert parse(*FACTORY, checkpoint=None, file=file) == parse(*FACTORY, checkpoint=None)


@pytest.mark.parametrize("words", [[], ["--pad-vocab-to-multiple-of", "64"], ["--unused-rows", "cut"]])
def test_a_seed_is_refused_where_no_row_is_begun_with_it(words: list[str], tmp_path: Path) -> None:
    sentence = "--seed has no effect alone: expected tokens to add, got none; leave it out."
    for typed, file in ((["--seed", "3"], None), ([], write(tmp_path, {"seed": 3}))):
        with pytest.raises(SettingsError) as refusal:
            parse(*words, *typed, file=file)
        assert str(refusal.value) == sentence


def test_all_options_without_effect_are_told_in_one_sentence() -> None:
    with pytest.raises(SettingsError, match="^--task, --base, --top-k have no effect beside --factory: .* leave them"):
        parse(*FACTORY, "--task", "reward", "--top-k", "3", "--base", "b")


@pytest.mark.parametrize("name", ["tag", "allow_non_finite"])
def test_an_option_of_weights_is_refused_where_there_are_none(name: str) -> None:
    words, _ = EXAMPLES[name]
    with pytest.raises(SettingsError) as refusal:
        parse(*FACTORY, *words, checkpoint=None)
    expected = "expected the weights of a CHECKPOINT, got none; leave it out."
    assert str(refusal.value) == f"{words[0]} has no effect without a CHECKPOINT: {expected}"
    assert parse(*FACTORY, *words).checkpoint == Path("c")


def test_inputs_are_refused_without_a_factory_and_a_factory_without_inputs() -> None:
    with pytest.raises(SettingsError) as refusal:
        parse("--inputs", "inputs.json")
    sentence = "--inputs has no effect without --factory: expected --factory ENTRY, got none; leave it out."
    assert str(refusal.value) == sentence
    with pytest.raises(SettingsError, match="the factory's inputs are not described: expected --inputs FILE, got none"):
        parse(*FACTORY[:2])


def test_there_must_be_something_to_export() -> None:
    with pytest.raises(SettingsError, match="nothing to export: expected a CHECKPOINT or --factory, got neither."):
        parse(checkpoint=None)


def test_a_request_that_is_made_in_python_is_held_to_the_same() -> None:
    made = {"name": "n", "repository": Path("r"), "checkpoint": None, "factory": "m:f", "inputs": Path("i")}
    names = ("pooling", "normalize", "top_k", "threshold", "aggregation", "preprocess", "pictures")
    assert ExportRequest(**made).task_options == dict.fromkeys(names)
    for idle, flag in (
        ({"task": "reward"}, "--task"),
        ({"task_options": {"normalize": False}}, "--normalize"),
        ({"vocabulary": VocabularyOptions(unused_rows="cut")}, "--unused-rows"),
    ):
        with pytest.raises(SettingsError, match=f"{flag} has no effect beside --factory"):
            ExportRequest(**made | idle)


def read_toml(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "modelyard.toml"
    path.write_text(text)
    return read_options(path, "n", print)


def test_tables_of_other_models_alone_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "modelyard.toml"
    path.write_text("[default]\nseed = 1\n[models.tickets]\ninstances = 4\n")
    assert read_options(path, "ticket", print) == {"seed": 1}
    assert capsys.readouterr().out == f"{path} has no table of ticket, but of tickets; did you mean [models.tickets]\n"
    assert read_options(path, "tickets", print) == {"seed": 1, "instances": 4}
    assert not capsys.readouterr().out


def test_the_table_of_a_model_stands_over_the_one_of_all(tmp_path: Path) -> None:
    text = """
    default.max_queue_size = 64
    [default.rate_limit]
    cores = 1
    [models.n]
    instances = 4
    warmup = [16, 8]
    max_queue_size = 32
    [models.other]
    instances = 9
    """
    path = tmp_path / "modelyard.toml"
    path.write_text(text)
    serving = parse("--instances", "3", file=path).serving
    assert (serving.instances, serving.max_queue_size, serving.warmup) == (3, 32, (8, 16))
    assert serving.rate_limit == {"cores": 1}


def test_a_variant_is_what_it_says_over_what_the_model_is(tmp_path: Path) -> None:
    path = tmp_path / "modelyard.toml"
    path.write_text(
        """
        default.configs.staging = { instances = 1, max_queue_size = 8 }
        [models.n]
        priority_levels = 2
        rate_limit.cores = 1
        [models.n.configs.staging]
        max_queue_size = 4
        [models.n.configs.production]
        """
    )
    request = parse("--instances", "3", "--rate-limit", "disks=1", file=path)
    assert {*request.variants} == {"staging", "production"}
    assert request.variants["production"] == request.serving
    staging = request.variants["staging"]
    assert (staging.instances, staging.max_queue_size, staging.priority_levels) == (1, 4, 2)
    assert staging.rate_limit == {"cores": 1, "disks": 1}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[models.n.configs]\nstaging = 1", "configs in FILE line 1 holds no variants: .* got ..staging.: 1."),
        ("[default.configs.'a/b']", "configs in FILE has a variant that cannot be named so: .* got .a/b.."),
        (
            "[default.configs.a]\ntask = 'reward'",
            "FILE line 2 has the unknown option task: expected one of instances, .*",
        ),
        (
            "[default]\n# max_queue_dealy\n\nmax_queue_dealy = 3",
            "FILE line 4 has the unknown option max_queue_dealy: .*; did you mean max_queue_delay_microseconds.",
        ),
        ("[models.n]\n'instancse' = 3", "FILE line 2 has the unknown option instancse: .*; did you mean instances."),
        ("[models.n.instancse]\na = 3", "FILE line 1 has the unknown option instancse: .*"),
        ("models = { n = { instancse = 3 } }", "FILE has the unknown option instancse: .*"),
        (
            "[models.m]\ninstances = 1\n[models.n]\ninstances = 'x'",
            'instances in FILE line 4 is of another kind: .* "x"',
        ),
        ("[default]\nwarmup = 3", "warmup in FILE line 2 is of another kind: expected whole numbers .*"),
        ("[default]\nrate_limit.cores = 0", "rate_limit in FILE line 2 is of another kind: expected resources, .*"),
        ("[default]\ninstances = 2026-01-01", "instances in FILE line 2 is of another kind: .*"),
        ("[default]\ntimeout_action = 'delya'", "timeout_action in FILE line 2 is unknown: .*; did you mean delay."),
        (
            "[tickets]\ninstances = 1",
            "FILE line 1 has the unknown table tickets: .* write .models.tickets. for a model",
        ),
        ("[model.n]", "FILE line 1 has the unknown table model: .*; did you mean .models.NAME..$"),
        ("[defaults]", "FILE line 1 has the unknown table defaults: .*; did you mean .default..$"),
        ("[models.n.config.a]\ninstances = 1", "FILE.* has the unknown option config: .*; did you mean configs."),
        ("instances = 1", "FILE line 1 has the unknown table instances: .* below .default.."),
        ("default = 3", "FILE line 1 has no table default: expected options below its name in brackets, got 3."),
        ("models = 3", "FILE line 1 has no table models.n: .*, got 3."),
        ("[default", "FILE cannot be read: expected a TOML file, got .*at end of document"),
    ],
)
def test_a_table_that_means_nothing_is_refused_with_its_line(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refusal:
        read_toml(tmp_path, text)
    assert re.match(sentence, str(refusal.value).replace(str(tmp_path / "modelyard.toml"), "FILE")), str(refusal.value)


def test_the_file_of_the_working_directory_is_read_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_options(None, "n", print) == {}
    Path("modelyard.toml").write_text("[models.n]\ninstances = 4")
    assert read_options(None, "n", print) == {"instances": 4}
    assert read_options(write(tmp_path, {"seed": 1}), "n", print) == {"seed": 1}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--default-priority-level", "1"], "--default-priority-level has no effect without --priority-levels: "),
        (["--default-priority-level", "3", "--priority-levels", "2"], ".* expected one from 1 to 2, got 3"),
    ],
)
def test_a_priority_needs_levels(words: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        parse(*words)


def test_a_file_of_options_that_is_there_and_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("modelyard.toml")
    path.write_bytes(codecs.BOM_UTF8 + b"[models.n]\ninstances = 4")
    assert read_options(None, "n", print) == {"instances": 4}
    path.unlink()
    for make in (
        path.mkdir,
        partial(os.mkfifo, path),
        partial(path.symlink_to, path),
        partial(path.symlink_to, "/dev/zero"),
    ):
        make()
        with pytest.raises(SettingsError, match="modelyard.toml cannot be read: expected a TOML file"):
            read_options(None, "n", print)
        path.rename("away")
        path.with_name("away").rmdir() if path.with_name("away").is_dir() else path.with_name("away").unlink()
