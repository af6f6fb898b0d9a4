"""vLLM's OpenAI server with its experts behind a service: parallel ranks, features, and lost ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_models import FLOAT32, EngineModel, apart, prompts
from engine_runs import NEW_TOKENS, REQUESTS, Server, complete, house_of, stream

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

FAILURES = int(os.environ.get("MOESERVE_FAILURES", "20"))
EAGER = ("--dtype", "float32", "--enforce-eager", "--block-size", "32")


@pytest.fixture(scope="module")
def model(engine_model: Any) -> EngineModel:
    made: EngineModel = engine_model("qwen3_moe", "float32")
    return made


@pytest.fixture(scope="module")
def house(model: EngineModel) -> Iterator[LocalCluster]:
    with house_of(model.path, step__timeout_seconds=5.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(model: EngineModel, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM's server answers to 16 requests at once, with experts of its own."""
    with Server(model.path, None, tmp_path_factory.mktemp("alone"), *EAGER) as server:
        return complete(server.address, server.model, prompts(REQUESTS), NEW_TOKENS)


WAYS: dict[str, tuple[str, ...]] = {
    "one": EAGER,
    "compiled": ("--dtype", "float32", "--block-size", "32"),
    "tp2": (*EAGER, "--tensor-parallel-size", "2"),
    "tp2-ep": (*EAGER, "--tensor-parallel-size", "2", "--enable-expert-parallel"),
    "dp2": (*EAGER, "--data-parallel-size", "2"),
    "chunked": (*EAGER, "--max-num-batched-tokens", "32", "--max-num-seqs", "8"),
}


@pytest.mark.parametrize("way", WAYS)
def test_sixteen_requests_at_once_are_answered_as_by_vllm_alone(
    model: EngineModel, house: LocalCluster, alone: list[dict[str, Any]], tmp_path: Path, way: str
) -> None:
    with Server(model.path, house.address, tmp_path, *WAYS[way]) as server:
        first = complete(server.address, server.model, prompts(REQUESTS), NEW_TOKENS)
        again = complete(server.address, server.model, prompts(REQUESTS), NEW_TOKENS)  # prefixes are cached
        # one request: with two data-parallel ranks the other one is idle
        single = complete(server.address, server.model, prompts(REQUESTS)[5:6], NEW_TOKENS)
        text = stream(server.address, server.model, prompts(REQUESTS)[5], NEW_TOKENS)
    for found, expected in ((first, alone), (again, alone), (single, alone[5:6])):
        told = apart(found, expected)
        assert told.within(FLOAT32) and not told.ties, told
    assert len(text) > 0


class Streaming:
    """Clients that stream the same completions over and over; a context, which raises what went wrong."""

    def __init__(self, server: Server, expected: dict[int, str]) -> None:
        self._server, self._expected = server, expected
        self._stop = threading.Event()
        self.answered = 0
        self.errors: list[BaseException] = []
        self._clients = [threading.Thread(target=self._ask, args=(at,), daemon=True) for at in expected]

    def __enter__(self) -> Streaming:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(200)
        if self.errors:
            raise self.errors[0]

    def _ask(self, at: int) -> None:
        try:
            while not self._stop.is_set():
                text = stream(self._server.address, self._server.model, prompts(REQUESTS)[at], NEW_TOKENS)
                assert text == self._expected[at]
                self.answered += 1
        except BaseException as error:
            self.errors.append(error)


@pytest.mark.timeout(1500)
def test_ranks_killed_and_stopped_in_the_middle_fail_no_request_and_change_no_text(
    model: EngineModel, tmp_path: Path
) -> None:
    with (
        house_of(model.path, step__timeout_seconds=3.0) as house,
        Server(model.path, house.address, tmp_path, *EAGER) as server,
        MoeClient(house.address, timeout=60) as client,
    ):
        asked = range(4)
        expected = {
            at: stream(server.address, server.model, prompts(REQUESTS)[at], NEW_TOKENS) for at in asked
        }
        with Streaming(server, expected) as streaming:
            for failure in range(FAILURES):
                before, answered = client.status().generation, streaming.answered
                strike(house.pid(failure % 2), stopped=failure % 4 >= 2)
                wait(lambda b=before: client.status().generation > b, streaming)  # type: ignore[misc]
                wait(lambda a=answered: streaming.answered >= a + 2, streaming)  # type: ignore[misc]
        assert client.status().generation > FAILURES // 2
        assert server.process.poll() is None
    print(f"{FAILURES} failures, {streaming.answered} streamed completions, none failed")


def strike(pid: int, *, stopped: bool) -> None:
    """Kills a rank, or stops it for good: whoever waits for it must give it up."""
    os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)


def wait(done: Any, streaming: Streaming, seconds: float = 120.0) -> None:
    """Until `done()`; raises what a client met meanwhile."""
    deadline = time.monotonic() + seconds
    while not done():
        if streaming.errors:
            raise streaming.errors[0]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
