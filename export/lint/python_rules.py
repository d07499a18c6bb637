"""Rules on models of Triton's Python backend; their code is parsed and never run."""

import ast
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from .finding import Problem
from .model import Model, Repository

_CLASS = "TritonPythonModel"


def check_syntax(model: Model, _: Repository) -> Iterator[Problem]:
    """Find code that does not parse."""
    for path, tree in _list_trees(model):
        # A later Python, or the model's own, may read more than this one.
        if isinstance(tree, SyntaxError) and not (_has_own_python(model) or _is_later(model.target.python_version)):
            yield Problem(
                path=path,
                line=tree.lineno or 1,
                what=f"{path.name} is not valid Python: {tree.msg}",
                instead="correct the line",
            )


def check_class(model: Model, _: Repository) -> Iterator[Problem]:
    """Find code without the class that the backend makes."""
    for path, tree in _list_trees(model):
        if isinstance(tree, ast.Module) and not _defines(tree):
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
            yield Problem(
                path=path,
                line=classes[0].lineno if classes else 1,
                what=f"{path.name} has no class {_CLASS}",
                instead=f"write `class {_CLASS}:`",
            )


def check_execute(model: Model, _: Repository) -> Iterator[Problem]:
    """Find a class without `execute`."""
    for path, tree in _list_trees(model):
        for node in tree.body if isinstance(tree, ast.Module) else ():
            if isinstance(node, ast.ClassDef) and node.name == _CLASS and not (node.bases or node.keywords):
                names = {n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
                names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                if "execute" not in names:
                    yield Problem(
                        path=path,
                        line=node.lineno,
                        what=f"{_CLASS} has no method execute, so that every request fails",
                        instead="write `def execute(self, requests):`",
                    )


def check_imports(model: Model, _: Repository) -> Iterator[Problem]:
    """Find imports of what is neither beside the model nor installed here."""
    for path, tree in _list_trees(model):
        if _has_own_python(model) or not isinstance(tree, ast.Module):
            continue
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                top = name.split(".")[0]
                if not _can_be_found(top, path):
                    yield Problem(
                        path=path,
                        line=node.lineno,
                        what=f"{top} is neither beside {path.name} nor installed here",
                        instead=f"put {top}.py there, or install it where the server runs",
                    )


def _list_trees(model: Model) -> Iterator[tuple[Path, ast.Module | SyntaxError]]:
    for version in model.served if model.backend == "python" else ():
        path = model.find_model_file(version)
        if path is not None and path.is_file() and path.suffix == ".py":
            yield path, _parse(path)


def _parse(path: Path) -> ast.Module | SyntaxError:
    try:
        with warnings.catch_warnings():
            # An escape that Python does not like is not what is asked here.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except SyntaxError as exc:
        return exc
    except (ValueError, RecursionError, MemoryError) as exc:
        return SyntaxError(str(exc))


def _defines(tree: ast.Module) -> bool:
    """Tell whether the class may be made anywhere, or be imported, perhaps with a star."""
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    made = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    quoted = any(isinstance(node, ast.Constant) and node.value == _CLASS for node in nodes)
    return quoted or "*" in imported or _CLASS in imported | made | named


def _can_be_found(name: str, path: Path) -> bool:
    if name in sys.stdlib_module_names or name in ("triton_python_backend_utils", "c_python_backend_utils"):
        return True
    if any((folder / name).exists() or (folder / f"{name}.py").exists() for folder in (path.parent, path.parents[1])):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _has_own_python(model: Model) -> bool:
    return "EXECUTION_ENV_PATH" in model.config.parameters


def _is_later(version: str) -> bool:
    return tuple(map(int, version.split(".")[:2])) > sys.version_info[:2]
