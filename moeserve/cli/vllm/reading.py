"""Reads vLLM's settings: each becomes the configuration keys that do the same, or a reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moeserve.checkpoints.load_as import scheme_to_load_as
from moeserve.cli.vllm.backends import (
    AUTO_MEMBER,
    MEMBERS,
    MOE_BACKENDS,
    MoeBackend,
    VllmFamily,
    VllmMember,
    family_of,
)
from moeserve.cli.vllm.switches import ANY, DISPATCHER, GIVEN, SWITCHES, WEIGHTS, Here, Switch, Value
from moeserve.dispatch.backends import dispatcher_named
from moeserve.quant.format import Scheme
from moeserve.quant.formats.floats import BF16, FLOATS
from moeserve.runtime.sections import AUTO, ConfigError

PREFIX = "VLLM_"

ABOUT_EXPERTS = (
    "AITER",
    "ALL2ALL",
    "CUTLASS",
    "DEEP_GEMM",
    "DEEPEP",
    "DEEPGEMM",
    "EPLB",
    "EXPERT",
    "FLASHINFER_MOE",
    "FP4",
    "FP8",
    "HUMMING",
    "MARLIN",
    "MOE",
    "MORI",
    "ROUTING",
)
"""Words in the name of a switch that is about experts, or may be."""

EVERY = frozenset(VllmFamily)
"""The families of a switch that is about experts of any kind, also of formats that vLLM has no family for."""

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class VllmSetting:
    """One setting of vLLM, and the configuration keys that do the same."""

    said: str  # as it was set: `VLLM_MOE_DP_CHUNK_SIZE=256`
    keys: Mapping[str, Value] = field(default_factory=dict)
    why: str = ""

    def lines(self) -> list[str]:
        """Formats the setting, then each key or the reason."""
        found = [f"{key} = {json.dumps(value)}" for key, value in self.keys.items()] or ["no key"]
        return [self.said, f"  {', '.join(found)}" + (f": {self.why}" if self.why else "")]


def read(environ: Mapping[str, str], backend: str, stored: Scheme | None) -> list[VllmSetting]:
    """What vLLM's environment and its `--moe-backend` (empty: not given) say of experts stored as `stored`.

    Without `stored`, what depends on it is told for every kind of experts, and gives no key. Switches that
    are not known but may be about experts are findings too. Raises ConfigError for a value that vLLM does not
    take, and for an unknown backend.
    """
    findings = [
        _switch(SWITCHES[name], value, stored, environ)
        for name, value in sorted(environ.items())
        if name in SWITCHES and value
    ]
    findings += [
        VllmSetting(f"{name}={environ[name]}", why="unknown here; if it is about experts, it has no effect")
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in SWITCHES and any(word in name for word in ABOUT_EXPERTS)
    ]
    if backend:
        keys, why = of_backend(backend, stored)
        findings.append(VllmSetting(f"--moe-backend {backend}", keys, why))
    return findings


def merged(findings: Iterable[VllmSetting]) -> dict[str, Value]:
    """Merges the keys of all findings; `auto` gives way to any other value.

    Raises ConfigError where two settings want different values.
    """
    keys: dict[str, Value] = {}
    by: dict[str, str] = {}
    for finding in findings:
        for key, value in finding.keys.items():
            before = keys.get(key, AUTO)
            if value == AUTO and key in keys:
                continue
            if before not in (AUTO, value):
                raise ConfigError(
                    f"{by[key]} means {key} = {json.dumps(before)}, and {finding.said} "
                    f"{json.dumps(value)}; unset one of them"
                )
            keys[key], by[key] = value, finding.said
    return keys


def text(findings: Sequence[VllmSetting], keys: Mapping[str, Value]) -> str:
    """Formats each finding, then all keys as a configuration file."""
    told = [line for finding in findings for line in finding.lines()]
    told = told or ["vLLM's environment says nothing about experts"]
    return "\n".join(told) + ("\n\n# the same for moeserve\n" + toml(keys) if keys else "")


def toml(keys: Mapping[str, Value]) -> str:
    """Formats the keys as a TOML configuration."""
    tables: dict[str, list[str]] = {}
    for key, value in keys.items():
        table, name = key.split(".")
        tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join(line for table, lines in tables.items() for line in (f"[{table}]", *lines))


def of_backend(name: str, stored: Scheme | None) -> tuple[dict[str, Value], str]:
    """Returns the keys that a name of `--moe-backend` means, and why. Raises ConfigError."""
    if name not in MOE_BACKENDS:
        raise ConfigError(f"unknown moe_backend {name!r}; known: {', '.join(MOE_BACKENDS)}")
    backend = MOE_BACKENDS[name]
    if not backend.members:
        return {}, backend.note
    if backend.members.keys() == EVERY:
        return {"plan.kernel": AUTO}, "the plan chooses"
    if stored is None:
        return {}, f"by what the checkpoint stores, {'; '.join(told(backend))}"
    family = family_of(stored)
    if family is None or family not in backend.members:
        return {}, f"vLLM does not take it for {_kind(stored)} experts"
    keys, why = _of_members(backend, family)
    if keys.get("plan.kernel", AUTO) != AUTO and member_of(backend, family).plain and not _plain(stored):
        keys["model.load_as"] = f"{stored.weights} x {BF16}"
    return keys, why


def told(backend: MoeBackend) -> list[str]:
    """Returns what a name means for each family; families with one meaning share a line."""
    alike: dict[str, list[str]] = {}
    for family in backend.members:
        keys, why = _of_members(backend, family)
        found = [f"`{key} = {json.dumps(value)}`" for key, value in keys.items()]
        alike.setdefault(": ".join(filter(None, (", ".join(found), why))), []).append(family.value)
    return [f"{', '.join(families)}: {meaning}" for meaning, families in alike.items()]


def member_of(backend: MoeBackend, family: VllmFamily) -> VllmMember:
    """Returns the member that stands for a name: the first that has a kernel here, else the first."""
    members = [MEMBERS[family, name] for name in backend.members[family]]
    return next((member for member in members if member.kernel), members[0])


def _of_members(backend: MoeBackend, family: VllmFamily) -> tuple[dict[str, Value], str]:
    if AUTO_MEMBER in backend.members[family]:
        return {"plan.kernel": AUTO}, "the plan chooses"
    member = member_of(backend, family)
    if not member.kernel:
        return {}, member.note
    device: dict[str, Value] = {} if backend.device == AUTO else {"plan.device": backend.device}
    return {"plan.kernel": member.kernel} | device, member.note


def _kind(stored: Scheme) -> str:
    """Returns vLLM's family of the experts, or the name of a number format that vLLM has no family for."""
    family = family_of(stored)
    return family.value if family else stored.weights.name


def _plain(stored: Scheme) -> bool:
    return stored.activations in FLOATS.values()


def _switch(switch: Switch, value: str, stored: Scheme | None, environ: Mapping[str, str]) -> VllmSetting:
    said = f"{switch.name}={value}"
    here = _answer(switch, value)
    if stored is not None and switch.families != EVERY and family_of(stored) not in switch.families:
        return VllmSetting(said, why=f"it says nothing about {_kind(stored)} experts")
    if here.backend:
        if switch.chooses:
            return VllmSetting(said, why=_chosen(switch, here.backend, environ))
        if switch.beside and not _is_on(SWITCHES[switch.beside], environ):
            return VllmSetting(said, why=f"nothing to do: {switch.beside} is off")
        if word := environ.get(switch.chosen_by, ""):
            here = _answer(SWITCHES[switch.chosen_by], word)
        keys, why = of_backend(here.backend, stored)
        return VllmSetting(said, keys, f"as --moe-backend {here.backend}: {why}")
    if DISPATCHER in here.keys.values():
        return _dispatcher(said, value)
    if stored is None and here.keys and switch.families != EVERY:
        kinds = ", ".join(family.value for family in VllmFamily if family in switch.families)
        return VllmSetting(said, why=f"for {kinds} experts {shown(here)}")
    keys = {key: _number(said, value) if given == GIVEN else given for key, given in here.keys.items()}
    return _with_weights(VllmSetting(said, keys, here.why), stored)


def _is_on(switch: Switch, environ: Mapping[str, str]) -> bool:
    return (environ.get(switch.name) or switch.default).lower() in ON


def _chosen(switch: Switch, backend: str, environ: Mapping[str, str]) -> str:
    """Which switches mean `backend` by this one, that only chooses for those that are on."""
    on = [one.name for one in SWITCHES.values() if one.chosen_by == switch.name and _is_on(one, environ)]
    if not on:
        return f"nothing to do: it is the kernel of switches that are off; on, they are as {backend}"
    return f"{', '.join(on)}: as --moe-backend {backend}"


def _answer(switch: Switch, value: str) -> Here:
    if ANY in switch.answers:
        return switch.answers[ANY]
    word = value.lower()
    if switch.flag:
        word = "1" if word in ON else "0" if word in OFF else word
    if word not in switch.answers:
        raise ConfigError(f"{switch.name}={value!r} is no value of it; known: {', '.join(switch.answers)}")
    return switch.answers[word]


def shown(here: Here) -> str:
    """Formats what one value of a switch means for any checkpoint."""
    if here.backend:
        return f"as `--moe-backend {here.backend}`"
    words = {GIVEN: "the same number", DISPATCHER: "the all2all backend of that name"}
    keys = [
        f"`{key}`, {words[value]}" if value in words else f"`{key} = {json.dumps(value)}`"
        for key, value in here.keys.items()
    ]
    return ": ".join(part for part in (", ".join(keys), here.why) if part)


def _dispatcher(said: str, value: str) -> VllmSetting:
    try:
        return VllmSetting(said, {"plan.all2all_backend": dispatcher_named(value).name})
    except ValueError as error:
        return VllmSetting(said, why=str(error))


def _number(said: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{said} must be a number of tokens, 1 or more")
    return int(value)


def _with_weights(finding: VllmSetting, stored: Scheme | None) -> VllmSetting:
    """Fills in the format of the stored weights; drops the key for a scheme that is unknown or stored."""
    load_as = str(finding.keys.get("model.load_as", ""))
    if stored is None or WEIGHTS not in load_as:
        return finding
    wanted = load_as.replace(WEIGHTS, stored.weights.name)
    try:
        scheme = scheme_to_load_as(wanted, BF16)
    except ValueError:
        return VllmSetting(finding.said, why=f"there is no scheme {wanted}")
    if scheme == stored:
        return VllmSetting(finding.said, why=f"nothing to do: the checkpoint says {wanted} itself")
    return VllmSetting(finding.said, dict(finding.keys) | {"model.load_as": wanted}, finding.why)
