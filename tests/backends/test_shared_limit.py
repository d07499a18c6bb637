"""What the versions of one model take of its memory for keys and values together, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import CHECKOUT, load_backend

from export.engines.openvino_generation import OpenVINOGeneration, measure_block
from export.errors import EngineError

shared_limit = load_backend("openvino_generate", "shared_limit")

# Claims what it is told, a number a line, and says whether there was room.
OTHER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shared_limit import SharedLimit
limit = SharedLimit(Path(sys.argv[2]), 32)
print("ready", flush=True)
for line in sys.stdin:
    print(limit.claim(int(line)), flush=True)
limit.close()
"""


class Version:
    """Another version of a model, of the same tritonserver."""

    def __init__(self, model: str) -> None:
        folder = CHECKOUT / "backends" / "openvino_generate"
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(folder), model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()

    def read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def claim(self, wanted: int) -> str:
        assert self.process.stdin
        self.process.stdin.write(f"{wanted}\n")
        self.process.stdin.flush()
        return self.read()


@contextmanager
def versions(*models: str) -> Iterator[list[Version]]:
    started = [Version(model) for model in models]
    try:
        yield started
    finally:
        for version in started:
            version.process.kill()
            version.process.wait()
            for file in (version.process.stdin, version.process.stdout):
                assert file
                file.close()


def find_claims(version: Version) -> list[str]:
    folder = f"/dev/shm/modelyard-kv-{os.geteuid()}"
    return [name for name in os.listdir(folder) if name.endswith(f"-{version.process.pid}")]  # noqa: PTH208


def test_two_versions_have_together_what_there_is_and_a_killed_one_has_nothing() -> None:
    with versions("writer", "writer", "poet") as (old, new, other):
        assert (old.claim(28), new.claim(4), other.claim(32)) == ("True", "True", "True")
        assert (new.claim(5), old.claim(29)) == ("False", "False")
        # What shrinks makes room; what does not grow needs none.
        assert (old.claim(20), new.claim(13), new.claim(12), old.claim(20)) == ("True", "False", "True", "True")
        old.process.kill()
        old.process.wait()
        assert (new.claim(32), find_claims(old)) == ("True", [])
        new.process.communicate(timeout=60)
        assert (new.process.returncode, find_claims(new)) == (0, [])
        assert len(find_claims(other)) == 1


@pytest.mark.parametrize(("blocks", "spared"), [(8, 4), (32, 4), (64, 8), (1000, 125)])
def test_an_eighth_is_left_to_the_version_that_comes_after(blocks: int, spared: int) -> None:
    assert shared_limit.spare(blocks) == spared


def test_the_export_refuses_what_would_be_too_little_for_two_versions() -> None:
    engine = OpenVINOGeneration()
    # 24 layers of 16 heads of 64: 6 MiB a block in fp32.
    shapes = [(16, 64)] * 24
    least = 2 * shared_limit.LEAST_BLOCKS * measure_block(shapes, "fp32") >> 20
    assert least == 48
    engine.check_parameters({"kv_cache_mb": least}, shapes, "fp32")
    engine.check_parameters({"kv_cache_mb": least - 1}, shapes, "int8")
    with pytest.raises(EngineError, match="expected --kv-cache-mb 48 or more, got 47; raise it, or choose"):
        engine.check_parameters({"kv_cache_mb": least - 1}, shapes, "fp32")


def test_a_folder_of_another_user_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"modelyard-kv-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        PermissionError, match="expected a folder of this user's own, got a link or another user's; remove it"
    ):
        shared_limit.SharedLimit(tmp_path, 32, tmp_path)
