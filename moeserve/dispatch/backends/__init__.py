"""The table of dispatchers: one file a dispatcher, one line here; and the names other systems give them."""

from moeserve.dispatch.backends import (
    all2allv,
    allgather_reducescatter,
    deepep_ht,
    deepep_ll,
    deepep_v2,
    flashinfer,
    flashinfer_two_sided,
    local,
    mori,
    naive,
    nccl_ep,
    nixl_ep,
    nvlink_ht,
    nvlink_ll,
)
from moeserve.dispatch.dispatcher import DispatchEntry

DISPATCHERS: dict[str, DispatchEntry] = {
    entry.name: entry
    for entry in (
        local.ENTRY,
        naive.ENTRY,
        allgather_reducescatter.ENTRY,
        all2allv.ENTRY,
        nvlink_ll.ENTRY,
        nvlink_ht.ENTRY,
        deepep_ht.ENTRY,
        deepep_ll.ENTRY,
        deepep_v2.ENTRY,
        flashinfer.ENTRY,
        flashinfer_two_sided.ENTRY,
        nccl_ep.ENTRY,
        nccl_ep.ENTRY_LL,
        nixl_ep.ENTRY,
        mori.ENTRY,
    )
}

ALIASES: dict[str, str] = {
    "deepep_high_throughput": "deepep_ht",
    "deepep_low_latency": "deepep_ll",
    "flashinfer_all2allv": "flashinfer_two_sided",
    "flashinfer_nvlink_one_sided": "flashinfer",
    "flashinfer_nvlink_two_sided": "flashinfer_two_sided",
    "mori_high_throughput": "mori",
    "mori_low_latency": "mori",
    "ag_rs": "allgather_reducescatter",
    "broadcast": "naive",
}
"""What model servers call a dispatcher, by the name it has here."""

ELSEWHERE: dict[str, str] = {
    "pplx": "its library was withdrawn by its makers; use allgather_reducescatter",
}
"""Dispatchers known by name that have no entry, and why."""


def dispatcher_named(name: str) -> DispatchEntry:
    """The dispatcher called `name`, here or in another system.

    Raises ValueError with the reason for a known name that has no entry, with the list for any other.
    """
    own = ALIASES.get(name, name)
    if own in DISPATCHERS:
        return DISPATCHERS[own]
    known = ", ".join(sorted(DISPATCHERS))
    if own in ELSEWHERE:
        raise ValueError(f"dispatcher {name!r} cannot serve: {ELSEWHERE[own]}; dispatchers here: {known}")
    raise ValueError(
        f"unknown dispatcher {name!r}; dispatchers here: {known}; "
        f"also understood: {', '.join(sorted(ALIASES))}"
    )
