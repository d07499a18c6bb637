"""What `inspect` and `run` say of memory, beside what real processes hold."""

import json
import os
import re
import shlex
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest
from benches.measure_memory import build_checkpoint, build_decoder, measure
from harness import CHECKOUT, run
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BertConfig,
    BertModel,
    DistilBertConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    XLNetConfig,
)

from export.checkpoints import open_checkpoint
from export.commands.inspect_checkpoint import format_inspection, inspect_checkpoint
from export.commands.memory_estimates import (
    EMBEDDED_BYTES,
    FAMILIES,
    GRAPHS,
    WRITERS,
    Held,
    count_pool,
    count_row,
    estimate_memory,
)
from export.engines.openvino_generation import BLOCK_TOKENS, PARAMETERS, PROPERTIES, VALUE_BYTES
from export.engines.table import ENGINES
from export.graph.onnx_export import EXTERNAL_ABOVE_BYTES
from modelyard.free_memory import read_free_memory

TINY = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}

# What the documents promise.
OFF_AT_MOST = 0.2

PAGE = CHECKOUT / "docs" / "checkpoints.md"

# As the kernel names the version 1 of control groups, which lets a folder be made in which a limit holds.
LIMITS = Path("/sys/fs/cgroup/memory")


@pytest.mark.rarer
def test_an_export_and_an_instance_hold_what_was_told(tmp_path: Path) -> None:
    checkpoint = build_checkpoint("bert", "4x256", tmp_path / "checkpoint")
    held = measure(checkpoint, "onnxruntime:fp32", tmp_path / "models")
    told = inspect_checkpoint(checkpoint).memory["onnxruntime"]["fp32"]
    assert told["export_bytes"] == pytest.approx(held.export, rel=OFF_AT_MOST)
    assert told["instance_bytes"] == pytest.approx(held.instance, rel=OFF_AT_MOST)


def test_the_page_has_what_was_measured_beside_what_is_told() -> None:
    titles = {engine.title: name for name, engine in ENGINES.items()}
    rows = r"^\| ([^|,]+) (\w+)(?:, ([\w-]+))? \| \d+ x (\d+) \| (\d+) tokens \| (.*) \|$"
    found = re.findall(rows, PAGE.read_text(), re.MULTILINE)
    sizes: Counter[tuple[str, str, str]] = Counter()
    for title, precision, family, width, length, rest in found:
        engine = "openvino-genai" if title == "text generation" else titles[title]
        sizes[engine, precision, family] += 1
        weights, table, export, told_export, _, instance, told_instance, _ = (
            int(number.split()[0].replace(",", "").rstrip("%")) for number in rest.split(" | ")
        )
        held = _find_held(engine, precision, family)
        config = {"hidden_size": int(width), "num_attention_heads": int(width) // 64}
        row = count_row(config | {"max_position_embeddings": int(length)}, Path("none"))
        # What writes text holds the whole table.
        table = 0 if engine == "openvino-genai" else table
        shown, _ = held.measure_instance(weights * 10**6, table * 10**6, row)
        assert told_export == pytest.approx(held.export.at(weights * 10**6, row) / 1e6, abs=1)
        assert told_instance == pytest.approx(shown / 1e6, abs=1)
        assert told_export == pytest.approx(export, rel=OFF_AT_MOST)
        assert told_instance == pytest.approx(instance, rel=OFF_AT_MOST)
    counted = {(name, precision, ""): held.sizes for name, by in GRAPHS.items() for precision, held in by.items()}
    counted |= {("onnxruntime", "fp32", family): held.sizes for family, held in FAMILIES.items()}
    assert sizes == counted | {("openvino-genai", precision, ""): held.sizes for precision, held in WRITERS.items()}


def test_what_lies_in_the_graphs_own_file_is_what_the_export_puts_there() -> None:
    assert EMBEDDED_BYTES == EXTERNAL_ABOVE_BYTES


def _find_held(engine: str, precision: str, family: str) -> Held:
    if engine == "openvino-genai":
        return WRITERS[precision]
    return FAMILIES[family] if family else GRAPHS[engine][precision]


@pytest.mark.parametrize(
    ("model", "is_own"),
    [
        (BertModel(BertConfig(**TINY)), (True, True)),
        (T5EncoderModel(T5Config(vocab_size=64, d_model=8, num_layers=1, num_heads=1)), (True, False)),
        (AlbertModel(AlbertConfig(**TINY)), (False, False)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_family_that_was_not_measured_is_told_as_a_bert(
    model: PreTrainedModel, is_own: tuple[bool, bool], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    told = estimate_memory(open_checkpoint(tmp_path))
    found = (told["onnxruntime"]["fp32"], told["openvino"]["fp32"])
    assert tuple("as_of" not in each for each in found) == is_own
    if not is_own[1]:
        text = format_inspection(inspect_checkpoint(tmp_path))
        assert "as of a BERT: none of this architecture has been measured" in text


@pytest.mark.parametrize(
    ("config", "length", "intermediate", "heads"),
    [
        (BertConfig(), 512, 3072, 12),
        (DistilBertConfig(), 512, 3072, 12),
        (BartConfig(), 1024, 4096, 16),
        (T5Config(), 512, 2048, 8),
        (XLNetConfig(), 512, 4096, 16),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_largest_activations_are_counted_by_the_names_of_each_architecture(
    config: PretrainedConfig, length: int, intermediate: int, heads: int
) -> None:
    assert count_row(config.to_dict(), Path("none")) == 4 * length * (intermediate + heads * length)


def test_the_longest_text_is_the_shortest_that_any_file_allows(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert count_row(config, checkpoint) == 4 * 256 * (1536 + 12 * 256)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert count_row(config, tmp_path) == 4 * 512 * (1536 + 12 * 512)
    # Nor is that a length where the model has no positions of its own.
    unlimited = {key: value for key, value in config.items() if key != "max_position_embeddings"}
    assert count_row(unlimited, tmp_path) == 4 * 512 * (1536 + 12 * 512)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    assert count_row(config, tmp_path) == 4 * 100 * (1536 + 12 * 100)


def test_a_model_that_writes_text_is_told_its_pool(tmp_path: Path) -> None:
    checkpoint = build_decoder("gpt2", "2x128", tmp_path / "checkpoint")
    told = inspect_checkpoint(checkpoint).memory
    assert list(told) == ["openvino-genai"]
    assert set(told["openvino-genai"]["fp32"]) == {"export_bytes", "instance_bytes", "sizes", "kv_pool_bytes"}
    assert set(told["openvino-genai"]["int8"]) == {"kv_pool_bytes"}
    # Two layers of keys and values of 128 in fp32; 64 texts of 1024 tokens have 34 blocks of 32 each.
    assert told["openvino-genai"]["fp32"]["kv_pool_bytes"] == 2 * 2 * 128 * 4 * 32 * 34 * 64
    large = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert 0 <= (1 << 30) - count_pool(large | {"max_position_embeddings": 8192}, "fp32") < 1 << 24
    assert PARAMETERS["kv_cache_mb"] == "1024" and PARAMETERS["max_num_seqs"] == "64" and BLOCK_TOKENS == 32


def test_what_is_told_is_of_engines_and_precisions_that_there_are() -> None:
    for name, precisions in GRAPHS.items():
        assert set(precisions) <= set(ENGINES[name].graph_precisions)
    assert set(VALUE_BYTES) == set(PROPERTIES)


def test_run_warns_before_it_takes_more_than_there_is(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    # A file with a hole: as long as its header says, on hardly any disk.
    size = 4 << 40
    entry = {"large": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    header = json.dumps(entry).encode()
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    (checkpoint / "config.json").write_text('{"model_type": "none_such", "architectures": ["NoneSuch"]}')
    done = run("-m", "export", "run", str(checkpoint), "--name", "m", "--repository", str(tmp_path / "models"))
    assert done.code == 1
    first, *rest = done.err.splitlines()
    assert first.startswith("Warning: this export in fp32 is expected to hold ")
    assert first.endswith(" GB are free here; give it more, or it may be killed.")
    assert "none_such" in "".join(rest)


@pytest.mark.skipif(not os.access(LIMITS / "tasks", os.W_OK), reason="makes a control group; run as root, version 1")
def test_what_is_free_is_no_more_than_a_control_group_allows() -> None:
    group = LIMITS / f"modelyard-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
        code = "from modelyard.free_memory import read_free_memory; print(read_free_memory())"
        command = f"echo $$ > {group}/cgroup.procs; exec {shlex.quote(sys.executable)} -c '{code}'"
        done = run("-c", f"import os; os.execv('/bin/sh', ['sh', '-c', {command!r}])")
        assert 100 << 20 < int(done.out) < 300 << 20
    finally:
        group.rmdir()
    free = read_free_memory()
    assert free is not None and free > 300 << 20
