"""Whether a server serves its repository as verified: the check of a deployment, and of a container's health."""

import http.client
import math
import os
import urllib.error
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from modelyard.exchange import fetch

from ..errors import CheckError, GoldenError
from ..locations import name_command
from ..tritonserver.control import pick_from
from .agreement import NOT_FOLLOWED, Told, find_disagreement, find_lost, find_wait, is_being_loaded, read_following
from .health import check_answer
from .model_text import CONFIG_FILE
from .published import Published, read_repository
from .recorded import DamagedGoldenError
from .sums import GOLDEN_FILE, FileSums

_TIMEOUT_S = 5.0

_OTHER_ADDRESS = "correct --host and --http-port"


class _DamageError(ValueError):
    """A model has files that are not as they were published."""


class _AbsentError(OSError):
    """Tritonserver has no version of a model."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of asking a model.

    Attributes:
        error: The largest difference to the verified answer; NaN where none could be asked for, and the model is ready.
        served: The version that answered; 0 where tritonserver has none, and others answer.
        active: The version that is active in the repository.
        disagreement: Why the one is not the other, where it has not just become so.
        doubt: Why it is not known whether a rollout is in progress; empty where it is.
        waits: What it waits for, in words that follow its name, before it is rolled out; empty where it does not.
    """

    error: float
    served: int
    active: int
    disagreement: str = ""
    doubt: str = ""
    waits: str = ""


def check_ensembles(
    url: str, repository: Path, status_url: str | None = None, *, any_version: bool = False
) -> dict[str, Checked]:
    """Ask every active model of `repository`, ensembles and lone graphs, for its verified answer.

    Args:
        url: Of the server's HTTP port.
        repository: Where the models are published.
        status_url: Of its status port, which tells how far it follows the repository.
        any_version: Whether a model may answer from another version than the active one for good, or while its files
            are damaged, and may have none that is served, as long as another answers.

    Returns:
        Name to what came of it.

    Raises:
        CheckError: One of them does not answer, or otherwise, or another version than the active one for longer than
            a rollout takes, or there is none to ask. One that is just being loaded need not, if another does.
        StrangerError: Another program answers in the place of a server.
    """
    wanted = _read(repository)
    _reach(url, repository)
    published = _list_published(repository)
    # One of which no version is active has no configuration.
    names = sorted(folder.name for folder in published if os.path.lexists(folder / CONFIG_FILE))
    told = read_following(status_url) if status_url else None
    following, doubt = told or Told(), _describe_doubt(status_url) if told is None else ""
    reasons = {
        name: str(each.get("reason", "")) for name, each in following.models.items() if each.get("state") == "failed"
    }
    faults = find_lost(repository, wanted, following)
    # Of one without a recorded answer, such as one that was written by hand, the server alone knows.
    faults |= {name: reasons[name] for name in reasons.keys() - {*names}}
    faults |= {name: each.damage for name, each in wanted.items() if each.damage}
    checked, failures, remedy = dict[str, Checked](), [], "see the server's log"
    for name in dict.fromkeys([*faults, *names]):
        active = wanted[name].version if name in wanted else 0
        try:
            if name in faults:
                raise _DamageError(faults[name].rstrip("."))
            checked[name] = _check(url, repository, name, active, following, doubt, any_version=any_version)
        except GoldenError as exc:
            failures.append(f"{name}: {exc.fault}")
            remedy = exc.remedy
        except (_DamageError, DamagedGoldenError) as exc:
            try:
                if not any_version:
                    raise _DamageError(exc) from exc
                checked[name] = _check_damaged(url, repository, name, active, following, str(exc))
            except _DamageError as damage:
                failures.append(f"{name}: {damage}")
        except _AbsentError as exc:
            reason = reasons.get(name, "").rstrip(".") or (str(exc) if following.follows else NOT_FOLLOWED)
            waits = find_wait(name, following)
            if told is not None and is_being_loaded(repository, name, told):
                reason = _describe_loading(waits) if any_version else ""
            elif not any_version:
                failures.append(f"{name}: {reason}{f', and {doubt}' if doubt else ''}")
                continue
            checked[name] = Checked(error=math.nan, served=0, active=active, disagreement=reason, waits=waits)
        except OSError as exc:
            # Of one that it could not load, the server knows more than that it is not there.
            failures.append(f"{name}: {reasons.get(name) or exc}")
        except ValueError as exc:
            known, reason = following.models.get(name, {}), reasons.get(name, "").rstrip(".")
            # What it was asked for is not what it was loaded with, which the launcher knows.
            is_other = GOLDEN_FILE in reason and known.get("served") == active
            if any_version and is_other and (served := _find_served(url, name)):
                checked[name] = Checked(error=math.nan, served=served, active=active, disagreement=reason)
            else:
                failures.append(f"{name}: {reason if is_other else exc}")
    is_answered = any(each.served for each in checked.values())
    # Of models that were all written by hand nobody knows what they should answer.
    is_unknown = any_version and not names and told is not None and _is_ready(status_url)
    if failures or not (is_answered or is_unknown):
        failures += [
            f"{name}: {each.disagreement or _describe_loading(each.waits)}"
            for name, each in checked.items()
            if not each.served
        ]
        raise CheckError(
            f"{url} does not serve {repository} as verified",
            expected="an answer of every ensemble",
            got="; ".join(failures) or f"no ensemble with a {GOLDEN_FILE}",
            remedy=remedy,
        )
    return checked


def _is_ready(status_url: str | None) -> bool:
    """Tell whether the launcher says that the server is ready."""
    try:
        fetch(f"{status_url}/ready", _TIMEOUT_S)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def _describe_loading(waits: str) -> str:
    return f"it {waits}" if waits else "it is being loaded"


def _read(repository: Path) -> dict[str, Published]:
    """Return what should be served.

    Raises:
        CheckError: There is no repository, or it cannot be read.
    """
    try:
        return read_repository(repository, FileSums())
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise CheckError(
            f"there is no repository {repository}",
            expected="the folder that the server serves",
            got="a file" if repository.exists() else "nothing",
            remedy="name it with --repository",
        ) from exc
    except OSError as exc:
        raise CheckError(
            f"{repository} cannot be read",
            expected="a folder that this user may read",
            got=f"'{exc.strerror}'",
            remedy="open it, or check as its owner",
        ) from exc


def _reach(url: str, repository: Path) -> None:
    """Refuse where nobody answers: no log of a server says why.

    Raises:
        CheckError: There is no server.
    """
    try:
        fetch(f"{url}/v2/health/live", _TIMEOUT_S)
    # Whatever it says, it is there; what answers in another protocol is found out as it is asked.
    except (urllib.error.HTTPError, http.client.HTTPException):
        return
    except OSError as exc:
        cause, start = getattr(exc, "reason", exc), name_command("serve", "--repository", repository)
        # It is there, and its log may say why it does not answer.
        if isinstance(cause, TimeoutError):
            return
        raise CheckError(
            f"{url} cannot be reached",
            expected=f"the server of {repository}",
            got=f"'{getattr(cause, 'strerror', None) or cause}'",
            remedy=f"start it with `{start}`, or {_OTHER_ADDRESS}",
        ) from exc


def _list_published(repository: Path) -> set[Path]:
    """Return the folders of models with a recorded answer."""
    folders = {path.parent.parent for path in repository.glob(f"*/*/{GOLDEN_FILE}")}
    return {folder for folder in folders if not folder.name.startswith(".")}


def _describe_doubt(status_url: str | None) -> str:
    """Return in words that nobody tells whether a rollout is in progress."""
    place = f" could not be asked at {urllib.parse.urlsplit(status_url).netloc}" if status_url else " was not named"
    return f"whether it is being rolled out is not known: the status port{place}; pass --status-port"


def _check(
    url: str, repository: Path, name: str, active: int, following: Told, doubt: str, *, any_version: bool
) -> Checked:
    """Ask one model for its verified answer.

    Raises:
        StrangerError: Another program answers.
        OSError: The server does not answer, or refuses.
        _DamageError: Its recorded answer is gone.
        ValueError: It answers something else, or from another version than it should.
    """
    version = _read_version(url, name)
    error = check_answer(url, repository, name, version)
    if error is None:
        # It may be gone with the rest of its folder, which the server tells while it waits for the next one.
        told = following.models.get(name, {})
        reason = str(told.get("reason", "")).rstrip(".") if told.get("state") == "failed" else ""
        raise _DamageError(reason or f"version {version} has no {GOLDEN_FILE}")
    reason = find_disagreement(repository, name, active, int(version), following)
    if reason and doubt:
        reason = f"{reason}, and {doubt}"
    if reason and not any_version:
        raise ValueError(reason)
    waits = find_wait(name, following)
    return Checked(error=error, served=int(version), active=active, disagreement=reason, doubt=doubt, waits=waits)


def _check_damaged(url: str, repository: Path, name: str, active: int, following: Told, damage: str) -> Checked:
    """Ask a model of which files are damaged: a server that has it in memory answers all the same.

    Raises:
        _DamageError: It is not answered.
        StrangerError: Another program answers.
    """
    # That its backend processes are lost, the launcher knows: tritonserver calls it ready.
    is_lost = following.models.get(name, {}).get("served") == 0
    served = 0 if is_lost else _find_served(url, name)
    if not served:
        if _is_absent(url, name):
            return Checked(error=math.nan, served=0, active=active, disagreement=damage)
        raise _DamageError(damage)
    try:
        error = check_answer(url, repository, name, str(served))
    except OSError as exc:
        # One of several backend processes may be lost, and the others answer as the launcher says.
        if name not in following.models:
            raise _DamageError(f"{damage}; asked all the same: {exc}") from exc
        error = None
    except ValueError:
        # It may be what it is asked for that is damaged, which says nothing of the server.
        error = None
    if error is None and name not in following.models:
        damage = f"{damage}, and without its status port (--status-port) nobody can tell whether it answers"
    return Checked(error=math.nan if error is None else error, served=served, active=active, disagreement=damage)


def _find_served(url: str, name: str) -> int:
    """Return which version of a model answers that it is ready; 0 where none does.

    Raises:
        StrangerError: Another program answers.
    """
    try:
        version = _read_version(url, name)
        ready = f"{url}/v2/models/{urllib.parse.quote(name)}/versions/{version}/ready"
        fetch(ready, _TIMEOUT_S)
        return int(version)
    except (OSError, http.client.HTTPException):
        return 0


def _is_absent(url: str, name: str) -> bool:
    """Tell whether tritonserver says that it has no version of a model.

    Raises:
        StrangerError: Another program answers.
    """
    try:
        _read_version(url, name)
    except _AbsentError:
        return True
    except OSError:
        return False
    return False


def _read_version(url: str, name: str) -> str:
    """Return the newest version of a model that the server has.

    Raises:
        StrangerError: Another program answers.
        _AbsentError: It has none.
        OSError: The server does not answer, or refuses.
    """
    asked = f"{url}/v2/models/{urllib.parse.quote(name)}"
    try:
        answer = fetch(asked, _TIMEOUT_S)
        return pick_from(answer, lambda told: str(max(map(int, told["versions"]))), asked, _OTHER_ADDRESS)
    except urllib.error.HTTPError as exc:
        raise (_AbsentError if exc.code == http.HTTPStatus.NOT_FOUND else OSError)(str(exc)) from exc
    except http.client.HTTPException as exc:
        raise OSError(f"no HTTP: {exc!r}") from exc
