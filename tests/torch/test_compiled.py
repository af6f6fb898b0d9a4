"""A block with remote experts: the same bits eager and compiled, and every call is made once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config
from torch import Tensor, nn

import moeserve
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.launch.torchrun import join_torchrun
from moeserve.torch import MoeExperts, Settings, Way, connect
from moeserve.torch.in_process import InProcess
from moeserve.torch.ways import Rows


class Block(nn.Module):
    """A router, routed experts elsewhere, shared experts meanwhile, and the residual.

    Weights are the router's scores as they are: a softmax that Inductor writes has other bits than eager's.
    """

    def __init__(self, way: Way, alone: Alone) -> None:
        super().__init__()
        hidden = alone.checkpoint.hidden
        torch.manual_seed(1)
        self.gate = nn.Linear(hidden, alone.checkpoint.num_experts, bias=False)
        self.shared = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList(MoeExperts(way, layer) for layer in (0, 1))
        self.top_k = alone.checkpoint.top_k

    def forward(self, hidden: Tensor) -> Tensor:
        for experts in self.layers:
            weights, ids = self.gate(hidden).topk(self.top_k)
            ticket = experts.submit(hidden, ids, weights)
            shared = self.shared(hidden).relu()
            hidden = hidden + experts.wait(ticket) + shared
        return self.layers[0](hidden, self.gate(hidden))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return Alone(path)


@pytest.fixture(scope="module", params=["in_process", "attached", "remote"])
def way(request: pytest.FixtureRequest, alone: Alone) -> Iterator[Way]:
    config = house_config(alone.checkpoint.path)
    if request.param == "in_process":
        way: Way = InProcess(join_torchrun(config))
        yield way
        way.close()
        return
    with LocalCluster(config) as house:
        way = connect(Settings(request.param, house.address, timeout=20.0, dtype="fp32"))
        yield way
        way.close()


@torch.no_grad()
def test_a_block_answers_with_the_same_bits_eager_and_compiled(way: Way, alone: Alone) -> None:
    backend = "inductor" if isinstance(way, InProcess) else "aot_eager"  # it takes half a minute a way
    torch._dynamo.reset()  # it compiles one function so many times only
    block = Block(way, alone)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for rows in (1, 5, 9):
        hidden, _, _ = alone.batch(rows, seed=rows)
        eager = block(hidden)
        assert torch.equal(compiled(hidden), eager)


@torch.no_grad()
def test_remote_experts_answer_as_one_process_does(way: Way, alone: Alone) -> None:
    for rows in (0, 1, 6):
        batch = alone.batch(rows, seed=rows)
        torch.testing.assert_close(MoeExperts(way, 0)(*batch), alone.forward(0, *batch), rtol=1e-4, atol=1e-4)


class Noted:
    """A way whose experts return their rows; notes what it was asked, in order."""

    def __init__(self) -> None:
        self.order = torch.zeros(1, dtype=torch.int64)
        self.asked: list[tuple[str, int]] = []
        self._under_way: dict[int, Tensor] = {}

    def mixed(self, layer: int, rows: Rows) -> Tensor:
        self.asked.append(("mixed", layer))
        return rows.hidden.clone()

    def submit(self, layer: int, rows: Rows) -> int:
        self.asked.append(("submit", layer))
        self._under_way[len(self.asked)] = rows.hidden.clone()
        return len(self.asked)

    def wait(self, number: int) -> Tensor:
        self.asked.append(("wait", number))
        return self._under_way.pop(number)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@torch.no_grad()
def test_compilers_drop_join_and_reorder_no_call(backend: str) -> None:
    """In process each call is collective: one call less on one rank would stop all of them."""
    torch._dynamo.reset()
    way = Noted()
    first, second = MoeExperts(way, 0), MoeExperts(way, 1)

    @torch.compile(fullgraph=True, backend=backend)
    def model(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tickets = [second.submit(hidden, ids, weights), second.submit(hidden, ids, weights)]
        second(hidden, ids, weights)  # whose answer nobody reads
        answer = first(hidden, ids, weights) + first(hidden, ids, weights)
        last, mixed = first.exchange(tickets[1], hidden, ids, weights)
        return answer + mixed + second.wait(tickets[0]) + first.wait(last)

    hidden = torch.randn(3, 8)
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    wanted = [
        ("submit", 1),
        ("submit", 1),
        ("mixed", 1),
        ("mixed", 0),
        ("mixed", 0),
        ("submit", 0),
        ("wait", 2),
        ("wait", 1),
        ("wait", 6),
    ]
    for _ in range(2):
        way.asked.clear()
        torch.testing.assert_close(model(hidden, ids, weights), 5 * hidden)
        assert way.asked == wanted


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("asks", ["hidden", "weights", "logits"])
def test_a_forward_pass_in_grad_mode_is_as_ever_and_its_backward_says_that_there_is_none(
    backend: str, asks: str
) -> None:
    torch._dynamo.reset()
    way = Noted()
    experts = MoeExperts(way, 0)

    def model(hidden: Tensor, route: Tensor, weights: Tensor | None) -> Tensor:
        ticket = experts.submit(hidden, route, weights)
        answer = experts(hidden, route, weights)
        last, mixed = experts.exchange(ticket, hidden, route, weights)
        return answer.relu() + mixed.relu() * experts.wait(last)

    run = model if backend == "none" else torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for rows in (3, 5):
        hidden, ids = torch.randn(2, rows, 8), torch.zeros(2, rows, 2, dtype=torch.int32)
        given = (
            [hidden, torch.randn(2, rows, 4), None]
            if asks == "logits"
            else [hidden, ids, torch.ones(2, rows, 2)]
        )
        with torch.no_grad():
            wanted = model(*given)
        asking = given[{"hidden": 0, "weights": 2, "logits": 1}[asks]]
        assert asking is not None
        asking.requires_grad_()
        way.asked.clear()
        answer = run(*given)
        assert torch.equal(answer, wanted) and answer.requires_grad
        assert [what for what, _ in way.asked] == ["submit", "mixed", "submit", "wait", "wait"]
        with pytest.raises(RuntimeError, match=r"give no gradients; call the model under torch\.no_grad"):
            answer.sum().backward()
        assert len(way.asked) == 5


def test_a_way_that_is_gone_is_named() -> None:
    experts = MoeExperts(Noted(), 0)
    number = experts._number
    del experts
    with pytest.raises(RuntimeError, match=f"way {number} to the experts is gone"):
        torch.ops.moeserve.mixed_experts(
            torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4), torch.zeros(1, 4), None, number, 0
        )


def test_operators_have_names_of_their_own() -> None:
    """torch lets a second operator of a name replace the first, without a word."""
    named: Counter[str] = Counter()
    for path in Path(moeserve.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                given = node.args[0]
                if node.func.attr == "custom_op" and isinstance(given, ast.Constant):
                    named[str(given.value)] += 1
    assert len(named) >= 7 and set(named.values()) == {1}, named
