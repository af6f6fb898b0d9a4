"""How late a killed process with a GPU's memory closes its sockets: `sockets` asks, `main` is the process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

from bench.lib.record import ROOT
from bench.service.passes.gpu.clock import Clock
from bench.service.serving_on.gpu.told import Told

READY_SECONDS, CLOSED_SECONDS = 60.0, 30.0
STEP = 1 << 28  # bytes of one tensor: a bank has many


class Held(NamedTuple):
    """What a process holds when it is killed, in GB."""

    device: float
    pinned: float
    host: float = 0.0

    def __str__(self) -> str:
        found = {"of a GPU": self.device, "page-locked": self.pinned, "of host memory": self.host}
        return (
            ", ".join(f"{size:g} GB {name}" for name, size in found.items() if size) or "CUDA and no memory"
        )


ON_GPUS = (Held(0, 0), Held(11, 0), Held(22, 0), Held(11, 11), Held(0, 0, 11))
ON_CPU = (Held(0, 0, 0.05), Held(0, 0, 0.2))


def sockets(told: Told, part: Clock, *, gpus: bool) -> None:
    """Kills one process after the other; tells when each of its sockets closed, and when it had ended.

    Of its two sockets one is older than its CUDA, the other younger: the kernel closes files in an order.
    """
    for held in ON_GPUS if gpus else ON_CPU:
        if part.left <= 0:
            told.say(left_out=f"a killed process of {held}")
            return
        found = _killed(held, "cuda" if gpus else "cpu")
        late = max(found.get("older", CLOSED_SECONDS), found.get("younger", CLOSED_SECONDS))
        peers = {f"{name}, ms": seconds * 1e3 for name, seconds in found.items()}
        told.add(f"a killed process of {held}: its last socket closes", late * 1e3, "ms", **peers)


def _killed(held: Held, device: str) -> dict[str, float]:
    """Seconds from the kill until each thing was seen."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        server.settimeout(READY_SECONDS)
        words = [str(server.getsockname()[1]), device, *map(str, held)]
        child = subprocess.Popen([sys.executable, "-m", __name__, *words], cwd=ROOT)
        stack.callback(child.wait, 60.0)
        stack.callback(child.kill)
        ends = dict[int, str]()
        for name in ("older", "younger"):
            one = stack.enter_context(server.accept()[0])
            one.settimeout(READY_SECONDS)
            if one.recv(1) != b"r":
                raise RuntimeError(f"a process with {held} has ended: {child.wait(10.0)}")
            ends[one.fileno()] = name
        handle = os.pidfd_open(child.pid)
        stack.callback(os.close, handle)
        ends[handle] = "ended"
        time.sleep(0.3)
        return _seen(child, ends)


def _seen(child: subprocess.Popen[bytes], ends: dict[int, str]) -> dict[str, float]:
    """Kills the process, and waits for what becomes readable."""
    poll, found, left = select.poll(), dict[str, float](), dict(ends)
    for handle in ends:
        poll.register(handle, select.POLLIN)
    began = time.monotonic()
    child.send_signal(signal.SIGKILL)
    while left and (rest := began + CLOSED_SECONDS - time.monotonic()) > 0:
        for handle, _ in poll.poll(rest * 1e3):
            poll.unregister(handle)
            found[left.pop(handle)] = time.monotonic() - began
    return found


def main() -> None:
    """The process: holds memory and two sockets until it is killed, or nobody is there any more."""
    port, device, *sizes = sys.argv[1:]
    address = ("127.0.0.1", int(port))
    with socket.create_connection(address) as older:
        import torch

        on_device, pinned, host = (int(float(size) * 1e9) for size in sizes)
        kept = [
            torch.ones(min(STEP, on_device - at), dtype=torch.uint8, device=device)
            for at in range(0, on_device, STEP)
        ]
        kept += [torch.ones(min(STEP, host - at), dtype=torch.uint8) for at in range(0, host, STEP)]
        kept += [
            torch.ones(min(STEP, pinned - at), dtype=torch.uint8).pin_memory()
            for at in range(0, pinned, STEP)
        ]
        if device != "cpu":
            torch.ones(1, device=device)
            torch.cuda.synchronize()
        with socket.create_connection(address) as younger:
            older.sendall(b"r")
            younger.sendall(b"r")
            older.recv(1)


if __name__ == "__main__":
    main()
