"""`Warming`: what one rank runs before it serves, and what of it is warm already.

On the CPU there is nothing to compile, so nothing is run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.experts.batch import Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.routing.choices import StepAddressing
from moeserve.experts.routing.gate import Gate
from moeserve.quant.format import Format
from moeserve.runtime.planning.plan import Plan
from moeserve.runtime.rank.experts import RankExperts
from moeserve.runtime.rank.warm.kernels import Arrivals, warm
from moeserve.runtime.rank.warm.steps import numbers_of, warm_choices, warm_grouping, warm_routing, warm_steps
from moeserve.runtime.served import Served
from moeserve.runtime.step import LaneRows

log = logging.getLogger(__name__)


class Warming:
    """The warming of the rank in seat `index`; what is warm stays so when the group forms again.

    `gate` gives the gate of a layer, with its bias on the device.
    """

    def __init__(
        self, index: int, served: Served, device: str, experts: RankExperts, gate: Callable[[int], Gate]
    ) -> None:
        self._index = index
        self._served = served
        self._device = device
        self._experts = experts
        self._gate = gate
        self._kernels: set[tuple[KernelSpec, Arrivals]] = set()
        self._choices = False
        self._grouped: set[tuple[Format, tuple[int, int, int, int]]] = set()  # wire; K, H, slots, row_align

    def before_joining(
        self, plans: dict[int, Plan], slots: int, addressing: Callable[[int], StepAddressing] | None
    ) -> None:
        """Runs the kernels of `plans` where this member holds `slots`, and the addressing of a lane's rows.

        `addressing` gives that of a step by the rows of its fullest lane; None for a member without a lane.
        No other member is waited for.
        """
        if self._device == "cpu":
            return
        started, before = time.perf_counter(), len(self._kernels)
        if slots:
            self._warm_kernels(plans)
        if len(self._kernels) > before or not self._choices:
            kernels, self._choices = time.perf_counter(), True
            if addressing is not None:
                self._warm_choices(addressing)
            text = "rank %d: its kernels are warm in %.1f s, choices and routing in %.1f s"
            log.info(text, self._index, kernels - started, time.perf_counter() - kernels)

    def _warm_kernels(self, plans: dict[int, Plan]) -> None:
        """Applies each layer's kernel to every size of batch that its dispatchers can bring."""
        for layer, plan in plans.items():
            slots = self._experts.bank[layer].slots
            for arrivals in {Arrivals.over(span, plan, slots) for span in plan.fitting}:
                key = (self._experts.kernel_spec(plan), arrivals)
                if key not in self._kernels:
                    warm(self._experts.kernels[layer], self._experts.bank[layer], arrivals)
                    self._kernels.add(key)

    def _warm_choices(self, addressing: Callable[[int], StepAddressing]) -> None:
        """What a step does with its rows' choices and logits before they leave this member."""
        served, device = self._served, self._device
        warm_choices(served, addressing, device)
        for layer in {numbers_of(self._experts.gate(layer)): layer for layer in served.layers}.values():
            warm_routing(self._gate(layer), (torch.float32, served.dtype), addressing(1), device)

    def grouping(self, plans: dict[int, Plan], slots: int) -> None:
        """Groups and weighs rows where a dispatcher that serves leaves that to the kernels of `permute`."""
        if self._device == "cpu" or not slots:
            return
        wanted = {
            (span.wire, (plan.problem.top_k, plan.problem.shape.hidden, slots, plan.kernel.row_align))
            for plan in plans.values()
            for span in plan.dispatchers
            if span.dispatcher.grouping is Grouping.RAGGED and span.dispatcher.permutes
        }
        started = time.perf_counter()
        for wire, sizes in wanted - self._grouped:
            warm_grouping(wire, sizes, self._served.dtype, self._device)
        if wanted - self._grouped:
            log.info("rank %d: grouping rows is warm in %.1f s", self._index, time.perf_counter() - started)
        self._grouped |= wanted

    def steps(
        self, plans: dict[int, Plan], run: Callable[[int, LaneRows], Tensor], most_recorded: int
    ) -> None:
        """Whole steps of the first layer of every plan, as `run` runs them on a rank that is alone.

        Steps of up to `most_recorded` rows come from graphs where a lane may bring so many.
        """
        if self._device == "cpu":
            return
        started, done = time.perf_counter(), 0
        for layer in {id(plan): layer for layer, plan in reversed(plans.items())}.values():

            def run_layer(rows: LaneRows, layer: int = layer) -> Tensor:
                return run(layer, rows)

            recorded = min(most_recorded, plans[layer].problem.lane_rows)
            done += warm_steps(run_layer, self._served, self._gate(layer), recorded)
        log.info("rank %d: %d steps warmed it in %.1f s", self._index, done, time.perf_counter() - started)
