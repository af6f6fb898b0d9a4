"""The table of carriers: one file a carrier, one line here; and the names other systems give them."""

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
from moeserve.dispatch.dispatcher import DispatchRow

DISPATCHERS: dict[str, DispatchRow] = {
    row.name: row
    for row in (
        local.ROW,
        naive.ROW,
        allgather_reducescatter.ROW,
        all2allv.ROW,
        nvlink_ll.ROW,
        nvlink_ht.ROW,
        deepep_ht.ROW,
        deepep_ll.ROW,
        deepep_v2.ROW,
        flashinfer.ROW,
        flashinfer_two_sided.ROW,
        nccl_ep.ROW,
        nccl_ep.ROW_LL,
        nixl_ep.ROW,
        mori.ROW,
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
"""What model servers call a carrier, by the name it has here."""

ELSEWHERE: dict[str, str] = {
    "pplx": "its library was withdrawn by its makers; use allgather_reducescatter",
}
"""Carriers known by name that have no row, and why."""


def carrier_named(name: str) -> DispatchRow:
    """The carrier called `name`, here or in another system.

    Raises ValueError with the reason for a known name that has no row, with the list for any other.
    """
    own = ALIASES.get(name, name)
    if own in DISPATCHERS:
        return DISPATCHERS[own]
    known = ", ".join(sorted(DISPATCHERS))
    if own in ELSEWHERE:
        raise ValueError(f"carrier {name!r} cannot serve: {ELSEWHERE[own]}; carriers here: {known}")
    raise ValueError(
        f"unknown carrier {name!r}; carriers here: {known}; also understood: {', '.join(sorted(ALIASES))}"
    )
