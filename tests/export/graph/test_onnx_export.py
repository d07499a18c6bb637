from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from harness import Exported
from torch import nn
from transformers import LongformerConfig, LongformerForSequenceClassification

from export.errors import GraphError, TargetError
from export.graph.onnx_export import check_graph, export_onnx
from export.signature import BATCH, SEQ_LEN, ModelSignature, TensorSignature
from export.targets import DEFAULT_TARGET
from export.tasks.base import HeadModule

SIGNATURE = ModelSignature(
    inputs=(TensorSignature(name="input_ids", dtype=torch.int64, dims=(BATCH, SEQ_LEN)),),
    outputs=(TensorSignature(name="scores", dtype=torch.float32, dims=(BATCH, 3)),),
)
EXAMPLE = (torch.ones(2, 7, dtype=torch.int64),)


def test_the_graph_has_the_signatures_names_and_symbolic_axes(exported: Exported) -> None:
    graph = onnx.load(exported.model_file).graph
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask", "token_type_ids"]
    for value in graph.input:
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == ["batch", "seq_len"]
    assert [dim.dim_param or dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim] == ["batch", 16]


def test_the_file_carries_nothing_of_the_machine_it_was_made_on(exported: Exported, tmp_path: Path) -> None:
    content = exported.model_file.read_bytes()
    assert b"stack_trace" not in content
    assert b".py" not in content
    again = tmp_path / "model.onnx"
    export_onnx(
        exported.source.task.module,
        exported.source.task.signature,
        exported.source.task.build_example(),
        again,
        DEFAULT_TARGET,
    )
    assert again.read_bytes() == content, "the same inputs give the same bytes"


def test_a_file_too_new_for_the_target_is_refused(exported: Exported) -> None:
    check_graph(exported.model_file, exported.source.task.signature, DEFAULT_TARGET)
    for older, message in (
        (replace(DEFAULT_TARGET, max_opset=17), "expected at most opset 17 and IR version 10, got opset 18"),
        (replace(DEFAULT_TARGET, max_ir_version=9), "pass --target 26.07, the newest release .*, or 24.10, the oldest"),
    ):
        with pytest.raises(TargetError, match=message):
            check_graph(exported.model_file, exported.source.task.signature, older)


class FixedLength(nn.Module):
    """Its loop over the tokens makes the length a constant."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(input_ids.shape[0], 3)
        for index in range(input_ids.shape[1]):
            total = total + input_ids[:, index : index + 1].float()
        return total


class DataDependent(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(input_ids.shape[0], 3) if input_ids.sum() > 0 else torch.zeros(input_ids.shape[0], 3)


@pytest.mark.parametrize("module", [FixedLength(), DataDependent()], ids=["loop over tokens", "branch on values"])
def test_what_would_be_silently_fixed_in_the_graph_is_refused(module: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="cannot be exported|has other inputs"):
        export_onnx(module, SIGNATURE, EXAMPLE, tmp_path / "model.onnx", DEFAULT_TARGET)


class StarForward(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].float().mean(dim=1, keepdim=True).repeat(1, 3)


def test_an_output_that_differs_from_the_signature_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_onnx(StarForward(), SIGNATURE, EXAMPLE, path, DEFAULT_TARGET)
    wrong = replace(SIGNATURE, outputs=(replace(SIGNATURE.outputs[0], dims=(BATCH, 4)),))
    with pytest.raises(GraphError, match=r"other outputs than the model: expected scores FLOAT \['batch', 4\]"):
        check_graph(path, wrong, DEFAULT_TARGET)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(GraphError, match="is not a valid ONNX file"):
        check_graph(path, SIGNATURE, DEFAULT_TARGET)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_file_says_what_it_was_made_of(tmp_path: Path, is_traced: bool) -> None:
    path, provenance = tmp_path / "model.onnx", {"modelyard.task": "feature-extraction", "modelyard.a": "ä"}
    export_onnx(StarForward(), SIGNATURE, EXAMPLE, path, DEFAULT_TARGET, is_traced=is_traced, provenance=provenance)
    assert {item.key: item.value for item in onnx.load(path).metadata_props} == provenance


def test_a_stock_architecture_that_cannot_be_exported_is_one_sentence_with_a_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = LongformerConfig(**sizes, vocab_size=64, attention_window=[16], num_labels=3)
    model = LongformerForSequenceClassification(config).eval()
    with pytest.raises(GraphError) as refusal:
        export_onnx(HeadModule(model, ("input_ids",)), SIGNATURE, EXAMPLE, tmp_path / "model.onnx", DEFAULT_TARGET)
    assert str(refusal.value).endswith(
        "; export an architecture that docs/architectures.md lists, or pass --factory with a module of your own whose "
        "code has none."
    )
    # Neither a graph nor a warning, which went past the streams of Python.
    assert capfd.readouterr() == ("", "")
