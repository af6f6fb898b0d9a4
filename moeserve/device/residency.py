"""How many blocks of a GPU can count on running at once: its multiprocessors, less those that others hold.

A kernel that waits for rows holds the multiprocessors it runs on for as long as it waits. A grid whose blocks
wait for each other must fit beside it, since a block that finds no multiprocessor never comes.
"""

from __future__ import annotations

import torch

Device = torch.device | str

_held: dict[torch.device, int] = {}
_sized: dict[torch.device, int] = {}  # what `resident_blocks` answered


def hold(device: Device, multiprocessors: int) -> None:
    """Keeps `multiprocessors` of `device` free of grids that must run at once; call it before any launch.

    Raises ValueError where none would be left or the number is negative, and RuntimeError where a grid has
    been sized with another number: kernels count blocks by it, and recorded graphs hold it.
    """
    found = _named(device)
    total = torch.cuda.get_device_properties(found).multi_processor_count
    if not 0 <= multiprocessors < total:
        raise ValueError(
            f"{multiprocessors} multiprocessors held of {found} leave none of its {total}; "
            f"hold 0 to {total - 1} (members.held_multiprocessors)"
        )
    if (blocks := _sized.get(found, total - multiprocessors)) != total - multiprocessors:
        raise RuntimeError(
            f"a grid of {found} has been sized with {total - blocks} multiprocessors held, so "
            f"{multiprocessors} cannot be held now; call hold before anything is launched or recorded"
        )
    _held[found] = multiprocessors


def held(device: Device) -> int:
    """How many multiprocessors of `device` others hold; from here on the number stands."""
    resident_blocks(device)
    return _held.get(_named(device), 0)


def resident_blocks(device: Device) -> int:
    """How many blocks run on `device` at once, one a multiprocessor; from here on the number stands."""
    found = _named(device)
    blocks = _sized.get(found)
    if blocks is None:
        total = torch.cuda.get_device_properties(found).multi_processor_count
        blocks = _sized[found] = total - _held.get(found, 0)
    return blocks


def _named(device: Device) -> torch.device:
    """`device` with its index."""
    found = torch.device(device)
    index: int | None = found.index  # torch's stubs say that there is one
    if found.type == "cpu" or index is not None:
        return found
    return torch.device(found.type, torch.cuda.current_device())
