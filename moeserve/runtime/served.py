"""`Served`: what a service serves, agreed by all ranks, and what follows of it for plans and carriers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.experts.checkpoint import Checkpoint
from moeserve.experts.kernel import Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.machine import Machine
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import FLOATS
from moeserve.runtime.config import FAIL
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.plan import Plan, Span, Wanted, make_plan


@dataclass(frozen=True)
class Served:
    """What is served, agreed by all ranks: the checkpoint, its layers, the mesh, and a step's bounds."""

    checkpoint: Checkpoint
    layers: tuple[int, ...]  # decoder indices
    mesh: Mesh
    dtype: torch.dtype
    lane_rows: int
    replica_choice: str = "hash"  # of `REPLICA_CHOICES`
    patience: float = 30.0  # seconds a carrier waits for a rank before it names it late
    on_late: str = FAIL  # or "drop": a step goes on without a late rank's rows
    graph_rows: int = 256  # of the fullest lane, up to which a GPU's steps are CUDA graphs; 0: none are

    def scheme(self, layer: int) -> Scheme:
        """How `layer` computes: whatever the checkpoint leaves in plain floats is in the served dtype."""
        scheme, plain = self.checkpoint.scheme(layer), FLOATS.values()
        weights = self.model_format if scheme.weights in plain else scheme.weights
        return Scheme(weights, self.model_format if scheme.activations in plain else scheme.activations)

    @property
    def model_format(self) -> Format:
        """The served dtype as a format."""
        return FLOATS[self.dtype]

    def reloaded_from(self, path: str) -> Checkpoint:
        """The checkpoint in `path`, when its experts can take these' place. ValueError names what differs."""
        new = self.checkpoint.sibling(path)
        for layer in self.layers:
            if layer not in new.layers:
                raise ValueError(f"{path}: layer {layer} has no experts, and is served")
            for what, old, found in (
                ("experts", self.checkpoint.num_experts, new.num_experts),
                ("experts a token", self.checkpoint.top_k, new.top_k),
                ("shape", self.checkpoint.shape(layer), new.shape(layer)),
                ("scheme", self.checkpoint.scheme(layer), new.scheme(layer)),
            ):
                if old != found:
                    raise ValueError(f"{path}: layer {layer} has {what} {found}, and {old} is served")
        return new

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

    def dispatch_spec(self, plan: Plan, span: Span, rank: int, slots: int, device: str) -> DispatchSpec:
        """What `rank`, with `slots` on `device`, builds the carrier of `span` for."""
        problem = plan.problem
        return DispatchSpec(
            rank=rank,
            ranks=problem.ranks,
            slots=slots,
            hidden=problem.shape.hidden,
            top_k=problem.top_k,
            lane_rows=span.up_to,
            dtype=self.dtype,
            wire=span.wire,
            sliced=problem.sliced,
            row_align=plan.kernel.row_align,
            device=device,
            patience=self.patience,
            on_late=self.on_late,
        )
