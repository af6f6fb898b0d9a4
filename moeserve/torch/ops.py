"""What compiled graphs see of experts: operators without a body to look into.

`moeserve::mixed_experts` is one call, `moeserve::submit_experts` and `moeserve::wait_experts` are its halves,
and `moeserve::exchange_experts` is the first half of one call and the second of another.
Each is declared to write the way's `order` tensor, so that no compiler drops, joins or reorders calls: in one
process they are collective, and all of its ranks have to make them in one order.

There is no gradient. torch takes no backward for operators that write, and a compiler runs one as it
compiles: so rows go in without their gradients, and `ungraded` gives answers a backward of one more operator,
which says so when it runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moeserve.torch.ways import Rows, Way, exchange

_numbers = itertools.count(1)
_ways: weakref.WeakValueDictionary[int, Way] = weakref.WeakValueDictionary()


def numbered(way: Way) -> int:
    """The number by which operators find `way`, for as long as somebody holds it."""
    for number, known in _ways.items():
        if known is way:
            return number
    number = next(_numbers)
    _ways[number] = way
    return number


def _way(number: int) -> Way:
    way = _ways.get(number)
    if way is None:
        raise RuntimeError(f"way {number} to the experts is gone: keep what `connect` returned")
    return way


def asking(*given: Tensor | None) -> tuple[Tensor, ...]:
    """Those that want a gradient, where gradients are wanted at all."""
    wanted = torch.is_grad_enabled()
    return tuple(tensor for tensor in given if wanted and tensor is not None and tensor.requires_grad)


def ungraded(mixed: Tensor, asked: Sequence[Tensor]) -> Tensor:
    """The answer to rows of which these want a gradient: it can be computed with, but not differentiated."""
    return cast(Tensor, _Ungraded.apply(mixed, *asked)) if asked else mixed  # type: ignore[no-untyped-call]


class _Ungraded(torch.autograd.Function):
    """The answer itself, as a node that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, *asked: Tensor) -> Tensor:
        ctx.like = [(list(tensor.shape), tensor.dtype) for tensor in asked]
        return mixed.view_as(mixed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(no_gradient(gradients[0], shape, dtype) for shape, dtype in ctx.like)


@torch.library.custom_op("moeserve::no_gradient", mutates_args=())
def no_gradient(gradient: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Raises RuntimeError; a compiler takes it for a gradient of this shape."""
    raise RuntimeError("experts behind moeserve give no gradients; call the model under torch.no_grad()")


@no_gradient.register_fake
def _(gradient: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=gradient.device)


@torch.library.custom_op("moeserve::mixed_experts", mutates_args=("order",))
def mixed_experts(
    order: Tensor, hidden: Tensor, route: Tensor, weights: Tensor | None, way: int, layer: int
) -> Tensor:
    """Mixed rows [T, H] like `hidden`; see `Rows` for what goes in."""
    return _way(way).mixed(layer, Rows(hidden, route, weights))


@mixed_experts.register_fake
def _(order: Tensor, hidden: Tensor, route: Tensor, weights: Tensor | None, way: int, layer: int) -> Tensor:
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


@torch.library.custom_op("moeserve::submit_experts", mutates_args=("order",))
def submit_experts(
    order: Tensor, hidden: Tensor, route: Tensor, weights: Tensor | None, way: int, layer: int
) -> Tensor:
    """Begins what `mixed_experts` does; returns the number to wait for, [1] int64 on the CPU."""
    return torch.tensor([_way(way).submit(layer, Rows(hidden, route, weights))], dtype=torch.int64)


@submit_experts.register_fake
def _(order: Tensor, hidden: Tensor, route: Tensor, weights: Tensor | None, way: int, layer: int) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.custom_op("moeserve::wait_experts", mutates_args=("order",))
def wait_experts(order: Tensor, number: Tensor, hidden: Tensor, way: int) -> Tensor:
    """Waits for what `submit_experts` began with the same `hidden`; returns as `mixed_experts` does."""
    return _way(way).wait(int(number.item()))


@wait_experts.register_fake
def _(order: Tensor, number: Tensor, hidden: Tensor, way: int) -> Tensor:
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


@torch.library.custom_op("moeserve::exchange_experts", mutates_args=("order",))
def exchange_experts(
    order: Tensor,
    hidden: Tensor,
    route: Tensor,
    weights: Tensor | None,
    number: Tensor,
    awaited: Tensor,
    way: int,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Begins as `submit_experts` does, and waits as `wait_experts` for what began with the rows `awaited`."""
    begun, mixed = exchange(_way(way), layer, Rows(hidden, route, weights), int(number.item()))
    return torch.tensor([begun], dtype=torch.int64), mixed


@exchange_experts.register_fake
def _(
    order: Tensor,
    hidden: Tensor,
    route: Tensor,
    weights: Tensor | None,
    number: Tensor,
    awaited: Tensor,
    way: int,
    layer: int,
) -> tuple[Tensor, Tensor]:
    mixed = torch.empty(awaited.shape, dtype=awaited.dtype, device=awaited.device)
    return torch.empty(1, dtype=torch.int64), mixed
