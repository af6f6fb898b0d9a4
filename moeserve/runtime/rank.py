"""`Rank`: one rank's experts, carrier and step, as a plain class without Ray or gRPC.

A launcher gives it a seat in a group; a model server may as well host it in its own process (torchrun) and
call `step` directly, with no hop at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatcher, DispatchSpec
from moeserve.dispatch.routing import Routing, merge_duplicates
from moeserve.experts.bank import Bank
from moeserve.experts.checkpoint import Checkpoint
from moeserve.experts.kernel import Kernel, KernelSpec, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.load import Load, LoadMeter
from moeserve.experts.machine import Machine
from moeserve.experts.placement import EMPTY, AddressBook
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import FLOATS
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.plan import Plan, Wanted, make_plan
from moeserve.runtime.step import LaneInput, Phases

log = logging.getLogger(__name__)

Progress = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True)
class Served:
    """What is served, agreed by all ranks: the checkpoint, its layers, the mesh, and a step's bounds."""

    checkpoint: Checkpoint
    layers: tuple[int, ...]  # decoder indices
    mesh: Mesh
    dtype: torch.dtype
    lane_rows: int

    def scheme(self, layer: int) -> Scheme:
        """How `layer` computes: whatever the checkpoint leaves in plain floats is in the served dtype."""
        scheme, plain = self.checkpoint.scheme(layer), FLOATS.values()
        weights = self.model_format if scheme.weights in plain else scheme.weights
        return Scheme(weights, self.model_format if scheme.activations in plain else scheme.activations)

    @property
    def model_format(self) -> Format:
        """The served dtype as a format."""
        return FLOATS[self.dtype]

    def problem(self, layer: int) -> Problem:
        """What a plan is asked for."""
        return Problem(
            scheme=self.scheme(layer),
            model_format=self.model_format,
            shape=self.checkpoint.shape(layer, self.mesh.slices),
            experts=self.checkpoint.num_experts,
            ranks=self.mesh.ranks,
            top_k=self.checkpoint.top_k,
            lane_rows=self.lane_rows,
            sliced=self.mesh.sliced,
        )

    def plans(self, machine: Machine, wanted: Wanted) -> dict[int, Plan]:
        """Each layer's plan; layers with the same problem share one. Raises NoPlan."""
        made: dict[Problem, Plan] = {}
        plans: dict[int, Plan] = {}
        for layer in self.layers:
            problem = self.problem(layer)
            if problem not in made:
                made[problem] = make_plan(problem, machine, KERNELS, DISPATCHERS, wanted)
            plans[layer] = made[problem]
        return plans


class Rank:
    """One rank. `load` reads its experts, `join` builds its carriers once the process group is up, `step`
    runs.
    """

    def __init__(self, index: int, served: Served, plans: dict[int, Plan], device: str) -> None:
        self.index = index
        self.served = served
        self.plans = plans
        self.device = device
        self.bank = Bank()
        self.meter: LoadMeter | None = None
        self.bytes_read = 0
        self._position = {layer: at for at, layer in enumerate(served.layers)}
        self._kernels: dict[int, Kernel] = {}
        self._carriers: dict[int, Dispatcher] = {}
        self._book: AddressBook | None = None

    def load(self, epoch: Epoch, progress: Progress = iter) -> None:
        """Reads this rank's experts of every layer from the checkpoint, and only those, and prepares them."""
        built: dict[KernelSpec, Kernel] = {}
        checkpoint, mesh = self.served.checkpoint, self.served.mesh
        before = checkpoint.bytes_read
        owner = 0 if mesh.sliced else self.index
        for layer in progress(self.served.layers):
            plan = self.plans[layer]
            spec = KernelSpec(plan.problem.scheme, plan.problem.shape, self.served.dtype)
            kernel = built.setdefault(spec, plan.kernel.build(spec))
            slots = epoch.placement.of_rank(self._position[layer], owner)
            part = (self.index, mesh.slices) if mesh.sliced else (0, 1)
            weights = checkpoint.experts(layer, [int(e) for e in slots if e != EMPTY], part=part)
            self._kernels[layer] = kernel
            self.bank.load(layer, kernel, weights.to(self.device), slots)
        self.bytes_read += checkpoint.bytes_read - before
        self._book = AddressBook(epoch.placement, self.device)
        self.meter = LoadMeter(len(self.served.layers), checkpoint.num_experts, self.device)

    def join(self) -> None:
        """Builds the carriers over the process group that is up now; layers of the same sizes share one."""
        self.leave()
        built: dict[tuple[str, DispatchSpec], Dispatcher] = {}
        for layer, plan in self.plans.items():
            spec = self._dispatch_spec(plan, layer)
            key = (plan.carrier.name, spec)
            if key not in built:
                built[key] = plan.carrier.build(spec)
            self._carriers[layer] = built[key]

    def leave(self) -> None:
        """Closes the carriers."""
        for carrier in set(self._carriers.values()):
            carrier.close()
        self._carriers = {}

    def step(self, layer: int, rows: LaneInput, lane_rows: tuple[int, ...]) -> tuple[Tensor, Phases]:
        """Runs one layer's step; collective over the group.

        `rows` are this lane's, hidden states of the served dtype and final weights; `lane_rows` counts every
        lane's. Returns the mixed expert output `[T, H]` of the served dtype, and what the step took.
        """
        if self._book is None or self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts; call load and join before step")
        position, carrier = self._position[layer], self._carriers[layer]
        lap, before = _stopwatch(), carrier.traffic
        experts, weights = merge_duplicates(
            torch.where(rows.valid[:, None], rows.experts, EMPTY), rows.weights
        )
        hidden, weights = self._weigh_input(layer, rows.hidden, experts, weights)
        self.meter.count(position, experts)
        routing = Routing(self._book.resolve(position, experts, rows.valid), weights, lane_rows)
        arrived = carrier.dispatch(hidden, routing).wait()
        dispatched = lap()
        outputs = self._kernels[layer].apply(self.bank[layer], arrived.batch)
        computed = lap()
        answer = carrier.combine(outputs, arrived.ticket).wait()
        combined = lap()
        after = carrier.traffic
        expert_rows = int(arrived.batch.counts.sum()) if self.device == "cpu" else -1
        sent = (after.dispatched - before.dispatched, after.combined - before.combined)
        return answer, Phases(dispatched, computed, combined, expert_rows, *sent)

    def expert_load(self) -> Load:
        """Tokens by logical expert that this rank's lane sent, by served layer."""
        if self.meter is None:
            raise RuntimeError(f"rank {self.index} has loaded no experts")
        return self.meter.read()

    def _weigh_input(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For models that weight the input (top-1), the lane does it here and sends weight 1."""
        if not self.served.checkpoint.gate(layer).weight_on_input:
            return hidden, weights
        scale = weights.sum(dim=1, keepdim=True)  # top-1 after merging: one weight a row
        return hidden * scale.to(hidden.dtype), (experts >= 0).to(weights.dtype)

    def _dispatch_spec(self, plan: Plan, layer: int) -> DispatchSpec:
        problem = plan.problem
        return DispatchSpec(
            rank=self.index,
            ranks=problem.ranks,
            slots=self.bank[layer].slots,
            hidden=problem.shape.hidden,
            top_k=problem.top_k,
            lane_rows=problem.lane_rows,
            dtype=self.served.dtype,
            wire=plan.wire,
            sliced=problem.sliced,
            row_align=plan.kernel.row_align,
            device=self.device,
        )


def _stopwatch() -> Callable[[], float]:
    """Seconds since the last call. It never waits for a device."""
    last = [time.perf_counter()]

    def lap() -> float:
        now = time.perf_counter()
        last[0], lapsed = now, now - last[0]
        return lapsed

    return lap


def torch_device(machine: Machine, index: int) -> str:
    """The torch device of GPU `index` of a host with `machine`s."""
    return "cpu" if machine.device == "cpu" else f"cuda:{index % torch.cuda.device_count()}"
