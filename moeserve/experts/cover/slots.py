"""How many slots it takes to stand the loss of one owner."""

from __future__ import annotations

from moeserve.experts.balance.room import slots_a_rank


def redundant_for(experts: int, owners: int, *, replicas: bool) -> int:
    """Fewest redundant slots over all owners, as they divide, with which any one owner may be lost.

    Where one is lost, the others have a slot for every expert; with `replicas` every expert has room for a
    second replica besides, so that nothing has to be brought in. Raises ValueError for fewer than two owners.
    """
    if owners < 2:
        raise ValueError(f"{owners} owner cannot be lost: no other holds experts; take 2 or more")
    needed = experts if replicas else 0
    while True:
        try:
            stride = slots_a_rank(experts, owners, needed)
        except ValueError:  # does not divide
            needed += 1
            continue
        if (owners - 1) * stride >= experts:
            return needed
        needed += 1


def check_cover(experts: int, owners: int, redundant: int) -> None:
    """Raises ValueError, with how many slots are missing, where any one of `owners` cannot be lost."""
    needed = redundant_for(experts, owners, replicas=False)
    if slots_a_rank(experts, owners, redundant) * (owners - 1) < experts:
        raise ValueError(
            f"{redundant} redundant slots over {owners} owners do not stand the loss of one: the other "
            f"{owners - 1} have {slots_a_rank(experts, owners, redundant) * (owners - 1)} slots a layer for "
            f"{experts} experts; {needed - redundant} more are missing ({needed} in all; {experts} more than "
            f"the experts hold a second replica of each: "
            f"{redundant_for(experts, owners, replicas=True)})"
        )
