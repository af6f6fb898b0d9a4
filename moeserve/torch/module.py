"""`MoeExperts`: the experts of one decoder layer as an `nn.Module`, wherever they are computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moeserve.torch import ops
from moeserve.torch.ways import Way


class Ticket(NamedTuple):
    """A call under way. `MoeExperts.wait` takes it, once."""

    number: Tensor  # [1] int64 on the CPU
    hidden: Tensor  # the caller's rows
    asked: tuple[Tensor, ...] = ()  # what wants a gradient, which there is none of


class MoeExperts(nn.Module):
    """One layer's routed experts, reached by `way`. It has no parameters, and no gradient.

    The way is used by all modules of a model, from one thread, and stays open until `way.close()`. Call it
    with chosen experts and their final weights, or with the router linear's output alone:

    mixed = experts(hidden, ids, weights)  # ids [T, K] int32 or int64, -1 = none; weights [T, K]
    mixed = experts(hidden, logits)  # [T, E], routed as the checkpoint says

    `hidden` is [T, H], or [..., T, H]; answers have its shape, dtype and device.
    """

    def __init__(self, way: Way, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.way = way

    @property
    def way(self) -> Way:
        """How its rows get to the experts; another one, as after a `close`, may be put in its place."""
        return self._way

    @way.setter
    def way(self, way: Way) -> None:
        self._way, self._number = way, ops.numbered(way)

    def forward(self, hidden: Tensor, route: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mixed rows, shaped as `hidden`."""
        rows, asked = _flat(hidden, route, weights), ops.asking(hidden, route, weights)
        mixed: Tensor = ops.mixed_experts(self.way.order, *rows, self._number, self.layer)
        return ops.ungraded(mixed.reshape(hidden.shape), asked)

    def submit(self, hidden: Tensor, route: Tensor, weights: Tensor | None = None) -> Ticket:
        """Begins what a call does, for shared experts meanwhile. The tensors may not change until `wait`."""
        rows = _flat(hidden, route, weights)
        number: Tensor = ops.submit_experts(self.way.order, *rows, self._number, self.layer)
        return Ticket(number, hidden, ops.asking(hidden, route, weights))

    def wait(self, ticket: Ticket) -> Tensor:
        """The answer of what `submit` began."""
        flat = _rows_of(ticket.hidden)
        mixed: Tensor = ops.wait_experts(self.way.order, ticket.number, flat, self._number)
        return ops.ungraded(mixed.reshape(ticket.hidden.shape), ticket.asked)

    def exchange(
        self, ticket: Ticket, hidden: Tensor, route: Tensor, weights: Tensor | None = None
    ) -> tuple[Ticket, Tensor]:
        """Begins a call as `submit` does, and returns its ticket with the answer of `ticket`, as `wait` does:
        of other rows of the batch, which have their attention next. From a GPU to a GPU it is one kernel.
        """
        rows, flat = _flat(hidden, route, weights), _rows_of(ticket.hidden)
        number: Tensor
        mixed: Tensor
        number, mixed = ops.exchange_experts(
            self.way.order, *rows, ticket.number, flat, self._number, self.layer
        )
        answer = ops.ungraded(mixed.reshape(ticket.hidden.shape), ticket.asked)
        return Ticket(number, hidden, ops.asking(hidden, route, weights)), answer

    def extra_repr(self) -> str:
        """What is printed of it."""
        return f"layer={self.layer}, way={type(self.way).__name__}"


def _flat(hidden: Tensor, route: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors with one dimension of rows."""
    return _rows_of(hidden), _rows_of(route), None if weights is None else _rows_of(weights)


def _rows_of(tensor: Tensor) -> Tensor:
    """The tensor with one dimension of rows, and without its gradient."""
    tensor = tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor
    return tensor.reshape(-1, tensor.shape[-1])
