"""`Limits`: what a dispatcher's library serves, as data that a plan and a probe read alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Limits:
    """Sizes, formats and surroundings that a library has kernels for. The default: no limit."""

    dtypes: frozenset[str] = frozenset()  # plain formats of hidden states and answers; empty: any
    ranks: frozenset[int] = frozenset()  # group sizes; empty: any
    top_k: int | None = None  # most choices a row
    hidden_sizes: tuple[int, ...] = ()  # rising; a row travels in the first that holds it
    hidden_step: int = 1  # else a row travels in the next multiple of this many elements
    hidden_multiple: int = 1  # of H itself, where nothing can be added
    one_host: bool = False  # every rank reaches every other's memory
    nccl: Version | None = None  # oldest NCCL at run time
    api: frozenset[str] = frozenset()  # names that its package has in the generation meant; empty: any
    rdma: bool = False  # an RDMA adapter on every host
    waits: float | None = None  # seconds its kernels wait for a peer; None: as long as the plan says

    @property
    def waiting(self) -> str:
        """How a wait for a peer ends where the plan has no say in it; empty where it has."""
        if self.waits is None:
            return ""
        if self.waits == inf:
            return "its kernels wait for a peer for ever, and only the end of the process ends that"
        return f"its kernels wait {self.waits:g} s for a peer, then end the process"

    def travelling(self, hidden: int) -> int:
        """Elements a row of `hidden` travels with. Raises ValueError where it fits no size."""
        if not self.hidden_sizes:
            return -(-hidden // self.hidden_step) * self.hidden_step
        for size in self.hidden_sizes:
            if hidden <= size:
                return size
        raise ValueError(f"H={hidden} is more than the largest row, {self.hidden_sizes[-1]}")

    def refuses(self, ranks: int, top_k: int, hidden: int, dtype: str) -> str | None:
        """Why a group of `ranks` with rows of `hidden` cannot be served, or None."""
        if self.dtypes and dtype not in self.dtypes:
            return f"carries hidden states in {_listed(self.dtypes)}, not in {dtype}"
        if self.ranks and ranks not in self.ranks:
            return f"joins {_listed(self.ranks)} ranks, not {ranks}"
        if self.top_k is not None and top_k > self.top_k:
            return f"takes at most {self.top_k} experts a token, not {top_k}"
        if hidden % self.hidden_multiple:
            return f"H={hidden} must be a multiple of {self.hidden_multiple}"
        if self.hidden_sizes and hidden > self.hidden_sizes[-1]:
            return f"H={hidden} is more than its largest row, {self.hidden_sizes[-1]}"
        return None


def _listed(values: Iterable[object]) -> str:
    ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
    return ", ".join(map(str, ordered))


def dotted(version: Version) -> str:
    """The version as text, such as `2.30.4`."""
    return ".".join(map(str, version))
