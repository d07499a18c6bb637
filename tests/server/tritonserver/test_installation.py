"""The environment that tritonserver is given."""

import sys
from pathlib import Path

import pytest
from launcher import running

from server.tritonserver.installation import build_environment, find_installation


def test_a_gpu_multiplies_fp32_as_it_was_proven_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installation = find_installation()
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert build_environment(installation)["NVIDIA_TF32_OVERRIDE"] == "0"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert build_environment(installation)["NVIDIA_TF32_OVERRIDE"] == "1"


# As it is loaded, numpy tells that this matrix has no inverse.
RAISING = "import numpy\n\nnumpy.linalg.inv(numpy.zeros((2, 2)))\n"
TENSORS = 'input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }'


@pytest.mark.parametrize("of_base", [False, True], ids=["its own path", "its base's as well"])
def test_an_environment_in_a_folder_that_is_not_ascii_is_found(tmp_path: Path, *, of_base: bool) -> None:
    """The Python in tritonserver's backend processes has no locale."""
    base, environment, model = tmp_path / "bäse", tmp_path / "käse", tmp_path / "models" / "raises"
    base.symlink_to(sys.base_prefix)
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python3").symlink_to(sys.executable)
    (environment / "lib").symlink_to(Path(sys.prefix, "lib"))
    home = base if of_base else Path(sys.base_prefix)
    (environment / "pyvenv.cfg").write_text(f"home = {home / 'bin'}\ncommand = python -m venv {environment}\n")
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(f'name: "raises" backend: "python" {TENSORS}')
    (model / "1" / "model.py").write_text(RAISING)
    with running(model.parent, program=(str(environment / "bin" / "python3"), "-m", "server")) as server:
        server.read_until("FAILED: ")
        assert "LinAlgError: Singular matrix" in server.lines[-1]
