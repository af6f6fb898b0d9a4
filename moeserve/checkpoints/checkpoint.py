"""A model's checkpoint on disk, read expert by expert: `Checkpoint`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeserve.checkpoints.contents import check_contents
from moeserve.checkpoints.dialects import DIALECTS, ModelFamily, dialect_for, family_of
from moeserve.checkpoints.dialects.dialect import Quantization, Storage
from moeserve.checkpoints.dtypes import dtype_of, say_casts
from moeserve.checkpoints.families.config import (
    EXPERT_COUNT_KEYS,
    TOP_K_KEYS,
    Config,
    depth_of,
    required,
)
from moeserve.checkpoints.hub import located
from moeserve.checkpoints.layer import StoredLayer
from moeserve.checkpoints.load_as import keeps, scheme_to_load_as
from moeserve.checkpoints.names import LayerNames, Numbers, correction_biases, expert_layers
from moeserve.checkpoints.nearest import in_its_place
from moeserve.checkpoints.reading import copy_expert
from moeserve.checkpoints.store import SAMPLES, CheckpointError, TensorStore, read_json, values_of
from moeserve.experts.batch import ExpertShape, ExpertWeights
from moeserve.experts.routing.families import gate_for
from moeserve.experts.routing.gate import Gate
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import FLOATS

__all__ = ["Checkpoint", "CheckpointError"]

CONFIG = "config.json"

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files in which producers put the quantization config when config.json has none."""


class Checkpoint:
    """A Hugging Face checkpoint: shapes and routing of its experts, and their weights on request.

    `path` is its directory, or `org/name` or `org/name@revision` in the local hub cache.

    Opening reads config.json and the safetensors headers only, and compares the two. It raises
    CheckpointError (a ValueError), which names what the directory, the config or a tensor lacks or has
    otherwise than the model's family and quantization say. Weights are read through a memory map, and only
    those that are asked for.

    `load_as` names the scheme that experts are quantized to while they are read, whatever they are stored as:
    `fp8_per_block`, `mxfp4`, `nvfp4 x bf16`, ... Raises ValueError for one that weights cannot be brought to.
    """

    def __init__(self, path: str | Path, *, load_as: str | None = None) -> None:
        self.path = located(path)
        check_contents(self.path)
        self._load_as_name = load_as
        with values_of(self.path / CONFIG):
            self._open(load_as)

    def _open(self, load_as: str | None) -> None:
        """Reads the config and the headers."""
        whole = _config(self.path)
        self.family, self.config = family_of(whole)
        _check_zero_experts(self.family, self.config)
        self.model_type = self.family.model_type
        self.architecture = str((whole.get("architectures") or [self.model_type])[0])
        self.quantization = _quantization(self.path, whole, self.config)
        self.dialect = dialect_for(self.quantization)
        self._store = TensorStore(self.path)
        self.dtype = dtype_of(self.config, self._store)  # of activations, and of weights not quantized
        self._load_as = None if load_as is None else scheme_to_load_as(load_as, FLOATS[self.dtype])
        self.num_experts = required(self.config, *EXPERT_COUNT_KEYS)
        self.top_k = required(self.config, *TOP_K_KEYS)
        self.hidden = self.family.hidden(self.config)
        self.inner = self.family.inner(self.config)
        self.depth = depth_of(self.config)
        self._numbers = Numbers(self.depth, self.family.numbers(self.config))
        self._layers = self._stored_layers()
        self.activation = self.family.activation(self.config, self.layers[0])
        say_casts(self.dtype, self._layers, self._store)
        self._gates: dict[int, Gate] = {}
        self._sampled: tuple[str, ...] = ()  # the tensors that its mark is made of
        self._described = ""  # and what the config says of them

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[Path]]:
        """A checkpoint travels to another process as its path, and is opened again there."""
        return partial(Checkpoint, load_as=self._load_as_name), (self.path,)

    def sibling(self, path: str | Path) -> Checkpoint:
        """Opens the checkpoint in another folder with the same `load_as`. Raises CheckpointError."""
        return Checkpoint(path, load_as=self._load_as_name)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have experts."""
        return tuple(self._layers)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this object has read so far."""
        return self._store.bytes_read

    @property
    def mark(self) -> str:
        """What tells these experts and how they are chosen from others, by the config and a sample of the
        weights: a copy in another folder, or in other shards, has the same. Files that were written to have
        another one, as far as their experts differ. Raises CheckpointError for a file that cannot be read.
        """
        if not self._sampled:
            names = sorted(name for stored in self._layers.values() for name in stored.names.tensors)
            biases = correction_biases(self._store.entries, self._numbers)
            some = {names[at * len(names) // SAMPLES] for at in range(SAMPLES)}
            each = [
                (layer, self.shape(layer), self.scheme(layer).name, self._unbiased(layer).constants)
                for layer in self.layers
            ]
            self._described = repr((self.num_experts, self.top_k, each))
            self._sampled = tuple(sorted(some | {biases[layer] for layer in biases if layer in self._layers}))
        return hashlib.sha256((self._described + self._store.mark(self._sampled)).encode()).hexdigest()[:32]

    def unmap(self) -> None:
        """Lets go of the maps of its files, once experts have been read; see `TensorStore.unmap`."""
        self._store.unmap()

    def scheme(self, layer: int) -> Scheme:
        """The formats of the experts of `layer` once they are loaded: of weights and of activations."""
        return self._stored(layer).scheme

    def expert_nbytes(self, layer: int) -> int:
        """Bytes that one whole expert of `layer`, the first, takes in the file with its scales and biases."""
        return self._stored(layer).nbytes

    def tensors(self, layer: int) -> tuple[str, ...]:
        """Names of the expert tensors of `layer`, sorted."""
        return tuple(sorted(self._stored(layer).names.tensors))

    def tensor_nbytes(self, name: str) -> int:
        """Bytes that the tensor called `name` takes in the file."""
        return self._store.entries[name].nbytes

    def shape(self, layer: int, slices: int = 1) -> ExpertShape:
        """The shape of one expert of `layer`, or of one of `slices` equal slices of it along I.

        Raises ValueError where I is no multiple of `slices`, or a slice would cut a block of the format.
        """
        stored = self._stored(layer)
        storage, form = stored.storage, stored.scheme.weights
        if slices < 1 or self.inner % slices:
            raise ValueError(f"I={self.inner} must be a multiple of slices={slices}")
        inner = self.inner // slices
        spans = [(part.rows, part.columns) for part in form.parts]
        if slices > 1 and keeps(storage.scheme.weights, form):
            spans += [(tensor.rows, tensor.columns) for tensor in storage.tensors]
        rows = max(rows for rows, _ in spans)  # gate and up must not share a block of rows, sliced or not
        columns = max(Fraction(columns).numerator for _, columns in spans) if slices > 1 else 1
        for span, side in ((rows, "gate and up rows"), (columns, "down columns")):
            if span > 1 and inner % span:
                found = f"I={self.inner} over slices={slices} is {inner} {side} a slice"
                raise ValueError(f"{found}, which must be a multiple of {span}, a block of {form}")
        return ExpertShape(
            self.hidden, inner, self.family.activation(self.config, layer), bias=self.family.bias
        )

    def gate(self, layer: int) -> Gate:
        """The routing of `layer`, with its correction bias where the family has one.

        Raises CheckpointError for a bias that is missing or has another shape, and ValueError for settings
        that the family's router cannot have.
        """
        if layer not in self._gates:
            self._stored(layer)
            gate = self._unbiased(layer)
            with values_of(self.path / CONFIG):
                self._gates[layer] = self._biased(gate, layer) if gate.biased and gate.takes_logits else gate
        return self._gates[layer]

    def _unbiased(self, layer: int) -> Gate:
        with values_of(self.path / CONFIG):
            return replace(gate_for(self.config), by_token=self.family.by_token(self.config, layer))

    def experts(self, layer: int, ids: Sequence[int], *, part: tuple[int, int] = (0, 1)) -> ExpertWeights:
        """Reads the experts `ids` of `layer`, in that order, and nothing else.

        `part` (index, of) takes slice `index` of `of` along I: rows of gate and of up, columns of down. The
        down bias is in slice 0 and zero in the others, so that the slices' outputs add up to the expert's.
        Raises ValueError for an unknown layer, expert or slice, and CheckpointError for a file that cannot be
        read or a scale that is NaN, infinite or negative.
        """
        stored, (index, of) = self._stored(layer), part
        if not 0 <= index < of:
            raise ValueError(f"part={part} must be (index, of) with 0 <= index < of")
        shape, weights = self.shape(layer, of), stored.scheme.weights
        inner = slice(index * shape.inner, (index + 1) * shape.inner)
        scales = stored.static_scales
        read = ExpertWeights(
            weights.empty((len(ids), shape.gate_up_rows, shape.hidden)),
            weights.empty((len(ids), shape.hidden, shape.inner)),
            torch.zeros(len(ids), shape.gate_up_rows) if shape.bias else None,
            torch.zeros(len(ids), shape.hidden) if shape.bias else None,
            *(None if scales is None else torch.full((len(ids),), scale) for scale in scales or (0.0, 0.0)),
        )
        for position, expert in enumerate(ids):
            if not 0 <= expert < self.num_experts:
                raise ValueError(
                    f"expert {expert} of layer {layer} must be between 0 and {self.num_experts - 1}"
                )
            copy_expert(stored, expert, inner, read, position)
        return read

    def read_ahead(self, layer: int, ids: Sequence[int]) -> int:
        """Asks the operating system for the experts `ids` of `layer`, to be read soon; waits for nothing.

        Returns the bytes that were asked for. Raises ValueError for an unknown layer, CheckpointError for
        files that are gone and were not opened before.
        """
        return self._store.read_ahead(self._stored(layer).spans(ids))

    def _stored(self, layer: int) -> StoredLayer:
        if layer not in self._layers:
            raise ValueError(f"layer {layer} has no experts; layers with experts: {list(self._layers)}")
        return self._layers[layer]

    def _stored_layers(self) -> dict[int, StoredLayer]:
        """Returns the layers that have experts by the config, each checked against the file."""
        found, layers = expert_layers(self._store.entries, self._numbers), {}
        wanted = self.family.layers(self.config, self.depth)
        if wanted is None:  # the config does not say
            wanted = frozenset(found)
        for layer in sorted(wanted | found.keys()):
            if layer not in wanted:
                raise CheckpointError(
                    f"layer {layer} is dense by config.json, but has {min(found[layer].tensors)}"
                )
            if layer not in found:
                first = self._first_tensor(layer)
                instead = in_its_place(first, self._store.entries)
                raise CheckpointError(f"layer {layer} misses tensor {first}, and all its experts{instead}")
            layers[layer] = self._stored_layer(layer, found[layer])
            layers[layer].check(layer)
        if not layers:
            raise CheckpointError(f"{self.path}: none of the {self.depth} layers has experts by config.json")
        return layers

    def _stored_layer(self, layer: int, names: LayerNames) -> StoredLayer:
        gated = self.family.activation(self.config, layer).gated
        names = names if gated else names.ungated()
        names = names.below(self.num_experts) if self.family.others_after else names
        sizes = (self.num_experts, self.hidden, self.inner)
        storage = self._storage(names).fitting(self.inner)
        return StoredLayer(
            self._store, names, self.family, storage, *sizes, gated=gated, load_as=self._load_as
        )

    def _first_tensor(self, layer: int) -> str:
        family, block = self.family, f"{self.family.block}." * bool(self.family.block)
        stem = f"model.layers.{layer}.{block}experts"
        return f"{stem}.gate_up_proj" if family.stacked else f"{stem}.0.{family.spelling[0]}.weight"

    def _storage(self, names: LayerNames) -> Storage:
        settings = self.quantization or {}
        skipped = self.quantization is not None and self.dialect.skips(settings, names)
        dialect = DIALECTS["plain"] if skipped else self.dialect
        return dialect.storage(settings, self.dtype, names)

    def _biased(self, gate: Gate, layer: int) -> Gate:
        name = correction_biases(self._store.entries, self._numbers).get(layer)
        if name is None:
            raise CheckpointError(
                f"layer {layer} misses tensor e_score_correction_bias, which its router needs"
            )
        shape = self._store.entries[name].shape
        several = (1, 2) if self.family.others_after else (1,)  # of text, and after it of vision
        if shape not in ((self.num_experts,), *((kinds, self.num_experts) for kinds in several)):
            raise CheckpointError(f"tensor {name} must have shape {[self.num_experts]}, found {list(shape)}")
        return gate.with_bias(self._store.read(name).clone().reshape(-1)[: self.num_experts])


def _config(path: Path) -> dict[str, Any]:
    return read_json(path / CONFIG)


def _check_zero_experts(family: ModelFamily, config: Config) -> None:
    """Raises CheckpointError for zero-experts of a family that does not say that its model computes them."""
    if config.get("zero_expert_num") and not family.others_after:
        raise CheckpointError(
            f"zero_expert_num={config['zero_expert_num']}: zero-experts of {family.model_type} are not served"
        )


def _quantization(path: Path, *configs: Config) -> Quantization:
    for config in configs:
        for key in ("quantization_config", "compression_config"):
            if config.get(key) is not None:
                if not isinstance(config[key], dict):
                    raise CheckpointError(f"config.json: {key} must be an object, found {config[key]!r}")
                found: dict[str, Any] = config[key]
                return found | _expert_dtype(found, config)
    files = (path / name for name in QUANTIZATION_FILES)
    return next((read_json(file) for file in files if file.is_file()), None)


def _expert_dtype(quantization: Config, config: Config) -> dict[str, Any]:
    """Returns DeepSeek-V4's `expert_dtype`, which stands beside the quantization config, as a key of it."""
    default = "fp4" if config.get("model_type") == "deepseek_v4" else None
    named = quantization.get("expert_dtype", config.get("expert_dtype", default))
    if quantization.get("quant_method") != "fp8" or named in (None, "fp8"):
        return {}
    if named != "fp4":
        raise CheckpointError(f"config.json: expert_dtype must be 'fp4' or 'fp8', found {named!r}")
    return {"store_dtype": "mxfp4"}
