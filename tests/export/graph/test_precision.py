import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from harness import Published, run
from launcher import read_golden_texts
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from tokenizers import Tokenizer
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2Model

from export.errors import PrecisionError
from export.graph.conversion import Conversion, Measure, PrecisionReport, Quality, convert_graph
from export.graph.files import Feed, find_files, load_graph, measure_ranges, open_session, run_feeds
from export.graph.fp16 import write_float16
from export.graph.int8 import _find_fewest, _find_quantized, _quantize, _restore
from export.graph.islands import find_islands
from export.graph.onnx_export import OPSET, export_onnx
from export.graph.precisions import COSINE, LABEL_AGREEMENT, PRECISIONS
from export.graph.speed import Speed
from export.signature import BATCH, SEQ_LEN, ModelSignature, TensorSignature
from export.targets import DEFAULT_TARGET

CONVERTING = [precision.name for precision in PRECISIONS.values() if precision.converts]


def convert(
    precision: str, source: Path, path: Path, *, threshold: float | None = None, **options: object
) -> PrecisionReport:
    """Convert a graph, held to the usual thresholds of the precision or to another one."""
    usual = PRECISIONS[precision].thresholds
    bounds = usual if threshold is None else dict.fromkeys(usual, threshold)
    conversion = Conversion(source=source, destination=path, bounds=bounds, **options)
    return convert_graph(PRECISIONS[precision], conversion)


def compare_rows(expected: Sequence[np.ndarray], got: Sequence[np.ndarray], metric: str = COSINE) -> Quality:
    """Return how near rows of values are, each array [..., values] and of the same shape in both."""
    want, have = (
        np.concatenate([array.reshape(-1, array.shape[-1]).astype(np.float64) for array in arrays])
        for arrays in (expected, got)
    )
    if metric == LABEL_AGREEMENT:
        share = float((want.argmax(axis=1) == have.argmax(axis=1)).mean())
        return Quality(metric=metric, worst=share, mean=share, rows=len(want))
    cosines = (want * have).sum(axis=1) / np.linalg.norm(want, axis=1) / np.linalg.norm(have, axis=1)
    return Quality(metric=metric, worst=float(cosines.min()), mean=float(cosines.mean()), rows=len(cosines))


@dataclass(frozen=True)
class Real:
    """The real checkpoint's graph, questions to it, and a measure against what torch answers."""

    graph: Path
    feeds: list[Feed]
    measure: Measure


@pytest.fixture(scope="module")
def real(published: Published) -> Real:
    repository = published.repository
    tokenizer = Tokenizer.from_file(str(repository / "sentence_embedding_preprocess" / "1" / "tokenizer.json"))
    golden, _ = read_golden_texts(repository, "sentence_embedding")
    batches = [golden[start : start + 4] for start in range(0, len(golden), 4)]
    feeds = []
    for batch in batches:
        rows = tokenizer.encode_batch([text for text, _ in batch])
        feeds.append({
            "input_ids": np.array([row.ids for row in rows]),
            "attention_mask": np.array([row.attention_mask for row in rows]),
            "token_type_ids": np.array([row.type_ids for row in rows]),
        })  # fmt: skip
    expected = [np.array([vector for _, vector in batch]) for batch in batches]

    def measure(path: Path) -> Quality:
        return compare_rows(expected, [answers[0] for answers in run_feeds(open_session(path), feeds)])

    return Real(repository / "sentence_embedding_model" / "1" / "model.onnx", feeds, measure)


@pytest.fixture(scope="module")
def converted(real: Real, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PrecisionReport]]:
    made = {}
    for precision in CONVERTING:
        path = tmp_path_factory.mktemp(precision) / "model.onnx"
        made[precision] = (path, convert(precision, real.graph, path, feeds=real.feeds, measure=real.measure))
        assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    return made


def list_tensors(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    return [(item.name, item.type.SerializeToString()) for item in (*model.graph.input, *model.graph.output)]


# As measured: fp16 0.9999996, bf16 0.99997, int8 from 0.99 on, with 0.969 where nothing stays fp32.
@pytest.mark.parametrize(
    ("precision", "cosine", "size"), [("fp16", 0.99999, 0.51), ("bf16", 0.9999, 0.51), ("int8", 0.99, 0.45)]
)
def test_the_real_model_answers_as_torch_does_at_half_the_size_or_less(
    real: Real, converted: dict[str, tuple[Path, PrecisionReport]], precision: str, cosine: float, size: float
) -> None:
    path, report = converted[precision]
    assert report.quality == real.measure(path)
    assert cosine <= report.quality.worst <= report.quality.mean <= 1.0
    assert report.quality.rows == 16
    assert report.model_bytes == path.stat().st_size
    assert report.size_ratio == report.model_bytes / real.graph.stat().st_size < size
    onnx.checker.check_model(str(path), full_check=True)
    before, after = onnx.load(real.graph), onnx.load(path)
    assert list_tensors(after) == list_tensors(before)
    assert (after.ir_version, after.opset_import[0].version) == (before.ir_version, OPSET)
    assert {item.domain for item in after.opset_import} == {""}


def test_a_vector_of_length_1_keeps_it_in_fp16(real: Real, converted: dict[str, tuple[Path, PrecisionReport]]) -> None:
    vectors = np.concatenate([answers[0] for answers in run_feeds(open_session(converted["fp16"][0]), real.feeds)])
    # One step of fp16 in the norm alone would be 5e-4.
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)


def test_int8_keeps_few_nodes_in_fp32(converted: dict[str, tuple[Path, PrecisionReport]]) -> None:
    _, report = converted["int8"]
    sensitive = [name for name, reason in report.kept_fp32.items() if reason == "sensitive to int8"]
    assert 0 < len(sensitive) <= 15, "of 37; 10 as measured"
    assert report.measured <= 8, "log2 of 37, and both ends"
    assert report.speed.ratio > 0, "measured, whatever this CPU makes of it"
    assert report.threshold == 0.99


def test_fp16_leaves_masks_and_norms_in_fp32_and_every_product_of_matrices_in_fp16(
    converted: dict[str, tuple[Path, PrecisionReport]],
) -> None:
    path, report = converted["fp16"]
    graph = load_graph(path).graph
    types = {node.op_type: set() for node in graph}
    for node in graph:
        types[node.op_type].add(node.outputs[0].dtype)
    assert types["MatMul"] == {ir.DataType.FLOAT16}
    assert types["LayerNormalization"] == types["Softmax"] == {ir.DataType.FLOAT}
    assert sum("mask" in reason for reason in report.kept_fp32.values()) == 12, (
        "what adds the mask, and softmax, six times"
    )


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=2000,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=5,
            attn_implementation="eager",
        )
        self.model = BertForSequenceClassification(config)
        # Random heads prefer one label for everything.
        nn.init.normal_(self.model.classifier.weight, std=2.0)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=inputs[0], attention_mask=inputs[1]).logits


class Decoder(nn.Module):
    """A GPT-2 of which one token's features grow to 1e5 inside, as in large language models."""

    def __init__(self, growth: float = 3e6) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=2000,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            attn_implementation="eager",
            use_cache=False,
        )
        self.model = GPT2Model(config)
        self.model.h[0].mlp.c_fc.weight.data *= 20
        self.model.h[0].mlp.c_proj.weight.data[:, 3] *= growth

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=inputs[0], attention_mask=inputs[1]).last_hidden_state


class Constant(nn.Module):
    """A constant that fp16 cannot hold, in the middle of what it can, and one that it rounds to nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(2000, 32)
        self.linear = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.full((32,), 1e6))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        mask = inputs[1].unsqueeze(-1).float()
        hidden = self.linear(self.embedding(inputs[0])) * mask
        scaled = hidden * self.scale + self.scale
        return torch.log(scaled.abs() + 1e-9) / self.scale.sqrt()


def export(module: nn.Module, path: Path, dims: tuple[str | int, ...]) -> Path:
    names = ("input_ids", "attention_mask")
    signature = ModelSignature(
        inputs=tuple(TensorSignature(name=name, dtype=torch.int64, dims=(BATCH, SEQ_LEN)) for name in names),
        outputs=(TensorSignature(name="made", dtype=torch.float32, dims=dims),),
    )
    example = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    export_onnx(module.eval(), signature, example, path, DEFAULT_TARGET)
    return path


def build_feeds(count: int = 6) -> list[Feed]:
    generator = np.random.default_rng(0)
    feeds = []
    for _ in range(count):
        mask = np.ones((3, 12), dtype=np.int64)
        mask[1, 7:] = mask[2, 4:] = 0
        feeds.append({"input_ids": generator.integers(0, 2000, (3, 12)), "attention_mask": mask})
    return feeds


def measure_torch(module: nn.Module, feeds: Sequence[Feed], metric: str = COSINE) -> Measure:
    with torch.no_grad():
        expected = [module(*(torch.tensor(value) for value in feed.values())).numpy() for feed in feeds]
    return lambda path: compare_rows(expected, [row[0] for row in run_feeds(open_session(path), feeds)], metric)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Classifier, Path]:
    module = Classifier().eval()
    return module, export(module, tmp_path_factory.mktemp("classifier") / "model.onnx", (BATCH, 5))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Path]:
    module = Decoder().eval()
    return module, export(module, tmp_path_factory.mktemp("decoder") / "model.onnx", (BATCH, SEQ_LEN, 32))


def test_the_quantizer_leaves_the_root_logger_as_it_was(
    classifier: tuple[Classifier, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = list(logging.getLogger().handlers)
    _quantize(classifier[1], tmp_path, 1 << 40)
    assert logging.getLogger().handlers == handlers and not logging.getLogger().disabled
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("precision", CONVERTING)
def test_a_classifier_keeps_its_labels(classifier: tuple[Classifier, Path], tmp_path: Path, precision: str) -> None:
    module, source = classifier
    feeds = build_feeds()
    measure = measure_torch(module, feeds, LABEL_AGREEMENT)
    report = convert(precision, source, tmp_path / "model.onnx", feeds=feeds, measure=measure)
    assert report.quality == Quality(metric=LABEL_AGREEMENT, worst=1.0, mean=1.0, rows=18)
    assert report.threshold == (0.98 if precision == "int8" else 0.99)


@pytest.mark.parametrize("precision", CONVERTING)
def test_the_same_graph_gives_the_same_bytes_and_nothing_of_the_machine(
    classifier: tuple[Classifier, Path], tmp_path: Path, precision: str
) -> None:
    module, source = classifier
    feeds = build_feeds()
    paths = [tmp_path / name / "model.onnx" for name in ("once", "twice")]
    reports = []
    for path in paths:
        path.parent.mkdir()
        measure = measure_torch(module, feeds)
        reports.append(convert(precision, source, path, feeds=feeds, measure=measure, threshold=0.9))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert (reports[0].kept_fp32, reports[0].quality) == (reports[1].kept_fp32, reports[1].quality)
    model = onnx.load(paths[0])
    assert not (model.metadata_props or model.producer_name or model.producer_version or model.doc_string)
    assert str(tmp_path.parent).encode() not in paths[0].read_bytes()


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp16", r"^fp16 does not hold the quality asked for: expected cosine >= 2, got 1; ask for less, or export"),
        ("int8", r"^int8 does not hold the quality asked for, whichever of 14 nodes stay fp32: expected cosine >= 2, "),
    ],
)
def test_an_impossible_threshold_is_refused_in_one_sentence(
    classifier: tuple[Classifier, Path], tmp_path: Path, precision: str, message: str
) -> None:
    module, source = classifier
    feeds = build_feeds()
    measure = measure_torch(module, feeds)
    with pytest.raises(PrecisionError, match=message):
        convert(precision, source, tmp_path / "model.onnx", feeds=feeds, measure=measure, threshold=2.0)


def test_a_node_that_was_put_back_is_as_the_quantizer_leaves_it(
    classifier: tuple[Classifier, Path], tmp_path: Path
) -> None:
    _, source = classifier
    quantized = _quantize(source, tmp_path, 1 << 40)
    nodes, small = _find_quantized(source, quantized)
    kept = [nodes[0], *nodes[5:9], *small]
    restored, excluded = tmp_path / "restored.onnx", tmp_path / "excluded.onnx"
    ir.save(_restore(source, quantized, kept), restored)
    quantize_dynamic(
        # Not the source: it stumbles over the shapes of a Gemm.
        tmp_path / "plain.onnx",
        excluded,
        op_types_to_quantize=["MatMul", "Gather"],
        per_channel=True,
        weight_type=QuantType.QUInt8,
        nodes_to_exclude=kept,
    )
    assert restored.stat().st_size == pytest.approx(excluded.stat().st_size, rel=1e-2)
    for got, want in zip(*(run_feeds(open_session(path), build_feeds()) for path in (restored, excluded)), strict=True):
        np.testing.assert_array_equal(got[0], want[0])


def test_a_linear_layer_with_bias_on_vectors_becomes_int8_and_fp32_again(
    classifier: tuple[Classifier, Path], tmp_path: Path
) -> None:
    _, source = classifier
    gemms = {node.name for node in load_graph(source).graph if node.op_type == "Gemm"}
    quantized = _quantize(source, tmp_path, 1 << 40)
    nodes, small = _find_quantized(source, quantized)
    assert gemms and gemms <= set(nodes)
    ir.save(_restore(source, quantized, [*nodes, *small]), tmp_path / "restored.onnx")
    feeds = build_feeds(1)
    got, want = (run_feeds(open_session(path), feeds)[0][0] for path in (tmp_path / "restored.onnx", source))
    np.testing.assert_array_equal(got, want)


class Tied(nn.Module):
    """Its table is looked up, and multiplied with the last token's vector: by a Gemm that transposes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(2000, 256)
        self.linear = nn.Linear(256, 256)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(self.embedding(inputs[0])) * inputs[1].unsqueeze(-1)
        return nn.functional.linear(hidden[:, 0], self.embedding.weight)


def test_a_table_that_is_multiplied_as_well_stays_what_it_is(tmp_path: Path) -> None:
    module, feeds = Tied().eval(), build_feeds()
    (tmp_path / "fp32").mkdir()
    source = export(module, tmp_path / "fp32" / "model.onnx", (BATCH, 2000))
    path = tmp_path / "model.onnx"
    report = convert("int8", source, path, feeds=feeds, measure=measure_torch(module, feeds))
    assert report.quality.worst > 0.999
    shared = [
        name for name, reason in report.kept_fp32.items() if reason == "its constant is read by other nodes as well"
    ]
    graph = load_graph(path).graph
    assert {node.op_type for node in load_graph(source).graph if node.name in shared} == {"Gather", "Gemm"}
    assert sum(node.op_type == "MatMulInteger" for node in graph) == 1
    tables = [value for value in graph.initializers.values() if value.shape == ir.Shape([2000, 256])]
    assert len(tables) == 1, "stored once"


def test_large_values_inside_stay_fp32_and_would_be_infinite_otherwise(
    decoder: tuple[Decoder, Path], tmp_path: Path
) -> None:
    module, source = decoder
    feeds = build_feeds()
    measure = measure_torch(module, feeds)
    report = convert("fp16", source, tmp_path / "model.onnx", feeds=feeds, measure=measure)
    assert report.quality.worst > 0.9999
    assert any(reason.startswith("values up to") for reason in report.kept_fp32.values())
    assert any(node.op_type == "MatMul" and node.name not in report.kept_fp32 for node in load_graph(source).graph), (
        "only what needs it stays fp32"
    )
    unseen = find_islands(load_graph(source), {})
    write_float16(source, tmp_path / "naive.onnx", unseen)
    with np.errstate(all="ignore"):
        assert not measure(tmp_path / "naive.onnx").holds(0.9999)


def test_constants_that_fp16_cannot_hold_stay_as_they_are(tmp_path: Path) -> None:
    module, feeds = Constant().eval(), build_feeds()
    (tmp_path / "fp32").mkdir()
    source = export(module, tmp_path / "fp32" / "model.onnx", (BATCH, SEQ_LEN, 32))
    path = tmp_path / "model.onnx"
    report = convert("fp16", source, path, feeds=feeds, measure=measure_torch(module, feeds))
    assert any(reason == "reads a constant beyond fp16, 1e+06" for reason in report.kept_fp32.values())
    assert report.quality.worst > 0.9999
    scale = load_graph(path).graph.initializers["scale"].const_value
    assert scale is not None and scale.numpy().dtype == np.float32 and (scale.numpy() == 1e6).all()


def test_positions_are_never_fp16(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            positions = inputs[1].cumsum(dim=1).float() + 3000.0
            angles = positions.unsqueeze(-1) * torch.pow(10000.0, -torch.arange(16) / 16)
            return torch.cat([angles.sin(), angles.cos()], dim=-1) * inputs[0].unsqueeze(-1)

    (tmp_path / "fp32").mkdir()
    source = export(Rotary(), tmp_path / "fp32" / "model.onnx", (BATCH, SEQ_LEN, 32))
    feeds = build_feeds()
    report = convert("fp16", source, tmp_path / "model.onnx", feeds=feeds, measure=measure_torch(Rotary(), feeds))
    assert report.quality.worst > 0.9999999
    assert set(report.kept_fp32.values()) >= {"computed from integers and constants alone"}


BRANCHED = """<ir_version: 10, opset_import: ["": 18]>
main (float[batch, 4] x, bool flag) => (float[batch, 4] y, float[batch, 4] hidden)
<float[4, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6}>
{
    hidden = MatMul(x, w)
    chosen = If(flag) <
        then_branch = yes () => (float[batch, 4] a) { a = Add(hidden, x) },
        else_branch = no () => (float[batch, 4] b) { b = Neg(hidden) }
    >
    y = MatMul(chosen, w)
}"""


def test_a_branch_reads_fp32_and_an_output_in_the_middle_keeps_name_and_type(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(BRANCHED)
    source, path = tmp_path / "source.onnx", tmp_path / "model.onnx"
    onnx.save(model, source)
    write_float16(source, path, find_islands(load_graph(source), {}))
    onnx.checker.check_model(str(path), full_check=True)
    for flag in (True, False):
        feeds = [{"x": np.array([[1, 2, 3, 4]], np.float32), "flag": np.array(flag)}]
        (want,), (got,) = (run_feeds(open_session(file), feeds) for file in (source, path))
        for expected, answer in zip(want, got, strict=True):
            np.testing.assert_allclose(answer, expected, rtol=2e-3)
            assert answer.dtype == np.float32
    types = {node.op_type: node.outputs[0].dtype for node in load_graph(path).graph}
    assert types["MatMul"] == ir.DataType.FLOAT16
    assert types["If"] == ir.DataType.FLOAT


OVERFLOWING = """<ir_version: 10, opset_import: ["": 18]>
main (float[batch, 4] x) => (float[batch, 4] y)
<float[1] big = {1e5}, float[4] ones = {1, 1, 1, 1}, float[4] zeros = {0, 0, 0, 0}>
{
    scaled = Mul(x, big)
    moved = Add(scaled, big)
    normal = LayerNormalization(moved, ones, zeros)
    y = Mul(normal, ones)
}"""


def test_the_converter_of_onnxruntime_loses_what_islands_are_for_and_this_one_does_not(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(OVERFLOWING)
    for index, node in enumerate(model.graph.node):
        node.name = f"node_{index}"
    source, path = tmp_path / "source.onnx", tmp_path / "model.onnx"
    onnx.save(model, source)
    feeds = [{"x": np.array([[1, 2, 3, 4]], np.float32)}]
    islands = find_islands(load_graph(source), measure_ranges(source, feeds, tmp_path))
    assert set(islands) == {"node_0", "node_1", "node_2", "node_3"}
    theirs = convert_float_to_float16(model, keep_io_types=True, node_block_list=list(islands))
    session = onnxruntime.InferenceSession(theirs.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.isnan(session.run(None, feeds[0])[0]).all(), "mend the docstring of export/graph/fp16.py"
    write_float16(source, path, islands)
    (want,), (got,) = (run_feeds(open_session(file), feeds) for file in (source, path))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3)


def test_constants_that_are_called_as_made_up_names_are_become_int8(tmp_path: Path) -> None:
    """torch's exporter calls some of them val_0 and so on, as onnx_ir calls what has no name."""
    random, width = np.random.default_rng(0), 64
    names = [f"val_{index}" for index in range(12)]
    values = ["x", *(f"h{index}" for index in range(len(names)))]
    nodes = [
        onnx.helper.make_node("MatMul", [values[index], name], [values[index + 1]], name=f"product_{index}")
        for index, name in enumerate(names)
    ]
    made = [
        onnx.numpy_helper.from_array(random.standard_normal((width, width)).astype(np.float32) / 8, name)
        for name in names
    ]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", width]) for name in ("x", values[-1])
    ]
    known = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", width]) for name in values[1:-1]
    ]
    graph = onnx.helper.make_graph(nodes, "main", ends[:1], ends[1:], made, value_info=known)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=9)
    (tmp_path / "fp32").mkdir()
    source = tmp_path / "fp32" / "model.onnx"
    onnx.save(model, source)
    feeds = [{"x": random.standard_normal((8, width)).astype(np.float32)}]
    want = run_feeds(open_session(source), feeds)

    def measure(path: Path) -> Quality:
        return compare_rows([each[0] for each in want], [each[0] for each in run_feeds(open_session(path), feeds)])

    report = convert("int8", source, tmp_path / "model.onnx", feeds=feeds, measure=measure, threshold=0.9)
    assert report.quality.worst > 0.9


def test_the_largest_values_are_found_without_holding_all_of_them(tmp_path: Path) -> None:
    """60 values of 8 MB one after another: as many of them at once as a run holds, and not all."""
    values = ["x", *(f"h{index}" for index in range(60))]
    nodes = [
        onnx.helper.make_node("Mul", [values[index], "half"], [values[index + 1]], name=f"mul_{index}")
        for index in range(60)
    ]
    half = onnx.numpy_helper.from_array(np.array(1.01, np.float32), "half")
    known = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["size"]) for name in values]
    graph = onnx.helper.make_graph(nodes, "main", known[:1], known[-1:], [half], value_info=known[1:-1])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.save(model, tmp_path / "source.onnx")
    code = (
        "import resource, sys, numpy as np; from pathlib import Path; from export.graph.files import measure_ranges; "
        "folder = Path(sys.argv[1]); feed = {'x': np.ones(1 << 21, np.float32)}; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "ranges = measure_ranges(folder / 'source.onnx', [feed], folder); "
        "print(len(ranges), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = run("-c", code, tmp_path)
    assert done.code == 0, done.err
    count, kilobytes = map(int, done.out.split())
    assert count == 60 and kilobytes < 200_000, kilobytes


@pytest.mark.parametrize("precision", CONVERTING)
def test_weights_in_a_file_of_their_own_stay_in_one(
    decoder: tuple[Decoder, Path], tmp_path: Path, precision: str
) -> None:
    module, inline = decoder
    feeds = build_feeds()
    measure = measure_torch(module, feeds)
    for name in ("fp32", "small", "large"):
        (tmp_path / name).mkdir()
    source = tmp_path / "fp32" / "model.onnx"
    ir.save(ir.load(inline), source, external_data="model.onnx.data", size_threshold_bytes=1024)
    small, large = tmp_path / "small" / "model.onnx", tmp_path / "large" / "model.onnx"
    options = {"feeds": feeds, "measure": measure, "threshold": -1.0}
    convert(precision, inline, small, **options)
    report = convert(precision, source, large, external_above_bytes=10_000, **options)
    assert sorted(path.name for path in large.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert find_files(large) == [large, large.parent / "model.onnx.data"]
    assert report.model_bytes == sum(path.stat().st_size for path in find_files(large))
    assert report.fp32_bytes == sum(path.stat().st_size for path in find_files(source))
    assert large.stat().st_size < 100_000 < (large.parent / "model.onnx.data").stat().st_size
    onnx.checker.check_model(str(large), full_check=True)
    for got, want in zip(*(run_feeds(open_session(path), feeds) for path in (small, large)), strict=True):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fewest", [0, 1, 2, 17, 35, 36])
def test_bisection_finds_the_fewest_in_few_steps(fewest: int) -> None:
    tried: list[int] = []

    def holds(count: int) -> bool:
        tried.append(count)
        return count >= fewest

    assert _find_fewest(36, holds) == fewest
    assert len(tried) <= 8
    assert _find_fewest(36, lambda count: False) is None
    assert _find_fewest(0, lambda count: False) is None


def refuse(action: Callable[[], object], message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        action()


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    header = '<ir_version: 10, opset_import: ["": 18, "other": 1]> '
    source, path = tmp_path / "source.onnx", tmp_path / "out" / "model.onnx"
    path.parent.mkdir()
    feeds = [{"x": np.ones((1, 4), np.float32)}]

    def save(body: str) -> None:
        onnx.save(onnx.parser.parse_model(header + body), source)

    save("main (float[batch, 4] x) => (float[batch, 4] y) { y = Neg(x) }")
    refuse(
        lambda: convert(
            "int8", source, path, feeds=feeds, measure=lambda path: Quality(metric=COSINE, worst=1.0, mean=1.0, rows=1)
        ),
        "^nothing in source.onnx can become int8: expected products with a constant matrix, or tables, got none; ",
    )
    save("main (float[batch, 4] x) => (float[batch, 4] y) { z = other.Unknown(x) y = Neg(z) }")
    refuse(lambda: load_graph(source), "^source.onnx does not say of which type z is: expected a type on every value, ")
    refuse(lambda: open_session(source), "^ONNX Runtime cannot load source.onnx: got ")


def test_a_quality_that_is_no_number_holds_no_threshold() -> None:
    for metric in (COSINE, LABEL_AGREEMENT):
        assert not Quality(metric=metric, worst=float("nan"), mean=1.0, rows=2).holds(0.0)
    swapped = Quality(metric=LABEL_AGREEMENT, worst=0.5, mean=0.75, rows=2)
    assert str(swapped) == "label agreement 0.5 at worst, 0.75 on average"


def test_the_report_says_which_nodes_stayed_fp32_and_why() -> None:
    report = PrecisionReport(
        precision="int8",
        quality=Quality(metric=COSINE, worst=0.991, mean=0.997, rows=22),
        threshold=0.99,
        model_bytes=34,
        fp32_bytes=90,
        speed=Speed(fp32_ms=56.0, this_ms=35.0),
        kept_fp32={"b": "sensitive to int8", "a": "sensitive to int8", "c": "small table"},
        measured=8,
    )
    assert json.loads(json.dumps(report.to_json())) == {
        "precision": "int8",
        "quality": {"metric": "cosine", "worst": 0.991, "mean": 0.997, "rows": 22},
        "threshold": 0.99,
        "model_bytes": 34,
        "fp32_bytes": 90,
        "size_ratio": 0.3778,
        "speed": {"fp32_ms": 56.0, "this_ms": 35.0, "ratio": 1.6},
        "kept_fp32": {"sensitive to int8": ["a", "b"], "small table": ["c"]},
        "measured": 8,
    }
