"""The text of a `config.pbtxt`, as far as the launcher must read and change it: its fields at the top level.

The launcher uses the standard library alone, so it knows no protobuf messages. Text protobuf:
https://protobuf.dev/reference/protobuf/textformat-spec/
"""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

CONFIG_FILE = "config.pbtxt"

# A hundred times what the largest published one has.
_MAX_CONFIG_BYTES = 1 << 20

_TOKEN = re.compile(r"#[^\n]*|[{}\[\]<>:;,]|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[^\s{}\[\]<>:;,\"'#]+")
_OPENING, _CLOSING = "{[<", "}]>"


def read_config(path: Path) -> str:
    """Return the text of a configuration, whatever lies there in its place: a pipe is not waited for.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no file, or too large for one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(_MAX_CONFIG_BYTES + 1)
    if len(content) > _MAX_CONFIG_BYTES:
        raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
    return content.decode("utf-8", errors="surrogateescape")


def read_fields(config: str) -> list[tuple[str, str]]:
    """Return name and text of every field at the top level, in order, without comments.

    Raises:
        ValueError: Its braces do not match.
    """
    if rest := _TOKEN.sub("", config).strip():
        raise ValueError(f"expected names, values and braces, got {rest[:80]!r}")
    fields: list[tuple[str, str]] = []
    tokens: list[str] = []
    depth = 0
    for token in _TOKEN.findall(config):
        if token.startswith("#") or (depth == 0 and token in (",", ";")):
            continue
        depth += (token in _OPENING) - (token in _CLOSING)
        tokens.append(token)
        if depth < 0:
            break
        # A field is a name and a block, or a name, a colon and a value.
        if depth == 0 and (token in _CLOSING or (len(tokens) > 2 and tokens[1] == ":")):
            fields.append((tokens[0], " ".join(tokens)))
            tokens = []
    if depth or tokens:
        raise ValueError(f"expected a whole field at the end, got {' '.join(tokens)[:80]!r}")
    return fields


def replace_field(config: str, name: str, text: str = "") -> str:
    """Return `config` with `text` in place of every field `name` of the top level."""
    kept = [field for key, field in read_fields(config) if key != name]
    return "\n".join([*kept, *([text] if text else [])]) + "\n"


def rename(config: str, name: str) -> str:
    """Return `config` for a model called `name`."""
    return replace_field(config, "name", f'name: "{name}"')


def serve_versions(config: str, versions: Iterable[int]) -> str:
    """Return `config` with a policy that serves exactly `versions`."""
    listed = " ".join(f"versions: {version}" for version in sorted(set(versions)))
    return replace_field(config, "version_policy", f"version_policy {{ specific {{ {listed} }} }}")


def set_parameter(config: str, key: str, value: str) -> str:
    """Return `config` with one parameter added or replaced; key and value are plain words.

    A parameter of a list of several in one field (`parameters [ ... ]`) is not found, only added to.
    """
    kept = [
        field
        for name, field in read_fields(config)
        if not (name == "parameters" and field.startswith(f'parameters {{ key : "{key}"'))
    ]
    return "\n".join([*kept, f'parameters {{ key : "{key}" value {{ string_value : "{value}" }} }}']) + "\n"


def read_parameter(config: str, key: str) -> str | None:
    """Return the string of one parameter, None where there is none."""
    for name, field in read_fields(config):
        if name == "parameters":
            found = re.search(rf'key : "{re.escape(key)}" value {{ string_value : "((?:\\.|[^"\\])*)"', field)
            if found:
                return found[1]
    return None


def read_name(config: str) -> str:
    """Return the name that `config` gives its model; empty where it leaves that to its folder."""
    return next((field.split(" ", 2)[2].strip("\"'") for key, field in read_fields(config) if key == "name"), "")


def read_inputs(config: str) -> list[str]:
    """Return the names of the inputs that `config` lists."""
    listed = " ".join(field for key, field in read_fields(config) if key == "input")
    return re.findall(r"""\bname : ["']((?:\\.|[^"'\\])*)["']""", listed)


def read_versions(config: str) -> list[int]:
    """Return the versions that the policy of `config` names; none where it leaves the choice to the server."""
    policy = " ".join(field for key, field in read_fields(config) if key == "version_policy")
    return [int(number) for number in re.findall(r"-?\b\d+\b", policy)] if "specific" in policy else []


def read_steps(config: str) -> list[tuple[str, int]]:
    """Return name and version of every step of an ensemble; -1 for the newest. Empty for what is not an ensemble."""
    scheduling = " ".join(field for key, field in read_fields(config) if key == "ensemble_scheduling")
    steps = re.split(r"\bmodel_name : ", scheduling)[1:]
    found = []
    for step in steps:
        version = re.search(r"\bmodel_version : (-?\d+)", step)
        found.append((step.split()[0].strip("\"'"), int(version[1]) if version else -1))
    return found
