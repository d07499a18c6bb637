"""Whether a running server serves what is active in its repository, and if not, whether it is about to."""

import http.client
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.exchange import fetch

from .model_text import CONFIG_FILE

_TIMEOUT_S = 5.0

# A launcher looks twice a second, and what it sees of a network file system may be a minute old.
_NOTICE_S = 90.0

# Of every model.
_TOLD = {"active": int, "served": int, "state": str, "reason": str}


def read_following(status_url: str) -> Mapping[str, Any] | None:
    """Return model → how far the launcher follows it, as its status port tells; None where no launcher answers."""
    try:
        models = json.loads(fetch(f"{status_url}/versions", _TIMEOUT_S))["models"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return None
    # Another program may listen there.
    return models if isinstance(models, dict) and all(map(_is_told, models.values())) else None


def _is_told(model: Any) -> bool:
    return isinstance(model, dict) and all(type(model.get(key)) is kind for key, kind in _TOLD.items())


def is_being_loaded(repository: Path, name: str, following: Mapping[str, Any]) -> bool:
    """Tell whether a model of which no version is served is being loaded, or has only just become one to load.

    Args:
        repository: The model repository.
        name: The public model.
        following: What `read_following` returned, of a launcher that could be asked.
    """
    if name in following:
        return bool(following[name].get("state") == "rolling")
    try:
        # Whatever time its configuration bears: this one is that of its coming.
        return time.time() - (repository / name).stat().st_ctime < _NOTICE_S
    except OSError:
        return True


def find_wait(name: str, following: Mapping[str, Any]) -> str:
    """Return what a model that has changed waits for, in words that follow its name; empty where it does not.

    Args:
        name: The public model.
        following: What `read_following` returned; empty where nobody could be asked.
    """
    known = following.get(name, {})
    return str(known.get("reason", "")).rstrip(".") if known.get("state") == "rolling" else ""


def find_disagreement(repository: Path, name: str, active: int, served: int, following: Mapping[str, Any]) -> str:
    """Return why a server serves something else than what is active; nothing where it is just being rolled out.

    Args:
        repository: The model repository.
        name: The public model.
        active: Its active version; 0 where the repository does not name one.
        served: The version that answers.
        following: What `read_following` returned; empty where nobody could be asked.
    """
    known = following.get(name, {})
    if active in (served, 0):
        # What the repository says of the same version may not be what is served of it.
        return str(known.get("reason", "")).rstrip(".") if known.get("state") == "failed" else ""
    if known.get("state") == "rolling":
        return ""
    what = f"version {served} is served, and version {active} is active in the repository"
    if known.get("state") == "failed":
        return f"{what}: {str(known.get('reason', '')).rstrip('.')}"
    age_s = _find_age_s(repository, name)
    return "" if age_s < _NOTICE_S else f"{what} for {age_s:.0f} s"


def _find_age_s(repository: Path, name: str) -> float:
    """Return since how many seconds a model's active version is the one."""
    try:
        return time.time() - (repository / name / CONFIG_FILE).stat().st_mtime
    except OSError:
        return 0.0
