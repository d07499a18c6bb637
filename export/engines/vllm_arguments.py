"""`model.json`, with which Triton's vLLM backend makes its engine: the one file that says where a version lies.

The backend hands it to vLLM as it is, and vLLM takes a folder by its whole path. So the path is that of one documented
mount, and is written again where the version gets another number.
"""

import json
from typing import Any

# Beside the weights; no other name is looked for.
ARGUMENTS_FILE = "model.json"

# Where the repository is mounted in the image.
MOUNT = "/models"


def render_arguments(name: str, version: int, arguments: dict[str, Any]) -> str:
    """Return the text of a `model.json`.

    Args:
        name: The Triton model.
        version: Its version.
        arguments: What vLLM is told beside the place of the model.
    """
    return json.dumps({"model": locate(name, version), **arguments}, indent=2) + "\n"


def renumber_arguments(text: str, name: str, version: int) -> str:
    """Return the same with the place of another version of `name`."""
    return render_arguments(name, version, {key: value for key, value in json.loads(text).items() if key != "model"})


def locate(name: str, version: int) -> str:
    """Return the folder of a version in the image."""
    return f"{MOUNT}/{name}/{version}"
