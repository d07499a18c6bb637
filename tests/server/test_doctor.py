"""`python -m server doctor`: what is there, what is missing, and what to do about it."""

import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from harness import CHECKOUT, Published, run
from launcher import find_ports, mounts

from server.doctor import examine_cpu, examine_temporary_folder
from server.errors import NotFoundError
from server.limits import check_temporary_folder
from server.locations import name_command, name_opening


def port_options() -> list[str]:
    options = ("--http-port", "--grpc-port", "--metrics-port", "--status-port")
    return [word for option, port in zip(options, find_ports(), strict=True) for word in (option, str(port))]


def limit_addresses(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def test_a_machine_that_can_serve_is_told_so(published: Published) -> None:
    done = run("-m", "server", "doctor", "--json", "--repository", str(published.repository), *port_options())
    assert done.code == 0, done.out
    findings = {finding["what"]: finding for finding in json.loads(done.out)}
    assert len(findings) == 12
    assert not [finding for finding in findings.values() if finding["verdict"] == "broken"]
    assert "sentence_embedding_model" in findings["model repository"]["found"]
    # Every finding that is not well says what to do.
    assert all(bool(finding["remedy"]) == (finding["verdict"] != "ok") for finding in findings.values())


def test_what_keeps_it_from_serving_is_named_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = [*port_options(), "--grpc-port", str(taken.getsockname()[1])]
        done = run("-m", "server", "doctor", "--repository", str(tmp_path), *options)
    assert done.code == 1
    lines = done.out.splitlines()
    for what, remedy in (
        ("ports", "pass another --grpc-port"),
        ("model repository", "publish one with `python -m export run`"),
    ):
        (index,) = [index for index, line in enumerate(lines) if line.startswith(f"broken   {what} ")]
        assert remedy in lines[index + 1]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="gives up a right")
@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 1, reason="everyone may listen on port 1"
)
def test_a_port_that_this_user_may_not_have_is_told_as_one(tmp_path: Path) -> None:
    right = "-net_bind_service"
    command = ["setpriv", f"--inh-caps={right}", f"--bounding-set={right}", sys.executable, "-m", "server", "doctor"]
    command += ["--json", "--repository", str(tmp_path), *port_options(), "--http-port", "1"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["what"] == "ports"]
    assert finding["found"] == (
        "port 1 on 127.0.0.1 cannot be used: expected one that this user may listen on, got 'Permission denied'"
    )
    assert finding["remedy"] == "pass another --http-port, from 1024 on"


@mounts
def test_a_small_shared_memory_is_found(published: Published) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -m server doctor "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, "--repository", str(published.repository)]
    done = subprocess.run([*command, *port_options()], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning  /dev/shm" in done.stdout
    assert "1 MiB free" in done.stdout
    assert "shm_size" in done.stdout


def test_a_cpu_without_wide_registers_is_found() -> None:
    finding = examine_cpu("processor : 0\nflags\t\t: fpu sse2 avx fma\n")
    assert finding.verdict == "warning"
    assert "without avx2" in finding.found
    assert examine_cpu("flags\t\t: avx2 fma amx_bf16\n").found.endswith("avx2, fma, amx_bf16")


@pytest.mark.parametrize(
    ("limit", "verdict", "remedy"),
    [(64, "broken", "raise the limit (ulimit -Hn"), (300, "warning", "1024 at least"), (1024, "ok", "")],
)
def test_a_limit_on_open_files_is_found(published: Published, limit: int, verdict: str, remedy: str) -> None:
    command = ["prlimit", f"--nofile={limit}:{limit}", sys.executable, "-m", "server", "doctor", "--json"]
    command += ["--repository", str(published.repository), *port_options()]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["what"] == "open files"]
    assert finding["verdict"] == verdict
    assert finding["remedy"].startswith(remedy)
    assert done.returncode == int(verdict == "broken")


@pytest.mark.parametrize(
    ("gigabytes", "verdict", "remedy"),
    [(160, "broken", "lift the limits (ulimit -Hv"), (300, "warning", "512 GiB"), (600, "ok", "")],
)
def test_a_limit_on_addresses_is_found(published: Published, gigabytes: int, verdict: str, remedy: str) -> None:
    limit = gigabytes << 30
    options = ["--repository", str(published.repository), *port_options()]
    done = run("-m", "server", "doctor", "--json", *options, preexec_fn=partial(limit_addresses, limit))
    (finding,) = [finding for finding in json.loads(done.out) if finding["what"] == "addresses"]
    assert finding["verdict"] == verdict
    assert finding["remedy"].startswith(remedy)
    if verdict == "broken":
        refused = run("-m", "server", *options, preexec_fn=partial(limit_addresses, limit))
        assert refused.code == 1
        assert "error: one process may have too few addresses: expected 176 GiB at least" in refused.err


@pytest.mark.parametrize("name", ["a b", "ü", "a$b", "a'b", "a;b"])
def test_a_temporary_folder_that_a_shell_reads_otherwise_is_found(
    published: Published, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    options = ["--repository", str(published.repository), *port_options()]
    for words in ([], ["doctor"]):
        done = run("-m", "server", *words, *options, env=os.environ | {"TMPDIR": str(tmp_path / name)})
        assert done.code == 1
        assert "the temporary folder cannot be used: expected a path of" in done.err + done.out


@pytest.mark.parametrize(("name", "reason"), [("gone", "No such file or directory"), ("file", "Not a directory")])
def test_a_temporary_folder_that_python_passes_over_is_found(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    finding = examine_temporary_folder(holds_programs=True)
    told = f"/tmp, in place of {tmp_path / name} of TMPDIR ({reason})"
    assert (finding.verdict, finding.found) == ("warning", told)
    assert finding.remedy.startswith("name one in TMPDIR that is there")
    monkeypatch.setattr("server.limits.starts_programs", lambda folder: False)
    with pytest.raises(NotFoundError, match=re.escape(f"started from the temporary folder {told}: expected")):
        check_temporary_folder(holds_programs=True)
    for right in (str(tmp_path), f"{tmp_path}/", ""):
        monkeypatch.setenv("TMPDIR", right)
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert examine_temporary_folder(holds_programs=False).verdict == "ok"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="changes its user")
def test_a_limit_on_threads_is_found(published: Published) -> None:
    # Root's threads are not counted. What this user may read besides is what root may.
    rights = "-all,+dac_override,+dac_read_search"
    user = ["setpriv", "--reuid", "12345", "--clear-groups", f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    command = [
        "prlimit",
        "--nproc=100:100",
        *user,
        f"--bounding-set={rights}",
        sys.executable,
        "-m",
        "server",
        "doctor",
    ]
    command += ["--json", "--repository", str(published.repository), *port_options()]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["what"] == "threads"]
    assert finding["verdict"] == "broken"
    assert "too few threads may run: expected 128 more at least, got" in finding["found"]
    assert "pids_limit" in finding["remedy"]


def test_a_command_that_is_told_can_be_typed_where_a_path_has_a_space() -> None:
    repository = Path("/srv/my $models")
    assert shlex.split(name_opening(repository)) == ["chmod", "-R", "a+rX", str(repository)]
    assert shlex.split(name_command("check", "--repository", repository))[3:] == [
        "check",
        "--repository",
        str(repository),
    ]
