"""Choosing dispatchers by cost when a group has come together: what is known, and what is measured."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moeserve import __version__
from moeserve.dispatch.costs.agreement import gathered
from moeserve.dispatch.costs.costs import Costs, CostSetting, table
from moeserve.dispatch.costs.files import costs_folder, store_costs, stored_costs
from moeserve.dispatch.costs.measure import METHOD, Candidate, measure
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.runtime.config import Config
from moeserve.runtime.planning.plan import DispatchSpan, Plan
from moeserve.runtime.sections import ALWAYS, AUTO, NEVER

log = logging.getLogger(__name__)


SECONDS = {"cpu": 0.8, "cuda": 1.6}
"""Of measuring at start, by torch device, for all dispatchers of a problem together."""

SpecOf = Callable[[Plan, DispatchSpan], DispatchSpec]
"""What this rank builds a dispatcher for."""

Key = tuple[str, str]
"""Of a dispatcher and its wire."""


@dataclass(frozen=True)
class Costing:
    """When dispatchers are measured, and where costs are kept; what is kept is not measured again."""

    measure: str = NEVER  # auto: on GPUs
    folder: str = ""  # the user's cache folder when empty
    anew: bool = False  # whatever was kept
    seconds: float = 0.0  # of measuring; 0: what a start may take
    graph_rows: int = 0  # steps of up to so many rows a lane are replayed from CUDA graphs
    held: int = 0  # multiprocessors of each GPU that grids leave to others
    within: float = 300.0  # seconds for a rank to build and measure, while the others wait for it

    def counts(self, plan: Plan) -> bool:
        """Whether cost has a say in `plan`: dispatchers to choose from, on a device where it is asked."""
        asked = self.measure == ALWAYS or (self.measure == AUTO and plan.machine.device != "cpu")
        return asked and plan.chooses

    def outlives(self, plan: Plan) -> bool:
        """As `Plan.outlives`; not where dispatchers are measured, which are closed at once, whoever may still
        write to them.
        """
        return plan.outlives and not self.counts(plan)

    def setting(self, plan: Plan, hosts: tuple[str, ...]) -> CostSetting:
        """What costs of the dispatchers of `plan` hold for, between ranks on `hosts`."""
        problem = plan.problem
        versions = {"moeserve": __version__, "method": METHOD, "torch": torch.__version__}
        if platform := torch.version.cuda or torch.version.hip:
            versions["cuda"] = platform
        return CostSetting(
            hosts=hosts,
            device=plan.machine.name,
            lanes=problem.lanes_here,
            owners=problem.owners_here,
            max_lanes=problem.lanes,
            max_owners=problem.owners,
            hidden=problem.shape.hidden,
            top_k=problem.top_k,
            experts=problem.experts,
            lane_rows=problem.lane_rows,
            dtype=problem.model_format.name,
            sliced=problem.sliced,
            graph_rows=0 if plan.machine.device == "cpu" else self.graph_rows,
            held=0 if plan.machine.device == "cpu" else self.held,
            versions=tuple(versions.items()),
        )


def costing_of(config: Config) -> Costing:
    """How dispatchers are chosen by cost under `config`."""
    plan, held = config.plan, config.members.held_multiprocessors
    return Costing(
        plan.measure,
        plan.costs,
        graph_rows=config.step.graph_rows,
        held=held,
        within=plan.measure_timeout_seconds,
    )


TABLE_ORDER = Costing()
"""Nothing is measured, and what was kept has no say."""


class CostBook:
    """What one rank knows of costs, over the generations of its group."""

    def __init__(self, costing: Costing) -> None:
        self._costing = costing
        self.known: dict[CostSetting, Costs] = {}

    def choose(
        self, plans: Mapping[int, Plan], spec_of: SpecOf, group: ProcessGroup | None
    ) -> dict[int, Plan]:
        """`plans` by layer with dispatchers chosen by cost where that counts, alike on all members.

        Collective over `group`; None: this member is alone, and has no choice. Raises RuntimeError when they
        would choose differently, and when a dispatcher fails while it is measured.
        """
        made = {id(plan): plan for plan in plans.values()}
        if group is not None and group.size() > 1:
            offers = [self._offers(plan) for plan in made.values()]
            everyone = gathered((socket.gethostname(), offers, _carried(made.values())), group)
            hosts = tuple(sorted({host for host, _, _ in everyone}))
            offered, carried = [found for _, found, _ in everyone], [found for _, _, found in everyone]
            for at, plan in enumerate(list(made.values())):
                keys = [key for key in offered[0][at] if all(key in found[at] for found in offered)]
                if len(keys) > 1:
                    made[id(plan)] = plan.by_cost(self._costs(plan, hosts, keys, spec_of, group))
                    carried = []  # of which nothing counts any more
            _check_alike(carried or gathered(_carried(made.values()), group))
        return {layer: made[id(plan)] for layer, plan in plans.items()}

    def _offers(self, plan: Plan) -> list[Key]:
        return [span.key for span in plan.fitting] if self._costing.counts(plan) else []

    def _costs(
        self, plan: Plan, hosts: tuple[str, ...], keys: Sequence[Key], spec_of: SpecOf, group: ProcessGroup
    ) -> Costs:
        """Costs of every dispatcher in `keys`: those the first member knows, and others measured by all."""
        costs = self._recalled(self._costing.setting(plan, hosts), group)
        spans = {span.key: span for span in plan.fitting}
        missing = [spans[key] for key in keys if not costs.tried(*key)]
        if missing:
            began, seconds = time.perf_counter(), self._costing.seconds or SECONDS[plan.machine.device]
            graph_rows = self._costing.graph_rows
            candidates = [Candidate(span.dispatcher, spec_of(plan, span), graph_rows) for span in missing]
            measured = measure(candidates, seconds, group, self._costing.within)
            costs = costs.plus(measured.costs, measured.refused)
            if group.rank() == 0:
                self._keep(costs, time.perf_counter() - began)
        self.known[costs.setting] = costs
        return costs

    def _recalled(self, setting: CostSetting, group: ProcessGroup) -> Costs:
        """What the first member knows or has kept, the same on every one. Collective."""
        box: list[Costs | None] = [None]
        if group.rank() == 0:
            kept = None if self._costing.anew else stored_costs(setting, costs_folder(self._costing.folder))
            box = [self.known.get(setting) or kept or Costs(setting)]
        dist.broadcast_object_list(box, group=group, group_src=0)
        assert box[0] is not None
        return box[0]

    def _keep(self, costs: Costs, seconds: float) -> None:
        log.info("measured dispatchers in %.2f s:\n%s", seconds, "\n".join(table(costs)))
        try:
            log.info("kept in %s", store_costs(costs, costs_folder(self._costing.folder)))
        except OSError as error:
            log.warning("costs are not kept, and are measured at the next start: %s", error)


def recalled(plans: Mapping[int, Plan], costing: Costing) -> dict[int, Plan]:
    """`plans` as ranks of this host alone would serve them by costs that were kept; nothing is measured."""
    made = {id(plan): plan for plan in plans.values()}
    for at, plan in list(made.items()):
        if costing.counts(plan):
            kept = stored_costs(costing.setting(plan, (socket.gethostname(),)), costs_folder(costing.folder))
            made[at] = plan if kept is None else plan.by_cost(kept)
    return {layer: made[id(plan)] for layer, plan in plans.items()}


def _carried(plans: Iterable[Plan]) -> list[str]:
    """What carries the rows of each plan."""
    return ["; ".join(map(str, plan.dispatchers)) for plan in plans]


def _check_alike(found: Sequence[Sequence[str]]) -> None:
    """Raises RuntimeError where a rank would carry differently from rank 0; `found` is of each rank."""
    for rank, theirs in enumerate(found):
        for first, other in zip(found[0], theirs, strict=True):
            if first != other:
                raise RuntimeError(
                    f"ranks chose different dispatchers: rank 0 {first}; rank {rank} {other}; "
                    "install the same packages on all hosts, or name a dispatcher (plan.all2all_backend)"
                )
