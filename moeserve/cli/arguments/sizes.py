"""The sizes of a model's experts, by which `moeserve simulate` counts bytes and times, and their source."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moeserve.cli.arguments.names import named
from moeserve.experts.balance.cost import CostModel
from moeserve.experts.load import LoadTrace

DEEPSEEK_V3 = (58, 256)
"""Layers with experts and experts of a layer of the model whose sizes are the defaults of `CostModel`."""

WAY_OUT = "give --checkpoint FOLDER, or --hidden, --inner and --top-k"


@dataclass(frozen=True)
class Sizes:
    """Sizes of one expert and of a token's choice; they are fields of `CostModel` too."""

    hidden: int
    inner: int
    top_k: int
    weight_bits: float  # of one weight, its scales included

    def line(self, source: str) -> str:
        """The sizes in one line."""
        model = f"H={self.hidden}, I={self.inner}, top {self.top_k}, {self.weight_bits:g} bits a weight"
        return f"{model} ({source})"


SIZE_NAMES = tuple(each.name for each in fields(Sizes))
NEEDED = ("hidden", "inner", "top_k")
"""Sizes that nothing stands for; weights have 8 bits where nothing else is said."""


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which model the loads are of."""
    add = parser.add_argument
    add(
        "--checkpoint",
        type=named,
        metavar="FOLDER",
        help="take the sizes of experts from this checkpoint's config and headers",
    )
    add("--hidden", type=int, metavar="H", help="size of a hidden state")
    add("--inner", type=int, metavar="I", help="inner size of an expert")
    add("--top-k", type=int, metavar="K", help="experts that a token chooses")
    add("--weight-bits", type=float, metavar="BITS", help="bits of one weight with its scales; 8 by default")


def sizes_of(
    args: argparse.Namespace, trace: LoadTrace, given: Mapping[str, Any]
) -> tuple[Sizes | None, str]:
    """The sizes and where they are from; None, and why, where nothing tells them.

    `given` are sizes by name that the command line states otherwise; flags override them, and both override
    the checkpoint. Without any, DeepSeek-V3's are taken where the loads are of as many layers and experts.
    ValueError: some sizes are stated and others missing, or the checkpoint has another number of experts.
    """
    flags = {name: value for name in SIZE_NAMES if (value := getattr(args, name)) is not None}
    stated = dict(given) | flags
    if args.checkpoint:
        source = f"of {args.checkpoint}" + (f", but {', '.join(stated)} as given" if stated else "")
        return Sizes(**(_stored(args.checkpoint, trace) | stated)), source
    default = {name: getattr(CostModel(), name) for name in SIZE_NAMES}
    if (len(trace.layers), trace.experts) == DEEPSEEK_V3 and not stated.keys() & set(NEEDED):
        source = "DeepSeek-V3's, whose layers and experts the loads have"
        return Sizes(**(default | stated)), source + (", but weight_bits as given" if stated else "")
    missing = [name for name in NEEDED if name not in stated]
    if len(missing) == len(NEEDED):
        return None, f"not known, so bytes and times are left out: {WAY_OUT}"
    if missing:
        known, lacking = (", ".join(_flag(name) for name in names) for names in (stated, missing))
        raise ValueError(f"{known} without {lacking}: {WAY_OUT}")
    return Sizes(**({"weight_bits": default["weight_bits"]} | stated)), "as given"


def _stored(path: str, trace: LoadTrace) -> dict[str, Any]:
    """The sizes of a checkpoint; bits are the mean over its layers, as they are stored."""
    from moeserve.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    if checkpoint.num_experts != trace.experts:
        raise ValueError(
            f"{path} has {checkpoint.num_experts} experts a layer, and the loads count {trace.experts}: "
            f"they are of another model"
        )
    shape = checkpoint.shape(checkpoint.layers[0])
    nbytes = sum(map(checkpoint.expert_nbytes, checkpoint.layers)) / len(checkpoint.layers)
    return {
        "hidden": shape.hidden,
        "inner": shape.inner,
        "top_k": checkpoint.top_k,
        "weight_bits": 8 * nbytes / (3 * shape.hidden * shape.inner),
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
