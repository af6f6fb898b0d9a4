"""What steps of our CUDA C++ kernels share on the host: groups of rows, compiled forms, clusters launched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeserve.device.arguments import Argument, Arguments
from moeserve.device.nvrtc import Function, LaunchError, Program
from moeserve.device.residency import held
from moeserve.device.source import Part
from moeserve.device.source import source as _text
from moeserve.device.streams import MAIN, spared, track
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertBatch

FUSED_ACTIVATIONS = frozenset({"silu", "swigluoai", "swigluoai_uninterleave"})
"""What a first GEMM activates itself: gate x sigmoid(alpha gate) x (up + beta), both halves limited."""

OUTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

CLUSTER = 2
"""Blocks that share rows, each with rows of the weights of its own."""

ROWS_THREADS = 512

PIECE_COLUMNS = 14336
"""Columns of K that a cluster goes through, of whole tiles, in one launch beside the short track."""

MOST_PIECES = 16
"""Of one GEMM: each recorded launch takes memory, and as many are recorded as a batch might need."""

EXTENT = {"first": "int", "last": "int"}
"""The tiles that a launch of a grouped GEMM is for: from the first to before the last."""

SHARED = ("hopper.cu", "epilogue.cu")
"""Texts that stand before those of every kernel."""

LIST = Arguments("ListArguments", counts="const int*", offsets="const int*", tiles="int*", slots="int")

SCALES = Arguments(
    "ScaleArguments",
    scale="const float*",  # of row r and block k of 128 columns at r * row_step + k * block_step
    grouped="float*",  # [groups, blocks, most rows of a group]
    tiles="const int*",  # as `list_groups` writes it
    blocks="int",
    row_step="int",
    block_step="int",
)

ROWS_SOURCES = (LIST, SCALES, "rows.cu")


@dataclass(frozen=True)
class GemmForm:
    """One compiled form of a grouped GEMM: with an activation fused, or with an output dtype of `OUTS`."""

    bias: bool
    fused: bool = False
    limited: bool = False
    out: int = 0

    def tiles_across(self, columns: int, weights: int = 128) -> int:
        """How many tiles of a cluster `columns` of the output make; a block has `weights` rows of weights."""
        return -(-columns // (CLUSTER * (weights // 2 if self.fused else weights)))

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options for this form."""
        flags = {"CLUSTER": CLUSTER, "FUSED": self.fused, "BIAS": self.bias, "LIMITED": self.limited}
        return defined(flags | {"OUT": self.out})


@dataclass(frozen=True)
class Groups(ABC):
    """A batch cut into groups of rows of one slot; nothing is read on the host."""

    batch: ExpertBatch
    capacity: int  # rows of the batch, PADDED ones flat

    @property
    @abstractmethod
    def cut(self) -> tuple[int, int]:
        """The rows by which a group grows, and the most it has."""

    @property
    def limit(self) -> int:
        """The most groups that there can be."""
        return min(self.batch.slots, self.capacity) + self.capacity // self.cut[1]

    @cached_property
    def tiles(self) -> Tensor:
        """The list of groups, `[4 + 4 limit]` int32, as `rows.cu` writes it."""
        tiles = torch.empty(4 + 4 * self.limit, dtype=torch.int32, device=self.batch.counts.device)
        batch = self.batch
        given: dict[str, Argument] = {
            "counts": batch.counts,
            "offsets": batch.offsets,
            "tiles": tiles,
            "slots": batch.slots,
        }
        _rows_function("list_groups", LIST, self.cut).launch(1, ROWS_THREADS, given, overlapped=True)
        return tiles

    def scale_storage(self, blocks: int) -> Tensor:
        """Room for scales by row of a group, `[limit, blocks, most rows]` float32."""
        size = (self.limit, blocks, self.cut[1])
        return torch.empty(size, dtype=torch.float32, device=self.batch.counts.device)

    def grouped(self, scale: Tensor) -> Tensor:
        """Scales `[R, K / 128]` of any strides by row of a group, as the GEMMs read them."""
        blocks = scale.shape[1]
        grouped = self.scale_storage(blocks)
        row_step, block_step = scale.stride()
        given: dict[str, Argument] = {
            "scale": scale,
            "grouped": grouped,
            "tiles": self.tiles,
            "blocks": blocks,
            "row_step": row_step,
            "block_step": block_step,
        }
        function = _rows_function("group_scales", SCALES, self.cut)
        function.launch(self.limit, ROWS_THREADS, given, overlapped=True)
        return grouped

    def launch(
        self, function: Function, block: Block, given: Mapping[str, Argument], extent: tuple[int, int]
    ) -> None:
        """Runs a GEMM on as many clusters as run at once, less those that are spared. extent: tiles of a
        group, and columns of K.

        None waits for another: more would be right too, but take a second round. Beside the short track it is
        several launches, MOST_PIECES at most, each of whole rounds: between two of them kernels of that track
        find places.
        """
        across, columns = extent
        resident = max(1, resident_clusters(function, block) - spared())
        most = self.limit * across
        clusters = min(resident, most)
        apart = track() == MAIN and spared() > 0
        rounds = max(1, PIECE_COLUMNS // columns, -(-most // (clusters * MOST_PIECES)))
        tiles = clusters * rounds if apart else most
        for first in range(0, most, tiles):
            function.launch(
                clusters * CLUSTER,
                block.threads,
                {**given, "first": first, "last": first + tiles},
                shared=block.shared_bytes,
                cluster=CLUSTER,
                # on MAIN it would wait on what is spared; on SHORT it has its places before MAIN's next one
                overlapped=block.waits and not apart,
            )


class Block(NamedTuple):
    """What a block of a launch needs of its multiprocessor."""

    threads: int
    shared_bytes: int
    waits: bool = False  # whether it waits by itself for the launches before it


NUMBERS = {"limit": "float", "alpha": "float", "beta": "float"}
"""The arguments of a kernel that say how the activation is computed."""


def numbers(activation: Activation) -> dict[str, float]:
    """The values of `NUMBERS` for the fused form of `activation`."""
    limit, alpha, beta = activation.limit, activation.alpha, activation.beta
    return {
        "limit": float(limit or 0.0),
        "alpha": 1.0 if alpha is None else float(alpha),
        "beta": float(beta or 0.0),
    }


NO_NUMBERS = dict.fromkeys(NUMBERS, 0.0)
"""Where no activation is fused."""


def source(*parts: Part, before: str = "") -> str:
    """The texts and structs `parts` as one, behind what all kernels share and the text `before`."""
    return "\n".join((_text(__package__, *SHARED), before, _text(__package__, *parts)))


def defined(flags: Mapping[str, int]) -> tuple[str, ...]:
    """The compiler's options that define `flags`."""
    return tuple(f"-D{name}={int(value)}" for name, value in flags.items())


@cache
def resident_clusters(function: Function, block: Block) -> int:
    """Clusters that the current device runs at once: not all its multiprocessors can be of one.

    Each multiprocessor that is held may be of another cluster, which then finds no place. Raises LaunchError
    where none runs.
    """
    from cuda.bindings import driver

    threads, shared, _ = block
    function.resident_blocks(threads, shared)  # allows so much shared memory
    size: Any = driver.CUlaunchAttribute()
    size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = CLUSTER, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = CLUSTER, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared, [size], 1
    status, clusters = driver.cuOccupancyMaxActiveClusters(function.handle, config)
    taken = held("cuda")
    if status != driver.CUresult.CUDA_SUCCESS or clusters <= taken:
        raise LaunchError(
            f"no cluster of {CLUSTER} blocks with {shared} bytes each runs here beside {taken} held "
            f"multiprocessors: {status}"
        )
    return int(clusters) - taken


@cache
def _rows_function(name: str, arguments: Arguments, cut: tuple[int, int]) -> Function:
    unit, most = cut
    program = Program(source(*ROWS_SOURCES), defined({"UNIT": unit, "UNITS": most // unit}))
    return program.function(name, arguments)
