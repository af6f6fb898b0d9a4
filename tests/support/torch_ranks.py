"""Processes of a data-parallel model server: each is a rank with rows of its own, and needs no service."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from houses import Alone, house_config
from parallel import group
from torch import Tensor

from moeserve.checkpoints.store import CheckpointError
from moeserve.runtime.launch.torchrun import join_torchrun
from moeserve.runtime.rank.all2all import PeersLate
from moeserve.torch import MoeExperts, WrongRows
from moeserve.torch.in_process import InProcess
from moeserve.torch.meeting import OutOfStep

PASSES = ((3, 0, 5), (1, 1, 1), (0, 0, 2), (4, 7, 0))
"""Rows of each rank, pass by pass."""


def joined(rank: int, world: int, path: Path, backend: str) -> InProcess:
    """This process's way, beside the default group of its program."""
    torch.set_num_threads(1)
    store = dist.PrefixStore("program", group().get_group_store())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return InProcess(
        join_torchrun(
            house_config(
                path,
                parallel__data_parallel_size=world,
                parallel__enable_expert_parallel=True,
                plan__all2all_backend=backend,
                step__timeout_seconds=10.0,
                balance__redundant_experts=1 if world == 3 else 0,
            )
        )
    )


def joins(rank: int, world: int, paths: list[Path]) -> tuple[str, float]:
    """Worker: why it cannot join where each rank has a checkpoint of its own; or an answer's first number."""
    try:
        way = joined(rank, world, paths[rank], "all2allv")
    except CheckpointError as refused:
        return str(refused), 0.0
    answer = MoeExperts(way, 0)(*Alone(paths[0]).batch(3, seed=1))
    way.close()
    return "", float(answer.flatten()[0])


def right(found: Tensor, alone: Alone, layer: int, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    torch.testing.assert_close(found, alone.forward(layer, *batch), rtol=1e-4, atol=1e-4)


def unlike_rows(rank: int, world: int, path: Path, backend: str) -> int:
    """Worker: passes of two layers; a rank without rows runs nothing and follows. Returns its calls."""
    way, alone, calls = joined(rank, world, path, backend), Alone(path), 0
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    for number, lanes in enumerate(PASSES):
        batch = alone.batch(lanes[rank], seed=10 * number + rank)
        for module in layers if lanes[rank] else []:
            right(module(*batch), alone, module.layer, batch)
            calls += 1
        way.follow()
        known = way.rows(lanes) if number % 2 else nullcontext()
        with known:  # all ranks run all layers, those without rows too
            ticket = layers[1].submit(*batch)
            answer = layers[0](*batch)
            right(layers[1].wait(ticket), alone, 1, batch)
            right(answer, alone, 0, batch)
            calls += 2
    way.close()
    return calls


def moving(rank: int, world: int, path: Path, backend: str) -> tuple[int, int, list[list[int]]]:
    """Worker: experts move while passes run, every answer compared. Changes, passes meanwhile, and slots."""
    way, alone, passes = joined(rank, world, path, backend), Alone(path), 0
    layers = [MoeExperts(way, layer) for layer in (0, 1)]

    def one_pass(seed: int) -> None:
        hidden, ids, weights = alone.batch(2 + (rank + seed) % 3, seed=10 * seed + rank)
        hot = torch.where(torch.arange(len(ids))[:, None] >= 0, ids * 0 + torch.tensor([0, 1]), ids).int()
        batch = (hidden, hot if seed % 2 else ids, weights)
        for module in layers:
            right(module(*batch), alone, module.layer, batch)
        way.follow()

    for seed in range(6):
        one_pass(seed)
    before, changes = way._joined().epoch.placement.slots.copy(), way.rebalance("eplb")
    while way.moving:
        passes += 1
        one_pass(passes)
        if passes > 2000:
            raise AssertionError(f"{way.moving} changes are left after {passes} passes: {way.refused!r}")
    for seed in range(4):
        one_pass(seed)
    after = way._joined().epoch.placement.slots
    if changes and (before == after).all():
        raise AssertionError("nothing has moved")
    held = way._joined().experts.bank.checksums(0, [0])
    if not held or way.refused:
        raise AssertionError(way.refused)
    way.close()
    return changes, passes, after.tolist()


def refusing(rank: int, world: int, path: Path, backend: str) -> tuple[str, list[list[int]]]:
    """Worker: one rank cannot read an expert; all stay where they were, and say why."""
    way, alone = joined(rank, world, path, backend), Alone(path)
    experts, batch = MoeExperts(way, 0), alone.batch(3, seed=rank)

    def unreadable(*what: int) -> None:
        raise OSError("the disk is gone")

    right(experts(batch[0], batch[1] * 0, batch[2]), alone, 0, (batch[0], batch[1] * 0, batch[2]))
    way.follow()
    if rank == 0:
        object.__setattr__(way._moves._mover._sources, "read", unreadable)
    before, changes, passes = way._joined().epoch.placement.slots.copy(), way.rebalance("eplb"), 0
    while way.moving and passes < 2000:
        passes += 1
        right(experts(*batch), alone, 0, batch)
        way.follow()
    if not changes or (way._joined().epoch.placement.slots[0] != before[0]).any():
        raise AssertionError(f"{changes} changes, and experts have moved")
    way.close()
    return way.refused, before.tolist()


def refused_alone(rank: int, world: int, path: Path, backend: str) -> list[str]:
    """Worker: what one rank alone refuses, it refuses before the others are met, and all go on."""
    way, alone, told = joined(rank, world, path, backend), Alone(path), list[str]()
    experts, batch = MoeExperts(way, 0), alone.batch(2, seed=rank)
    if rank == 0:
        gates = way._joined().experts

        class Refusing:
            def check(self, logits: Tensor) -> None:
                raise ValueError("this layer takes a choice")

        kept, gates.gate = gates.gate, lambda layer: Refusing()  # type: ignore[assignment,method-assign,return-value]
        try:
            experts(batch[0], torch.zeros(2, alone.checkpoint.num_experts))
        except ValueError as error:
            told.append(str(error))
        gates.gate = kept  # type: ignore[method-assign]
        try:
            experts(*alone.batch(5000, seed=1))
        except WrongRows as error:
            told.append(str(error))
    way.follow()
    for _ in range(3):
        right(experts(*batch), alone, 0, batch)
    way.follow()
    way.close()
    return told


def left_by_one(rank: int, world: int, path: Path, backend: str) -> str:
    """Worker: one rank closes its way where all have told their rows; what the others' next step says."""
    way, alone = joined(rank, world, path, backend), Alone(path)
    experts, batch = MoeExperts(way, 0), alone.batch(2, seed=rank)
    told = ""
    with way.rows((2,) * world):
        right(experts(*batch), alone, 0, batch)
        if rank != 1:
            try:
                experts(*batch)
            except PeersLate as late:
                told = str(late)
    way.close()
    return told


def recorded(rank: int, world: int, path: Path, compiled: bool) -> list[bool]:
    """Worker on a GPU: a block in a CUDA graph, replayed between eager steps; whether bits were equal."""
    store = dist.PrefixStore("program", group().get_group_store())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    way = InProcess(
        join_torchrun(
            house_config(
                path,
                parallel__data_parallel_size=world,
                parallel__enable_expert_parallel=True,
                plan__device="cuda",
                plan__all2all_backend="nvlink_ll",
            )
        )
    )
    lanes, random = (4, 3), torch.Generator().manual_seed(rank)
    sizes, dtype = (way._sizes.hidden, way._sizes.experts, way._sizes.top_k), torch.bfloat16
    gate = torch.nn.Linear(sizes[0], sizes[1], bias=False, dtype=dtype, device="cuda")
    layers = torch.nn.ModuleList(MoeExperts(way, layer) for layer in (0, 1))

    def block(hidden: Tensor) -> Tensor:
        for experts in layers:
            weights, ids = gate(hidden).topk(sizes[2])
            ticket = experts.submit(hidden, ids, weights)
            shared = hidden * 0.5
            hidden = experts.wait(ticket) + shared
        return hidden + layers[0](hidden, gate(hidden))

    def fresh() -> Tensor:
        return torch.randn(lanes[rank], sizes[0], generator=random).to("cuda", dtype)

    run = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    static, graph, equal = fresh(), torch.cuda.CUDAGraph(), list[bool]()
    with torch.no_grad():
        with way.rows(lanes):
            for _ in range(3):
                block(fresh())
                run(fresh())
        way.check()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with way.recording(max(lanes)) as steps, torch.cuda.graph(graph, stream=stream):
            found = run(static)
        for turn in range(40):
            static.copy_(fresh())
            steps.expect()
            graph.replay()
            if turn % 3 == 0:
                with way.rows(lanes):
                    expected = block(static)
                equal.append(torch.equal(found, expected))
        way.check()
    torch.cuda.synchronize()
    dist.barrier(group=group())
    way.close()
    return equal


def out_of_step(rank: int, world: int, path: Path, backend: str) -> list[str]:
    """Worker: what ranks at different layers are told, and that they can go on afterwards."""
    way, alone, told = joined(rank, world, path, backend), Alone(path), list[str]()
    batch = alone.batch(2, seed=rank)
    try:
        MoeExperts(way, rank % 2)(*batch)
    except OutOfStep as error:
        told.append(str(error))
    try:
        with way.rows((2,) * world):
            MoeExperts(way, 0)(*alone.batch(3, seed=rank))
    except WrongRows as error:
        told.append(str(error))
    right(MoeExperts(way, 0)(*batch), alone, 0, batch)
    way.close()
    return told


def told_by_submit(rank: int, world: int, path: Path, backend: str) -> int:
    """Worker: micro-batches that are submitted, each inside `rows` of its own, and awaited outside of it."""
    way, alone = joined(rank, world, path, backend), Alone(path)
    experts, lanes = MoeExperts(way, 0), ((64, 40), (3, 0), (1, 5), (0, 2))
    for number in range(5):
        batches = [alone.batch(rows[rank], seed=10 * number + at) for at, rows in enumerate(lanes)]
        tickets = []
        for rows, batch in zip(lanes, batches, strict=True):
            with way.rows(rows):
                tickets.append(experts.submit(*batch))
        for ticket, batch in zip(tickets, batches, strict=True):
            right(experts.wait(ticket), alone, 0, batch)
    way.follow()
    way.close()
    return len(lanes)
