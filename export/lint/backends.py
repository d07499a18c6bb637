"""The backends that Triton's releases bring, and the file that each of them loads from a version's folder."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend.

    Attributes:
        name: What `backend` says.
        files: What it loads unless `default_model_filename` says otherwise, any of them; empty where that is not known.
    """

    name: str
    files: tuple[str, ...] = ()


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(name="onnxruntime", files=("model.onnx",)),
        Backend(name="tensorrt", files=("model.plan",)),
        Backend(name="python", files=("model.py",)),
        Backend(name="pytorch", files=("model.pt", "model.pt2", "model.py")),
        Backend(name="tensorflow", files=("model.savedmodel", "model.graphdef")),
        Backend(name="openvino", files=("model.xml", "model.onnx")),
        Backend(name="vllm", files=("model.json",)),
        *(Backend(name=name) for name in ("dali", "fil", "tensorrtllm", "identity", "square", "repeat", "sequence")),
        *(Backend(name=name) for name in ("dyna_sequence", "iterative_sequence", "implicit_state", "query")),
        *(Backend(name=name) for name in ("distributed_addsub", "hugectr", "hps", "stateful", "armnn_tflite")),
        *(Backend(name=name) for name in ("paddle", "redis", "rapids_identity", "nvtabular", "merlinmodels")),
        # modelyard's own.
        *(Backend(name=f"python_{step}") for step in ("preprocess", "postprocess", "lean", "openvino")),
        Backend(name="openvino_generate"),
    )
}

# What `platform` may say, for which Triton fills in the backend; an ensemble has none.
PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "ensemble": "",
}

# What Triton takes a model without `backend` and `platform` for.
BACKEND_OF_FILE = {
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.plan": "tensorrt",
    "model.onnx": "onnxruntime",
    "model.xml": "openvino",
    "model.pt": "pytorch",
    "model.py": "python",
}
