"""Unix sockets of this user alone, ports that are held for their listeners, and why none can be had."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
from pathlib import Path

from moeserve.proto.host import sockets_parent

log = logging.getLogger(__name__)

LONGEST_PATH = 107
"""Bytes of a Unix socket's path on Linux."""

LONGEST_NAME = "regions-4194304-0a1b2c3d"
"""Of the sockets that a service's processes have in the private folder."""

EVERY_ADDRESS = ("0.0.0.0", "::", "[::]")

_UCRED = struct.Struct("3i")  # pid, uid, gid


def check_room(path: str | None = None) -> None:
    """Raises OSError where the folder for temporary files is too long a path for the socket at `path`; by
    default for any that a service makes.
    """
    parent = sockets_parent()
    path = path or f"{parent}/moeserve-{os.geteuid()}/{LONGEST_NAME}"
    length, needed = len(os.fsencode(parent)), len(os.fsencode(path))
    if needed > LONGEST_PATH:
        most = length - needed + LONGEST_PATH
        raise OSError(
            f"the folder for temporary files, {parent}, is a path of {length} bytes, and Unix sockets there "
            f"need one of {most} at most; set TMPDIR to a shorter one, for clients, too"
        )


def listen_privately(what: str, kind: socket.SocketKind) -> tuple[socket.socket, str]:
    """A listening Unix socket in the private folder, and its path, which whoever closes it removes.

    what: the first word of its name. Sockets that processes left when they were killed are removed. Raises
    OSError.
    """
    folder = private_folder()
    _remove_dead(folder)
    path = str(folder / f"{what}-{os.getpid()}-{secrets.token_hex(4)}")
    check_room(path)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener, path


def private_folder() -> Path:
    """`moeserve-UID` of the folder for temporary files, or a fresh one where another user has that name."""
    folder = Path(sockets_parent()) / f"moeserve-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not own or stat.S_IMODE(found.st_mode) != 0o700:
            log.warning("%s is not a folder of this user with mode 0700; a fresh one is made", folder)
            return Path(tempfile.mkdtemp(prefix=f"moeserve-{os.geteuid()}-", dir=sockets_parent()))
    return folder


def remove(path: str) -> None:
    """Removes the socket at `path`, if it is still there."""
    Path(path).unlink(missing_ok=True)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and uid at the other end of a Unix socket, as the kernel knows them."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(packed)
    return pid, uid


def _remove_dead(folder: Path) -> None:
    for path in folder.iterdir():
        pid = path.name.split("-")[1:2]
        if pid and pid[0].isdecimal() and not Path("/proc", pid[0]).exists() and not _answers(path):
            remove(str(path))


def _answers(path: Path) -> bool:
    """Whether a process listens there, such as one of another container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(0)
        return asking.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


class HeldPort(int):
    """A TCP port that another process of this user holds for whoever listens there: it has bound it, and does
    not listen. The listener shares it by SO_REUSEPORT, which the kernel grants to processes of one user.
    """


def hold_port(host: str, port: int) -> tuple[socket.socket, HeldPort]:
    """Binds `host:port` (0: a free one) so that nobody else gets it while its listener starts again.

    Raises OSError where it is taken.
    """
    family, address = place_of(host, port)
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.bind(address)  # before it may be shared: a port that somebody else shares is taken, too
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        holder.close()
        raise
    return holder, HeldPort(holder.getsockname()[1])


def place_of(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Family and address of `host:port` to listen at; an IPv6 address may be in brackets. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, (str(address[0]), int(address[1]))


def address_of(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{int(port)}" if ":" in bare else f"{bare}:{int(port)}"


def reached_at(host: str, port: int, own: str) -> str:
    """Where to reach what listens on `host`: there, or at this machine's `own` address if that is each."""
    return address_of(own if host in EVERY_ADDRESS else host, port)


class CannotListen(OSError):
    """An address cannot be had; names it, why, and the key that sets it."""

    @classmethod
    def at(cls, doing: str, host: str, port: int, error: OSError, way_out: str) -> CannotListen:
        """doing: what cannot be done there; way_out: which key to set where the port is at fault."""
        named = not isinstance(error, socket.gaierror)
        if not named or error.errno == errno.EADDRNOTAVAIL:
            way_out = "set server.host (--host) to an address of this machine"
        why = os.strerror(error.errno) if named and error.errno else error.strerror or str(error)
        return cls(f"{doing} on {address_of(host, port)}: {why}; {way_out}")


def why_taken(host: str, port: int) -> OSError | None:
    """Why nothing can listen at `host:port`, as a bind of it says now; None where it says nothing."""
    try:
        hold_port(host, port)[0].close()
    except OSError as error:
        return error
    return None
