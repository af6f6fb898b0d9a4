"""Models of one expert a token, whose lanes are idle most of the time: right answers, no generation lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from checkpoints import make_checkpoint
from houses import EP4, Alone, house_config, request_of
from torch import Tensor

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.tensors import encode, plain
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
TP2 = {"parallel__tensor_parallel_size": 2}
LANE_ROWS = 16

HOUSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 4, EP4": ("llama4_text", EP4),
    "llama 4, EP2, all2allv": ("llama4_text", EP2 | {"plan__all2all_backend": "all2allv"}),
    "llama 4, TP2": ("llama4_text", TP2),
    "mixtral of one expert, EP2": ("mixtral", EP2),
}


class Served:
    """A running house, the model it serves as transformers made it, and what one process computes."""

    def __init__(self, family: str, path: Path, house: LocalCluster, model: Any) -> None:
        self.family, self.house, self.model, self.alone = family, house, model, Alone(path)

    def wanted(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The formulas' answer: Llama 4 weighs the expert's input, others its output."""
        if self.family != "llama4_text":
            return self.alone.forward(layer, hidden, experts, weights)
        scale = torch.where(experts >= 0, weights.float(), 0.0)
        return self.alone.forward(layer, hidden * scale, experts, torch.ones_like(scale))


@pytest.fixture(scope="module", params=HOUSES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, mesh = HOUSES[request.param]
    path = tmp_path_factory.mktemp("top1")
    model = make_checkpoint(family, path, top_k=1)
    with LocalCluster(house_config(path, step__lane_rows=LANE_ROWS, **mesh)) as house:
        yield Served(family, path, house, model)


def _lanes(client: MoeClient) -> list[int]:
    return [lane.rank for lane in client.topology().lanes]


@pytest.mark.parametrize("rows", [0, 1, LANE_ROWS, 2 * LANE_ROWS + 1])
def test_calls_of_one_lane_leave_the_others_idle(served: Served, rows: int) -> None:
    with MoeClient(served.house.address, timeout=20) as client:
        generation = client.status().generation
        for lane in _lanes(client):
            for layer in served.alone.checkpoint.layers:
                batch = served.alone.batch(rows, seed=rows + lane)
                answer = client.forward(layer, *batch, lane=lane)
                torch.testing.assert_close(answer, served.wanted(layer, *batch), **CLOSE)
        assert client.status().generation == generation


@pytest.mark.parametrize("served", [name for name in HOUSES if name.startswith("llama")], indirect=True)
def test_llama_4_answers_as_transformers_does(served: Served) -> None:
    hidden = torch.randn(7, served.alone.checkpoint.hidden, generator=torch.Generator().manual_seed(5))
    with MoeClient(served.house.address, timeout=20) as client:
        lane = _lanes(client)[-1]
        for layer in served.alone.checkpoint.layers:
            moe = served.model.model.layers[layer].feed_forward
            with torch.no_grad():
                wanted = moe(hidden)[0] - moe.shared_expert(hidden)
                logits = moe.router(hidden)[1]
            answer = client.forward_logits(layer, hidden, logits, lane=lane)
            torch.testing.assert_close(answer, wanted, **CLOSE)


HIDDEN_VALUES = (0.0, float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-45)
WEIGHT_VALUES = (0.0, -1.0, float("nan"), float("inf"), 1e-45)
LOGIT_VALUES = (0.0, float("nan"), float("inf"), -float("inf"), 65504.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _odd_requests(alone: Alone) -> Iterator[moe_pb2.ForwardRequest]:
    """What a lane accepts and a step has to survive, of 0, 1 and a few rows."""
    for rows in (0, 1, 3, LANE_ROWS + 1):
        hidden, experts, weights = alone.batch(rows, seed=rows)
        nobody = torch.full_like(experts, -1)
        yield request_of(0, (hidden, nobody, weights))
        yield request_of(0, (hidden, experts.long(), weights))
        for dtype in DTYPES:
            yield request_of(0, (hidden.to(dtype), experts, weights.to(dtype)))
        for value in HIDDEN_VALUES:
            yield request_of(0, (torch.full_like(hidden, value), experts, weights))
        for value in WEIGHT_VALUES:
            yield request_of(0, (hidden, experts, torch.full_like(weights, value)))
            yield request_of(0, (hidden, nobody, torch.full_like(weights, value)))
        for value in LOGIT_VALUES:
            for dtype in DTYPES:
                logits = torch.full((rows, alone.checkpoint.num_experts), value).to(dtype)
                yield moe_pb2.ForwardRequest(
                    hidden=encode(plain(hidden, "hidden")), logits=encode(plain(logits, "logits"))
                )


def test_what_a_lane_accepts_no_step_refuses(served: Served) -> None:
    with MoeClient(served.house.address, timeout=20) as client:
        generation = client.status().generation
        lanes = client.topology().lanes
        for turn, request in enumerate(_odd_requests(served.alone)):
            with grpc.insecure_channel(lanes[turn % len(lanes)].address) as channel:
                reply = moe_pb2_grpc.LaneServiceStub(channel).Forward(request, timeout=20)
            assert list(reply.hidden.shape) == list(request.hidden.shape)
        assert client.status().generation == generation
