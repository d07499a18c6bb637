"""What `inspect` and `run` say of memory, beside what real processes hold."""

import json
import os
import re
import shlex
import struct
import sys
from pathlib import Path

import pytest
from benches.measure_memory import build_checkpoint, build_decoder, measure
from harness import CHECKOUT, run
from transformers import BartConfig, BertConfig, DistilBertConfig, PretrainedConfig, T5Config, XLNetConfig

from export.commands.free_memory import read_free_memory
from export.commands.inspect_checkpoint import inspect_checkpoint
from export.commands.memory_estimates import GRAPHS, WRITERS, count_pool, count_row
from export.engines.openvino_generation import BLOCK_TOKENS, PARAMETERS, PROPERTIES, VALUE_BYTES
from export.engines.table import ENGINES

# What the documents promise.
OFF_AT_MOST = 0.2

PAGE = CHECKOUT / "docs" / "checkpoints.md"

# As the kernel names the version 1 of control groups, which lets a folder be made in which a limit holds.
LIMITS = Path("/sys/fs/cgroup/memory")


@pytest.mark.rarer
def test_an_export_and_an_instance_hold_what_was_told(tmp_path: Path) -> None:
    checkpoint = build_checkpoint("4x256", tmp_path / "checkpoint")
    held = measure(checkpoint, "onnxruntime:fp32", tmp_path / "models")
    told = inspect_checkpoint(checkpoint).memory["onnxruntime"]["fp32"]
    assert told["export_bytes"] == pytest.approx(held.export, rel=OFF_AT_MOST)
    assert told["instance_bytes"] == pytest.approx(held.instance, rel=OFF_AT_MOST)


def test_the_page_has_what_was_measured_beside_what_is_told() -> None:
    titles = {engine.title: name for name, engine in ENGINES.items()}
    cells = [
        line.strip("| ").split(" | ")
        for line in PAGE.read_text().splitlines()
        if line.startswith(tuple(f"| {title} " for title in titles))
    ]
    sizes: dict[tuple[str, str], set[int]] = {}
    for way, *numbers in cells:
        title, precision = way.rsplit(" ", 1)
        weights, table, export, told_export, _, instance, told_instance, _ = (
            int(number.split()[0].replace(",", "").rstrip("%")) for number in numbers
        )
        held = GRAPHS[titles[title]][precision]
        sizes.setdefault((titles[title], precision), set()).add(weights)
        assert told_export == pytest.approx(held.export.at(weights * 10**6) / 1e6, abs=1)
        assert told_instance == pytest.approx(held.instance.at((weights - table) * 10**6) / 1e6, abs=1)
        assert told_export == pytest.approx(export, rel=OFF_AT_MOST)
        assert told_instance == pytest.approx(instance, rel=OFF_AT_MOST)
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| text gen")]
    assert len(rows) == WRITERS["fp32"].sizes
    for _, *numbers in rows:
        weights, _, export, told_export, _, instance, told_instance, _ = (
            int(number.split()[0].replace(",", "").rstrip("%")) for number in numbers
        )
        assert told_export == pytest.approx(WRITERS["fp32"].export.at(weights * 10**6) / 1e6, abs=1)
        assert told_instance == pytest.approx(WRITERS["fp32"].instance.at(weights * 10**6) / 1e6, abs=1)
        assert told_export == pytest.approx(export, rel=OFF_AT_MOST)
        assert told_instance == pytest.approx(instance, rel=OFF_AT_MOST)
    rows = re.findall(r"^\| \d+ x (\d+) \| (\d+) tokens \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    graph = GRAPHS["onnxruntime"]["fp32"]
    assert len(rows) == graph.sizes
    sizes["onnxruntime", "fp32"] = {*range(len(rows))}
    for width, length, rest in rows:
        weights, table, export, told_export, _, instance, told_instance, _ = (
            int(number.split()[0].replace(",", "").rstrip("%")) for number in rest.split(" | ")
        )
        config = {"hidden_size": int(width), "num_attention_heads": int(width) // 64}
        row = count_row(config | {"max_position_embeddings": int(length)}, Path("none"))
        assert told_export == pytest.approx(graph.export.at(weights * 10**6, row) / 1e6, abs=1)
        assert told_instance == pytest.approx(graph.instance.at((weights - table) * 10**6) / 1e6, abs=1)
        assert told_export == pytest.approx(export, rel=OFF_AT_MOST)
        assert told_instance == pytest.approx(instance, rel=OFF_AT_MOST)
    counted = {(name, precision): held.sizes for name, held_by in GRAPHS.items() for precision, held in held_by.items()}
    assert {way: len(each) for way, each in sizes.items()} == counted


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
    checkpoint = build_decoder("2x128", tmp_path / "checkpoint")
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
        code = "from export.commands.free_memory import read_free_memory; print(read_free_memory())"
        command = f"echo $$ > {group}/cgroup.procs; exec {shlex.quote(sys.executable)} -c '{code}'"
        done = run("-c", f"import os; os.execv('/bin/sh', ['sh', '-c', {command!r}])")
        assert 100 << 20 < int(done.out) < 300 << 20
    finally:
        group.rmdir()
    free = read_free_memory()
    assert free is not None and free > 300 << 20
