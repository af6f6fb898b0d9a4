"""Closes what a library listens on to everyone, once those that it waited for have come.

gloo listens for as long as its group lives, though all its members are connected when it is formed. It keeps
each connection of a stranger for ever, so that a few thousand leave its process without descriptors.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

SO_ATTACH_FILTER = 26
"""Of Linux' asm-generic/socket.h: packets to a socket pass a program of classic BPF."""

_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes: of every packet nothing is kept


def listeners() -> set[str]:
    """The TCP sockets that this process listens on, as /proc names them."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:") and _listens(int(descriptor)):
            found.add(name)
    return found


def close_to_strangers(but: set[str]) -> int:
    """Has every TCP socket that this process listens on, other than those in `but`, accept nobody any more.

    Connections that there are stay as they are. Returns how many sockets it closed so.
    """
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:") and name not in but and _listens(int(descriptor)):
                with socket.socket(fileno=os.dup(int(descriptor))) as listener:
                    _drop_all(listener)
                count += 1
        except OSError:
            continue  # closed meanwhile
    return count


def _listens(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
            return tcp and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _drop_all(listener: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    option = struct.pack("HL", 1, ctypes.addressof(program))  # struct sock_fprog: one instruction, and where
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, option)
