"""The config of compressed-tensors: groups of modules, and the numbers that each stores and computes with.

Keys, defaults and checks are those of compressed-tensors 0.19; the values that older releases wrote are
accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.checkpoints.names import LayerNames
from moeserve.checkpoints.store import CheckpointError

CLASS_NAME = "Linear"
"""The class that every projection had when it was quantized; targets may name it."""

STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block", "token", "attn_head")
ACTORDERS = {"group": "group", "dynamic": "group", True: "group", "weight": "weight", "static": "weight"}
INFORMATIVE = {"scale_dtype", "zp_dtype", "observer", "observer_kwargs"}


@dataclass(frozen=True)
class CompressedNumbers:
    """How weights or inputs are quantized: the fields of QuantizationArgs that matter for reading."""

    bits: int
    type: str  # int, float
    symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    dynamic: bool | str  # "local": blocks have scales of their own, their global one is static
    actorder: str | None

    def __str__(self) -> str:
        where = {"group": f" {self.group}", "tensor_group": f" {self.group}", "block": f" {self.block}"}
        kind = f"{'' if self.symmetric else 'asymmetric '}{self.type}{self.bits}"
        when = self.dynamic if isinstance(self.dynamic, str) else "dynamic" if self.dynamic else "static"
        order = f", actorder {self.actorder}" if self.actorder else ""
        return f"{when} {kind} per {self.strategy}{where.get(self.strategy, '')}{order}"


@dataclass(frozen=True)
class ConfigGroup:
    """One entry of `config_groups`; `inputs` is None where activations are not quantized."""

    name: str
    targets: tuple[str, ...]
    weights: CompressedNumbers | None
    inputs: CompressedNumbers | None
    format: str


def numbers(raw: Mapping[str, Any], where: str) -> CompressedNumbers:
    """Checks the QuantizationArgs `raw`, found at the key `where` of the config, and returns their numbers.

    Raises CheckpointError, which names a key that is unknown, of another type, or contradicts another.
    """
    known = {
        "num_bits",
        "type",
        "symmetric",
        "strategy",
        "group_size",
        "block_structure",
        "dynamic",
        "actorder",
    }
    if unknown := sorted(set(raw) - known - INFORMATIVE):
        raise CheckpointError(
            f"{where} has the unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    group, block, actorder = raw.get("group_size"), raw.get("block_structure"), raw.get("actorder")
    inferred = "tensor" if group is None else "group" if isinstance(group, int) and group > 0 else "channel"
    found = CompressedNumbers(
        bits=raw.get("num_bits", 8),
        type=str(raw.get("type") or "int").lower(),
        symmetric=bool(raw.get("symmetric", True)),
        strategy=str(raw.get("strategy") or inferred).lower(),
        group=group,
        block=_block(block, where),
        dynamic=raw.get("dynamic") or False,
        actorder=_actorder(actorder, where),
    )
    for key, value, accepted in _checks(found):
        if accepted is not None:
            raise CheckpointError(f"{where}: {key}={value!r} is not valid; {accepted}")
    return found


def _checks(n: CompressedNumbers) -> list[tuple[str, object, str | None]]:
    """Yields each key with its value and, where the value is not accepted, what would be."""
    grouped = n.strategy in ("group", "tensor_group")
    size = n.group if isinstance(n.group, int) and not isinstance(n.group, bool) else -2
    rules = (
        ("num_bits", n.bits, isinstance(n.bits, int) and n.bits > 0, "a positive whole number is needed"),
        ("type", n.type, n.type in ("int", "float"), "known: int, float"),
        ("strategy", n.strategy, n.strategy in STRATEGIES, f"known: {', '.join(STRATEGIES)}"),
        ("group_size", n.group, n.group is None or size >= -1, "-1 or a positive size is needed"),
        ("group_size", n.group, not grouped or size > 0, f"strategy {n.strategy} needs a size"),
        (
            "group_size",
            n.group,
            grouped or n.group is None or (n.strategy == "channel" and n.group == -1),
            f"strategy {n.strategy} has no groups",
        ),
        (
            "block_structure",
            n.block,
            (n.strategy == "block") == (n.block is not None),
            "strategy block needs it, and only block has it",
        ),
        ("dynamic", n.dynamic, n.dynamic in (False, True, "local"), "known: false, true, local"),
        (
            "dynamic",
            n.dynamic,
            n.dynamic != "local" or n.strategy == "tensor_group",
            "only tensor_group is local",
        ),
        (
            "dynamic",
            n.dynamic,
            not n.dynamic or n.strategy in ("token", "tensor", "tensor_group", "group"),
            f"strategy {n.strategy} is static",
        ),
        ("dynamic", n.dynamic, n.strategy != "token" or bool(n.dynamic), "strategy token is dynamic"),
        ("actorder", n.actorder, n.actorder != "group" or grouped, "activation order needs groups"),
    )
    return [(key, value, None if holds else accepted) for key, value, holds, accepted in rules]


def _block(raw: Any, where: str) -> tuple[int, int] | None:
    if raw is None:
        return None
    sizes = raw.lower().split("x") if isinstance(raw, str) else raw
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: block_structure={raw!r} must be [rows, columns]") from error
    return rows, columns


def _actorder(raw: Any, where: str) -> str | None:
    if raw is None or raw is False:
        return None
    found = ACTORDERS.get(raw.lower() if isinstance(raw, str) else raw)
    if found is None:
        raise CheckpointError(
            f"{where}: actorder={raw!r} is not valid; known: group, weight, dynamic, static"
        )
    return str(found)


def groups(settings: Mapping[str, Any]) -> tuple[ConfigGroup, ...]:
    """Returns all groups. Raises CheckpointError for none, or one that compressed-tensors does not write."""
    raw = settings.get("config_groups")
    if not isinstance(raw, Mapping) or not raw:
        raise CheckpointError(f"quantization_config: config_groups must be a non-empty object, found {raw!r}")
    return tuple(_group(name, group, settings.get("format")) for name, group in raw.items())


def _group(name: str, raw: object, form: object) -> ConfigGroup:
    where = f"config_groups.{name}"
    if isinstance(raw, Sequence) and not isinstance(raw, str):
        if name not in PRESETS:
            raise CheckpointError(f"{where} is no known preset; known: {', '.join(PRESETS)}")
        raw = {"targets": raw} | PRESETS[name]
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{where} must be an object, or the targets of a preset; found {raw!r}")
    targets = raw.get("targets")
    if not isinstance(targets, Sequence) or isinstance(targets, str) or not targets:
        raise CheckpointError(f"{where}.targets must be a non-empty list, found {targets!r}")
    parsed: dict[str, CompressedNumbers | None] = {}
    for key in ("weights", "input_activations"):
        if raw.get(key) is not None and not isinstance(raw[key], Mapping):
            raise CheckpointError(f"{where}.{key} must be an object or null, found {raw[key]!r}")
        parsed[key] = numbers(raw[key], f"{where}.{key}") if raw.get(key) else None
    found = raw.get("format") or form
    return ConfigGroup(
        name, tuple(map(str, targets)), parsed["weights"], parsed["input_activations"], str(found)
    )


def matches(entry: str, name: str) -> bool:
    """Whether `entry` means the module `name`: it is the name, or `re:` and a pattern that fits its start."""
    return bool(re.match(entry[3:], name)) if entry.startswith("re:") else entry == name


def group_of(settings: Mapping[str, Any], names: LayerNames) -> ConfigGroup | None:
    """Returns the group of the layer's experts; None where they are ignored or no group targets them.

    Raises CheckpointError where experts of the layer belong to different groups, or only some to none.
    """
    ignore = settings.get("ignore") or []
    if not isinstance(ignore, list):
        raise CheckpointError(f"quantization_config: ignore must be a list, found {ignore!r}")
    if f"{names.module}.experts" in ignore:
        return None
    exact = {entry for entry in ignore if not entry.startswith("re:")}
    patterns = [re.compile(entry[3:]) for entry in ignore if entry.startswith("re:")]
    every = groups(settings)
    found: dict[str, ConfigGroup | None] = {}
    for module in names.modules():
        ignored = module in exact or any(pattern.match(module) for pattern in patterns)
        found[module] = None if ignored else _target(every, module)
    first, *rest = found
    for other in rest:
        if found[other] != found[first]:
            listed = " and ".join(f"{module} ({_called(found[module])})" for module in (first, other))
            raise CheckpointError(f"experts of a layer must be quantized alike; these are not: {listed}")
    return found[first]


def _called(group: ConfigGroup | None) -> str:
    return group.name if group else "unquantized"


def _target(every: Sequence[ConfigGroup], module: str) -> ConfigGroup | None:
    """Returns the first group with a target that means `module`: by name, or else by class."""
    named = (group for group in every if any(matches(target, module) for target in group.targets))
    of_class = (group for group in every if CLASS_NAME in group.targets)
    return next(named, None) or next(of_class, None)


def _preset(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"format": form, "weights": weights, "input_activations": inputs}


def _float(bits: int, strategy: str, **keys: object) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy} | keys


def _int(bits: int, strategy: str, **keys: object) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy} | keys


_NVFP4 = _float(4, "tensor_group", group_size=16)
_MXFP4, _MXFP8 = (
    _float(4, "group", group_size=32),
    _float(8, "group", group_size=32, scale_dtype="torch.uint8"),
)
_TOKEN8 = _float(8, "token", dynamic=True)
_INT4 = _int(4, "group", group_size=128)

PRESETS: dict[str, dict[str, Any]] = {
    "FP8": _preset("float-quantized", _float(8, "tensor"), _float(8, "tensor")),
    "FP8_DYNAMIC": _preset("float-quantized", _float(8, "channel"), _TOKEN8),
    "FP8_BLOCK": _preset(
        "float-quantized",
        _float(8, "block", block_structure=[128, 128]),
        _float(8, "group", group_size=128, dynamic=True),
    ),
    "W8A8": _preset("int-quantized", _int(8, "channel"), _int(8, "token", dynamic=True)),
    "W8A16": _preset("pack-quantized", _int(8, "channel")),
    "W4A16": _preset("pack-quantized", _INT4),
    "W4A16_ASYM": _preset("pack-quantized", _INT4 | {"symmetric": False}),
    "W4AFP8": _preset("pack-quantized", _INT4, _TOKEN8),
    "NVFP4": _preset("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"}),
    "NVFP4A16": _preset("nvfp4-pack-quantized", _NVFP4),
    "MXFP4": _preset("mxfp4-pack-quantized", _MXFP4, _MXFP4 | {"dynamic": True}),
    "MXFP4A16": _preset("mxfp4-pack-quantized", _MXFP4),
    "MXFP8": _preset("mxfp8-quantized", _MXFP8, _MXFP8 | {"dynamic": True}),
    "MXFP8A16": _preset("mxfp8-quantized", _MXFP8),
}
"""Schemes that a config may call by name, `{"FP8_DYNAMIC": ["Linear"]}`."""
