"""What a door checks of a request against what is served, and how it routes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.experts.routing.gate import Gate
from moeserve.proto import moe_pb2
from moeserve.proto.tensors import TensorError, dtype_of
from moeserve.proto.texts import quoted
from moeserve.proto.transports.carried import Carried
from moeserve.runtime.doors.payloads import OpenRequest, Payloads
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.served import Served
from moeserve.runtime.step import CallerMemory, Lent, Routed, Stamp


class NotServed(LookupError):
    """A model or layer that is not served here; names what is."""


@dataclass(frozen=True, eq=False)
class CheckedRequest:
    """A request whose tensors were checked and whose experts are chosen.

    Close it when it is answered, or when it will not be.
    """

    batch: LaneBatch
    request: OpenRequest

    def reply(self, answer: Tensor, stamp: Stamp) -> moe_pb2.ForwardReply:
        """The reply that holds `answer` [T, H], in the dtype of the request's hidden states."""
        return self.request.reply(_as(self.request.hidden.dtype, answer), *stamp)

    def reply_beside(
        self, answer: Tensor, stamp: Stamp
    ) -> moe_pb2.ForwardReply | Carried[moe_pb2.ForwardReply]:
        """Makes the same reply, a large inline answer beside its message."""
        return self.request.reply_beside(_as(self.request.hidden.dtype, answer), *stamp)

    def close(self) -> None:
        """Lets go of the caller's memory, once no device touches it any more."""
        if self.batch.lent is None:
            self.request.close()
        else:
            self.batch.lent.memory.done()


def transport_of(request: moe_pb2.ForwardRequest) -> str:
    """How a request's rows come, or its answer goes, as metrics name it."""
    shared = request.hidden.WhichOneof("payload") == "region" or request.HasField("output")
    return "shared_memory" if shared else "inline"


def _let_in(rows: int) -> None:
    """Lets all in."""


class RequestReader:
    """Reads requests against what is served. Safe from any thread.

    NaN or infinite hidden states are computed as they are and stay in their own rows; NaN logits count as
    minus infinity; the weight of an id of -1 is ignored, even NaN. Hidden states in another float dtype than
    the served one are converted, and the answer converted back.
    """

    def __init__(
        self, name: str, served: Served, gate: Callable[[int], tuple[Gate, int]], payloads: Payloads
    ) -> None:
        self._name = name
        self._served = served
        self._layers = frozenset(served.layers)
        self._gate = gate  # of a layer, by the weights that it holds now, and their version
        self._payloads = payloads

    def heavy(self, request: moe_pb2.ForwardRequest) -> bool:
        """Whether `read` computes: it routes logits, or converts hidden states to the served dtype."""
        served = str(self._served.dtype).removeprefix("torch.")
        given = dtype_of(request.hidden)
        return request.WhichOneof("route") == "logits" or (given is not None and given.torch_name != served)

    def read(
        self,
        request: moe_pb2.ForwardRequest,
        deadline: float = math.inf,
        data: memoryview | None = None,
        enter: Callable[[int], object] = _let_in,
    ) -> CheckedRequest:
        """Checks and routes `request`, whose hidden states may lie beside it, in `data`.

        enter: lets in so many rows, which are there, before anything is computed of them. Raises NotServed,
        TensorError (naming the field), RegionError, and what `enter` raises.
        """
        if request.model not in ("", self._name):
            raise NotServed(f"model {quoted(request.model)} is not served here; {self._name!r} is")
        if request.layer not in self._layers:
            raise NotServed(
                f"layer {request.layer} has no experts served here; layers {runs(self._served.layers)} have"
            )
        opened = self._payloads.open(request, data)
        try:
            self._check("hidden", opened.hidden, self._served.checkpoint.hidden, "the model's hidden size")
            enter(opened.hidden.shape[0])
            experts, weights, routed = self._route(request.layer, opened)
            hidden = _as(self._served.dtype, opened.hidden)
        except BaseException:
            opened.close()
            raise
        in_place = opened.reached and hidden.data_ptr() == opened.hidden.data_ptr()
        lent = Lent(CallerMemory(opened.close), in_place, opened.home)
        demanded = request.weights_version
        return CheckedRequest(
            LaneBatch(request.layer, hidden, experts, weights, deadline, demanded, lent, routed), opened
        )

    def _route(self, layer: int, opened: OpenRequest) -> tuple[Tensor, Tensor, Routed | None]:
        """Experts `[T, K]` int32 and final weights `[T, K]` float32, and by what a correction bias chose
        them: another one may come before their step.
        """
        checkpoint = self._served.checkpoint
        if opened.logits is not None:
            self._check("logits", opened.logits, checkpoint.num_experts, "the layer's experts")
            gate, version = self._gate(layer)
            if gate.by_model:
                raise TensorError("logits", f"layer {layer} takes a choice, ids and weights: {gate.by_model}")
            if gate.by_token:
                wanted = "send choice, with the ids that the model's table gives the tokens"
                raise TensorError("logits", f"layer {layer} chooses experts by token id; {wanted}")
            routed = None if gate.bias is None else Routed(opened.logits, version)
            return *gate.route(opened.logits), routed
        if opened.experts is None or opened.weights is None:
            raise TensorError("route", "neither choice nor logits is set")
        self._check("choice.ids", opened.experts, checkpoint.top_k, "the model's experts a token")
        check_ids(opened.experts.numpy(), checkpoint.num_experts)
        return _as(torch.int32, opened.experts), _as(torch.float32, opened.weights), None

    @staticmethod
    def _check(field: str, tensor: Tensor, width: int, what: str) -> None:
        if tensor.shape[1] != width:
            raise TensorError(field, f"rows of {tensor.shape[1]}, but {what} is {width}")


_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}  # by bytes


def check_ids(ids: NDArray[Any], experts: int) -> None:
    """Raises TensorError where one of `ids`, int32 or int64, is neither -1 nor below `experts`."""
    if not ids.size or ids.view(_UNSIGNED[ids.itemsize]).max() < experts:
        return  # at one look: what is below 0 is large without a sign
    low, high = int(ids.min()), int(ids.max())
    if low < -1 or high >= experts:
        wrong, text = low if low < -1 else high, f"experts are 0 to {experts - 1}, -1 is none"
        raise TensorError("choice.ids", f"id {wrong} is out of range: {text}")


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """`tensor` in `dtype`. Torch gives the interpreter up even to find that there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def runs(numbers: tuple[int, ...]) -> str:
    """`numbers` in words, neighbours joined: `0-3, 7`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
