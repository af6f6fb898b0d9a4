"""Weights that are replaced while steps run: every answer is all of one version, and names it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from failures import stand_still
from houses import EP4, Alone, house_config
from reported import until_reported
from torch import Tensor

from moeserve.proto.client import MoeClient
from moeserve.proto.client.batch import Choice
from moeserve.proto.errors import InvalidArgument, MoeError
from moeserve.runtime.doors import operations
from moeserve.runtime.epoch import Change
from moeserve.runtime.head.placing.pending_change import Outcome
from moeserve.runtime.launch.local_cluster import LocalCluster

LAYERS = (0, 1)
ROWS = (7, 96)  # whole on one lane, and in parts on three
SEEN_SECONDS = 30.0  # for callers to get answers


@dataclass(frozen=True)
class Question:
    """A batch, and what each checkpoint answers by the formulas."""

    layer: int
    batch: tuple[Tensor, Tensor, Tensor]
    answers: dict[str, Tensor]  # by checkpoint folder


@dataclass(frozen=True)
class Served:
    """A house with redundant experts, and the checkpoints it is given in turns."""

    house: LocalCluster
    old: str  # the configured one
    new: str
    questions: tuple[Question, ...]

    def weights(self, version: int) -> str:
        """The checkpoint that a version stands for."""
        return self.house.head.coordinator.epoch.weights[version - 1] or self.old

    def ask(self, client: MoeClient, question: Question, **options: Any) -> int:
        """Asks, and holds the answer against the version that it names; returns the version."""
        hidden, experts, weights = question.batch
        reply = client.call(question.layer, hidden, Choice(experts, weights), **options)
        right = question.answers[self.weights(reply.weights_version)]
        torch.testing.assert_close(torch.as_tensor(reply.hidden), right, rtol=1e-4, atol=1e-4)
        return reply.weights_version

    def versions(self) -> list[int]:
        """Of the layers now, asked for by calls."""
        with MoeClient(self.house.address, timeout=60) as client:
            asked = {question.layer: self.ask(client, question) for question in self.questions}
        return [asked[layer] for layer in LAYERS]


class Asking:
    """Callers that keep asking; a context, which raises what went wrong."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self.seen: dict[int, int] = {}  # answers by version
        self._callers = [threading.Thread(target=self._ask, args=(at,), daemon=True) for at in range(2)]

    def __enter__(self) -> Asking:
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._stop.set()
        for caller in self._callers:
            caller.join(60)
        if self.errors:
            raise self.errors[0]

    def until_answered_with(self, version: int) -> None:
        """Waits until every question was asked some times with a version."""
        until = time.monotonic() + SEEN_SECONDS
        while self.seen.get(version, 0) < 2 * len(self._served.questions) and not self.errors:
            assert time.monotonic() < until, f"no answers of version {version}: {self.seen}"
            time.sleep(0.01)

    def _ask(self, first: int) -> None:
        try:
            with MoeClient(self._served.house.address, timeout=60) as client:
                questions = self._served.questions[first:] + self._served.questions[:first]
                while not self._stop.is_set():
                    for question in questions:
                        version = self._served.ask(client, question)
                        self.seen[version] = self.seen.get(version, 0) + 1
        except BaseException as error:
            self.errors.append(error)


@pytest.fixture(scope="module")
def served(checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    other = tmp_path_factory.mktemp("other") / "weights"
    make_checkpoint("qwen3_moe", other, seed=1)
    paths = [str(checkpoint_path), str(other)]
    models = {path: Alone(Path(path)) for path in paths}
    questions = []
    for layer in LAYERS:
        for rows in ROWS:
            batch = models[paths[0]].batch(rows, seed=rows)
            answers = {path: model.forward(layer, *batch) for path, model in models.items()}
            questions.append(Question(layer, batch, answers))
    spare = {"balance__redundant_experts": 4, "step__lane_rows": 16}
    never = {"members__serve_on": False, "cluster__stopped_seconds": 0.0}  # those are stopped for a while
    with LocalCluster(house_config(checkpoint_path, **never, **EP4, **spare)) as house:
        yield Served(house, *paths, tuple(questions))


@pytest.fixture
def client(served: Served) -> Iterator[MoeClient]:
    with MoeClient(served.house.address, timeout=60) as made:
        yield made


def test_the_checkpoints_answer_differently(served: Served) -> None:
    for question in served.questions:
        assert (question.answers[served.old] - question.answers[served.new]).abs().max() > 0.1


def test_every_answer_is_of_the_version_it_names(served: Served, client: MoeClient) -> None:
    with Asking(served) as asking:
        asking.until_answered_with(1)
        until_reported(client, LAYERS)
        assert client.rebalance(policy="eplb").outcome == "moved"
        placement = served.house.head.coordinator.epoch.placement
        replicas = [len(placement.replicas(layer, e)) for layer in LAYERS for e in range(placement.experts)]
        assert max(replicas) > 1
        for version, path in enumerate((served.new, served.old, served.new), start=2):
            reply = client.reload(path)
            assert (reply.outcome, reply.reason, reply.weights_version) == ("reloaded", "", version)
            assert (reply.epochs, reply.corrupted) == (len(LAYERS), 0) and reply.nbytes > 0
            asking.until_answered_with(version)
    model = client.model()
    assert model.weights_version == 4 and [layer.weights_version for layer in model.layers] == [4, 4]
    assert served.house.head.coordinator.progress().generation == 1, "no group was formed again"


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_a_demanded_version_is_served_or_refused_by_name(served: Served, transport: str) -> None:
    (now,) = set(served.versions())
    with MoeClient(served.house.address, timeout=30, transport=transport) as client:
        for question in served.questions:
            assert served.ask(client, question, weights_version=now) == now
            started = time.monotonic()
            with pytest.raises(MoeError) as refused:
                served.ask(client, question, weights_version=now + 1)
            assert (refused.value.code, refused.value.reason) == ("FAILED_PRECONDITION", "wrong_version")
            assert f"layer {question.layer} is served with weights version {now}" in refused.value.message
            assert time.monotonic() - started < 10, "it must not be tried again"


def test_a_checkpoint_of_another_shape_is_refused(served: Served, client: MoeClient, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "wide", inner=256)
    make_checkpoint("qwen3_moe", tmp_path / "more", experts=16)
    coordinator = served.house.head.coordinator
    before, generation, versions = coordinator.epoch, coordinator.progress().generation, served.versions()
    for path, text in (
        (tmp_path / "wide", "layer 0 has shape .*inner=256.* is served"),
        (tmp_path / "more", "layer 0 has experts 16, and 8 is served"),
        (tmp_path / "none", "none/config.json: No such file"),
        (Path("weights"), "'weights' must be an absolute path"),
    ):
        with pytest.raises(InvalidArgument, match=f"checkpoint: .*{text}") as refused:
            client.reload(str(path))
        assert refused.value.reason == "bad_request"
    cycle = served.house.head.rebalancer.reload(str(tmp_path / "wide"))  # past the head's look
    assert (cycle.outcome, cycle.epochs) == ("abandoned", 0)
    assert cycle.reason.startswith("rank ") and "inner=256" in cycle.reason
    assert coordinator.epoch == before and coordinator.progress().generation == generation
    assert served.versions() == versions


def test_an_unreadable_checkpoint_leaves_nothing_behind(
    served: Served, client: MoeClient, tmp_path: Path
) -> None:
    shutil.copytree(served.new, tmp_path / "odd")
    file = tmp_path / "odd" / "model.safetensors"
    whole = file.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:size]) | {"__metadata__": {"format": 1}}  # which is seen when it is read
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[size:])
    version = max(served.versions())
    reply = client.reload(str(tmp_path / "odd"))
    assert (reply.outcome, reply.epochs, reply.weights_version) == ("abandoned", 0, version)
    assert "cannot read tensor" in reply.reason
    assert served.versions() == [version] * 2
    reply = client.reload(served.old)
    assert (reply.outcome, reply.reason, reply.weights_version) == ("reloaded", "", version + 1)
    assert served.versions() == [version + 1] * 2


def test_a_rank_killed_between_two_layers_comes_back_with_each_layers_version(
    served: Served, client: MoeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, change = served.house.head.coordinator, served.house.head.coordinator.change
    (before,) = set(served.versions())

    def struck(one: Change, timeout: float) -> Outcome:
        if one.layer == 1:
            pid = served.house.pid(2)
            stand_still(pid)  # it cannot vote
            threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
        return change(one, timeout)

    with Asking(served) as asking:
        asking.until_answered_with(before)
        with monkeypatch.context() as patched:
            patched.setattr(coordinator, "change", struck)
            reply = client.reload(served.new)
        assert (reply.outcome, reply.epochs) == ("abandoned", 1)
        assert "rank 2" in reply.reason and reply.weights_version == before
        coordinator.wait_serving(60)
        assert served.versions() == [before + 1, before]
        reply = client.reload(served.new)
        assert (reply.outcome, reply.reason, reply.weights_version) == ("reloaded", "", before + 2)
        asking.until_answered_with(before + 2)
    assert served.versions() == [before + 2] * 2


def test_a_service_that_forms_again_is_not_changed(
    served: Served, client: MoeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "JOIN_SECONDS", 0.1)  # before the stopped one is replaced
    coordinator = served.house.head.coordinator
    epoch, generation = coordinator.epoch, coordinator.progress().generation
    survivor = served.house.pid(0)
    stand_still(survivor)  # without it no group forms
    try:
        os.kill(served.house.pid(1), signal.SIGKILL)
        while coordinator.progress().generation == generation:
            time.sleep(0.01)
        for operation in (client.rebalance, lambda: client.reload(served.old)):
            with pytest.raises(MoeError) as refused:
                operation()
            assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "not_serving")
    finally:
        os.kill(survivor, signal.SIGCONT)
    coordinator.wait_serving(60)
    assert coordinator.epoch == epoch and len(set(served.versions())) == 1
