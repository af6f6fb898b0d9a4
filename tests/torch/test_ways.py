"""What ways to experts share: rounds of calls, and answers that nobody waits for."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moeserve.proto.client import MoeClient, Reply
from moeserve.proto.errors import MoeError
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.proto.timeouts import LONGEST_SECONDS
from moeserve.torch.attached import Attached
from moeserve.torch.connecting import Settings, connect, wanted_of
from moeserve.torch.module import MoeExperts
from moeserve.torch.remote import Remote
from moeserve.torch.ways import MOST_ALIKE, Rounds, Rows, Submitted


@pytest.mark.parametrize(
    ("alike", "layers", "rounds"),
    [
        (1, [0, 1, 2, 0, 1, 2], [1, 1, 1, 2, 2, 2]),
        (1, [3, 5, 3, 5], [1, 1, 2, 2]),
        (1, [4, 4, 4], [1, 2, 3]),
        (2, [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 2, 2]),
        (2, [0, 0, 0, 1], [1, 1, 2, 2]),
        (1, [0, 2, 1], [1, 1, 2]),
    ],
)
def test_a_round_begins_at_a_layer_that_is_not_after_the_last(
    alike: int, layers: list[int], rounds: list[int]
) -> None:
    told = Rounds(alike)
    assert [told.at(layer) for layer in layers] == rounds


def test_answers_that_nobody_waits_for_are_not_kept_for_ever() -> None:
    submitted = Submitted("test")
    for _ in range(300):
        for layer in range(3):
            number = submitted.put(layer, lambda: torch.zeros(1))
    assert len(submitted.numbers) <= 6
    assert torch.equal(submitted.take(number), torch.zeros(1))
    submitted.close()


def test_who_has_too_many_calls_of_one_layer_under_way_is_told_how_many_may_be() -> None:
    submitted = Submitted("test")
    numbers = [submitted.put(0, lambda: torch.zeros(1)) for _ in range(3 * MOST_ALIKE)]
    for number in numbers[-MOST_ALIKE:]:
        submitted.take(number)
    with pytest.raises(KeyError, match=f"more than {MOST_ALIKE} submitted calls of one layer"):
        submitted.take(numbers[0])
    submitted.close()


def test_a_closed_way_takes_no_call_and_says_so() -> None:
    way = Remote(cast(MoeClient, Client()))
    way.close()
    with pytest.raises(RuntimeError, match="this way to the experts was closed"):
        way.submit(0, Rows(torch.zeros(1, 4), torch.zeros(1, 2), None))


class Client:
    """Answers with the rows."""

    def call(self, layer: int, hidden: Tensor, route: Any) -> Reply:
        return Reply(hidden, 1, 1)

    def close(self) -> None:
        pass


def test_an_answer_goes_to_the_device_in_the_caller_s_thread_and_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that asks has another stream, whose memory may be given on before the caller has read it."""
    way = Remote(cast(MoeClient, Client()))
    host = Rows(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))
    monkeypatch.setattr(Rows, "on_host", lambda rows: host)
    number = way.submit(0, Rows(host.hidden.to("meta"), host.route, host.weights))
    assert way._submitted._answers[number].result(10).device.type == "cpu"
    assert way.wait(number).device.type == "meta"
    way.close()


@pytest.mark.parametrize("kind", ["submit", "wait", "mixed"])
def test_after_a_fork_a_way_says_so_and_waits_for_nothing(kind: str) -> None:
    way = Remote(cast(MoeClient, Client()))
    rows = Rows(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))
    way.wait(way.submit(0, rows))
    kept = way.submit(0, rows)  # its thread waits for work when the child is made
    way._submitted._answers[kept].result(10)
    child = os.fork()
    if not child:
        said = b""
        try:
            signal.alarm(5)  # ends a child that waits
            {
                "submit": lambda: way.wait(way.submit(0, rows)),
                "wait": lambda: way.wait(kept),
                "mixed": lambda: way.mixed(0, rows),
            }[kind]()
        except RuntimeError as failed:
            said = str(failed).encode()
        finally:
            os._exit(0 if b"made before a fork; connect again" in said else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(way.wait(kept), rows.hidden)
    way.close()


def test_a_lane_is_attached_anew_within_what_is_left_of_a_call() -> None:
    """Both questions of an attempt, at a service that takes connections and never answers."""
    told: list[float] = []

    def attach(seconds: float) -> AttachedLane:
        told.append(seconds)
        if len(told) == 1:
            return cast(AttachedLane, GoneLane())
        return AttachedLane.attach(address, Wanted("again", timeout=60.0), seconds)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        way = Attached(attach, timeout=0.5)
        rows = Rows(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))
        started = time.monotonic()
        with pytest.raises(MoeError):
            way.mixed(0, rows)
    assert time.monotonic() - started < 5
    assert all(seconds <= 0.5 for seconds in told)


class GoneLane:
    """A lane whose rank is gone."""

    layout = MailboxLayout.of((4, 1), (4, 2, 1), "fp32")
    alive = False

    def close(self, seconds: float) -> None:
        assert seconds <= 0.5


def test_a_module_takes_another_way_in_place_of_its_own() -> None:
    first, other = (Remote(cast(MoeClient, Client())) for _ in range(2))
    experts = MoeExperts(first, 0)
    first.close()
    experts.way = other
    assert torch.equal(experts.wait(experts.submit(torch.ones(2, 4), torch.zeros(2, 2))), torch.ones(2, 4))
    other.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "remote", "one_version": True}, r"one_version=True needs mode='attached'"),
        ({"mode": "in_process", "config": "x", "one_version": True}, r"one_version=True needs"),
        ({"mode": "remote", "rank": 1}, r"leave rank=1 out"),
        ({"mode": "attached", "layers": (0, 1)}, r"layers=\(0, 1\) are of rows from a GPU"),
        ({"mode": "attached", "device": "cpu:0"}, r"device='cpu:0' is neither cpu nor cuda"),
        ({"mode": "attached", "device": "cuda:x"}, r"device='cuda:x' is neither cpu nor cuda"),
        ({"mode": "attached", "timeout": float("nan")}, r"timeout=nan must be more than 0 seconds"),
        ({"mode": "attached", "timeout": 0}, r"timeout=0 must be more than 0 seconds"),
    ],
)
def test_settings_that_no_way_of_the_mode_would_heed_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**{"address": "127.0.0.1:1"} | given)


def test_how_long_a_caller_is_awake_reaches_its_lane() -> None:
    settings = Settings("attached", "127.0.0.1:1", spin=0.25)
    assert wanted_of(settings).spin == 0.25
    assert wanted_of(replace(settings, spin=None)).spin is None
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"spin=.* must be 0 to 1 seconds"):
            wanted_of(replace(settings, spin=wrong))


def test_a_timeout_without_end_is_a_long_one_for_rows_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel waits for nanoseconds, which are a whole number."""
    seen: list[float] = []

    class Service:
        layers = (SimpleNamespace(hidden=8, experts=4, top_k=2),)

        def __init__(self, address: str, **options: object) -> None: ...

        def __enter__(self) -> Service:
            return self

        def __exit__(self, *failed: object) -> None: ...

        def model(self) -> Service:
            return self

    def device(
        attach: object, layout: object, device: object, timeout: float, *rest: object, **more: object
    ) -> None:
        seen.append(timeout)

    monkeypatch.setattr("moeserve.proto.client.MoeClient", Service)
    monkeypatch.setattr("moeserve.torch.attached_device.AttachedDevice", device)
    connect(Settings("attached", "127.0.0.1:1", timeout=math.inf, device="cuda:0"))
    assert seen == [LONGEST_SECONDS]
