"""What stands between an expert's two GEMMs, as a value (`Activation`) and a table (`ACTIVATIONS`).

Canonical weights hold gate rows first and up rows after them, so the first GEMM's output always comes as
two halves; a checkpoint with interleaved rows (gpt-oss) is brought to halves once, on load, by `halves`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor
from torch.nn import functional

PARAMETERS = ("limit", "alpha", "beta", "linear_beta")

NO_MUL = "_no_mul"
"""Ending of the names that have no gate half."""

NO_GATED_FORM = frozenset({"relu2"})
"""Names that other systems have, of activations that nothing computes with an up half."""

ALIASES: Mapping[str, str] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_pytorch_tanh_no_mul": "gelu_tanh_no_mul",
    "swish": "silu",
}
"""Names of other systems -> ours."""


@dataclass(frozen=True)
class Activation:
    """An activation with its parameters; compared by value, defaults filled in, aliases resolved.

    `Activation("swigluoai")` has limit 7, alpha 1.702 and beta 1. ValueError: a name that is not in
    `ACTIVATIONS`, a parameter the activation does not take, one it needs and did not get, or one that is not
    positive and finite.
    """

    name: str
    limit: float | None = None  # bound of the gate from above and of the up half on both sides
    alpha: float | None = None  # slope inside the sigmoid
    beta: float | None = None  # added to the up half; in situ the bound of the gate
    linear_beta: float | None = None  # situ's bound of the up half

    def __post_init__(self) -> None:
        name = ALIASES.get(self.name, self.name)
        if name not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.name!r}; known: {', '.join(sorted(ACTIVATIONS))}")
        object.__setattr__(self, "name", name)
        for parameter in PARAMETERS:
            object.__setattr__(self, parameter, self._resolved(parameter))

    def _resolved(self, parameter: str) -> float | None:
        entry = ACTIVATIONS[self.name]
        value: float | None = getattr(self, parameter)
        if parameter not in entry.takes:
            if value is not None:
                takes = ", ".join(entry.takes) or "no parameter"
                raise ValueError(f"activation {self.name} takes {takes}, got {parameter}={value}")
            return None
        value = entry.takes[parameter] if value is None else value
        if value is None and parameter in entry.needs:
            raise ValueError(f"activation {self.name} needs {parameter}; give {parameter}=<positive number>")
        if value is None or value == entry.takes[parameter]:
            return value
        if not (isfinite(value) and value > 0):
            raise ValueError(f"activation {self.name}: {parameter}={value} must be positive and finite")
        return value

    @property
    def gated(self) -> bool:
        """Whether the first GEMM gives a gate half and an up half (2I columns) instead of I columns."""
        return not self.name.endswith(NO_MUL)

    def apply(self, rows: Tensor) -> Tensor:
        """Maps `rows [..., 2I]` (gate half, then up half; `[..., I]` if not gated) to `[..., I]` float32.

        Any float dtype; all arithmetic is float32, and `rows` is left as it is. ValueError: an odd width of a
        gated activation.
        """
        entry = ACTIVATIONS[self.name]
        if not self.gated:
            return entry.act(rows.float())
        width = rows.shape[-1]
        if width % 2:
            raise ValueError(f"activation {self.name} is gated: its row width {width} must be even (2I)")
        parameters = {p: v for p in entry.takes if (v := getattr(self, p)) is not None}
        return entry.act(rows[..., : width // 2].float(), rows[..., width // 2 :].float(), **parameters)

    def without_mul(self) -> Activation:
        """This activation without the product with an up half: silu -> silu_no_mul; itself if not gated.

        ValueError: the activation has no such twin, or has a limit, which the twin would lose.
        """
        if not self.gated:
            return self
        twin = self.name + NO_MUL
        if twin not in ACTIVATIONS:
            have = ", ".join(
                sorted(name.removesuffix(NO_MUL) for name in ACTIVATIONS if name.endswith(NO_MUL))
            )
            raise ValueError(
                f"activation {self.name} has no form without an up half; those that have: {have}"
            )
        if self.limit is not None:
            raise ValueError(f"activation {twin} takes no limit, and limit={self.limit} may not be dropped")
        return Activation(twin)


Act = Callable[..., Tensor]
"""(gate, up, **parameters) of a gated activation, (rows) of the others; float32 in and out."""


@dataclass(frozen=True)
class ActivationEntry:
    """One activation: its function, and its parameters with their defaults (None: off unless given)."""

    act: Act
    takes: Mapping[str, float | None] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


def halves(interleaved: Tensor, dim: int = -1) -> Tensor:
    """Brings gate/up rows stored as g0, u0, g1, u1, ... along `dim` to all gates first, then all ups; a copy.

    `[.., 2I, ..] -> [.., 2I, ..]`, any dtype. ValueError: an odd size of `dim`.
    """
    size = interleaved.shape[dim]
    if size % 2:
        raise ValueError(
            f"dimension {dim} of shape {list(interleaved.shape)} is {size}: pairs need an even size"
        )
    even = torch.arange(0, size, 2, device=interleaved.device)
    return interleaved.index_select(dim, torch.cat((even, even + 1)))


def _silu(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up


def _gelu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate) * up


def _gelu_tanh_no_mul(rows: Tensor) -> Tensor:
    return functional.gelu(rows, approximate="tanh")


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return _gelu_tanh_no_mul(gate) * up


def _relu2_no_mul(rows: Tensor) -> Tensor:
    return functional.relu(rows).square()


def _relu2(gate: Tensor, up: Tensor) -> Tensor:
    raise ValueError("activation relu2 has no gated implementation; use relu2_no_mul")


def _swiglu_oai(gate: Tensor, up: Tensor, *, limit: float, alpha: float, beta: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swiglu_step(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None = None) -> Tensor:
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


ACTIVATIONS: Mapping[str, ActivationEntry] = {
    "silu": ActivationEntry(_silu, {"limit": None}),
    "gelu": ActivationEntry(_gelu),
    "gelu_tanh": ActivationEntry(_gelu_tanh),
    "relu2": ActivationEntry(_relu2),
    "swigluoai": ActivationEntry(_swiglu_oai, {"limit": 7.0, "alpha": 1.702, "beta": 1.0}),
    "swigluoai_uninterleave": ActivationEntry(
        _swiglu_oai, {"limit": None, "alpha": 1.0, "beta": 0.0}, needs=frozenset({"limit"})
    ),
    "swiglustep": ActivationEntry(_swiglu_step, {"limit": 7.0}),
    "situ": ActivationEntry(_situ, {"beta": None, "linear_beta": None}, needs=frozenset({"beta"})),
    "silu_no_mul": ActivationEntry(functional.silu),
    "gelu_no_mul": ActivationEntry(functional.gelu),
    "gelu_tanh_no_mul": ActivationEntry(_gelu_tanh_no_mul),
    "relu2_no_mul": ActivationEntry(_relu2_no_mul),
    "relu_no_mul": ActivationEntry(functional.relu),
}
"""Every activation by name; a new one is one function and one line here."""
