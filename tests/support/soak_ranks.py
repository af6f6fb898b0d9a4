"""What each member of a soak does on a CPU."""

from __future__ import annotations

from parallel import group

from bench.dispatch.gpu_soak import Soaked, parsed, soak, spec_for


def soaked(rank: int, world: int, options: list[str]) -> Soaked:
    """Worker: so many steps with random lanes absent, as the bench takes them."""
    args = parsed(["--device", "cpu", *options])
    return soak(spec_for(args, rank, world), args.dispatcher, args.steps, group())
