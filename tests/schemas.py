"""Kubernetes' objects beside the schemas that Kubernetes, KServe and Prometheus' operator publish; no cluster."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
from harness import CHECKOUT

PUBLISHED = CHECKOUT / ".venv" / "kubernetes"

_KUBERNETES = PUBLISHED / "kubernetes_validate" / "kubernetes-json-schema"
_KSERVE = PUBLISHED / "kserve" / "models"

# Types of KServe's models that are no models: what JSON has for them.
_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "ResourceQuantity": (str, int)}


def check(document: dict[str, Any], version: str) -> list[str]:
    """Return what is wrong with an object, a line each, by the schemas of that version of Kubernetes.

    Raises:
        LookupError: Nobody publishes a schema of its kind.
    """
    group = document["apiVersion"].partition("/")[0]
    if group == "serving.kserve.io":
        prefix = document["apiVersion"].partition("/")[2].replace("v", "V", 1)
        return _check_kserve(f"{prefix}{document['kind']}", document, document["kind"], version)
    if group == "monitoring.coreos.com":
        return _check_operator(document)
    return _check_builtin(document, version)


def _check_builtin(document: dict[str, Any], version: str) -> list[str]:
    # rbac.authorization.k8s.io/v1 is rbac-v1 there.
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", document["apiVersion"])
    path = _KUBERNETES / f"v{version}.0-local-strict" / f"{document['kind'].lower()}-{name}.json"
    if not path.is_file():
        raise LookupError(f"Kubernetes {version} has no {document['kind']} of {document['apiVersion']}")
    return _judge(path.read_text(), path.parent, document, document["kind"])


def _judge(schema: str, folder: Path, value: Any, where: str) -> list[str]:
    found = _make_validator(schema, folder).iter_errors(value)
    return [f"{'.'.join(map(str, [where, *error.instance_path]))}: {error.message}" for error in found]


@functools.cache
def _make_validator(schema: str, folder: Path) -> Any:
    # It refers to a file beside it.
    whole = json.loads(schema.replace('"/api/_definitions.json#/', '"#/'))
    return jsonschema_rs.validator_for({**whole, "$defs": _read_definitions(folder)})


@functools.cache
def _read_definitions(folder: Path) -> dict[str, Any]:
    definitions: dict[str, Any] = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return definitions


def _check_kserve(model: str, value: Any, where: str, version: str) -> list[str]:
    """Judge by the attributes of a generated model: their names, types, and which of them must be there."""
    if inner := re.fullmatch(r"list\[(.+)\]|dict\(str, (.+)\)", model):
        wanted, items = (list, enumerate) if inner[1] else (dict, dict.items)
        if not isinstance(value, wanted):
            return [f"{where}: expected {model}, got {type(value).__name__}"]
        return [
            line
            for key, item in items(value)
            for line in _check_kserve(inner[1] or inner[2], item, f"{where}.{key}", version)
        ]
    if model in _PLAIN:
        is_right = isinstance(value, _PLAIN[model]) and (model != "int" or not isinstance(value, bool))
        return [] if is_right else [f"{where}: expected {model}, got {type(value).__name__}"]
    attributes = _read_kserve().get(model)
    if attributes is None:
        return _check_definition(model, value, where, version)
    if not isinstance(value, dict):
        return [f"{where}: expected an object, got {type(value).__name__}"]
    types, required = attributes
    found = [f"{where}: {name} is missing" for name in required - value.keys()]
    found += [f"{where}: KServe knows no {name}" for name in value.keys() - types.keys()]
    for name in value.keys() & types.keys():
        found += _check_kserve(types[name], value[name], f"{where}.{name}", version)
    return found


def _check_definition(model: str, value: Any, where: str, version: str) -> list[str]:
    """Judge what KServe takes from Kubernetes, `V1Container` say."""
    folder = _KUBERNETES / f"v{version}.0-local-strict"
    kind = re.sub(r"^V(\d+(?:alpha\d+|beta\d+)?)", r"v\1.", model)
    (name,) = [key for key in _read_definitions(folder) if key.endswith(f".{kind}")]
    return _judge(json.dumps({"$ref": f"#/$defs/{name}"}), folder, value, where)


@functools.cache
def _read_kserve() -> dict[str, tuple[dict[str, str], set[str]]]:
    """Return model → the type of each of its keys, and the keys that it must have.

    They are read, not imported: KServe's package depends on a web server, pandas and a newer protobuf.
    """
    models = {}
    for path in _KSERVE.glob("v1*.py"):
        text = path.read_text(encoding="utf-8")
        for made in (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)):
            tables = {
                node.targets[0].id: ast.literal_eval(node.value)
                for node in made.body
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Dict)
            }
            keys = tables["attribute_map"]
            required = {keys[name] for name in re.findall(r"value for `(\w+)`, must not be `None`", text)}
            models[made.name] = ({keys[name]: kind for name, kind in tables["openapi_types"].items()}, required)
    return models


def _check_operator(document: dict[str, Any]) -> list[str]:
    """Judge by the operator's models, which pass over keys that they do not know: those are what is lost on the way."""
    if str(PUBLISHED) not in sys.path:
        sys.path.append(str(PUBLISHED))
    from cloudcoil.models.prometheus_operator import v1
    from pydantic import ValidationError

    try:
        model = getattr(v1, document["kind"]).model_validate(document)
    except ValidationError as exc:
        return [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors()]
    kept = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
    return [] if kept == document else [f"{document['kind']}: the operator knows not all of it, but {kept}"]
