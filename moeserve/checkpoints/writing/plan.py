"""Which tensors a rewrite writes into which file: `plan_of` reads headers only, and repeats itself exactly.

Tensors that do not belong to experts are copied. Where the source has them in FP8 blocks too, they are
decoded to the model's dtype, because the new config quantizes experts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.names import LayerNames, Numbers, Spelling, expert_layers
from moeserve.checkpoints.store import DTYPES, CheckpointError, TensorStore
from moeserve.checkpoints.writing.shards import Declared
from moeserve.checkpoints.writing.targets import Target
from moeserve.checkpoints.writing.units import INVERSE_SCALE, Copied, Decoded, Expert, Unit, expert_tensors

SCALING = re.compile(r"(?:.*_)?(?:scale(?:s|_inv|_2)?|packed|zero_point|g_idx|qweight|qzeros|blocks)")
"""Fits the last word in the name of a tensor that quantized modules have, and some others, too."""

CODES = re.compile(r"(?:.*_)?(?:packed|qweight|qzeros|blocks)")
"""Fits the last word in the name of a tensor with packed codes, which are whole numbers."""

BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
"""dtypes of codes of any name."""


@dataclass(frozen=True)
class Shard:
    """One file of the new checkpoint, with its units in the order they are written."""

    name: str
    units: tuple[Unit, ...]

    @property
    def declared(self) -> Mapping[str, Declared]:
        """Every tensor of the file, by name."""
        return {name: tensor for unit in self.units for name, tensor in unit.declared.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the file."""
        return sum(tensor.nbytes for tensor in self.declared.values())


@dataclass(frozen=True)
class RewritePlan:
    """The files of a new checkpoint, and the modules that its config leaves as they are."""

    shards: tuple[Shard, ...]
    ignore: tuple[str, ...]
    decoded: int  # number of matrices beside the experts that are decoded

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of all files."""
        return sum(shard.nbytes for shard in self.shards)


def plan_of(source: Checkpoint, target: Target, shard_bytes: int) -> RewritePlan:
    """Plans how `source` is written with its experts as `target`, in files of about `shard_bytes` bytes.

    Raises CheckpointError for sizes that the format cannot have, and for modules beside the experts that are
    quantized in a way that is not decoded here.
    """
    for letter, size in (("H", source.hidden), ("I", source.inner)):
        if size % target.multiple:
            raise CheckpointError(
                f"{letter}={size} must be a multiple of {target.multiple} to be written as {target.form}"
            )
    if not source.activation.gated:
        raise CheckpointError(
            f"{source.path}: experts without a gate ({source.activation.name}) are not written anew"
        )
    store = TensorStore(source.path)
    experts = {name for layer in source.layers for name in source.tensors(layer)}
    rest = [name for name in store.entries if name not in experts]
    units: list[tuple[str, Unit]] = list(_others(source, store, rest))
    decoded = sum(isinstance(unit, Decoded) for _, unit in units)
    ignore = tuple(sorted(_modules(unit for _, unit in units), key=_natural))
    units += _experts(source, target, expert_layers(store.entries, Numbers(source.depth)))
    ordered = [unit for _, unit in sorted(units, key=lambda pair: _natural(pair[0]))]
    return RewritePlan(tuple(_shards(ordered, shard_bytes)), ignore, decoded)


def _others(source: Checkpoint, store: TensorStore, names: list[str]) -> Iterator[tuple[str, Unit]]:
    for name in names:
        if DTYPES.get(store.entries[name].dtype) is None:
            raise CheckpointError(f"tensor {name} has the unknown dtype {store.entries[name].dtype}")
    if source.quantization is None:
        yield from ((name, Copied(store, name)) for name in names)
        return
    blocks = {name for name in names if name + INVERSE_SCALE in store and len(store.entries[name].shape) == 2}
    quantized = {_module(name) for name in names if _holds_codes(store, name)}
    for name in names:
        if name in blocks:
            yield name, Decoded(store, name, source.dtype)
        elif name.removesuffix(INVERSE_SCALE) in blocks:
            continue
        elif _module(name) in quantized and SCALING.fullmatch(name.rpartition(".")[2]):
            raise CheckpointError(
                f"{source.path} quantizes more than its experts, as {name}; only experts are written "
                f"anew, and only FP8 matrices in 128x128 blocks are decoded beside them: "
                f"start from the unquantized checkpoint"
            )
        else:
            yield name, Copied(store, name)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _holds_codes(store: TensorStore, name: str) -> bool:
    """Whether a tensor holds codes, which mean nothing without the scales beside it."""
    dtype = DTYPES[store.entries[name].dtype]
    packed = CODES.fullmatch(name.rpartition(".")[2]) is not None
    return dtype in BYTES or (packed and not dtype.is_floating_point)


def _experts(
    source: Checkpoint, target: Target, layers: Mapping[int, LayerNames]
) -> Iterator[tuple[str, Unit]]:
    found = _suffixes(source, target)
    for layer in source.layers:
        names = layers[layer]
        if names.stacked:
            ids = frozenset(range(source.num_experts))
            names = LayerNames(names.module, Spelling(source.family.spelling), ids, frozenset())
        for expert in range(source.num_experts):
            sides = zip(names.projections(expert), found, strict=True)
            declared = {f"{stem}.{suffix}": tensor for stem, side in sides for suffix, tensor in side.items()}
            unit = Expert(source, target, names, layer, expert, declared)
            yield f"{names.module}.experts.{expert}", unit


def _suffixes(source: Checkpoint, target: Target) -> list[dict[str, Declared]]:
    """Returns the tensors of gate, up and down by suffix; found by encoding zeros of an expert's size."""
    hidden, inner = source.hidden, source.inner
    sides = ("gate", "up", "down")
    made = expert_tensors(target, sides, torch.zeros(2 * inner, hidden), torch.zeros(hidden, inner))
    found: dict[str, dict[str, Declared]] = {side: {} for side in sides}
    for name, tensor in made:
        side, _, suffix = name.partition(".")
        found[side][suffix] = Declared(tensor.dtype, tuple(tensor.shape))
    if source.family.bias:
        for side, rows in zip(sides, (inner, inner, hidden), strict=True):
            found[side]["bias"] = Declared(source.dtype, (rows,))
    return list(found.values())


def _modules(units: Iterator[Unit]) -> set[str]:
    """Returns the modules to ignore: lm_head, and every module with a matrix that is no embedding."""
    found = {"lm_head"}
    for unit in units:
        for name, tensor in unit.declared.items():
            module, _, last = name.rpartition(".")
            if last == "weight" and len(tensor.shape) == 2 and "embed" not in module.rpartition(".")[2]:
                found.add(module)
    return found


def _shards(units: list[Unit], limit: int) -> Iterator[Shard]:
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        nbytes = sum(tensor.nbytes for tensor in unit.declared.values())
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += nbytes
    for number, group in enumerate(groups, 1):
        yield Shard(f"model-{number:05}-of-{len(groups):05}.safetensors", tuple(group))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts numbers within names by value."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]
