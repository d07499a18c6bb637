"""Who may ask, and how much in a minute: a file with one key a line, of which the gateway knows only the hashes."""

import hashlib
import hmac
import json
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ApiError, GatewayError

_LOOK_INTERVAL_S = 1.0
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_LINE = '{"name": "alice", "sha256": "64 hexadecimal digits", "requests_per_minute": 60, "tokens_per_minute": 100000}'
_REMEDY = "correct the line, or add a key with --add-key"


class Bucket:
    """So much in a minute: full at first, filled all the time, and in debt after more than it held.

    Args:
        per_minute: What it holds, and what flows in within a minute.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left, self._at = float(per_minute), time.monotonic()

    @property
    def left(self) -> float:
        """What may be taken now."""
        now = time.monotonic()
        self._left = min(self.per_minute, self._left + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._left

    def take(self, amount: float) -> None:
        """Take some, whether it is there or not."""
        self._left = self.left - amount

    def count_wait(self) -> int:
        """Return after how many whole seconds one may be taken; 0 for now."""
        return max(0, math.ceil((1 - self.left) * 60 / self.per_minute))


@dataclass(frozen=True)
class Key:
    """A caller.

    Attributes:
        name: As the operator knows it.
        digest: SHA-256 of the secret.
        buckets: Name of the limit → what is left of it, where there is one.
    """

    name: str
    digest: bytes
    buckets: dict[str, Bucket]

    def admit(self) -> None:
        """Take one request.

        Raises:
            ApiError: There have been too many requests or tokens.
        """
        for name, bucket in self.buckets.items():
            if wait := bucket.count_wait():
                what = name.replace("_", " ")
                raise ApiError(
                    429,
                    f"the key {self.name} has used up its limit: expected at most {bucket.per_minute} {what}, "
                    f"got more; ask again in {wait} s.",
                    type="rate_limit_error",
                    code="rate_limit_exceeded",
                    headers={"retry-after": str(wait)},
                )
        if _LIMITS[0] in self.buckets:
            self.buckets[_LIMITS[0]].take(1)

    def charge(self, tokens: int) -> None:
        """Take tokens, which are known only once a request is answered."""
        if _LIMITS[1] in self.buckets:
            self.buckets[_LIMITS[1]].take(tokens)

    def describe(self) -> dict[str, str]:
        """Return what is left, as OpenAI's headers say it."""
        said = {}
        for name, bucket in self.buckets.items():
            what = name.split("_")[0]
            said[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
            said[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.left)))
        return said


class Keys:
    """The keys of a file, which is read again when it changes.

    Args:
        path: The file.
        say: Where it is told that it was read again, or cannot be.

    Raises:
        GatewayError: It cannot be read.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._keys, self._stamp = read_keys(path), _stamp(path)
        self._looked = time.monotonic()

    def find(self, authorization: str | None) -> Key:
        """Return whose key it is.

        Args:
            authorization: The header of that name.

        Raises:
            ApiError: There is none, or it is nobody's.
        """
        self._look()
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise _refuse_entry("no key came with the request: expected a header 'Authorization: Bearer KEY'.", None)
        digest = hashlib.sha256(secret.strip().encode("utf-8", errors="replace")).digest()
        # All of them, whichever fits: how long it takes tells nothing.
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if not found:
            raise _refuse_entry("the key is nobody's: expected one that this gateway knows.", "invalid_api_key")
        return found[0]

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_INTERVAL_S:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = read_keys(self._path)
        except GatewayError as exc:
            self._say(f"the keys stay as they were: {exc}")
            return
        # Who had used something up has still used it up.
        before = {(key.name, key.digest): key for key in self._keys}
        for key in keys:
            old = before.get((key.name, key.digest))
            for name, bucket in key.buckets.items():
                if old and name in old.buckets and old.buckets[name].per_minute == bucket.per_minute:
                    key.buckets[name] = old.buckets[name]
        self._keys = keys
        self._say(f"read {len(keys)} keys again from {self._path}")


def read_keys(path: Path) -> list[Key]:
    """Return the keys of a file.

    Raises:
        GatewayError: It cannot be read, or a line is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise GatewayError(
            f"{path} cannot be read",
            expected="a file with one key a line",
            got=f"'{exc}'",
            remedy="make one with --add-key, or correct --keys",
        ) from exc
    keys = [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for what, values in (("name", [key.name for key in keys]), ("sha256", [key.digest.hex() for key in keys])):
        if twice := [value for value in values if values.count(value) > 1]:
            raise GatewayError(
                f"{path} holds a {what} twice", expected="each once", got=f"{twice[0]!r}", remedy="remove one line"
            )
    return keys


def add_key(path: Path, name: str, limits: dict[str, int | None]) -> str:
    """Append a new key to a file, which is made with mode 600 where there is none, and return its secret.

    Args:
        path: The file.
        name: As the operator knows whose it is.
        limits: Name of a limit → how much in a minute, None for no limit.

    Raises:
        GatewayError: The name is taken, or the file cannot be written.
    """
    if not name.strip() or not name.isprintable():
        raise GatewayError(
            "a key cannot be named so",
            expected="characters that can be shown",
            got=repr(name),
            remedy="name whose it is",
        )
    # pathlib raises where a folder above it may not be entered, of which the attempt to write tells.
    keys = read_keys(path) if os.path.exists(path) else []  # noqa: PTH110
    if name in [key.name for key in keys]:
        raise GatewayError(
            f"{path} has a key of that name", expected="another name", got=repr(name), remedy="remove its line first"
        )
    secret = f"sk-{secrets.token_urlsafe(32)}"
    entry = {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest()}
    line = json.dumps(entry | {limit: value for limit, value in limits.items() if value is not None})
    # Refused as it would be when it is read.
    _read_line(path, len(keys) + 1, line)
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        start = "" if not before or before.endswith("\n") else "\n"
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(f"{start}{line}\n")
    except OSError as exc:
        raise GatewayError(
            f"{path} cannot be written", expected="a file of this user's", got=f"'{exc}'", remedy="correct --keys"
        ) from exc
    return secret


def _read_line(path: Path, number: int, line: str) -> Key:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _refuse_line(path, number, line[:40])
    unknown = content.keys() - {"name", "sha256", *_LIMITS}
    name, digest = content.get("name"), content.get("sha256", "")
    limits = {limit: content[limit] for limit in _LIMITS if limit in content}
    if unknown or not isinstance(name, str) or not name or not _is_digest(digest):
        raise _refuse_line(path, number, f"{sorted(content)}")
    if wrong := [limit for limit, value in limits.items() if type(value) is not int or value < 1]:
        raise _refuse_line(path, number, f"{wrong[0]} {limits[wrong[0]]!r}")
    return Key(name, bytes.fromhex(digest), {limit: Bucket(value) for limit, value in limits.items()})


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and not set(text) - set("0123456789abcdef")


def _refuse_line(path: Path, number: int, got: str) -> GatewayError:
    return GatewayError(f"{path}, line {number}, is no key", expected=_LINE, got=repr(got), remedy=_REMEDY)


def _refuse_entry(message: str, code: str | None) -> ApiError:
    return ApiError(401, message, type="authentication_error", code=code, headers={"www-authenticate": "Bearer"})


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
