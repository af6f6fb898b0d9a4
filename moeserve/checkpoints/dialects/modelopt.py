"""ModelOpt: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MXFP4, MXFP8, W4A8_MXFP4_FP8.

The config is flat in config.json or nested in hf_quant_config.json. Only `quant_algo`, in any case, names the
formats: `config_groups` may be missing, and only its group sizes are read. All scales are multiplied.
FP8_PB_WO, "weight only" by name, is served with activations in dynamic groups of 128, as others serve it.
W4A8_MXFP4_FP8 rounds activations per tensor in its producer and per token here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moeserve.checkpoints.dialects import forms
from moeserve.checkpoints.dialects.dialect import Dialect, Quantization, Settings, StaticScale, Storage
from moeserve.checkpoints.dialects.modelopt_excludes import excluded
from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError
from moeserve.checkpoints.stored import Axes
from moeserve.quant.format import Format
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.fp8 import FP8_CHANNEL, FP8_GROUP, FP8_STATIC, FP8_TOKEN
from moeserve.quant.formats.mx import MXFP4, MXFP8
from moeserve.quant.formats.nvfp4 import NVFP4_STATIC

INPUT_SCALE = StaticScale("input_scale")
GROUP_SIZES = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP4": 32, "MXFP8": 32, "W4A8_MXFP4_FP8": 32}

BLOCK_SCALES: tuple[Axes, ...] = (("n", 1, "k", 1), ("n", "k"), ())
"""The axes of block scales; a matrix of a single block has a scale without dimensions."""

ALGORITHMS: Mapping[str, Callable[[Format], Storage]] = {
    "FP8": lambda _: forms.per_tensor(FP8_CHANNEL, FP8_STATIC, INPUT_SCALE),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda _: forms.per_channel(FP8_CHANNEL, FP8_TOKEN),
    "FP8_PB_WO": lambda _: forms.fp8_block(FP8_GROUP, "weight_scale", BLOCK_SCALES),
    "NVFP4": lambda _: forms.nvfp4(NVFP4_STATIC, INPUT_SCALE),
    "W4A16_NVFP4": forms.nvfp4,
    "MXFP4": lambda _: forms.mx(MXFP4, MXFP4),
    "MXFP8": lambda _: forms.mx(MXFP8, MXFP8),
    "W4A8_MXFP4_FP8": lambda _: forms.mx(MXFP4, FP8_TOKEN),
}
"""The storage of each algorithm, as a function of the model's plain format."""

MIXED = "MIXED_PRECISION"
NVFP4_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
"""Keys that the nested form must have with NVFP4; their values may be null."""


def _claims(quantization: Quantization) -> bool:
    if quantization is None:
        return False
    if quantization.get("quant_method") is None:
        return "quantization" in quantization or "quant_algo" in quantization
    return quantization["quant_method"] in ("modelopt", "modelopt_fp4")


def _settled(settings: Settings) -> dict[str, Any]:
    """Checks the settings and returns them in the flat form: upper-case quant_algo, `ignore`, group_size."""
    nested = settings.get("quantization")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(f"quantization must be an object, found {nested!r}")
    flat: dict[str, Any] = dict(settings if nested is None else nested)
    algorithm = flat.get("quant_algo")
    known = ", ".join((*ALGORITHMS, MIXED))
    if not algorithm or not isinstance(algorithm, str):
        raise CheckpointError(f"ModelOpt's config has no quant_algo, found {algorithm!r}; supported: {known}")
    flat["quant_algo"] = algorithm.upper()
    cache = flat.get("kv_cache_quant_algo")
    if cache is not None and not isinstance(cache, str):
        raise CheckpointError(f"kv_cache_quant_algo must be a string, found {cache!r}")
    flat["ignore"] = _list(flat, "exclude_modules") or _list(flat, "ignore")
    flat["group_size"] = _integer("group_size", flat.get("group_size"))
    if flat["quant_algo"] not in (*ALGORITHMS, MIXED):
        raise CheckpointError(f"quant_algo={algorithm!r} is not supported; supported: {known}")
    missing = [key for key in NVFP4_KEYS if key not in (nested or ())]
    if nested is not None and flat["quant_algo"] == "NVFP4" and missing:
        raise CheckpointError(f"quantization of NVFP4 misses the keys {', '.join(missing)}; null is allowed")
    return flat


def _list(flat: Mapping[str, Any], key: str) -> list[str]:
    found = flat.get(key) or []
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise CheckpointError(f"{key} must be a list of names, found {found!r}")
    return found


def _integer(key: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        return int(value)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{key} must be an integer, found {value!r}") from error


def _algorithm(flat: Mapping[str, Any], names: LayerNames) -> tuple[str, int | None] | None:
    """Returns algorithm and group size of the layer's experts; None where they are not quantized."""
    if flat["quant_algo"] != MIXED:
        return flat["quant_algo"], flat["group_size"]
    layers = flat.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise CheckpointError(f"{MIXED} needs a non-empty object quantized_layers, found {layers!r}")
    stem = f"{names.module}.experts"
    own = {name: entry for name, entry in layers.items() if name == stem or name.startswith(f"{stem}.")}
    found: dict[tuple[str, int | None], str] = {}
    for name, entry in own.items():
        settled = _settled(entry if isinstance(entry, dict) else {})
        found.setdefault((settled["quant_algo"], settled["group_size"]), name)
    if len(found) > 1:
        listed = " and ".join(f"{name} ({algorithm})" for (algorithm, _), name in found.items())
        raise CheckpointError(f"experts of a layer must be quantized alike; these are not: {listed}")
    return next(iter(found), None)


def _listed_groups(settings: Settings) -> Iterator[tuple[str, int | None]]:
    """Yields keys and sizes of the groups in `config_groups`, the only place of sizes in the flat form."""
    listed = settings.get("config_groups")
    for name, group in listed.items() if isinstance(listed, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            key = f"config_groups.{name}.weights.group_size"
            yield key, _integer(key, weights.get("group_size"))


def _skips(settings: Settings, names: LayerNames) -> bool:
    flat = _settled(settings)
    return _algorithm(flat, names) is None or excluded(flat["ignore"], names)


def _storage(settings: Settings, dtype: torch.dtype, names: LayerNames) -> Storage:
    chosen = _algorithm(_settled(settings), names)
    if chosen is None:
        raise ValueError(f"{names.module} is not quantized")
    algorithm, group = chosen
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"quant_algo={algorithm!r} of experts is not supported; supported: {', '.join(ALGORITHMS)}"
        )
    only = GROUP_SIZES.get(algorithm)
    for key, size in (("group_size", group), *_listed_groups(settings)):
        if size is not None and only is not None and size != only:
            raise CheckpointError(f"{algorithm} with {key}={size} is not supported, only {only}")
    return ALGORITHMS[algorithm](FLOATS[dtype])


ENTRY = Dialect(
    name="modelopt",
    reads=f"quant_method modelopt with quant_algo {', '.join((*ALGORITHMS, MIXED))}",
    claims=_claims,
    storage=_storage,
    skips=_skips,
)
