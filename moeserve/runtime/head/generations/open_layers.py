"""`OpenLayers`: which layers are served, while members that took over experts still read some."""

from __future__ import annotations

from collections.abc import Collection


class OpenLayers:
    """Positions of layers that a member lacks experts of. It decides, and nothing else."""

    def __init__(self) -> None:
        self._lacking: dict[int, set[int]] = {}  # by seat, the positions
        self._why_not: dict[tuple[int, int], str] = {}  # by seat and position: why it could not be read

    @property
    def closed(self) -> frozenset[int]:
        """Positions of layers that no step may take: somebody has yet to read some of their experts."""
        return frozenset().union(*self._lacking.values())

    @property
    def reading(self) -> bool:
        """Whether some member may soon hold all of a layer that it lacks: it has not said that it cannot."""
        lacking = {(seat, at) for seat, positions in self._lacking.items() for at in positions}
        return bool(lacking - self._why_not.keys())

    @property
    def unread(self) -> dict[int, list[int]]:
        """By position, the seats that lack experts of a layer and cannot read them."""
        found: dict[int, list[int]] = {}
        for seat, at in sorted(self._why_not):
            found.setdefault(at, []).append(seat)
        return found

    @property
    def reason(self) -> str:
        """What is waited for, in words; empty where every layer is open."""
        if not (closed := sorted(self.closed)):
            return ""
        seats = sorted(seat for seat, positions in self._lacking.items() if positions)
        text = f"{len(closed)} layers are being restored by ranks {seats}"
        failed = sorted(self._why_not.items())
        return text + "".join(f"; rank {seat}, layer {at} in order: {why}" for (seat, at), why in failed[:1])

    def clear(self) -> None:
        """A new generation begins: who lacks what is not known yet."""
        self._lacking, self._why_not = {}, {}

    def lacks(self, seat: int, positions: Collection[int]) -> None:
        """A member has prepared, and has yet to read some of these layers' experts."""
        self._lacking[seat] = set(positions)

    def restored(self, seat: int, position: int, why_not: str = "") -> bool:
        """A member holds all of a layer now, or says why not yet; whether the layer is open with it."""
        if why_not:
            self._why_not[seat, position] = why_not
            return False
        self._why_not.pop((seat, position), None)
        self._lacking.get(seat, set()).discard(position)
        return position not in self.closed
