"""What callers send is read by nobody else on the machine, not even by who waits for the moment to open its memory."""

import http.client
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import Published
from launcher import Running, running

from server.tritonserver.private_memory import close_region
from server.tritonserver.processes import list_children

SECRET = "patient Jane Roe, diagnosis confidential 4711"
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set=-all"]

# Opens whatever turns up in shared memory, as fast as it can, and says of each file once that it did.
WATCHER = """
while :; do
  for file in /dev/shm/*_backend_shm_region_*; do
    case $opened in *"$file"*) continue ;; esac
    { true <"$file"; } 2>/dev/null && opened="$opened $file" && echo "$file"
  done
done
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="becomes another user")


def list_regions(server: Running) -> set[Path]:
    """Return the shared memory of a server's backend processes; a `StubTable` would take the rights of others off."""
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in list_children(server.tritonserver)]
    names = {word for line in lines for word in line.split("\0") if "_backend_shm_region_" in word}
    return {Path("/dev/shm", name) for name in names}


def test_another_user_never_opens_the_memory_in_which_texts_are_exchanged(published: Published) -> None:
    watcher = subprocess.Popen([*NOBODY, "sh", "-c", WATCHER], stdout=subprocess.PIPE, text=True)
    try:
        with running(published.repository) as server:
            server.read_until("serving HTTP")
            connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
            body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [SECRET]}]}
            connection.request("POST", "/v2/models/sentence_embedding/infer", json.dumps(body))
            assert connection.getresponse().status == 200
            regions = list_regions(server)
            # Who serves finds the text there: it is what others must not read.
            assert any(SECRET.encode() in region.read_bytes() for region in regions)
            for region in regions:
                done = subprocess.run([*NOBODY, "cat", str(region)], capture_output=True, text=True, check=False)
                assert "Permission denied" in done.stderr
            assert server.stop() == 0
    finally:
        watcher.kill()
    assert watcher.stdout is not None
    assert not {str(region) for region in regions} & set(watcher.stdout.read().split())


def test_where_the_kernel_has_no_filter_the_rights_of_others_are_taken_off(tmp_path: Path) -> None:
    region = tmp_path / "region"
    region.touch(mode=0o644)
    region.chmod(0o644)
    close_region(region)
    assert region.stat().st_mode & 0o777 == 0o600
    close_region(tmp_path / "gone")
