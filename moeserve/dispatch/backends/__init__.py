"""The table of carriers: one file a carrier, one line here; and the names other systems give them."""

from moeserve.dispatch.backends import all2allv, allgather_reducescatter, local, naive
from moeserve.dispatch.dispatcher import DispatchRow

DISPATCHERS: dict[str, DispatchRow] = {
    row.name: row
    for row in (
        local.ROW,
        naive.ROW,
        allgather_reducescatter.ROW,
        all2allv.ROW,
    )
}

ALIASES: dict[str, str] = {
    "deepep_high_throughput": "deepep_ht",
    "deepep_low_latency": "deepep_ll",
    "flashinfer_all2allv": "flashinfer",
    "flashinfer_nvlink_one_sided": "flashinfer",
    "flashinfer_nvlink_two_sided": "flashinfer",
    "ag_rs": "allgather_reducescatter",
    "broadcast": "naive",
}
"""What model servers call a carrier, by the name it has here."""

ELSEWHERE: dict[str, str] = {
    "deepep_ht": "it needs DeepEP, which moeserve does not drive yet",
    "deepep_ll": "it needs DeepEP, which moeserve does not drive yet",
    "deepep_v2": "it needs DeepEP's elastic buffers, which moeserve does not drive yet",
    "flashinfer": "it needs FlashInfer's one-sided all-to-all, which moeserve does not drive yet",
    "nccl_ep": "it needs NCCL EP, which moeserve does not drive yet",
    "nvlink_ll": "moeserve has no peer-memory kernels yet",
    "nvlink_ht": "moeserve has no peer-memory kernels yet",
    "nixl_ep": "it needs NIXL, which moeserve does not drive yet",
    "mori": "it needs MORI on ROCm, which moeserve does not drive yet",
    "mori_high_throughput": "it needs MORI on ROCm, which moeserve does not drive yet",
    "mori_low_latency": "it needs MORI on ROCm, which moeserve does not drive yet",
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
