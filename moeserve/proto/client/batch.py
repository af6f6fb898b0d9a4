"""One call's arrays: checked, cut into parts for the lanes, and joined again from the parts' answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from moeserve.proto import moe_pb2
from moeserve.proto.client.patience import Patience, is_whole
from moeserve.proto.errors import NotFound, WeightsChanged
from moeserve.proto.tensors import (
    FLOATS,
    INTEGERS,
    Array,
    Plain,
    TensorError,
    as_numpy,
    encode_into,
    plain,
    restore,
    spec_of,
)
from moeserve.proto.texts import quoted
from moeserve.proto.transports.shared_memory import SharedTensor

SPLIT_ROWS = 512
"""Fewest rows that are worth a call of their own where they ride inline. Fewer go whole to one lane: a second
lane's call costs more than it takes off the first one's. Rows in shared memory are spread only where one lane
does not hold them all.
"""

MESSAGE_MARGIN = 1 << 16
"""Bytes of a message kept free for everything but rows."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Experts that the caller chose.

    experts: [T, K] int32 or int64, -1 = none; weights: [T, K] fp32, bf16, fp16.
    """

    experts: Array
    weights: Array


@dataclass(frozen=True, eq=False)
class Logits:
    """The router linear's output [T, E] with its bias; the service chooses the experts."""

    logits: Array


@dataclass(frozen=True, eq=False)
class Reply:
    """An answer [T, H], like the hidden states in kind and dtype; the oldest epoch that a part of it saw, and
    the version of the weights that all of it saw.
    """

    hidden: Array
    epoch: int
    weights_version: int


class CallOptions(TypedDict, total=False):
    """What a single call may say for itself, in place of what its client says.

    timeout: seconds or a Patience; lane: the rank whose lane takes all rows, None = spread; dtype: "bf16"
    declares numpy uint16 arrays to be bfloat16 bits; output: a tensor of the same lane where the answer is
    to be written; weights_version: the one the layer must be served with, as an earlier reply named it, 0 =
    any; with another, the call fails with reason `wrong_version` and is not tried again.
    """

    timeout: float | Patience | None
    lane: int | None
    dtype: str
    output: SharedTensor | None
    weights_version: int


def check_options(options: Mapping[str, object]) -> None:
    """Raises TypeError for an option that calls do not take, naming those they take, and for a value of
    another type; ValueError for a timeout that is none.
    """
    if not options:
        return
    unknown = sorted(options.keys() - CallOptions.__annotations__.keys())
    if unknown:
        names = ", ".join(CallOptions.__annotations__)
        raise TypeError(f"a call takes no option {', '.join(unknown)}; its options are {names}")
    timeout = options.get("timeout")
    if timeout is not None and not isinstance(timeout, Patience):
        Patience(timeout)  # type: ignore[arg-type]  # it says what is wrong with another type
    if "lane" in options:
        check_lane(options["lane"])
    output = options.get("output")
    if output is not None and not isinstance(output, SharedTensor):
        raise TypeError(f"output={quoted(output)} must be a tensor that `allocate` made, or None")
    if "dtype" in options and not isinstance(dtype := options["dtype"], str):
        raise TypeError(f"dtype={quoted(dtype)} must be 'bf16', or ''")
    if "dtype" in options and dtype not in ("", "bf16"):
        raise ValueError(f"dtype={dtype!r} must be 'bf16', which declares uint16 arrays, or ''")
    if "weights_version" in options and not is_whole(options["weights_version"]):
        raise TypeError(f"weights_version={quoted(options['weights_version'])} must be a whole number")


def check_lane(lane: object) -> None:
    """Raises TypeError for what is neither the rank of a lane nor None."""
    if lane is not None and not is_whole(lane):
        raise TypeError(f"lane={quoted(lane)} must be the rank of a lane, a whole number, or None")


def check_lane_named(lane: object) -> None:
    """Raises TypeError for what is not the rank of a lane."""
    if not is_whole(lane):
        raise TypeError(f"lane={quoted(lane)} must be the rank of a lane, a whole number")


def check_layer(layer: object) -> None:
    """Raises TypeError for what is no number, ValueError for what can be no layer's."""
    if not is_whole(layer):
        raise TypeError(f"layer={quoted(layer)} must be the number of a layer, a whole number")
    if not 0 <= layer < 1 << 32:  # type: ignore[operator]
        raise ValueError(f"layer={layer} must be the number of a layer, from 0 on")


@dataclass(frozen=True)
class BatchPart:
    """Rows [start, stop) of a batch, which one lane computes as one job."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ClientBatch:
    """The arrays of one call, in host memory. `like` is what the caller passed as hidden states."""

    layer: int
    hidden: Plain
    routes: dict[str, Plain]
    like: Array | SharedTensor
    output: SharedTensor | None
    weights_version: int = 0  # demanded; 0: any

    @classmethod
    def of(
        cls, layer: int, hidden: Array | SharedTensor, route: Choice | Logits, options: CallOptions
    ) -> ClientBatch:
        """Checks the arrays against each other; TensorError names the one that is wrong."""
        check_layer(layer)
        dtype, output = options.get("dtype", ""), options.get("output")
        rows = hidden.plain if isinstance(hidden, SharedTensor) else plain(hidden, "hidden", dtype=dtype)
        _check("hidden", rows, FLOATS)
        if isinstance(route, Logits):
            routes = {"logits": plain(route.logits, "logits", dtype=dtype)}
        else:
            routes = {
                "choice.ids": plain(route.experts, "choice.ids"),
                "choice.weights": plain(route.weights, "choice.weights", dtype=dtype),
            }
        for field, array in routes.items():
            _check(field, array, INTEGERS if field == "choice.ids" else FLOATS)
            if len(array.storage) != len(rows.storage):
                raise TensorError(field, f"{array.spec} has other rows than hidden, {rows.spec}")
        if output is not None and output.spec != rows.spec:
            raise TensorError("output", f"{output.spec} cannot take the answer {rows.spec}")
        version = options.get("weights_version", 0)
        if not 0 <= version < 1 << 64:
            raise ValueError(f"weights_version={version} must be a version, from 1 on, or 0 for any")
        return cls(layer, rows, routes, hidden, output, version)

    @classmethod
    def of_request(cls, request: moe_pb2.ForwardRequest) -> ClientBatch | None:
        """The arrays of a request whose tensors all ride inline, as views of its bytes.

        None where a tensor or the answer lies in a region, and for a request that is malformed: such a
        request can only be handed on whole.
        """
        if request.HasField("output"):
            return None
        try:
            hidden = _inline(request.hidden, "hidden", FLOATS)
            if request.WhichOneof("route") == "logits":
                routes = {"logits": _inline(request.logits, "logits", FLOATS)}
            else:
                routes = {
                    "choice.ids": _inline(request.choice.ids, "choice.ids", INTEGERS),
                    "choice.weights": _inline(request.choice.weights, "choice.weights", FLOATS),
                }
        except TensorError:
            return None
        if any(len(array.storage) != len(hidden.storage) for array in routes.values()):
            return None
        return cls(request.layer, hidden, routes, hidden.storage, None, request.weights_version)

    @cached_property
    def placed(self) -> tuple[SharedTensor, ...]:
        """The tensors that lie in a lane's region already; they bind the call to that lane."""
        return tuple(tensor for tensor in (self.like, self.output) if isinstance(tensor, SharedTensor))

    def lane(self, asked: int | None) -> int | None:
        """The lane that the call is bound to, by its regions or because the caller `asked`, or None."""
        bound = {tensor.rank for tensor in self.placed} | ({asked} if asked is not None else set())
        if len(bound) > 1:
            raise ValueError(
                f"one call goes to one lane, but its tensors and its caller name lanes {sorted(bound)}"
            )
        return bound.pop() if bound else None

    def check_regions(self, address: str) -> None:
        """Raises NotFound unless the lane at `address` has made the regions in which rows and answer lie."""
        for name, tensor in (("hidden", self.like), ("output", self.output)):
            made_by = tensor.region.address if isinstance(tensor, SharedTensor) else ""
            if made_by and made_by != address:
                text = f"{name}: it lies in a region of the lane at {made_by}, and the call is for {address}"
                raise NotFound("NOT_FOUND", "unknown_region", f"{text}; allocate it there")

    def parts(self, lanes: int, max_message_bytes: int, most_rows: int = 0) -> tuple[BatchPart, ...]:
        """The rows spread evenly over at most `lanes` lanes; more parts only where a message lacks room, or a
        part would have more than `most_rows` (0: without that bound).
        """
        rows = len(self.hidden.storage)
        if self.placed and lanes == 1:
            return (BatchPart(0, 0, rows),)
        arrays = (self.hidden, *self.routes.values())
        row_bytes = sum(array.storage.shape[1] * array.dtype.itemsize for array in arrays)
        most = rows if self.placed else (max_message_bytes - MESSAGE_MARGIN) // max(1, row_bytes)
        if most < min(1, rows):
            text = f"a row of {row_bytes} bytes has no room in a message of {max_message_bytes} bytes"
            raise TensorError("hidden", f"{text}; raise the server's message limit, or use shared memory")
        if most_rows and not self.placed:
            most = min(most, most_rows)
        return spread(rows, lanes, max(1, most))

    def request(self, part: BatchPart) -> moe_pb2.ForwardRequest:
        """The request for the rows of `part`, complete but for hidden states, names and times."""
        request = moe_pb2.ForwardRequest(layer=self.layer, weights_version=self.weights_version)
        for field, array in self.routes.items():
            message: Any = request
            for name in field.split("."):
                message = getattr(message, name)
            encode_into(message, array.rows(part.start, part.stop))
        return request

    def reply(self, answer: NDArray[Any], replies: Sequence[moe_pb2.ForwardReply]) -> Reply:
        """The whole answer as the caller gets it. Raises WeightsChanged where parts saw different weights."""
        versions = [reply.weights_version for reply in replies]
        if len(versions) > 1 and len(versions := sorted(set(versions))) > 1:
            text = f"parts of a call of layer {self.layer} saw weights versions {versions}: it was reloaded"
            raise WeightsChanged("UNAVAILABLE", "weights_changed", text)
        made = Plain(self.hidden.dtype, answer)
        like, output = self.like, self.output
        if output is not None:
            array: Array = output.array
        elif isinstance(like, SharedTensor):
            array = restore(made, like.array)
        else:
            array = restore(made, like)
        epoch = min(reply.epoch for reply in replies)
        return Reply(array, epoch, versions[0])


def spread(rows: int, lanes: int, most: int) -> tuple[BatchPart, ...]:
    """`rows` cut into even parts: one a lane, but none under SPLIT_ROWS rows, and none over `most`."""
    parts = max(min(lanes, rows // SPLIT_ROWS), -(-rows // most), 1)
    cuts = [rows * cut // parts for cut in range(parts + 1)]
    return tuple(BatchPart(index, cuts[index], cuts[index + 1]) for index in range(parts))


def whole(batch: ClientBatch, parts: tuple[BatchPart, ...]) -> NDArray[Any] | None:
    """Memory to join the parts in; None when there is but one part, whose answer is the whole."""
    return np.empty_like(batch.hidden.storage) if len(parts) > 1 else None


def _inline(message: moe_pb2.Tensor, field: str, dtypes: tuple[str, ...]) -> Plain:
    """A view of a message's bytes. TensorError where it is malformed or lies in a region."""
    spec = spec_of(message, field, rank=2, dtypes=dtypes)
    if message.WhichOneof("payload") != "data":
        raise TensorError(field, "it lies in a region")
    return as_numpy(message.data, spec, field)


def _check(field: str, array: Plain, dtypes: tuple[str, ...]) -> None:
    if array.storage.ndim != 2:
        raise TensorError(field, f"shape {list(array.storage.shape)} has not two dimensions, [tokens, ...]")
    if array.dtype.name not in dtypes:
        raise TensorError(field, f"dtype {array.dtype.name} is not one of {', '.join(dtypes)}")
