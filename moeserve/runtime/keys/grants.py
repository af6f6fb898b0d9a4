"""`Grants`: the file that says which token, and which certificate's name, has which roles.

A line is `ROLES token TOKEN`, `ROLES name NAME` or `ROLES anyone`; roles are separated by commas, and `#`
begins a comment. Several tokens are valid at once, so that a new one is added before the old one is taken
out. The file is read again when it changes; one that cannot be read leaves what was read before. One that
was emptied can be read: it grants nothing, so that who empties it locks all callers out.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moeserve.runtime.keys.access import GRANTED, Role

log = logging.getLogger(__name__)

SHORTEST_TOKEN = 16
LONGEST_TOKEN = 4096
LOOK_SECONDS = 0.25  # between looks whether the file has changed

Roles = frozenset[Role]
NOBODY: Roles = frozenset()


class BadGrants(ValueError):
    """The file of grants cannot be used; names the file and the line, never what stands in it."""


class Refused(Exception):
    """A caller may not do what it asks for."""


class NotAuthenticated(Refused):
    """A caller shows nothing, or a token that is not valid now."""


class WrongRole(Refused):
    """A caller is known, and has no role that lets it."""


@dataclass(frozen=True, repr=False)
class _Granted:
    """What a file says. Tokens are kept as digests alone."""

    tokens: tuple[tuple[bytes, Roles], ...] = ()
    names: dict[str, Roles] = field(default_factory=dict)
    anyone: Roles = NOBODY


Stamp = tuple[int, int, int]


class Grants:
    """What the file at `path` grants now. Safe from any thread. Raises BadGrants at first."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._looked = 0.0
        self._stamp: Stamp | None = None
        self._granted = _Granted()
        self._said = ""  # in the log, why the file cannot be used
        self._stamp, self._granted = _read(path)
        _warn_of_readers(path)
        self._warn_of_nothing()

    @property
    def version(self) -> object:
        """Another object once the file says something else."""
        return self._now()

    def of_token(self, token: str) -> Roles:
        """The roles of a token. Raises NotAuthenticated for one that is not valid now.

        All valid tokens are compared, each in constant time.
        """
        digest, found, roles = _digest(token), False, NOBODY
        for known, its in self._now().tokens:
            if hmac.compare_digest(digest, known):
                found, roles = True, roles | its
        if not found:
            raise NotAuthenticated("the token is not valid")
        return roles

    def of_names(self, names: Iterable[str]) -> Roles:
        """The roles of a certificate with these names."""
        granted = self._now().names
        return NOBODY.union(*(granted.get(name, NOBODY) for name in names))

    def of_anyone(self) -> Roles:
        """The roles of who shows nothing."""
        return self._now().anyone

    def _now(self) -> _Granted:
        """What the file says, looked at a few times a second at most."""
        if (now := time.monotonic()) - self._looked > LOOK_SECONDS:
            with self._lock:
                if now - self._looked > LOOK_SECONDS:
                    self._looked = now
                    self._look()
        return self._granted

    def _look(self) -> None:
        try:
            if _stamp_of(self._path) == self._stamp:
                return
            self._stamp, self._granted = _read(self._path)
        except BadGrants as bad:
            self._stays(str(bad))
            return
        except OSError as error:
            self._stays(f"keys.grants: cannot read {self._path}: {error.strerror}")
            return
        self._said = ""
        log.info("read %s anew: %d tokens, %d names", self._path, *_counts(self._granted))
        self._warn_of_nothing()

    def _stays(self, why: str) -> None:
        """The file cannot be used, which the log says once; it is tried again at the next look."""
        self._stamp = None
        if why != self._said:
            self._said = why
            log.error("what was granted before stays: %s", why)

    def _warn_of_nothing(self) -> None:
        granted = self._granted
        if not (granted.tokens or granted.names or granted.anyone):
            log.error(
                "%s grants nothing to anybody: all callers are refused until it has a line again; replace it "
                "in one go (mv) where that is not meant",
                self._path,
            )


def _counts(granted: _Granted) -> tuple[int, int]:
    return len(granted.tokens), len(granted.names)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _stamp_of(path: str) -> Stamp:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> tuple[Stamp, _Granted]:
    try:
        stamp = _stamp_of(path)
        text = Path(path).read_text()
    except OSError as error:
        raise BadGrants(f"keys.grants: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise BadGrants(f"keys.grants: {path} is not UTF-8") from None
    return stamp, _parsed(text, path)


def _parsed(text: str, path: str) -> _Granted:
    tokens: dict[bytes, Roles] = {}
    names: dict[str, Roles] = {}
    anyone = NOBODY
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        roles = _roles(words[0], f"{path} line {number}")
        match words[1:]:
            case ["token", token] if SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN:
                digest = _digest(token)
                tokens[digest] = tokens.get(digest, NOBODY) | roles
            case ["token", token]:
                raise BadGrants(
                    f"keys.grants: {path} line {number}: a token has {SHORTEST_TOKEN} to {LONGEST_TOKEN} "
                    f"characters, and this one {len(token)}"
                )
            case ["name", name]:
                names[name] = names.get(name, NOBODY) | roles
            case ["anyone"]:
                anyone |= roles
            case _:
                raise BadGrants(
                    f"keys.grants: {path} line {number} is neither `ROLES token TOKEN`, "
                    "`ROLES name NAME` nor `ROLES anyone`"
                )
    return _Granted(tuple(tokens.items()), names, anyone)


def _roles(word: str, where: str) -> Roles:
    known = {role.value: role for role in GRANTED}
    unknown = [number for number, name in enumerate(word.split(","), 1) if name not in known]
    if unknown:  # the word may be a token at the wrong place, so it is not repeated
        raise BadGrants(
            f"keys.grants: {where}: role {unknown[0]} of the first word is unknown; "
            f"there are {', '.join(known)}"
        )
    return frozenset(known[name] for name in word.split(","))


def _warn_of_readers(path: str) -> None:
    if os.stat(path).st_mode & 0o044:
        log.warning("%s holds tokens and can be read by other users; chmod 600 keeps it to one", path)
