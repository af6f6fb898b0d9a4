"""What engines' plug-ins share: settings, and a process' layers with a service that answers by rule."""

from __future__ import annotations

import builtins
import threading
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from proto_fake import FakeService
from torch import Tensor

from moeserve.proto import moe_pb2
from moeserve.proto.client import Choice, Reply
from moeserve.proto.errors import MoeError, Unavailable
from moeserve.proto.integrations import remote_layers
from moeserve.proto.integrations.remote_layers import (
    NotServed,
    RemoteLayers,
    layer_of,
    of_one_version,
    share_of,
)
from moeserve.proto.integrations.settings import Settings

ROOT = Path(__file__).parent.parent.parent
SETTINGS = Settings("127.0.0.1:1", timeout=5)


class Doubling:
    """A service of layers 1 and 2 that answers twice the hidden states, and names a version a layer."""

    def __init__(self, **versions: int) -> None:
        self.versions = {1: 7, 2: 7} | {int(layer[1:]): version for layer, version in versions.items()}
        self.calls: list[tuple[int, Tensor, Choice]] = []
        self.failures: list[MoeError] = []
        self.answer = torch.empty(0)

    def call(self, layer: int, hidden: Tensor, route: Choice) -> Reply:
        self.calls.append((layer, hidden, route))
        if self.failures:
            raise self.failures.pop()
        self.answer = hidden * 2
        return Reply(self.answer, 0, self.versions[layer])

    def model(self) -> moe_pb2.GetModelReply:
        if self.failures:
            raise self.failures.pop()
        layers = [
            moe_pb2.LayerInfo(layer=layer, experts=8, hidden=4, top_k=2, weights_version=version)
            for layer, version in self.versions.items()
        ]
        return moe_pb2.GetModelReply(model="tiny", architecture="Qwen3MoeForCausalLM", layers=layers)


def layers_of(service: Any) -> RemoteLayers:
    return RemoteLayers(SETTINGS, service)


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.ones(rows, 4),
        torch.zeros(rows, 2, dtype=torch.int64),
        torch.ones(rows, 2, dtype=torch.bfloat16),
    )


def test_without_an_address_nothing_is_chosen() -> None:
    assert Settings.chosen({}) is None
    assert Settings.chosen({"MOESERVE_EXPERTS": " ", "MOESERVE_EXPERTS_TIMEOUT": "x"}) is None
    given = {
        "MOESERVE_EXPERTS": " a:1 ",
        "MOESERVE_EXPERTS_TIMEOUT": "9.5",
        "MOESERVE_EXPERTS_CACHES": "recompute",
        "MOESERVE_EXPERTS_MODE": "attached",
    }
    assert Settings.chosen(given) == Settings("a:1", 9.5, "recompute", mode="attached")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"MOESERVE_EXPERTS_TIMEOUT": "soon"}, "MOESERVE_EXPERTS_TIMEOUT='soon' must be a number of seconds"),
        ({"MOESERVE_EXPERTS_TIMEOUT": "0"}, "MOESERVE_EXPERTS_TIMEOUT=0.0 must be more than 0"),
        ({"MOESERVE_EXPERTS_TIMEOUT": "inf"}, "MOESERVE_EXPERTS_TIMEOUT=inf must be more than 0"),
        ({"MOESERVE_EXPERTS_CACHES": "drop"}, "MOESERVE_EXPERTS_CACHES='drop' is not one of keep, recompute"),
        ({"MOESERVE_EXPERTS_MODE": "near"}, "MOESERVE_EXPERTS_MODE='near' is not one of remote, attached"),
        ({"MOESERVE_EXPERTS_MODE": "in_process"}, "MOESERVE_EXPERTS_MODE='in_process' .* is not built for"),
    ],
)
def test_a_setting_that_cannot_be_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings.chosen({"MOESERVE_EXPERTS": "a:1"} | given)


def test_the_entry_point_of_vllm_imports_nothing_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    register = EntryPoint("moeserve", points["moeserve"], "vllm.general_plugins").load()
    real = builtins.__import__

    def importing(name: str, *rest: Any) -> Any:
        assert name.split(".")[0] not in ("vllm", "torch"), name
        return real(name, *rest)

    monkeypatch.delenv("MOESERVE_EXPERTS", raising=False)
    monkeypatch.setattr(builtins, "__import__", importing)
    register()


def test_a_layer_is_found_in_a_name_with_one_number() -> None:
    assert layer_of("model.layers.3.mlp.experts") == 3
    assert layer_of("transformer.blocks.12.ffn") == 12
    for name in ("model.mlp.experts", "model.layers.3.experts.0"):
        with pytest.raises(ValueError, match=f"the MoE layer {name} does not name one decoder layer"):
            layer_of(name)


def test_layers_are_taken_once_and_only_those_that_are_served() -> None:
    layers = layers_of(Doubling())
    layers.take(1, "model.layers.1.mlp", experts=8, hidden=4, top_k=2)
    assert layers.missing() == [2]
    with pytest.raises(ValueError, match=r"draft.layers.1.mlp and model.layers.1.mlp are both layer 1"):
        layers.take(1, "draft.layers.1.mlp", experts=8, hidden=4, top_k=2)
    with pytest.raises(
        ValueError, match=r"model.layers.5.mlp has experts, but tiny .* only the layers \[1, 2\]"
    ):
        layers.take(5, "model.layers.5.mlp", experts=8, hidden=4, top_k=2)
    with pytest.raises(ValueError, match=r"E, H = \(8, 64\) in the engine, \(8, 4\) in what tiny serves"):
        layers.take(2, "model.layers.2.mlp", experts=8, hidden=64, top_k=2)
    with pytest.raises(
        ValueError, match=r"model is MixtralForCausalLM, but 127.0.0.1:1 serves tiny, a Qwen3Moe"
    ):
        layers.check_architecture(["MixtralForCausalLM"])
    layers.begin()
    assert layers.missing() == [1, 2]


def test_an_answer_is_a_copy_and_rows_that_are_none_are_not_asked_for() -> None:
    service = Doubling()
    layers = layers_of(service)
    answer = layers.ask(1, *batch(3))
    _, _, route = service.calls[0]
    assert (route.experts.dtype, route.weights.dtype) == (torch.int32, torch.float32)
    answer += 1
    assert torch.equal(service.answer, torch.full((3, 4), 2.0))
    assert layers.ask(1, *batch(0)).shape == (0, 4)
    assert (len(service.calls), layers.counts.calls, layers.counts.rows) == (1, 1, 3)


def test_a_call_in_two_halves_answers_as_one() -> None:
    layers = layers_of(Doubling())
    tickets = [layers.start(1, *batch(rows)) for rows in (2, 3)]
    assert [len(layers.finish(ticket)) for ticket in reversed(tickets)] == [3, 2]
    layers.ask(1, *batch(1))
    assert (layers.counts.calls, layers.counts.begun) == (3, 2)
    layers.service.failures.append(MoeError("INTERNAL", "", "broken"))  # type: ignore[union-attr]
    ticket = layers.start(2, *batch(1))
    with pytest.raises(MoeError, match=r"layer 2 got no answer of its experts at 127.0.0.1:1: broken"):
        layers.finish(ticket)


def test_a_forward_pass_names_the_versions_it_saw() -> None:
    layers = layers_of(Doubling(l2=8))
    layers.ask(1, *batch(1))
    assert layers.versions() == {7}
    layers.ask(2, *batch(1))
    assert layers.versions() == {7, 8}
    layers.start(1, *batch(1))  # of a pass that failed: nobody finishes it
    layers.start_forward()
    assert layers.versions() == frozenset()


def test_one_version_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Doubling(l2=8)
    layers = layers_of(service)
    timer = threading.Timer(0.5, lambda: service.versions.update({1: 8}))
    timer.start()
    assert layers.wait_one_version() == 8
    timer.join()
    service.versions[2] = 9
    monkeypatch.setattr(remote_layers, "POLL_SECONDS", 0.01)
    short = RemoteLayers(Settings("a:1", timeout=0.2), service)
    with pytest.raises(TimeoutError, match=r"weights versions \{1: 8, 2: 9\}; a forward pass must not mix"):
        short.wait_one_version()


def test_a_pass_that_saw_two_versions_is_run_again_with_one() -> None:
    service = Doubling(l2=8)
    layers = layers_of(service)
    seen: list[frozenset[int]] = []

    def forward(hidden: Tensor) -> Tensor:
        for layer in (1, 2):
            hidden = layers.ask(layer, hidden, *batch(len(hidden))[1:])
        return hidden

    def is_mixed(versions: frozenset[int]) -> bool:
        seen.append(versions)
        if len(seen) == 1:
            threading.Timer(0.3, lambda: service.versions.update({1: 8})).start()
        return len(versions) > 1

    answer = of_one_version(forward, layers, is_mixed)(torch.ones(2, 4))
    assert seen == [{7, 8}, {8}]
    assert torch.equal(answer, torch.full((2, 4), 4.0))
    assert layers.counts.repeated == 1


def test_a_pass_that_is_run_again_has_the_inputs_that_it_had() -> None:
    """Engines add to embedded prompts in place."""
    service = Doubling(l2=8)
    layers = layers_of(service)

    def forward(positions: Tensor, *, inputs_embeds: Tensor) -> Tensor:
        inputs_embeds += 1.0
        for layer in (1, 2):
            hidden = layers.ask(layer, inputs_embeds, *batch(len(inputs_embeds))[1:])
        return hidden

    def is_mixed(versions: frozenset[int]) -> bool:
        service.versions.update({1: 8})
        return len(versions) > 1

    whole = of_one_version(forward, layers, is_mixed)
    answer = whole(torch.arange(2), inputs_embeds=torch.ones(2, 4))
    assert layers.counts.repeated == 1 and torch.equal(answer, torch.full((2, 4), 4.0))


def test_an_engine_may_choose_fewer_experts_than_the_model_and_not_more() -> None:
    service = Doubling()
    layers = layers_of(service)
    layers.take(1, "model.layers.1.mlp", experts=8, hidden=4, top_k=1)
    asked: list[Choice] = []
    call = service.call

    def heard(layer: int, hidden: Tensor, route: Choice) -> Reply:
        asked.append(route)
        return call(layer, hidden, route)

    service.call = heard  # type: ignore[method-assign]
    layers.ask(1, torch.ones(3, 4), torch.full((3, 1), 5), torch.full((3, 1), 0.5))
    assert asked[0].experts.tolist() == [[5, -1]] * 3 and asked[0].weights.tolist() == [[0.5, 0.0]] * 3
    with pytest.raises(NotServed, match="3 experts a row in the engine, at most 2 in what tiny serves"):
        layers.take(2, "model.layers.2.mlp", experts=8, hidden=4, top_k=3)


def test_tensor_parallel_ranks_share_the_rows_without_a_gap() -> None:
    for rows in range(9):
        for ranks in (1, 2, 3):
            parts = [share_of(rows, rank, ranks) for rank in range(ranks)]
            assert [row for part in parts for row in range(rows)[part]] == list(range(rows))


def test_a_start_waits_for_the_service_and_not_for_ever() -> None:
    service = Doubling()
    service.failures = [Unavailable("UNAVAILABLE", "", "nobody there")] * 2
    assert layers_of(service).served().model == "tiny"
    service.failures = [Unavailable("UNAVAILABLE", "", "nobody there")] * 1000
    with pytest.raises(Unavailable, match="nobody there"):
        RemoteLayers(Settings("a:1", timeout=0.5), service).served()
    service.failures = [MoeError("UNAUTHENTICATED", "", "no token")]
    with pytest.raises(MoeError, match="no token"):
        layers_of(service).served()


def test_credentials_come_from_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "held.toml").write_text('token_file = "token"')
    given = {"MOESERVE_EXPERTS": "a:1", "MOESERVE_EXPERTS_CREDENTIALS": str(tmp_path / "held.toml")}
    settings = Settings.chosen(given)
    assert settings is not None and settings.credentials is not None
    assert settings.credentials.token_file == str(tmp_path / "token")
    with pytest.raises(ValueError, match=r"MOESERVE_EXPERTS_CREDENTIALS: cannot read .*absent\.toml"):
        Settings.chosen(given | {"MOESERVE_EXPERTS_CREDENTIALS": str(tmp_path / "absent.toml")})


def test_a_client_is_made_of_the_address() -> None:
    service = FakeService()
    try:
        layers = RemoteLayers(Settings(service.address, timeout=20))
        assert layers.client.model().model == "fake"
        layers.client.close()  # type: ignore[attr-defined]
    finally:
        service.stop()
