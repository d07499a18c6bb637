"""Whether a running server serves what is active in its repository, and if not, whether it is about to."""

import http.client
import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelyard.exchange import fetch

from .damage import find_rest
from .model_text import CONFIG_FILE

_TIMEOUT_S = 5.0

# A launcher looks twice a second, and what it sees of a network file system may be a minute old.
_NOTICE_S = 90.0

NOT_FOLLOWED = "the server does not follow it (--follow off), so start it anew"

# Of every model.
_TOLD = {"active": int, "served": int, "state": str, "reason": str}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a launcher says of itself, or nothing of what nobody could be asked.

    Attributes:
        models: Model → how far it is followed.
        follows: Whether what becomes active in the repository is served.
    """

    models: Mapping[str, Any] = field(default_factory=dict)
    follows: bool = True


def read_following(status_url: str) -> Told | None:
    """Return how far the launcher follows its models, as its status port tells; None where no launcher answers."""
    try:
        content = json.loads(fetch(f"{status_url}/versions", _TIMEOUT_S))
        models, follows = content["models"], content["follows"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return None
    # Another program may listen there.
    is_launcher = isinstance(models, dict) and all(map(_is_told, models.values())) and isinstance(follows, bool)
    return Told(models=models, follows=follows) if is_launcher else None


def _is_told(model: Any) -> bool:
    return isinstance(model, dict) and all(type(model.get(key)) is kind for key, kind in _TOLD.items())


def is_being_loaded(repository: Path, name: str, following: Told) -> bool:
    """Tell whether a model of which no version is served is being loaded, or has only just become one to load.

    Args:
        repository: The model repository.
        name: The public model.
        following: What `read_following` returned, of a launcher that could be asked.
    """
    if name in following.models:
        return bool(following.models[name].get("state") == "rolling")
    if not following.follows:
        return False
    try:
        # Whatever time its configuration bears: this one is that of its coming.
        return time.time() - (repository / name).stat().st_ctime < _NOTICE_S
    except OSError:
        return True


def find_lost(repository: Path, found: Collection[str], following: Told) -> dict[str, str]:
    """Return name → what is wrong with each model that a server has and its repository has not, or not whole.

    Args:
        repository: The model repository.
        found: Names of the models that should be served.
        following: What `read_following` returned; nothing where nobody could be asked.
    """
    lost = {}
    for name, known in following.models.items():
        if name in found:
            continue
        served, folder = known["served"], repository / name
        # What is a step of another by now, and was served by nobody, is lost by nobody.
        is_meant = served or not os.path.lexists(folder / CONFIG_FILE)
        if is_meant and (rest := find_rest(folder, served or known["active"])):
            lost[name] = rest
        # One that follows is about to unload it.
        elif served and not following.follows:
            lost[name] = f"version {served} is served, and the model is no longer in the repository; {NOT_FOLLOWED}"
    return lost


def find_wait(name: str, following: Told) -> str:
    """Return what a model that has changed waits for, in words that follow its name; empty where it does not.

    Args:
        name: The public model.
        following: What `read_following` returned; nothing where nobody could be asked.
    """
    known = following.models.get(name, {})
    return str(known.get("reason", "")).rstrip(".") if known.get("state") == "rolling" else ""


def find_disagreement(repository: Path, name: str, active: int, served: int, following: Told) -> str:
    """Return why a server serves something else than what is active; nothing where it is just being rolled out.

    Args:
        repository: The model repository.
        name: The public model.
        active: Its active version; 0 where the repository does not name one.
        served: The version that answers.
        following: What `read_following` returned; nothing where nobody could be asked.
    """
    known = following.models.get(name, {})
    if active in (served, 0):
        # What the repository says of the same version may not be what is served of it.
        return str(known.get("reason", "")).rstrip(".") if known.get("state") == "failed" else ""
    if known.get("state") == "rolling":
        return ""
    what = f"version {served} is served, and version {active} is active in the repository"
    if not following.follows:
        return f"{what}; {NOT_FOLLOWED}"
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
