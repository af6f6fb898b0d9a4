"""The one frozen configuration, from a TOML file and flags. An unknown key is an error; the result is printed
at start.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from moeserve.checkpoints.hub import path_from
from moeserve.experts.balance import BALANCERS
from moeserve.experts.routing.replicas import REPLICA_CHOICES
from moeserve.runtime.config_checks import (
    check_cover,
    check_host,
    check_keys,
    check_load_as,
    check_members,
    check_numbers,
    check_ports,
    check_spares,
    check_spin,
    one_of,
)
from moeserve.runtime.sections import (
    AUTO,
    DROP,
    FAIL,
    HOST_AHEAD,
    KEY_FILES,
    LOG_FORMATS,
    LOG_LEVELS,
    MEASURES,
    OFF,
    BalanceConfig,
    ClusterConfig,
    ConfigError,
    KeysConfig,
    LogConfig,
    MembersConfig,
    ModelConfig,
    ParallelConfig,
    PassesConfig,
    PlanConfig,
    ServerConfig,
    StepConfig,
)

PIPES = Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")
"""Folders of names for what lies elsewhere: of /dev/stdin nobody says in which folder its file is."""


@dataclass(frozen=True)
class Config:
    """Everything an operator can say."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    step: StepConfig = field(default_factory=StepConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    members: MembersConfig = field(default_factory=MembersConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Reads a TOML file; relative paths in it start at the file's own folder, those of a pipe at the
        working directory.

        Raises ConfigError for an unknown key or a value of another type.
        """
        try:
            document = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
        config: Config = from_mapping(cls, document)
        own = Path(path).absolute()
        return config.resolved(Path.cwd() if own.parent in PIPES or not own.is_file() else own.parent)

    def resolved(self, folder: Path) -> Config:
        """This configuration with its relative paths taken from `folder` and `~` expanded.

        Empty ones stay empty. `org/name` stays where no such folder exists: it is a repository of a hub.
        """
        paths: dict[str, str] = {}
        if self.model.checkpoint:
            paths["model.checkpoint"] = path_from(folder, self.model.checkpoint)
        if self.server.reload_root:
            paths["server.reload_root"] = str(folder / Path(self.server.reload_root).expanduser())
        if self.plan.costs:
            paths["plan.costs"] = str(folder / Path(self.plan.costs).expanduser())
        for name in KEY_FILES:
            if path := getattr(self.keys, name):
                paths[f"keys.{name}"] = str(folder / Path(path).expanduser())
        return self.with_values(paths)

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """This configuration with dotted keys replaced, such as `{"server.port": 0}`."""
        config = self
        for key, value in values.items():
            table, name = key.split(".")
            config = replace(
                config,
                **{
                    table: from_mapping(
                        type(getattr(config, table)), {name: value}, getattr(config, table), f"{table}."
                    )
                },
            )
        return config

    def checked(self) -> Config:
        """This configuration, when its values make sense together. Raises ConfigError."""
        if not self.model.checkpoint:
            raise ConfigError("model.checkpoint is not set; give a folder with config.json and safetensors")
        one_of("cluster.launcher", self.cluster.launcher, ("ray", "local"))
        one_of("model.dtype", self.model.dtype, (AUTO, "fp32", "bf16", "fp16"))
        one_of("balance.policy", self.balance.policy, (OFF, *BALANCERS))
        one_of("balance.replica_choice", self.balance.replica_choice, tuple(REPLICA_CHOICES))
        one_of("plan.device", self.plan.device, (AUTO, "cpu", "cuda"))
        one_of("passes.host_ahead", self.passes.host_ahead, HOST_AHEAD)
        one_of("passes.connections", self.passes.connections, HOST_AHEAD)
        one_of("plan.measure", self.plan.measure, MEASURES)
        one_of("step.on_late", self.step.on_late, (FAIL, DROP))
        one_of("log.level", self.log.level, LOG_LEVELS)
        one_of("log.format", self.log.format, LOG_FORMATS)
        for table in fields(self):
            check_numbers(table.name, getattr(self, table.name))
        try:
            _ = self.parallel.mesh, self.plan.wanted
        except ValueError as error:
            raise ConfigError(str(error)) from error
        check_members(self.members, self.parallel.mesh)
        check_cover(self.balance, self.parallel.mesh)
        check_spares(self.cluster)
        check_spin(self.passes)
        room = max(self.members.max_lanes, self.members.max_owners)
        local = self.cluster.launcher == "local"
        check_ports(self.server, max(self.parallel.mesh.ranks, room), beside=local)
        check_load_as(self.model.load_as)
        check_host(self.server.host)
        check_keys(self.keys, self.server.host)
        return self

    def lines(self) -> list[str]:
        """The configuration as lines of TOML, every key with its value."""
        out: list[str] = []
        for table in fields(self):
            out.append(f"[{table.name}]")
            value = getattr(self, table.name)
            out += [f"{f.name} = {_toml(getattr(value, f.name))}" for f in fields(value)]
        return out


def from_mapping(cls: type, document: Mapping[str, Any], start: Any = None, path: str = "") -> Any:
    """An instance of `cls` from nested tables. Raises ConfigError naming the key and its type."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in hints:
            raise ConfigError(f"unknown key {path}{key}; known: {', '.join(path + name for name in hints)}")
        values[key] = _value(hints[key], value, path + key)
    return replace(start, **values) if start is not None else cls(**values)


def _value(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a table, not {value!r}")
        return from_mapping(hint, value, path=f"{key}.")  # type: ignore[arg-type]
    if hint == tuple[int, ...]:
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return tuple(value)
        raise ConfigError(f"{key} must be a list of integers, not {value!r}")
    if hint is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if type(value) is not hint:
        raise ConfigError(f"{key} must be {hint.__name__}, not {value!r}")
    return value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has JSON's escapes
    return str(list(value)) if isinstance(value, tuple) else str(value)
