"""Where tritonserver is, and the environment in which it and its Python backend run."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ..errors import NotFoundError
from ..limits import starts_programs
from ..locations import name_installation
from .paced_starts import pace_program

# Says that a folder is a virtual environment, and of which interpreter.
_ENVIRONMENT_FILE = "pyvenv.cfg"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A tritonserver and what lies around it.

    Attributes:
        executable: The program.
        backends: The folder of the backends it came with.
        python_stub: The Python backend's stub for this interpreter.
        libraries: Folders that its shared libraries are found in.
        source: Where it was found, in words.
    """

    executable: Path
    backends: Path
    python_stub: Path
    libraries: tuple[Path, ...]
    source: str

    @property
    def is_assembled(self) -> bool:
        """Whether the stub lies inside of the Python backend, as in containers, so that no copy is needed."""
        return self.python_stub.parent == self.backends / "python"


def find_installation() -> Installation:
    """Return the tritonserver on PATH, else the one inside the wheel nvidia-pytriton.

    Raises:
        NotFoundError: There is neither, or its Python backend has no stub for this Python.
    """
    on_path = shutil.which("tritonserver")
    if on_path:
        return _describe(Path(on_path).resolve(), "found on PATH")
    # The package itself is not imported: that takes a second, and only its place is needed.
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or []) if spec else []:
        executable = Path(location, "tritonserver", "bin", "tritonserver")
        if executable.is_file():
            return _describe(executable, "from the wheel nvidia-pytriton")
    raise NotFoundError(
        "no tritonserver was found",
        expected="one on PATH or in the wheel nvidia-pytriton",
        got="neither",
        remedy=f"run `{name_installation('server')}`, or put tritonserver on PATH",
    )


def build_environment(installation: Installation, interpreter: Path | None = None) -> dict[str, str]:
    """Return the environment in which tritonserver finds its libraries, and its Python backend this interpreter.

    The stub embeds Python in isolated mode, so PYTHONPATH is ignored. It takes the interpreter that `python3` on PATH
    is, and with that interpreter's environment its packages.

    Args:
        installation: The tritonserver.
        interpreter: The folder that `link_interpreter` was asked for, if it was.
    """
    environment = dict(os.environ)
    programs = [Path(sys.executable).parent, environment.get("PATH", os.defpath)]
    if interpreter is not None and interpreter.exists():
        programs.insert(0, interpreter / "bin")
    environment["PATH"] = os.pathsep.join(map(str, programs))
    folders = [*map(str, installation.libraries), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(folder for folder in folders if folder)
    # The server's workers must never ask a hub for anything.
    environment["HF_HUB_OFFLINE"] = "1"
    # No backend multiplies matrices in numpy, whose OpenBLAS starts a thread for each core in each backend process.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    # On a GPU ONNX Runtime multiplies fp32 in TF32, with 10 bits of 23, unless it is told otherwise: all-MiniLM-L6-v2
    # was off by 1.9e-4 in place of 3e-7 on an H200, and no model in fp32 would give the answers that were proven.
    environment.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    return environment


def link_interpreter(directory: Path) -> None:
    """Make `directory`, through whose links this interpreter and its packages have paths in ASCII, if they have none.

    The stub's Python has no locale: it takes paths for ASCII, and what is not for lone surrogates. From such a path
    Python 3.12 imports no compiled module, no Python starts whose own it is, and the stub aborts where it tells of an
    exception that passed through a file there.

    Args:
        directory: A path in ASCII, at which there is nothing.

    Raises:
        OSError: There is no room.
    """
    if (sys.prefix + sys.base_prefix).isascii():
        return
    directory.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != _ENVIRONMENT_FILE:
            (directory / entry.name).symlink_to(entry)
    environment = Path(sys.prefix, _ENVIRONMENT_FILE)
    if environment.is_file():
        base = directory.with_name(f"{directory.name}-base")
        base.symlink_to(sys.base_prefix)
        # Beside `home` it says whether the packages of that interpreter are to be found as well.
        lines = [line for line in environment.read_text("utf-8").splitlines() if line.split("=")[0].strip() != "home"]
        (directory / _ENVIRONMENT_FILE).write_text("\n".join([f"home = {base / 'bin'}", *lines, ""]), "utf-8")


def assemble_backends(installation: Installation, own_backends: Path, directory: Path) -> None:
    """Fill `directory` with the backends that came with tritonserver and our own Python-based ones.

    Our `onnxruntime` stands in for the native one and is left out where that is there.

    Args:
        installation: The tritonserver whose backends to take.
        own_backends: Folder of the Python-based backends.
        directory: An empty folder; holds links, and the Python backend as a copy whose processes can be paced, or as
            it is where programs may not be started from `directory`.
    """
    for backend in sorted(installation.backends.iterdir()):
        if backend.is_dir() and backend.name != "python":
            (directory / backend.name).symlink_to(backend)
    python = directory / "python"
    if installation.is_assembled and not starts_programs(directory):
        python.symlink_to(installation.backends / "python")
    else:
        # tritonserver refuses a backend library that is a link out of its folder, so files are copied.
        shutil.copytree(installation.backends / "python", python, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(installation.python_stub, python / installation.python_stub.name)
        pace_program(python / installation.python_stub.name)
    for backend in sorted(own_backends.iterdir()):
        if (backend / "model.py").is_file() and not (directory / backend.name).exists():
            (directory / backend.name).symlink_to(backend)


def _describe(executable: Path, source: str) -> Installation:
    root = executable.parent.parent
    version = ".".join(platform.python_version_tuple()[:2])
    name = "triton_python_backend_stub"
    # The container holds one stub inside the backend, the wheel one for every Python beside it.
    candidates = (root / "python_backend_stubs" / version / name, root / "backends" / "python" / name)
    stub = next((path for path in candidates if path.is_file()), None)
    if stub is None:
        raise NotFoundError(
            f"the Python backend of {executable} does not run on Python {version}",
            expected=f"a stub at {' or '.join(map(str, candidates))}",
            got="neither",
            remedy="use Python 3.10, 3.11 or 3.12",
        )
    wheel_libraries = root.parent.parent / "nvidia_pytriton.libs"
    folders = [wheel_libraries, Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")]
    # pathlib raises over a folder that may not be entered.
    libraries = tuple(folder for folder in folders if os.path.isdir(folder))  # noqa: PTH112
    check_libpython(version, libraries)
    return Installation(
        executable=executable,
        backends=root / "backends",
        python_stub=stub,
        libraries=libraries,
        source=source,
    )


def check_libpython(version: str, libraries: tuple[Path, ...]) -> None:
    """Refuse an interpreter without the shared library that the Python backend is linked to.

    Debian and Ubuntu keep it in a package of its own, and pyenv builds none unless asked to.

    Args:
        version: Python's version, such as `3.11`.
        libraries: Folders to look in besides those that the system knows.

    Raises:
        NotFoundError: It is in none of them.
    """
    name = f"libpython{version}.so.1.0"
    if any(os.path.isfile(folder / name) for folder in libraries):  # noqa: PTH113
        return
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    known = subprocess.run([ldconfig, "-p"], stdout=subprocess.PIPE, text=True, check=False).stdout
    if name not in known:
        raise NotFoundError(
            "the Python backend cannot run",
            expected=f"the shared library {name}",
            got="none that this user may read",
            remedy=f"install it (Debian, Ubuntu: apt-get install libpython{version}; pyenv: "
            f"PYTHON_CONFIGURE_OPTS=--enable-shared), or let this user enter its folder",
        )
