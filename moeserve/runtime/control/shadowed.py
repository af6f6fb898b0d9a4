"""`Shadowed`: what a member says of the experts that it keeps in host memory, for the loss of another."""

from __future__ import annotations

from typing import NamedTuple

from moeserve.runtime.control.stream import Message


class Shadowed(NamedTuple):
    """Of an epoch, the positions of the layers whose shadows are all there; `nbytes` of all its shadows."""

    epoch: int = 0
    positions: frozenset[int] = frozenset()
    nbytes: int = 0


NO_SHADOWS = Shadowed()


def shadowed_message(shadowed: Shadowed) -> Message:
    """The message that tells the head of a member's shadows."""
    positions = sorted(shadowed.positions)
    return {"kind": "shadowed", "epoch": shadowed.epoch, "layers": positions, "nbytes": shadowed.nbytes}


def shadowed_from(message: Message) -> Shadowed:
    """What a message says. Raises KeyError, TypeError or ValueError for one of another form."""
    positions = frozenset(int(at) for at in message["layers"])
    return Shadowed(int(message["epoch"]), positions, int(message["nbytes"]))


def peers_message(addresses: dict[int, str]) -> Message:
    """The message that tells members where each owner's process gives its experts, by owner."""
    return {"kind": "peers", "addresses": addresses}


def addresses_from(message: Message) -> dict[int, str]:
    """The addresses in a message, by owner; those without one are left out. Raises as `shadowed_from`."""
    addresses = dict(message["addresses"])
    return {int(owner): str(address) for owner, address in addresses.items() if address}
