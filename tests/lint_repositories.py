"""Repositories for lint: good ones in the style of NVIDIA's examples, and one for every mistake."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

Dims = Sequence[int | str]

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""

COMPLETING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(0)
        config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "B", "data_type": "TYPE_FP32", "dims": [4]})
        return config

    def execute(self, requests):
        return []
"""


def tensor(name: str, dims: str, dtype: str = "TYPE_FP32", more: str = "") -> str:
    return f'{{ name: "{name}" data_type: {dtype} dims: {dims} {more} }}'


def add_config(folder: Path, text: str, versions: Sequence[object] = (1,)) -> Path:
    """Write a configuration beside empty version folders."""
    for version in versions:
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text)
    return folder


def add_python(repository: Path, name: str, text: str, code: str = IDENTITY) -> Path:
    """Write a model of the Python backend."""
    folder = add_config(repository / name, f'backend: "python"\n{text}')
    (folder / "1" / "model.py").write_text(code)
    return folder


def add_step(repository: Path, name: str, taken: str, made: str, more: str = "") -> Path:
    """Write a model of the Python backend with one input and one output."""
    return add_python(repository, name, f"max_batch_size: 8\ninput [ {taken} ]\noutput [ {made} ]\n{more}")


def step(model: str, taken: dict[str, str], made: dict[str, str], version: int = 1) -> str:
    maps = "".join(f'  input_map {{ key: "{key}" value: "{value}" }}\n' for key, value in taken.items())
    maps += "".join(f'  output_map {{ key: "{key}" value: "{value}" }}\n' for key, value in made.items())
    return f'{{\n  model_name: "{model}"\n  model_version: {version}\n{maps}}}'


def add_ensemble(repository: Path, name: str, steps: Sequence[str], text: str = "") -> Path:
    """Write an ensemble of IN and OUT."""
    text = text or f"max_batch_size: 8\ninput [ {tensor('IN', '[ 4 ]')} ]\noutput [ {tensor('OUT', '[ 4 ]')} ]"
    scheduling = f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
    return add_config(repository / name, f'platform: "ensemble"\n{text}\n{scheduling}\n')


def add_pair(repository: Path, **given: str) -> None:
    """Write two steps, one of which takes what the other makes."""
    add_step(repository, "first", tensor("X", "[ 4 ]"), tensor("Y", "[ 4 ]"))
    add_step(
        repository,
        "second",
        tensor("Y", given.get("dims", "[ 4 ]"), given.get("dtype", "TYPE_FP32")),
        tensor("Z", "[ 4 ]"),
    )


def add_chain(repository: Path, name: str = "chain", **given: dict[str, str]) -> Path:
    """Write an ensemble of the two steps of `add_pair`."""
    steps = [
        step("first", given.get("first", {"X": "IN"}), given.get("made", {"Y": "between"})),
        step("second", given.get("second", {"Y": "between"}), {"Z": "OUT"}),
    ]
    return add_ensemble(repository, name, steps)


def write_graph(
    path: Path,
    *,
    dims: Dims = ("batch", 4),
    opset: int = 17,
    ir_version: int = 8,
    operator: str = "Add",
    domain: str = "",
) -> onnx.ModelProto:
    """Write a graph that adds A and B to C."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in "ABC"]
    node = helper.make_node(operator, ["A", "B"], ["C"], domain=domain)
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(
        helper.make_graph([node], "add", values[:2], values[2:]), opset_imports=opsets, ir_version=ir_version
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return model


ADD = f"input [ {tensor('A', '[ 4 ]')}, {tensor('B', '[ 4 ]')} ]\noutput [ {tensor('C', '[ 4 ]')} ]\n"


def add_graph(
    repository: Path, name: str, text: str = f'backend: "onnxruntime"\nmax_batch_size: 8\n{ADD}', **graph: object
) -> Path:
    folder = add_config(repository / name, text)
    write_graph(folder / "1" / "model.onnx", **graph)  # type: ignore[arg-type]
    return folder


def write_embedding(path: Path, *, rows: int, external: bool = False) -> None:
    """Write a graph that looks ids up in a table."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"])
    rows_out = helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", "seq", 2])
    table = helper.make_tensor("table", TensorProto.FLOAT, [rows, 2], bytes(8 * rows), raw=True)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["rows"])], "g", [ids], [rows_out], [table]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=0)


EMBEDDING = (
    f"max_batch_size: 8\ninput [ {tensor('input_ids', '[ -1 ]', 'TYPE_INT64')} ]\n"
    f"output [ {tensor('rows', '[ -1, 2 ]')} ]\n"
)


def write_good(repository: Path) -> None:
    """Write what tritonserver loads: one model for each thing that NVIDIA's examples do."""
    add_graph(repository, "add_sub")
    add_graph(
        repository, "platform_only", f'name: "platform_only"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n{ADD}'
    )
    add_graph(repository, "fixed", f'backend: "onnxruntime"\nmax_batch_size: 0\n{ADD}', dims=(4,))
    add_config(repository / "external", f'backend: "onnxruntime"\n{EMBEDDING}')
    write_embedding(repository / "external" / "1" / "model.onnx", rows=5, external=True)
    add_python(repository, "identity", f"max_batch_size: 8\ninput [ {tensor('A', '[ -1 ]')} ]\n")
    add_python(repository, "completing", "", COMPLETING)
    # Called as a version is.
    add_python(repository, "7", f"max_batch_size: 8\ninput [ {tensor('A', '[ -1 ]')} ]\n")
    add_config(repository / "bare", "# nothing but a comment, in Latin-1 or not: é\n")
    (repository / "bare" / "1" / "model.py").write_text(COMPLETING)
    (repository / "without_config" / "1").mkdir(parents=True)
    (repository / "without_config" / "1" / "model.py").write_text(COMPLETING)
    add_pair(repository)
    add_chain(repository)
    add_chain(repository, "unmapped")
    optional = f"max_batch_size: 8\ninput [ {tensor('X', '[ 4 ]')}, {tensor('W', '[ 4 ]', more='optional: true')} ]\n"
    add_python(repository, "optional", optional + f"output [ {tensor('Y', '[ 4 ]')}, {tensor('V', '[ 1 ]')} ]")
    add_ensemble(repository, "around_optional", [step("optional", {"X": "IN"}, {"Y": "OUT"}, -1)])
    # Beside a model without batches, whose first dimension is the batch.
    unbatched = f"max_batch_size: 0\ninput [ {tensor('X', '[ -1, 4 ]')} ]\noutput [ {tensor('Y', '[ -1, 4 ]')} ]"
    add_python(repository, "unbatched", unbatched)
    add_ensemble(repository, "mixed", [step("unbatched", {"X": "IN"}, {"Y": "OUT"}, -1)])
    add_step(
        repository,
        "sequence",
        tensor("X", "[ 1 ]"),
        tensor("Y", "[ 1 ]"),
        """sequence_batching {
  oldest { max_candidate_sequences: 4 preferred_batch_size: [ 4, 8 ] }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
instance_group [ { kind: KIND_CPU count: 0 } ]
""",
    )
    labelled = add_step(
        repository,
        "labelled",
        tensor("X", "[ 4 ]", more="reshape: { shape: [ 2, 2 ] }"),
        tensor("Y", "[ 1 ]", more='label_filename: "labels.txt" reshape { shape: [ ] }'),
        'parameters { key: "anything" value: { string_value: "}{ [" } }\nresponse_cache { enable: false }\n'
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 }\n"
        "version_policy: { all { }}\n"
        'model_warmup [ { name: "w" batch_size: 1 inputs { key: "X" value: '
        "{ data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } } ]\n",
    )
    (labelled / "labels.txt").write_text("yes\nno\n")
    add_step(
        repository,
        "some_versions",
        tensor("X", "[ 4 ]"),
        tensor("Y", "[ 4 ]"),
        "version_policy { specific { versions: [ 1, 7 ] } }",
    )
    add_step(repository, "without_batch", tensor("X", "[ 4 ]"), tensor("Y", "[ 4 ]"))
    (repository / "without_batch" / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: 0 dynamic_batching {{ }} input <name: "X", data_type: TYPE_FP32, dims: 4>; '
        f"output [ {tensor('Y', '[ 4 ]')} ]"
    )
    add_python(
        repository,
        "inherited",
        f"max_batch_size: 0\ninput [ {tensor('X', '[ 4 ]')} ]\noutput [ {tensor('Y', '[ 4 ]')} ]",
        "class Base:\n    def execute(self, requests):\n        return []\nclass TritonPythonModel(Base):\n    pass\n",
    )


Seed = Callable[[Path], object]


def _mistake(more: str = "", **given: str) -> Seed:
    """Return what writes a model called `bad` of the Python backend with something wrong in it."""
    taken, made = given.get("taken", tensor("X", "[ 4 ]")), given.get("made", tensor("Y", "[ 4 ]"))
    return lambda repository: add_step(repository, "bad", taken, made, more)


def _warmup(value: str = "data_type: TYPE_FP32 dims: [ 4 ] zero_data: true", key: str = "X", more: str = "") -> Seed:
    size = "" if more == "skipped" else "batch_size: 1"
    second = f'inputs {{ key: "{more}" value {{ {value} }} }}' if more and more != "skipped" else ""
    return _mistake(f'model_warmup {{ name: "w" {size} inputs {{ key: "{key}" value {{ {value} }} }} {second} }}')


def _code(code: str) -> Seed:
    declared = f"max_batch_size: 0\ninput [ {tensor('X', '[ 4 ]')} ]\noutput [ {tensor('Y', '[ 4 ]')} ]"
    return lambda repository: add_python(repository, "bad", declared, code)


def _graph(text: str = f"max_batch_size: 8\n{ADD}", **graph: object) -> Seed:
    return lambda repository: add_graph(repository, "bad", f'backend: "onnxruntime"\n{text}', **graph)


def _chain(pair: dict[str, str] | None = None, **given: dict[str, str]) -> Seed:
    def write(repository: Path) -> None:
        add_pair(repository, **(pair or {}))
        add_chain(repository, "bad", **given)

    return write


def _config(text: str, versions: Sequence[object] = (1,)) -> Seed:
    return lambda repository: add_config(repository / "bad", text, versions)


def _without(seed: Seed, *paths: str) -> Seed:
    def write(repository: Path) -> None:
        seed(repository)
        for path in paths:
            file = repository / path
            file.rmdir() if file.is_dir() else file.unlink()

    return write


def _with(seed: Seed, path: str, content: str = "") -> Seed:
    def write(repository: Path) -> None:
        seed(repository)
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(content)

    return write


def _external(repository: Path) -> None:
    add_config(repository / "bad", f'backend: "onnxruntime"\n{EMBEDDING}')
    write_embedding(repository / "bad" / "1" / "model.onnx", rows=5, external=True)
    (repository / "bad" / "1" / "model.onnx.data").unlink()


def _tokenizer(repository: Path) -> None:
    text, ids = tensor("TEXT", "[ 1 ]", "TYPE_STRING"), tensor("input_ids", "[ -1 ]", "TYPE_INT64")
    rows = tensor("rows", "[ -1, 2 ]")
    batch = "max_batch_size: 8"
    tokenizer = f'backend: "python_preprocess"\n{batch}\ninput [ {text} ]\noutput [ {ids} ]'
    add_config(repository / "bad_preprocess", tokenizer)
    tokens = {"model": {"vocab": {"a": 0, "b": 4}}, "added_tokens": [{"id": 5, "content": "[NEW]"}]}
    (repository / "bad_preprocess" / "1" / "tokenizer.json").write_text(json.dumps(tokens))
    add_config(repository / "bad_model", f'backend: "onnxruntime"\n{EMBEDDING}')
    write_embedding(repository / "bad_model" / "1" / "model.onnx", rows=5)
    steps = [
        step("bad_preprocess", {"TEXT": "TEXT"}, {"input_ids": "ids"}),
        step("bad_model", {"input_ids": "ids"}, {"rows": "rows"}),
    ]
    add_ensemble(repository, "bad", steps, f"{batch}\ninput [ {text} ]\noutput [ {rows} ]")


def _plan(repository: Path) -> None:
    folder = add_config(repository / "bad", f'backend: "tensorrt"\nmax_batch_size: 8\n{ADD}')
    (folder / "1" / "model.plan").write_bytes(b"ftrt")
    (folder / "1" / "model.plan.json").write_text('{"tensorrt_version": "10.9.0"}')


def _vllm(arguments: str = '{"model": "/models/bad/1"}', policy: str = "decoupled: true") -> Seed:
    def write(repository: Path) -> None:
        text = f"input [ {tensor('text_input', '[ 1 ]', 'TYPE_STRING')} ]"
        text += f"output [ {tensor('text_output', '[ -1 ]', 'TYPE_STRING')} ]"
        config = f'backend: "vllm"\nmax_batch_size: 0\nmodel_transaction_policy {{ {policy} }}\n{text}'
        folder = add_config(repository / "bad", config)
        (folder / "1" / "model.json").write_text(arguments)
        (folder / "1" / "model.safetensors").write_bytes(b"")

    return write


_BATCH_4 = f"max_batch_size: 64\ninput [ {tensor('IN', '[ 4 ]')} ]\noutput [ {tensor('OUT', '[ 4 ]')} ]"
_ONE = step("first", {"X": "IN"}, {"Y": "OUT"})


def _ensemble(steps: Sequence[str], text: str = "") -> Seed:
    def write(repository: Path) -> None:
        add_pair(repository)
        add_ensemble(repository, "bad", steps, text)

    return write


SEEDS: dict[str, Seed] = {
    "parse-error": _mistake("max_batch_size: eight"),
    "unknown-field": _mistake("max_batchsize: 8"),
    "newer-field": _mistake("model_metrics { }"),
    "name-mismatch": _mistake('name: "good"'),
    "unknown-platform": _config(f'platform: "onnx"\n{ADD}'),
    "unknown-backend": _config(f'backend: "onnxruntim"\n{ADD}'),
    "platform-clash": _config(f'platform: "tensorrt_plan"\nbackend: "onnxruntime"\n{ADD}'),
    "no-backend": _config(ADD),
    "missing-config": lambda repository: add_python(repository, "bad", "").joinpath("config.pbtxt").unlink(),
    "incomplete-config": _config('backend: "identity"'),
    "unsaid-batch": _graph(ADD, dims=(4,)),
    "bad-tensor": _mistake(taken=tensor("X", "[ 0 ]")),
    "bad-reshape": _mistake(taken=tensor("X", "[ 4 ]", more="reshape { shape: [ 2, 3 ] }")),
    "duplicate-tensor": _mistake(f"input [ {tensor('X', '[ 4 ]')} ]"),
    "missing-labels": _mistake(made=tensor("Y", "[ 4 ]", more='label_filename: "labels.txt"')),
    "no-version": _without(_mistake(), "bad/1/model.py", "bad/1"),
    "no-served-version": _mistake("version_policy { specific { versions: [ 7 ] } }"),
    "missing-version": _mistake("version_policy { specific { versions: [ 1, 7 ] } }"),
    "version-name": _with(_mistake(), "bad/v2/model.py", IDENTITY),
    "missing-model-file": _without(_mistake(), "bad/1/model.py"),
    "extra-model-file": _with(_mistake(), "bad/1/model.plan"),
    "not-a-model": _with(_mistake(), "notes/readme.md"),
    "leftover": _with(_mistake(), "bad/inactive-config.pbtxt"),
    "damaged-graph": _with(_graph(), "bad/1/model.onnx", "<html>404</html>"),
    "graph-names": _graph(f"max_batch_size: 8\n{ADD}".replace('"B"', '"b"')),
    "graph-inputs": _graph(f"max_batch_size: 8\ninput [ {tensor('A', '[ 4 ]')} ]\noutput [ {tensor('C', '[ 4 ]')} ]"),
    "graph-types": _graph(f"max_batch_size: 8\n{ADD}".replace("FP32", "FP16", 1)),
    "graph-dims": _graph(f"max_batch_size: 8\n{ADD}".replace("[ 4 ]", "[ -1, 4 ]", 1)),
    "graph-outputs": _graph(f"max_batch_size: 8\n{ADD}", dims=("batch", "any")),
    "fixed-batch": _graph(dims=(1, 4)),
    "ragged-input": _graph(f"max_batch_size: 8\n{ADD}".replace("[ 4 ]", "[ 4 ] allow_ragged_batch: true", 1)),
    "batch-input": _graph(
        f"max_batch_size: 8\n{ADD}\nbatch_input [ {{ kind: BATCH_ELEMENT_COUNT "
        'target_name: "B" data_type: TYPE_INT64 source_input: "A" } ]'
    ),
    "opset": _graph(opset=22),
    "ir-version": _graph(ir_version=11),
    "custom-operators": _graph(operator="Mystery", domain="my.domain"),
    "missing-weights": _external,
    "ensemble-form": _ensemble([_ONE], "instance_group [ { count: 2 } ]\n" + _BATCH_4.replace("64", "8")),
    "missing-step": _ensemble([step("frist", {"X": "IN"}, {"Y": "OUT"})]),
    "unpinned-step": _ensemble([step("first", {"X": "IN"}, {"Y": "OUT"}, -1)]),
    "step-tensor": _ensemble([step("first", {"X": "IN", "x": "IN"}, {"Y": "OUT"})]),
    "step-input": _chain(first={"W": "IN"}),
    "unfed-tensor": _chain(second={"Y": "betwen"}),
    "ensemble-cycle": _chain(first={"X": "OUT"}),
    "unused-tensor": _chain(second={"Y": "IN"}),
    "made-twice": _ensemble([_ONE, step("second", {"Y": "IN"}, {"Z": "OUT"})]),
    "step-types": _chain(pair={"dtype": "TYPE_FP16"}),
    "step-shapes": _chain(pair={"dims": "[ 5 ]"}),
    "step-batch": _ensemble([_ONE], _BATCH_4),
    "python-syntax": _code("class TritonPythonModel:\n    def execute(self, requests)\n"),
    "python-class": _code("class Model:\n    def execute(self, requests):\n        return []\n"),
    "python-execute": _code("class TritonPythonModel:\n    def run(self, requests):\n        return []\n"),
    "python-imports": _code("import no_such_library_at_all\n" + IDENTITY),
    "negative-batch": _config(f'backend: "python"\nmax_batch_size: -1\n{ADD}'),
    "preferred-batch": _mistake("dynamic_batching { preferred_batch_size: [ 4, 16 ] }"),
    "priority-level": _mistake("dynamic_batching { priority_levels: 2 }"),
    "unused-priority": _mistake("dynamic_batching { default_priority_level: 1 }"),
    "order-clash": _mistake(
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }"
    ),
    "batching-without-batch": _config(f'backend: "identity"\nmax_batch_size: 0\ndynamic_batching {{ }}\n{ADD}'),
    "cache-clash": _mistake("sequence_batching { }\nresponse_cache { enable: true }"),
    "gpus-on-cpu": _mistake("instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]"),
    "no-instances": _mistake("instance_group [ { kind: KIND_CPU count: 0 } ]"),
    "many-instances": _mistake("instance_group [ { kind: KIND_CPU count: 200000 } ]"),
    "profile-clash": _mistake('instance_group [ { kind: KIND_CPU profile: [ "0" ] } ]'),
    "vllm-arguments": _vllm("{}"),
    "vllm-place": _vllm('{"model": "/models/bad/7"}'),
    "vllm-decoupled": _vllm(policy="decoupled: false"),
    "warmup-input": _warmup(more="W"),
    "warmup-missing-input": _warmup(key="W"),
    "warmup-dims": _warmup("data_type: TYPE_FP32 dims: [ -1 ] zero_data: true"),
    "warmup-type": _warmup("data_type: TYPE_FP16 dims: [ 4 ] zero_data: true"),
    "warmup-file": _warmup('data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "rows"'),
    "warmup-batch": _warmup(more="skipped"),
    "token-ids": _tokenizer,
    "plan-version": _plan,
}  # fmt: skip
"""Rule → what writes a repository that breaks it; in most of them, the model is called `bad`."""
