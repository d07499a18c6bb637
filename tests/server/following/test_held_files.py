"""What was loaded of a version stays known while that version is told anew, at whatever moment its files are others."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launcher import find_ports

from server.following.follower import Follower, Following
from server.following.overlay import Overlay
from server.following.rollout import Roller
from server.following.sums import FileSums, hash_file
from server.tritonserver.control import Control
from server.tritonserver.control_key import open_key

RIGHT, OTHER = b"what was published", b"and something else"


class TurningSums(FileSums):
    """Sums of a file that is another whenever what is loaded is compared, and the right one again right afterwards."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.turns = False

    def find_changed(self, sums: Mapping[Path, str], part: Path | None = None, *, since: str = "published") -> str:
        if not self.turns or since != "loaded":
            return super().find_changed(sums, part, since=since)
        self.path.write_bytes(OTHER)
        told = super().find_changed(sums, part, since=since)
        self.path.write_bytes(RIGHT)
        return told


class Followed:
    """A follower of a repository with one model, and what it tells; nobody listens to its orders."""

    def __init__(self, folder: Path) -> None:
        self.version = folder / "models" / "tiny" / "1"
        self.version.mkdir(parents=True)
        self.graph = self.version / "model.onnx"
        self.write({"model.onnx": RIGHT, "golden.json": json.dumps({}).encode()})
        (self.version.parent / "config.pbtxt").write_text('name: "tiny"\nversion_policy { specific { versions: 1 } }\n')
        self.sums = TurningSums(self.graph)
        self.told: dict[str, Following] = {}
        self.said: list[str] = []
        (port,) = find_ports(1)
        control = Control(f"http://127.0.0.1:{port}", open_key(folder / "key"), None)
        roller = Roller(folder / "models", Overlay(folder / "shown"), control, folder, self.sums, os.getpid)
        self.follower = Follower(folder / "models", roller, self.sums, self.told.__setitem__, self.said.append)

    def write(self, files: dict[str, bytes]) -> None:
        """Write files of the version, and the sums of all of them."""
        for name, content in files.items():
            (self.version / name).write_bytes(content)
        paths = sorted(path for path in self.version.iterdir() if path.name != "SHA256SUMS")
        (self.version / "SHA256SUMS").write_text("".join(f"{hash_file(path)}  {path.name}\n" for path in paths))

    def follow(self) -> None:
        """Look at the repository once, of which a configuration was written anew: another file, whatever the clock."""
        config = self.version.parent / "config.pbtxt"
        Path(shutil.copy(config, self.version.parent / "staging-config.pbtxt")).replace(config)
        self.follower._next_look = 0.0
        self.follower.look(follows=True)
        self.follower.wait()


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(tmp_path)
    followed.follower.start()
    assert followed.told["tiny"].state == "served"
    yield followed


def test_a_file_that_is_the_right_one_again_at_the_second_look_is_guarded_on(followed: Followed) -> None:
    followed.sums.turns = True
    followed.follow()
    followed.sums.turns = False
    assert followed.told["tiny"].state == "served"
    followed.graph.write_bytes(OTHER)
    # As before a tritonserver is started in the place of one that ended.
    followed.follower.leave_out_damaged()
    assert followed.follower.published == []
    assert followed.told["tiny"].reason == f"{followed.graph} has changed since it was loaded"
    assert followed.told["tiny"].served == 0


def test_what_is_told_anew_of_what_is_loaded_is_held_against_the_same_files(followed: Followed) -> None:
    followed.write({"notes.txt": b"of nobody"})
    followed.follow()
    assert followed.told["tiny"].state == "served"
    followed.graph.write_bytes(OTHER)
    followed.follow()
    assert f"{followed.graph} has changed since it was published" in followed.told["tiny"].reason
    followed.follower.leave_out_damaged()
    followed.follow()
    assert followed.follower.published == []
    # Whole sums of another file are those of another publication, which nobody is there to load.
    followed.write({"model.onnx": OTHER})
    followed.follow()
    assert "the end of tritonserver" in followed.told["tiny"].reason


def test_what_tritonserver_does_not_survive_is_named_once(followed: Followed) -> None:
    followed.graph.write_bytes(OTHER)
    followed.follower.leave_out_damaged()
    followed.graph.write_bytes(RIGHT)
    # The second look is at those behind it, which it was not the doing of.
    for _ in range(3):
        followed.follow()
        followed.follower.tell_end("was killed by signal 11", is_crash=True)
    assert followed.said[-1].startswith("ERROR: version 1 of tiny cannot be served: expected it to load ")
    assert followed.said[-1].endswith(" tritonserver crashed 2 times as it was loaded.")


@pytest.mark.parametrize("content", [RIGHT, OTHER])
def test_what_was_touched_while_it_was_loaded_is_unloaded_before_anything_is_read(
    followed: Followed, content: bytes
) -> None:
    assert not followed.follower.leave_out_touched()
    followed.graph.unlink()
    followed.graph.write_bytes(content)
    assert followed.follower.leave_out_touched()
    assert followed.follower.published == []
    assert followed.told["tiny"].reason == f"{followed.graph} was touched while it was loaded"
    followed.follow()
    what = "the end of tritonserver" if content == RIGHT else f"{followed.graph} has changed since it was published"
    assert what in followed.told["tiny"].reason
