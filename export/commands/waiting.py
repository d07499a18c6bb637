"""Waiting until a running server serves what became active, as the status port of its launcher tells."""

import json
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from modelyard.exchange import fetch

from ..errors import ServingError, SettingsError

_POLL_S = 0.2
_TIMEOUT_S = 5.0

# After which another version that is told as the active one is no moment's matter.
_SETTLING_S = 2.0

# Of every model.
_TOLD = {"active": int, "served": int, "state": str, "reason": str}

# A launcher looks twice a second; what it sees of a network file system may be a minute old.
_NOTICE_S = 90.0


def check_status_address(url: str) -> None:
    """Refuse what no status port can be at, before anything is changed that would be waited for.

    Raises:
        SettingsError: It is no address, or lacks its port.
    """
    try:
        parts = urlsplit(_add_scheme(url))
        # Behind a scheme, its usual port is meant.
        port = parts.port or ("://" in url and parts.port is None)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname and port)
    # A port that is no number, or half of a bracket.
    except ValueError:
        is_address = False
    if not is_address or any(letter.isspace() or not letter.isprintable() for letter in url):
        raise SettingsError(
            "--wait cannot be used",
            expected="HOST:PORT of a server's status port, such as localhost:8003",
            got=repr(url),
            remedy="correct it, or write what else belongs to the verb before --wait",
        )


def wait_until_served(url: str, name: str, version: int, tell: Callable[[str], None], golden: str = "") -> None:
    """Wait until a server serves a version; see `_wait`.

    Raises:
        ServingError: As there, or the wait was interrupted.
    """
    try:
        _wait(url, name, version, tell, golden)
    except KeyboardInterrupt as exc:
        raise ServingError(
            f"the wait for {url} was interrupted, and version {version} of {name} is active in the repository",
            expected="the server to serve it, as it may by now",
            got="no word of it yet",
            remedy=f"ask with `curl {url}/versions`",
        ) from exc


def _wait(url: str, name: str, version: int, tell: Callable[[str], None], golden: str) -> None:
    """Wait until a server serves a version.

    Args:
        url: Of its status port, such as `localhost:8003`.
        name: The public model.
        version: The version, which is the active one.
        tell: Called with what is going on, whenever that changes.
        golden: SHA-256 of its recorded answers, by which it is told from a version of another repository that has the
            same number; empty where that is not known.

    Raises:
        ServingError: It cannot serve it, does not follow the repository, or cannot be asked.
    """
    asked = _add_scheme(url)
    noticed_by, told, was_noticed = time.monotonic() + _NOTICE_S, "", False
    while True:
        content = _read_versions(asked, name, version)
        found = content["models"].get(name, {"active": 0, "served": 0, "state": "served", "reason": ""})
        is_others = bool(golden) and found.get("golden", golden) != golden
        if found["served"] == version and found["state"] == "served" and not is_others:
            return
        if found["active"] == version and found["state"] == "failed":
            raise ServingError(
                f"version {version} of {name} is active in the repository, and the server at {url} does not serve it",
                expected=f"version {version}",
                got=f"version {found['served']}, for: {found['reason'].rstrip('.')}"
                if found["served"]
                else "none, for: " + found["reason"].rstrip("."),
                remedy="mend that, or activate another version",
            )
        if not content.get("follows", True):
            raise ServingError(
                f"version {version} of {name} is active in the repository, and the server at {url} does not follow it",
                expected="a server with --follow on",
                got="--follow off",
                remedy="start it anew",
            )
        was_noticed = was_noticed or found["active"] == version
        if was_noticed and found["active"] != version and _is_settled(asked, name, version):
            raise ServingError(
                f"version {version} of {name} is not waited for any more",
                expected="it to stay the active one",
                got=f"version {found['active']}" if found["active"] else "none that is active",
                remedy="activate it again",
            )
        if found["state"] == "rolling":
            # Where tritonserver is being started for long, its launcher takes notice after that.
            noticed_by = max(noticed_by, time.monotonic() + _NOTICE_S)
        if (found["active"] != version or is_others) and time.monotonic() > noticed_by:
            raise ServingError(
                f"version {version} of {name} is active in the repository, and the server at {url} takes no notice",
                expected=f"version {version} as the active one within {_NOTICE_S:g} s",
                got=_describe_active(found, name, is_others=is_others),
                remedy="pass the status port of a server of this repository",
            )
        doing = _describe(found) if found["active"] == version and not is_others else "not noticed yet"
        if doing != told:
            tell(f"{url}: {doing}")
            told = doing
        time.sleep(_POLL_S)


def _is_settled(asked: str, name: str, version: int) -> bool:
    """Tell whether a server goes on saying that another version is the active one: a restart may pass it by."""
    time.sleep(_SETTLING_S)
    found = _read_versions(asked, name, version)["models"].get(name)
    return found is None or bool(found["active"] != version)


def _describe_active(found: dict[str, Any], name: str, *, is_others: bool) -> str:
    """Return what a server has in the place of the version that is waited for."""
    if is_others:
        return f"a version {found['active']} with other recorded answers"
    return f"version {found['active']}" if found["active"] else f"no model {name}"


def _describe(found: dict[str, Any]) -> str:
    """Return in words how far a server is."""
    answers = f"version {found['served']} answers" if found["served"] else "none answers"
    waits = f"; it {found['reason'].rstrip('.')}" if found["reason"] and found["state"] == "rolling" else ""
    return f"{found['state']}, {answers}{waits}"


def _add_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def _read_versions(url: str, name: str, version: int) -> Any:
    got = "nothing"
    cause: Exception | None = None
    try:
        answer = fetch(f"{url}/versions", _TIMEOUT_S)
        got = f"'{answer[:100].decode(errors='replace')}'" if answer else got
        content = json.loads(answer)
        models = content["models"]
        if name not in models or all(type(models[name][key]) is kind for key, kind in _TOLD.items()):
            return content
    # HTTPException: another port of the server answers in another protocol.
    except (OSError, HTTPException) as exc:
        got, cause = f"'{exc}'", exc
    # Another program answers.
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as exc:
        cause = exc
    raise ServingError(
        f"version {version} of {name} is active in the repository, and {url}/versions cannot be asked for it",
        expected="the status port of a running server",
        got=got,
        remedy="pass its address, such as localhost:8003",
    ) from cause
