"""The environment that tritonserver is given."""

import pytest

from server.tritonserver.installation import build_environment, find_installation


def test_a_gpu_multiplies_fp32_as_it_was_proven_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installation = find_installation()
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert build_environment(installation)["NVIDIA_TF32_OVERRIDE"] == "0"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert build_environment(installation)["NVIDIA_TF32_OVERRIDE"] == "1"
