"""Matrices for the laws of layouts: every byte random that a layout must keep, and what a call allocates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from made_experts import fresh_seed
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moeserve.quant.format import Format, Packed, Part
from moeserve.quant.layout import Layout

SHAPES = [
    *((1, 1), (3, 5), (33, 70), (130, 257), (2, 40, 96)),
    *((128, 128), (256, 256), (2, 256, 384)),
    *((0, 128), (256, 0), (0, 0), (0, 256, 256), (2, 0, 128), (2, 256, 0)),
]
"""Sizes to try: odd ones, whole tiles, stacks, and no elements in every dimension."""


def filled(form: Format, shape: tuple[int, ...]) -> Packed:
    """A tensor of `form` with random bytes, as far as its parts may hold any."""
    random = torch.Generator().manual_seed(fresh_seed())
    parts = tuple(_part(form, part, shape, random) for part in form.parts)
    return Packed(form, torch.Size(shape), parts)


def _part(form: Format, part: Part, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    size = part.shape_of(shape)
    if part.name == "zero":  # what every file can store
        return torch.randint(1, 16, size, generator=random).to(part.dtype)
    if part.name == "order":
        return torch.randint(0, 4, size, generator=random).to(part.dtype)
    if form.name == "nvfp4" and part.name == "scale":  # as every writer has it: 0 to 448
        return torch.randint(0, 0x7F, size, generator=random).to(torch.uint8).view(part.dtype)
    if part.dtype == torch.float32 and "ue8m0" in form.name:
        return torch.exp2(torch.randint(-126, 128, size, generator=random).float())
    count = torch.Size(size).numel()
    bytes_ = torch.empty(count * part.dtype.itemsize, dtype=torch.uint8).random_(generator=random)
    found = bytes_.view(part.dtype).view(size)
    if part.name == "codes" and part.columns == 2 and shape[-1] % 2:
        found[..., -1] &= 15  # the spare half of a byte is 0
    return found


def accepted(layout: Layout, form: Format) -> list[tuple[int, ...]]:
    """Every size of `SHAPES` at which `layout` takes `form`."""
    return [shape for shape in SHAPES if layout.refuses(form.empty(shape, "meta")) is None]


def some_format(layout: Layout) -> Format:
    """The format with the most parts, of a layout's."""
    return max(layout.formats, key=lambda form: (len(form.parts), form.name))


def raw(tensor: Tensor) -> Tensor:
    """The bytes, so that NaN compares with itself."""
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_same_bytes(left: Tensor, right: Tensor, what: object) -> None:
    assert (left.shape, left.dtype) == (right.shape, right.dtype), what
    assert torch.equal(raw(left), raw(right)), what


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that `call` held at once of what it allocated itself, as torch's allocator saw it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()  # alive until the profiler has stopped
    results = profiled.profiler
    assert results is not None and result is not None
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
