"""NCCL EP (package nccl-extensions): NVIDIA's dispatch and combine on NCCL's device windows.

Both algorithms carry one copy of a row to each rank that holds one of its slots, codes and scales as they
are, and add the ranks' partial sums at home. `nccl_ep` takes the high-throughput one, whose rows arrive one
after the other, and `nccl_ep_ll` the low-latency one, which gives every lane a block of places of its own.

Building compiles the library's kernels, 2 to 6 seconds for each shape and wire, with nvcc and the headers of
the NCCL that is loaded: `NCCL_HOME` says where they are, `NCCL_EP_JIT_CACHE_DIR` keeps kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.dispatcher import DispatchEntry, Dispatcher, DispatchSpec, Pace
from moeserve.dispatch.libraries.row_exchange import Arrived, RowExchange
from moeserve.dispatch.libraries.travel import only_first
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import Grouping
from moeserve.experts.placement import EMPTY

NANOSECONDS = 1e9
ROW_BYTES = 16  # rows of codes and of scales are multiples of it
COUNTS_STEP = 4  # rows a lane, and slots of all ranks, are whole steps, as its tensor copies need them
HIDDEN_STEP = 512  # elements of a row that travels: the scales of so many fill 16 bytes in every wire


class NcclEP(RowExchange):
    """The dispatcher over `nccl.ep.Group`, by the algorithm that `entry` has the pace for."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None, entry: DispatchEntry) -> None:
        super().__init__(spec, group, entry)
        self._rows = _stepped(max(spec.lane_rows, 1), COUNTS_STEP)
        self._held = _stepped(spec.slots, COUNTS_STEP // gcd(spec.ranks, COUNTS_STEP))
        self._low = entry.pace is Pace.LOW_LATENCY
        self._lead = (spec.ranks, self._rows) if self._low else (spec.ranks * self._rows,)
        self._ep: Any = import_module("nccl.ep")
        self._communicator = _communicator(self._group)
        self._joined: Any = self._ep.Group.create(self._communicator, self._settings())
        self._handle: Any = None
        self._bound: tuple[Any, ...] = ()
        self._warm()

    def _settings(self) -> Any:
        spec, algorithm = self._spec, self._ep.Algorithm
        return self._ep.GroupConfig(
            algorithm=algorithm.LOW_LATENCY if self._low else algorithm.HIGH_THROUGHPUT,
            num_experts=spec.ranks * self._held,
            max_dispatch_tokens_per_rank=self._rows,
            max_recv_tokens_per_rank=0 if self._low else spec.ranks * self._rows,
            max_token_bytes=max(_stepped(self._row_bytes, ROW_BYTES), self._travelling * spec.dtype.itemsize),
            num_topk=spec.top_k,
            timeout_ns=round(spec.patience * NANOSECONDS),
        )

    def _send(self, hidden: Tensor, routing: Routing) -> Arrived:
        parts, slots, weights = self._on_the_wire(hidden, routing)
        slots = self._numbered(slots)
        came = torch.zeros(self._lead[:-1] or 1, dtype=torch.int32, device=slots.device)
        info = self._bind(slots, came)
        received = tuple(part.new_empty((*self._lead, part.shape[1])) for part in parts)
        here = slots.new_empty((*self._lead, slots.shape[1]), dtype=torch.int32 if self._low else torch.int64)
        weighed = weights.new_empty((*self._lead, slots.shape[1]))
        recipe = self._ep.DispatchQuantizationRecipe
        self._handle.dispatch(
            self._ep.DispatchInputs(topk_weights=self._described(weights), **self._named(parts)),
            self._ep.DispatchOutputs(
                topk_weights=self._described(weighed), topk_idx=self._described(here), **self._named(received)
            ),
            layout_info=info if self._low else None,
            config=self._ep.DispatchConfig(quantization_recipe=recipe.FWD if len(parts) > 1 else recipe.NONE),
            stream=_stream(),
        )
        here = only_first(came[:, None] if self._low else came, here)
        flat = tuple(part.view(-1, part.shape[-1]) for part in received)
        return Arrived(flat, here, weighed.view(here.shape), slots.shape[0])

    def _numbered(self, slots: Tensor) -> Tensor:
        """Slots in the library's numbering, int64, where every rank holds some that nobody chooses."""
        ranks = slots.div(self._spec.slots, rounding_mode="floor")
        extra = (self._held - self._spec.slots) * ranks
        return torch.where(slots < 0, EMPTY, slots + extra).long()

    def _bind(self, slots: Tensor, came: Tensor) -> Any:
        """Gives the library this step's routing, and it `came` to count what arrives in.

        It keeps their addresses until the rows are home, so they are kept here too.
        """
        ids, counter = self._described(slots), self._described(came)
        counters = {"src_rank_counters" if self._low else "recv_total_counter": counter}
        info = self._ep.LayoutInfo(recv_topk_idx_kind=self._ep.ExpertIdKind.LOCAL, **counters)
        at_once = None if self._low else info
        if self._handle is None:
            layout = self._ep.Layout.RANK_MAJOR if self._low else self._ep.Layout.FLAT
            self._handle = self._joined.create_handle(layout, ids, layout_info=at_once, stream=_stream())
        else:
            self._handle.update(ids, layout_info=at_once, stream=_stream())
        self._bound = (ids, counter, info)
        return info

    def _named(self, parts: tuple[Tensor, ...]) -> dict[str, Any]:
        return {
            name: self._described(part)
            for name, part in zip(("tokens", "scales"), parts, strict=False)  # a plain float has no scales
        }

    def _described(self, tensor: Tensor) -> Any:
        return self._ep.Tensor(tensor)

    def _bring_home(self, partials: Tensor, handle: int) -> Tensor:
        """`handle` is how many rows were sent."""
        total = partials.new_empty((handle, self._travelling))
        self._handle.combine(
            self._ep.CombineInputs(tokens=self._described(partials.view(*self._lead, self._travelling))),
            self._ep.CombineOutputs(tokens=self._described(total)),
            stream=_stream(),
        )
        return total

    def close(self) -> None:
        """Frees handle, group and the communicator under them."""
        if self._handle is not None:
            self._handle.destroy()
        self._joined.destroy()
        self._communicator.destroy()


def _communicator(group: ProcessGroup) -> Any:
    """A NCCL communicator of the library's own binding over the ranks of `group`. Collective.

    The library's own way to one from a process group asks torch's default group for the rank.
    """
    core: Any = import_module("nccl.core")
    box = [bytes(core.get_unique_id().as_bytes) if group.rank() == 0 else b""]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return core.Communicator.init(group.size(), group.rank(), core.UniqueId.from_bytes(box[0]))


def _stream() -> int:
    """The stream that torch works on, as the library takes it."""
    return int(torch.cuda.current_stream().cuda_stream)


def _stepped(count: int, step: int) -> int:
    """`count` or a few more, so that it is whole steps."""
    return -(-count // step) * step


def _entry(
    name: str, pace: Pace, build: Callable[[DispatchSpec, ProcessGroup | None], Dispatcher]
) -> DispatchEntry:
    return DispatchEntry(
        name=name,
        build=build,
        wires=frozenset({"bf16", "fp8_group128", "fp8_group128_ue8m0", "mxfp8"}),
        grouping=Grouping.RAGGED,
        pace=pace,
        archs=frozenset({"sm90", "sm100", "sm103"}),
        modules=frozenset({"nccl.ep"}),
        partial_sums="float32 sums of a rank travel in bf16 and are added by the library",
        ordered=False,
        limits=Limits(dtypes=frozenset({"bf16"}), hidden_step=HIDDEN_STEP, nccl=(2, 30, 4)),
        verified=("sm90",),
    )


ENTRY: DispatchEntry = _entry("nccl_ep", Pace.HIGH_THROUGHPUT, lambda spec, group: NcclEP(spec, group, ENTRY))
ENTRY_LL: DispatchEntry = _entry(
    "nccl_ep_ll", Pace.LOW_LATENCY, lambda spec, group: NcclEP(spec, group, ENTRY_LL)
)
