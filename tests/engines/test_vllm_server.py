"""vLLM's OpenAI server with its experts behind a service: parallel ranks, features, and lost ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_models import FLOAT32, EngineModel, apart, prompts
from engine_runs import NEW_TOKENS, REQUESTS, Server, complete, house_of, stream, strike, until

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
        self.check()

    def check(self) -> None:
        """Raises what a client met so far."""
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


def moved(client: MoeClient, streaming: Streaming) -> int:
    """Has the service move experts to and fro while clients stream; how many copies it made."""
    copies = 0
    for policy in ("even", "eplb", "even", "eplb"):
        answered = streaming.answered
        reply = client.rebalance(policy=policy)
        assert reply.outcome in ("moved", "even"), reply
        copies += reply.committed_moves
        until(lambda a=answered: streaming.answered >= a + 2, streaming.check)  # type: ignore[misc]
    return copies


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("mode", "failures"), [("remote", FAILURES), ("attached", FAILURES // 5)])
def test_experts_that_move_and_ranks_that_are_lost_in_the_middle_fail_no_request_and_change_no_text(
    model: EngineModel, tmp_path: Path, mode: str, failures: int
) -> None:
    with (
        house_of(model.path, step__timeout_seconds=3.0) as house,
        Server(model.path, house.address, tmp_path, *EAGER, MOESERVE_EXPERTS_MODE=mode) as server,
        MoeClient(house.address, timeout=60) as client,
    ):
        asked = range(4)
        expected = {
            at: stream(server.address, server.model, prompts(REQUESTS)[at], NEW_TOKENS) for at in asked
        }
        with Streaming(server, expected) as streaming:
            copies = moved(client, streaming)
            for failure in range(failures):
                before, answered = client.status().generation, streaming.answered
                strike(house.pid(failure % 2), stopped=failure % 4 >= 2)
                until(lambda b=before: client.status().generation > b, streaming.check)  # type: ignore[misc]
                until(lambda a=answered: streaming.answered >= a + 2, streaming.check)  # type: ignore[misc]
        assert client.status().generation > failures // 2
        assert server.process.poll() is None
    print(
        f"{mode}: {copies} experts moved, {failures} failures, {streaming.answered} streamed completions, "
        "none failed"
    )
    assert copies > 0
