"""A user who is not root, for what root may do all the same: mount, use more threads, read what is closed."""

import os
import shutil

import pytest

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"),
    reason="mounts, or changes its user",
)

# A user who is not root may read here what root may, and no more. Threads are counted for each: what runs beside these
# tests has another.
USER = 12345 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_RIGHTS = "-all,+dac_override,+dac_read_search"
ANOTHER_USER = ["setpriv", "--reuid", str(USER), "--clear-groups", f"--inh-caps={_RIGHTS}"]
ANOTHER_USER += [f"--ambient-caps={_RIGHTS}", f"--bounding-set={_RIGHTS}"]
