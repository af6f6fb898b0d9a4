"""Rows of a GPU over a device lane: a caller's process and a rank's share one GPU, for the trial."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from fake_members import until
from gpu_ways import batch, opened
from houses import Alone, house_config
from lane_calls import counted
from torch import Tensor
from torch_blocks import Block, recorded

from moeserve.dispatch.peers.memory import memory_on
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError, Unavailable, WeightsChanged
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.running import PassLate
from moeserve.runtime.doors.passes.looking import COMPANY_SECONDS
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import MoeExperts, Settings, WrongRows, connect
from moeserve.torch.attached_device import AttachedDevice

NOBODY = "cuda:00000000-0000-0000-0000-000000000000"
SHARED = {"plan__device": "cuda", "passes__share_gpu": True}
Between = Callable[[Tensor, torch.cuda.Stream], None]


@pytest.fixture(scope="module")
def house(path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(path, **SHARED)) as house:
        yield house


@pytest.fixture
def way(house: LocalCluster) -> Iterator[AttachedDevice]:
    way = opened(house, stages=2)
    yield way
    way.close()


@pytest.fixture
def remote(house: LocalCluster) -> Iterator[object]:
    way = connect(Settings("remote", house.address, timeout=30.0))
    yield way
    way.close()


def test_a_rank_without_a_gpu_refuses_rows_of_one(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    with LocalCluster(house_config(tmp_path)) as house:
        for device, text in ((NOBODY, "this rank computes on the CPU"), ("tpu", "rows of 'tpu' cannot")):
            with pytest.raises(MoeError, match=text) as refused:
                AttachedLane.attach(house.address, Wanted("gpu", device=device, answers_handle=bytes(64)))
            assert refused.value.reason == "device_refused"


def test_settings_say_where_rows_lie() -> None:
    with pytest.raises(ValueError, match="takes rows of any device"):
        Settings("remote", "127.0.0.1:1", device="cuda")
    with pytest.raises(ValueError, match="'tpu' is neither cpu nor cuda"):
        Settings("attached", "127.0.0.1:1", device="tpu")
    with pytest.raises(ValueError, match="rows_wire='fp8_group128' is of rows from a GPU"):
        Settings("attached", "127.0.0.1:1", rows_wire="fp8_group128")


@pytest.mark.gpu(1)
def test_who_cannot_be_served_is_told(path: Path, house: LocalCluster) -> None:
    device = f"cuda:{torch.cuda.get_device_properties(0).uuid}"
    for wanted, text in (
        (Wanted("bad", device="cuda:0", answers_handle=bytes(64)), "neither cpu nor cuda: and the UUID"),
        (
            Wanted("bad", device=device, answers_handle=bytes(64)),
            "caller's memory for answers cannot be mapped",
        ),
        (Wanted("bad", device=device, answers_handle=b""), "caller's memory for answers cannot be mapped"),
        (Wanted("bad", device=device, dtype="fp32", answers_handle=bytes(64)), "dtype: fp32 is not"),
    ):
        with pytest.raises(MoeError, match=text):
            AttachedLane.attach(house.address, wanted)
    with LocalCluster(house_config(path, plan__device="cuda")) as other:
        wanted = Wanted("bad", device=device, answers_handle=bytes(64))
        with pytest.raises(MoeError, match="two processes on one GPU take turns of milliseconds"):
            AttachedLane.attach(other.address, wanted)


@pytest.mark.gpu(1)
def test_answers_have_the_bits_of_a_call(way: AttachedDevice, remote: object, alone: Alone) -> None:
    for turn, rows in enumerate((1, 5, 16, 40, 64, 2, 2, 2)):
        answers = []
        for layer in (0, 1):
            given = [batch(alone, rows, seed=20 * turn + 2 * layer + stage) for stage in (0, 1)]
            experts = MoeExperts(way, layer)
            tickets = [experts.submit(*one) for one in given]
            answers += [(layer, *one) for one in zip(given, map(experts.wait, tickets), strict=True)]
        way.check()
        for layer, one, answer in answers:
            assert torch.equal(answer, MoeExperts(remote, layer)(*one)), (turn, layer)


@pytest.mark.gpu(1)
def test_rows_of_its_passes_are_counted_as_tokens(
    house: LocalCluster, way: AttachedDevice, alone: Alone
) -> None:
    """Also of runs that were launched before anybody knew how many rows they would have."""

    def found() -> list[tuple[int, int]]:
        def of(name: str, layer: int) -> int:
            return counted(house, name, layer=str(layer))

        return [(of("moe_tokens_total", at), of("moe_expert_rows_total", at)) for at in (0, 1)]

    def still() -> list[tuple[int, int]]:
        """Once nothing of what ran before is yet to be told, which takes a second."""
        before = found()
        while True:
            time.sleep(2.5)
            if (now := found()) == before:
                return now
            before = now

    before, brought = still(), 0
    for turn, rows in enumerate((1, 5, 16, 1, 1, 1, 1, 1, 40, 2)):
        for layer in (0, 1):
            MoeExperts(way, layer)(*batch(alone, rows, seed=turn))
        brought += rows
    way.check()
    wanted = [(tokens + brought, pairs + alone.checkpoint.top_k * brought) for tokens, pairs in before]
    until(lambda: found() == wanted)


def check_replays(
    way: AttachedDevice, graph: torch.cuda.CUDAGraph, found: list[Tensor], wanted: list[Tensor]
) -> None:
    """Each replay gives these answers."""
    for _ in range(5):
        for answer in found:
            answer.zero_()
        graph.replay()
        way.check()
        assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu(1)
@torch.no_grad()
def test_two_stages_exchange_in_a_graph_with_the_bits_of_calls(
    way: AttachedDevice, remote: object, alone: Alone
) -> None:
    modules = [MoeExperts(way, layer) for layer in (0, 1)]
    given = [batch(alone, rows, seed=rows) for rows in (3, 40)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def passed() -> list[Tensor]:
        ticket, found = modules[0].submit(*given[0]), []
        for at in range(1, 4):
            ticket, answer = modules[at // 2].exchange(ticket, *given[at % 2])
            found.append(answer)
        return [*found, modules[1].wait(ticket)]

    with torch.cuda.stream(stream):
        eager = passed()
    way.check()
    wanted = [MoeExperts(remote, at // 2)(*given[at % 2]) for at in range(4)]
    assert all(map(torch.equal, eager, wanted))
    with torch.cuda.graph(graph, stream=stream):
        found = passed()
    check_replays(way, graph, found, wanted)


@pytest.mark.gpu(1)
@torch.no_grad()
def test_micro_batches_with_a_stream_each_have_the_bits_of_calls(
    house: LocalCluster, remote: object, alone: Alone
) -> None:
    """Eager and in a graph, over a forward pass that ends with the layer with which the next one begins."""
    order = (0, 1, 0)
    way = opened(house, "micro", stages=2, layers=order)
    given = [batch(alone, rows, seed=rows) for rows in (3, 40)]
    main, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    own = [torch.cuda.Stream(priority=-1) for _ in given]

    def passed() -> list[Tensor]:
        found = []
        for layer in order:
            for one, stream in zip(given, own, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    found.append(MoeExperts(way, layer)(*one))
        for stream in own:
            torch.cuda.current_stream().wait_stream(stream)
        return found

    wanted = [MoeExperts(remote, layer)(*one) for layer, one in product(order, given)]
    for _ in range(3):
        with torch.cuda.stream(main):
            eager = passed()
        way.check()
        assert all(map(torch.equal, eager, wanted))
    with torch.cuda.graph(graph, stream=main):
        found = passed()
    check_replays(way, graph, found, wanted)
    way.close()


@pytest.mark.gpu(1)
def test_one_stage_runs_ahead_with_any_rows(house: LocalCluster, remote: object, alone: Alone) -> None:
    way = opened(house, "one")
    layers, others = ([MoeExperts(one, layer) for layer in (0, 1)] for one in (way, remote))
    rounds = [((3, 3), (3, 60), (60, 1), (1, 1), (0, 5), (2, 0))[turn % 6] for turn in range(36)]
    given = [
        [batch(alone, rows, seed=2 * turn + at) for at, rows in enumerate(one)]
        for turn, one in enumerate(rounds)
    ]
    logits = torch.randn(4, alone.checkpoint.num_experts, device="cuda")
    given += [[(batch(alone, 4, seed=9)[0], logits)] * 2] * 3
    found = [[layers[at](*one) for at, one in enumerate(both)] for both in given]
    way.check()
    for turn, (both, answers) in enumerate(zip(given, found, strict=True)):
        for layer, (one, answer) in enumerate(zip(both, answers, strict=True)):
            assert answer.shape == one[0].shape
            if len(one) == 2:  # a call's logits are routed by the host, with other last bits
                torch.testing.assert_close(answer, others[layer](*one), rtol=2e-2, atol=5e-2)
            else:
                assert not len(answer) or torch.equal(answer, others[layer](*one)), (turn, layer)
    given = batch(alone, 2, seed=3)
    with MoeClient(house.address) as client:
        before = client.status().ranks[0].tokens
        for _ in range(5):
            for layer in (0, 1):
                layers[layer](*given)
        way.check()
        until(lambda: client.status().ranks[0].tokens >= before + 5 * 2 * given[1].numel())
    with pytest.raises(WrongRows, match="65 rows, and the way was opened for 64"):
        layers[0](*batch(alone, 65, seed=1))
    with pytest.raises(WrongRows, match="hidden is on cpu"):
        layers[0](*[column.cpu() for column in given])
    way.close()


@pytest.mark.gpu(1)
@torch.no_grad()
def test_a_block_in_a_graph_has_the_bits_of_eager_and_compiled(house: LocalCluster, alone: Alone) -> None:
    way = opened(house, "graph")
    block = Block(way, alone)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    static = batch(alone, 6, seed=1)[0]
    graph, out = recorded(block, static)
    for turn in range(12):
        fresh = batch(alone, 6, seed=30 + turn)[0]
        static.copy_(fresh)
        graph.replay()
        way.check()
        replayed = out.clone()
        assert torch.equal(replayed, block(fresh)), turn
        assert torch.equal(replayed, compiled(fresh)), turn
    way.close()


def _nothing(scratch: Tensor, side: torch.cuda.Stream) -> None:
    """The kernel before is what brought the rows."""


def _cleared(scratch: Tensor, side: torch.cuda.Stream) -> None:
    """Memory is set, which is no kernel in a graph."""
    scratch.zero_()


def _copied(scratch: Tensor, side: torch.cuda.Stream) -> None:
    """Memory is copied, which is none either."""
    scratch[0].copy_(scratch[1])


def _joined(scratch: Tensor, side: torch.cuda.Stream) -> None:
    """Two streams come together, so that a node has two before it."""
    here = torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        scratch[0].add_(1.0)
    scratch[1].add_(1.0)
    here.wait_stream(side)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("between", [_nothing, _cleared, _copied, _joined])
@torch.no_grad()
def test_an_answer_is_taken_behind_whatever_a_graph_has_before(
    house: LocalCluster, remote: object, alone: Alone, between: Between, rows: int
) -> None:
    """What fetches it begins beside the kernel before."""
    way, scratch = opened(house, "behind", stages=2), torch.zeros(2, 1 << 16, device="cuda")
    given = [[batch(alone, rows, seed=10 * layer + stage) for stage in (0, 1)] for layer in (0, 1)]
    stream, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def passed() -> list[Tensor]:
        found = []
        for layer, both in enumerate(given):
            experts = MoeExperts(way, layer)
            tickets = [experts.submit(*one) for one in both]
            for ticket in tickets:
                between(scratch, side)
                found.append(experts.wait(ticket))
        return found

    with torch.cuda.stream(stream):
        passed()
    way.check()
    with torch.cuda.graph(graph, stream=stream):
        found = passed()
    for turn in range(4):
        for both in given:
            for one in both:
                one[0].mul_(-1.0 - turn)
        graph.replay()
        way.check()
        wanted = [MoeExperts(remote, layer)(*one) for layer, both in enumerate(given) for one in both]
        assert all(map(torch.equal, found, wanted)), turn
    way.close()


@pytest.mark.gpu(1)
@torch.no_grad()
def test_a_recorded_graph_stays_true_after_its_rank_was_killed(path: Path, alone: Alone) -> None:
    with LocalCluster(house_config(path, **SHARED)) as house:
        way = opened(house, "graph")
        block, static = Block(way, alone), batch(alone, 6, seed=1)[0]
        graph, out = recorded(block, static)
        graph.replay()
        way.check()
        before = out.clone()
        os.kill(house.pid(0), signal.SIGKILL)
        started = time.monotonic()
        graph.replay()
        with pytest.raises(MoeError):
            way.check()
        assert time.monotonic() - started < 5.0, "nothing on the device waits for a rank that is gone"
        until = time.monotonic() + 60
        while True:
            try:
                way.renew()
                break
            except Unavailable:
                assert time.monotonic() < until
                time.sleep(0.2)
        graph.replay()
        way.check()
        assert torch.equal(out, before)
        way.close()


@pytest.mark.gpu(1)
def test_a_caller_that_withholds_rows_is_late_and_delays_nobody_for_long(
    house: LocalCluster, remote: object, alone: Alone
) -> None:
    way, other = opened(house, "late"), MoeExperts(remote, 0)
    given = batch(alone, 2, seed=1)
    right = other(*given)
    for _ in range(3):  # so that a whole forward pass is launched ahead
        for layer in (0, 1):
            MoeExperts(way, layer)(*given)
    way.check()
    MoeExperts(way, 0)(*given)  # and nothing of layer 1
    began = time.monotonic()
    second = opened(house, "beside")
    second.close()
    attached = time.monotonic() - began
    assert torch.equal(other(*given), right)
    assert time.monotonic() - began < 6.0 and attached < 4.0, attached
    print(f"attached and detached beside a waiting kernel in {attached:.3f} s")
    time.sleep(2.5)
    with pytest.raises(PassLate, match=r"passes\.patience_seconds = 2"):
        way.check()
    assert torch.equal(MoeExperts(way, 0)(*given), right)
    way.check()
    way.close()


@pytest.mark.gpu(1)
def test_two_callers_and_host_calls_take_turns(house: LocalCluster, remote: object, alone: Alone) -> None:
    ways = [opened(house, f"caller-{at}") for at in range(2)]
    host = [MoeExperts(remote, layer) for layer in (0, 1)]
    for turn in range(40):
        for layer in (0, 1):
            given = [batch(alone, 1 + turn % 3, seed=4 * turn + at) for at in range(2)]
            modules = [MoeExperts(way, layer) for way in ways]
            tickets = [module.submit(*one) for module, one in zip(modules, given, strict=True)]
            found = [module.wait(ticket) for module, ticket in zip(modules, tickets, strict=True)]
            for one, answer in zip(given, found, strict=True):
                assert torch.equal(answer, host[layer](*one)), (turn, layer)
    for way in ways:
        way.check()
        way.close()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("rows", [(1, 1), (3, 60)])
def test_two_callers_of_gpus_alone_take_turns(
    house: LocalCluster, remote: object, alone: Alone, rows: tuple[int, int]
) -> None:
    """Each on a stream of its own, so that they bring their rows in any order."""
    ways = [opened(house, f"turns-{at}") for at in range(2)]
    given = [
        [[batch(alone, many, seed=90 + 8 * at + 4 * layer + kind) for kind in range(3)] for layer in (0, 1)]
        for at, many in enumerate(rows)
    ]
    right = [
        [[MoeExperts(remote, layer)(*one) for one in given[at][layer]] for layer in (0, 1)] for at in (0, 1)
    ]
    modules = [[MoeExperts(way, layer) for layer in (0, 1)] for way in ways]
    streams = [torch.cuda.Stream() for _ in ways]
    time.sleep(2 * COMPANY_SECONDS)  # calls are company of another kind
    torch.cuda.synchronize()
    for _ in range(60):
        found: list[list[list[Tensor]]] = [[[], []], [[], []]]
        for kind in range(3):
            for at, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    for layer in (0, 1):
                        found[at][layer].append(modules[at][layer](*given[at][layer][kind]))
        torch.cuda.synchronize()
        for at, layer in product((0, 1), (0, 1)):
            assert all(map(torch.equal, found[at][layer], right[at][layer])), (at, layer)
    for way in ways:
        way.check()
        way.close()


def endless(address: str, path: str, begun: object) -> None:
    """A caller's process that is killed."""
    way = connect(Settings("attached", address, timeout=30.0, name="victim", rows=64, device="cuda"))
    given = batch(Alone(Path(path)), 8, seed=1)
    while True:
        for layer in (0, 1):
            MoeExperts(way, layer)(*given)
        way.check()
        begun.set()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_caller_that_is_killed_or_stopped_in_a_pass_costs_others_little(
    house: LocalCluster, remote: object, alone: Alone, path: Path, how: signal.Signals
) -> None:
    context = torch.multiprocessing.get_context("spawn")
    begun = context.Event()
    victim = context.Process(target=endless, args=(house.address, str(path), begun), daemon=True)
    victim.start()
    try:
        assert begun.wait(40)
        way, given = opened(house, "survivor"), batch(alone, 3, seed=2)
        right = [MoeExperts(remote, layer)(*given) for layer in (0, 1)]
        longest, until, killed = 0.0, time.monotonic() + 8.0, False
        while time.monotonic() < until:
            started = time.monotonic()
            found = [MoeExperts(way, layer)(*given) for layer in (0, 1)]
            way.check()
            longest = max(longest, time.monotonic() - started)
            assert all(map(torch.equal, found, right))
            if not killed and time.monotonic() > until - 6.0:
                os.kill(victim.pid, how)
                killed = True
        print(f"longest forward pass of the other: {longest:.3f} s")
        assert killed and longest < 4.0
        way.close()
    finally:
        victim.kill()
        victim.join()


@pytest.mark.gpu(1)
def test_memory_that_is_too_small_is_refused(house: LocalCluster, alone: Alone) -> None:
    small = memory_on("cuda:0", 4096)  # of which a device makes 2 MiB
    device = f"cuda:{torch.cuda.get_device_properties(0).uuid}"
    wanted = Wanted("small", rows=1024, stages=8, device=device, answers_handle=bytes(small.handle()))
    with pytest.raises(MoeError, match=r"it has [0-9]+ bytes, and [0-9]+ are needed"):
        AttachedLane.attach(house.address, wanted)
    small.close()


@pytest.mark.gpu(1)
def test_experts_move_and_weights_are_reloaded_between_passes(
    house: LocalCluster, remote: object, alone: Alone, path: Path
) -> None:
    way = opened(house, "moving")
    given = batch(alone, 3, seed=1)
    right = [MoeExperts(remote, layer)(*given) for layer in (0, 1)]
    for turn in range(12):
        found = [MoeExperts(way, layer)(*given) for layer in (0, 1)]
        way.check()
        assert all(map(torch.equal, found, right))
        if turn % 4 == 1:
            with MoeClient(house.address, timeout=60.0) as client:
                assert client.reload(str(path)).outcome == "reloaded"
    way.check()
    way.close()


@pytest.mark.gpu(1)
def test_a_caller_gets_the_weights_that_it_demands_or_is_told(
    house: LocalCluster, remote: object, alone: Alone, path: Path
) -> None:
    way, given = opened(house, "strict", one_version=True), batch(alone, 3, seed=1)
    right = [MoeExperts(remote, layer)(*given) for layer in (0, 1)]

    def answers() -> list[Tensor]:
        found = [MoeExperts(way, layer)(*given) for layer in (0, 1)]
        way.check()
        return found

    assert all(map(torch.equal, answers(), right))
    before = way.version()
    with MoeClient(house.address, timeout=60.0) as client:
        now = client.reload(str(path)).weights_version
    assert before < now
    with pytest.raises(WeightsChanged, match=f"weights version {now}, and this pass {before}"):
        answers()
    assert all(map(torch.equal, answers(), right)) and way.version() == now
    way.demand(before)
    with pytest.raises(WeightsChanged, match=f"weights version {now}, and this pass {before}"):
        answers()
    for version in (now, 0):
        way.demand(version)
        assert all(map(torch.equal, answers(), right)) and way.version() == now
    way.close()
