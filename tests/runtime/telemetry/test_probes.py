"""Probes are answered by a process of its own: whatever holds up the one that serves, and whoever asks."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import pytest
from failures import stand_still
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import descendants_of, gone

from moeserve.runtime.keys.sockets import CannotListen
from moeserve.runtime.telemetry.probes import Probes

SECONDS = 20.0
SERVICES = ("moeserve.v1.FrontService",)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Served:
    """Probes of a service that a test steers. It is not stalled while busy cores hold the test up."""

    def __init__(self, stalled_seconds: float = SECONDS) -> None:
        self.reason = "it is starting"
        self.go = threading.Event()
        self.go.set()
        before = set(descendants_of(os.getpid()))
        self.probes = Probes(("127.0.0.1", 0), SERVICES, stalled_seconds, self.why_not)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.probes.port}")
        self.health = health_pb2_grpc.HealthStub(self.channel)
        assert until(lambda: self.get("/livez")[0] == 200)
        self.child = (set(descendants_of(os.getpid())) - before).pop()

    def why_not(self) -> str:
        self.go.wait(SECONDS)
        return self.reason

    def get(self, path: str) -> tuple[int, str]:
        return get(self.probes.port, path)

    def check(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(self.health.Check(request, timeout=SECONDS).status)

    def say(self, reason: str) -> None:
        self.reason = reason
        self.probes.tell()

    def close(self) -> None:
        self.go.set()
        self.channel.close()
        self.probes.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()
    assert gone([made.child], SECONDS)


def get(port: int, path: str) -> tuple[int, str]:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.status, answer.read().decode().strip()
    finally:
        asked.close()


def until(true: Callable[[], bool]) -> bool:
    limit = time.monotonic() + SECONDS
    while not true() and time.monotonic() < limit:
        time.sleep(0.01)
    return true()


def test_probes_say_whether_layers_can_be_served(served: Served) -> None:
    assert served.get("/livez") == (200, "alive")
    assert served.get("/readyz") == (503, "not serving: it is starting")
    assert served.get("/startupz") == (503, "not started: it is starting")
    assert served.check() == NOT_SERVING
    served.say("")
    assert until(lambda: served.get("/readyz") == (200, "serving"))
    assert served.get("/startupz?verbose=1") == (200, "started")
    assert served.check("moeserve.v1.FrontService") == SERVING
    served.say("rank 3 is lost")
    assert until(lambda: served.get("/readyz") == (503, "not serving: rank 3 is lost"))
    assert served.get("/startupz") == (200, "started"), "it has started all the same"
    assert served.check() == NOT_SERVING
    assert served.get("/metrics") == (404, "there are /livez, /readyz and /startupz")
    with pytest.raises(grpc.RpcError) as refused:
        served.check("no.such.Service")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_process_that_is_stopped_is_replaced() -> None:
    stopped, others = set[int](), set(descendants_of(os.getpid()))
    made = Probes(("127.0.0.1", 0), SERVICES, SECONDS, lambda: "", stands_still=stopped.__contains__)
    try:
        assert until(lambda: get(made.port, "/readyz") == (200, "serving"))
        (before,) = set(descendants_of(os.getpid())) - others
        stand_still(int(before))
        stopped.add(int(before))
        assert gone([before], SECONDS)
        assert until(lambda: get(made.port, "/readyz") == (200, "serving"))
    finally:
        made.close()


def test_a_process_that_is_stopped_ends_with_its_service() -> None:
    code = """
import time
from moeserve.runtime.telemetry.probes import Probes
made = Probes(("127.0.0.1", 0), ("a",), 20.0, lambda: "")
print(made.port, flush=True)
time.sleep(600)
"""
    service = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    try:
        port = int(service.stdout.readline())
        assert until(lambda: get(port, "/readyz")[0] == 200)
        (child,) = descendants_of(service.pid)
        stand_still(int(child))
    finally:
        service.kill()
        service.wait(SECONDS)
        service.stdout.close()
    assert gone([child], SECONDS)


def test_watchers_are_told(served: Served) -> None:
    watch = served.health.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert next(watch).status == NOT_SERVING
    served.say("")
    assert next(watch).status == SERVING
    watch.cancel()


def test_a_service_that_says_nothing_is_neither_ready_nor_alive() -> None:
    made = Served(stalled_seconds=1.0)
    try:
        made.say("")
        assert until(lambda: made.check() == SERVING)
        made.go.clear()
        assert until(lambda: made.get("/readyz")[0] == 503)
        said = re.fullmatch(r"not alive: its process has said nothing for (\d+\.\d) s", made.get("/livez")[1])
        assert said is not None and float(said[1]) >= 1.0
        assert made.get("/startupz")[0] == 503 and made.check() == NOT_SERVING
        made.go.set()
        assert until(lambda: made.get("/livez") == (200, "alive"))
        assert until(lambda: made.check() == SERVING)
    finally:
        made.close()
    assert gone([made.child], SECONDS)


@pytest.mark.timed
def test_an_interpreter_that_is_held_holds_up_no_probe() -> None:
    """Another process asks while this one's interpreter does nothing else for two seconds."""
    made = Served()
    made.say("")
    assert until(lambda: made.check() == SERVING)
    code = f"""
import time, http.client
slowest, until = 0.0, time.monotonic() + 2
while time.monotonic() < until:
    began = time.monotonic()
    asked = http.client.HTTPConnection("127.0.0.1", {made.probes.port}, timeout=10)
    asked.request("GET", "/readyz")
    assert asked.getresponse().read() == b"serving\\n"
    asked.close()
    slowest = max(slowest, time.monotonic() - began)
    time.sleep(0.01)
print(slowest)
"""
    interval = sys.getswitchinterval()
    asking = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    sys.setswitchinterval(SECONDS)  # nobody else gets the interpreter
    until_then = time.monotonic() + 2.5
    while time.monotonic() < until_then:
        sum(range(10000))
    sys.setswitchinterval(interval)
    said, _ = asking.communicate(timeout=SECONDS)
    made.close()
    assert float(said) < 1.0


def test_connections_that_say_nothing_hold_up_no_probe(served: Served) -> None:
    silent = [socket.create_connection(("127.0.0.1", served.probes.port)) for _ in range(1000)]
    for at, one in enumerate(silent):
        with suppress(OSError):  # those that have been open for longest are closed
            one.send(b"GET /li" if at % 2 else b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    began = time.monotonic()
    for _ in range(20):
        assert served.get("/livez") == (200, "alive") and served.check() == NOT_SERVING
    assert time.monotonic() - began < 10
    for one in silent:
        one.close()


@pytest.mark.parametrize("said", [b"\0" * 100, b"GET /livez\r\n\r\n" * 10, b"X" * 100_000, b"GET  \r\n\r\n"])
def test_what_is_no_request_is_refused(served: Served, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.probes.port), timeout=SECONDS) as asked:
        with suppress(OSError):
            asked.sendall(said)
            asked.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            assert not asked.recv(100).startswith(b"HTTP/1.1 200")
    assert served.get("/livez") == (200, "alive")


def test_the_process_is_started_again(served: Served) -> None:
    served.say("")
    assert until(lambda: served.check() == SERVING)
    os.kill(int(served.child), signal.SIGKILL)
    assert gone([served.child], SECONDS)
    assert until(lambda: get(served.probes.port, "/readyz") == (200, "serving"))
    before, served.child = served.child, descendants_of(os.getpid())[-1]
    assert before != served.child


def test_a_port_that_is_taken_is_named(served: Served) -> None:
    with pytest.raises(CannotListen, match=rf"{served.probes.port}: .*in use; set server\.health_port"):
        Probes(("127.0.0.1", served.probes.port), SERVICES, 1.0, lambda: "")
