"""The one frozen configuration, from a TOML file and flags. An unknown key is an error; the result is printed
at start.
"""

from __future__ import annotations

import ipaddress
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from moeserve.checkpoints.hub import path_from
from moeserve.checkpoints.load_as import scheme_to_load_as
from moeserve.dispatch.backends import dispatcher_named
from moeserve.experts.balance import BALANCERS
from moeserve.experts.routing.replicas import REPLICA_CHOICES
from moeserve.proto.texts import clipped
from moeserve.quant.formats import BF16
from moeserve.runtime.mesh import Mesh

AUTO = "auto"


@dataclass(frozen=True)
class Wanted:
    """What the operator pinned by name; `auto` leaves the choice to the plan."""

    kernel: str = AUTO
    dispatcher: str = AUTO
    wire: str = AUTO


ALWAYS, NEVER = "always", "never"
MEASURES = (AUTO, ALWAYS, NEVER)

OFF = "off"
FAIL, DROP = "fail", "drop"


class ConfigError(ValueError):
    """A key or value of the configuration is wrong; names both, as far as a person reads."""

    def __init__(self, message: str) -> None:
        super().__init__(clipped(message))


@dataclass(frozen=True)
class ModelConfig:
    """The checkpoint that is served, and how."""

    checkpoint: str = ""  # folder with config.json and safetensors, or org/name of a hub; see `resolved`
    name: str = ""  # as clients call it; the folder's name when empty
    dtype: str = AUTO  # of hidden states and unquantized experts: auto (the checkpoint's), fp32, bf16, fp16
    load_as: str = ""  # a scheme that experts are quantized to while they are loaded; as stored when empty
    layers: tuple[int, ...] = ()  # decoder layers to serve; all that have experts when empty


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks, and what each holds."""

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh that the parallel sizes flatten to."""
        return Mesh.flatten(
            self.data_parallel_size, self.tensor_parallel_size, expert_parallel=self.enable_expert_parallel
        )


@dataclass(frozen=True)
class PlanConfig:
    """What is pinned by name; `auto` leaves the choice to the plan."""

    kernel: str = AUTO
    all2all_backend: str = AUTO
    wire: str = AUTO
    device: str = AUTO  # auto, cpu, cuda
    measure: str = AUTO  # dispatchers at start, where several fit: auto (on GPUs), always, never
    costs: str = ""  # folder for what was measured; the user's cache folder when empty

    @property
    def wanted(self) -> Wanted:
        """The pins, as the plan reads them; other systems' names of dispatchers are understood. Raises
        ValueError.
        """
        named = self.all2all_backend
        return Wanted(self.kernel, named if named == AUTO else dispatcher_named(named).name, self.wire)


@dataclass(frozen=True)
class StepConfig:
    """Bounds of a step and of waiting."""

    lane_rows: int = 4096  # most rows one lane brings to a step; larger calls are split
    max_step_tokens: int = 16384  # over all lanes
    quiet_seconds: float = 0.0005  # a step with company waits until no job came for so long
    gather_seconds: float = 0.004  # but never longer than this after its oldest job
    due_seconds: float = 1.0  # a job is due so long after it came, or at its deadline where that is earlier
    timeout_seconds: float = 30.0  # of one collective; a rank that does not answer by then is lost
    late_seconds: float = 10.0  # a step may stand still so long; then who holds it up; 0: timeout_seconds
    on_late: str = FAIL  # what becomes of a step without a late rank's rows: fail, or drop them and go on
    graph_rows: int = 256  # of the fullest lane, up to which a GPU's steps are CUDA graphs; 0: none are

    @property
    def patience(self) -> float:
        """Seconds a dispatcher waits for a rank before it names it late."""
        return self.late_seconds or self.timeout_seconds


@dataclass(frozen=True)
class BalanceConfig:
    """When and how experts move while steps run."""

    policy: str = OFF  # off, or incremental, eplb, even: rebalances by itself; by hand it always can
    redundant_experts: int = 0  # replicas over all ranks, beside one slot for every expert
    interval_seconds: float = 60.0  # between looks at the load
    min_imbalance: float = 0.05  # of the worst layer, largest over mean rank load less 1, for experts to move
    min_tokens: int = 1024  # (token, expert) pairs the busiest layer must have seen since the last look
    max_moves: int = 0  # of one look, over all layers; 0: as many as pay
    staging_slots: int = 2  # of a rank: experts it can copy in beside those it serves
    move_bytes_per_second: float = 2e9  # into a rank; 0: as fast as they come
    copy_seconds: float = 20.0  # for a peer to give the next bytes of a copy; then the disk is read
    prepare_timeout_seconds: float = 60.0  # of one layer's copies; then they are abandoned
    replica_choice: str = "auto"  # how a lane picks one of an expert's replicas: hash, waterfill, lp, auto


@dataclass(frozen=True)
class ServerConfig:
    """The addresses at which clients and Prometheus reach the service."""

    host: str = "127.0.0.1"
    port: int = 50051  # the coordinator's; 0 picks a free one
    metrics_port: int = 9400  # the head's; rank r takes this + 1 + r; 0 picks free ones, -1 turns metrics off
    max_message_bytes: int = 64 << 20
    max_concurrent_calls: int = 256  # a lane refuses more, with pushback
    max_streams: int = 256  # that are open at a lane or the front door; it refuses more, with pushback
    max_held_bytes: int = 2 << 30  # of the calls that a lane or the front door holds; it refuses more
    request_seconds: float = 30.0  # within which the message of a call has to arrive
    drain_seconds: float = 10.0  # for calls under way when the service is told to stop
    unread_seconds: float = 30.0  # within which the caller of a stream has to take a reply
    reload_root: str = ""  # folder below which a checkpoint may be reloaded; empty: the served one's parent
    region_bytes: int = 4 << 30  # of shared memory a rank may hand out
    allow_named_regions: bool = False  # unsafe: clients may register any shared-memory object by name
    max_held_rows: int = 65536  # of the calls that a lane holds; it refuses more, with pushback
    queue_seconds: float = 10.0  # that a call may wait at a lane, whatever its deadline; longer is refused
    health_port: int = 0  # of probes; 0 picks a free one, -1 has none
    stalled_seconds: float = 10.0  # after which a head that does not answer is not ready, nor alive
    registered_bytes: int = 4 << 30  # of regions, that a GPU copies from and to by itself; 0: none


@dataclass(frozen=True)
class ClusterConfig:
    """The launcher that starts the ranks, and what it gives each."""

    launcher: str = "ray"  # ray, local
    ray_address: str = ""  # an existing cluster; empty starts one on this machine
    cpus_per_rank: float = 1.0
    threads_per_rank: int = 0  # torch threads; 0: cores / ranks of a host, at least 1
    start_timeout_seconds: float = 600.0
    give_up_seconds: float = 0.0  # without serving, once it has served: then the service ends; 0: never
    connect_seconds: float = 30.0  # for a rank to reach the head
    hello_seconds: float = 10.0  # for whoever connects to the head, or for a rank's experts, to say who it is
    answer_seconds: float = 10.0  # for a rank's process to answer that a generation forms
    prepare_seconds: float = 120.0  # between two layers that a rank reads while a generation forms
    join_seconds: float = 300.0  # for the ranks' process group and dispatchers
    adopt_seconds: float = 60.0  # for every rank to serve a change of the epoch that was decided
    send_seconds: float = 5.0  # while a rank takes nothing of what the head sends it
    begin_seconds: float = 180.0  # for a rank's process to reach the head, once it was started
    stopped_seconds: float = 1.5  # a rank's process that does not run so long is given up; 0: never


@dataclass(frozen=True)
class MembersConfig:
    """How many members the group has room for, and what its GPUs leave to others."""

    max_lanes: int = 0  # that bring rows, callers' own ones with them; 0: as many as ranks
    max_owners: int = 0  # that hold experts; 0: as many as ranks
    held_multiprocessors: int = 0  # of each GPU: that waiting kernels of others may hold


@dataclass(frozen=True)
class KeysConfig:
    """Whom the service trusts and what it encrypts with: paths and names, never a secret.

    With `grants`, who may do what is decided by the table in keys/access.py; without, everyone may do
    everything.
    """

    certificate: str = ""  # PEM: the chain that every process of the service shows; without it, no TLS
    private_key: str = ""  # PEM, not encrypted: the certificate's key
    ca: str = ""  # PEM: authorities by which processes of the service know each other
    client_ca: str = ""  # PEM: authorities of the certificates that callers must show; empty: none must
    server_name: str = ""  # that the certificate has; empty: the host of each address
    grants: str = ""  # file of tokens and names of certificates, with the roles of each
    allow_plaintext: bool = False  # serve beyond loopback without TLS
    handshake_seconds: float = 10.0  # for whoever connects to finish TLS


LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class LogConfig:
    """What each process of the service logs to its stderr."""

    level: str = "info"  # from which on: debug, info, warning, error
    format: str = "text"  # text, or json: one object a line
    bytes_per_minute: int = 1 << 20  # of one process; what is over it is counted and left out; 0: no limit
    repeat_seconds: float = 10.0  # within which a line that comes again is counted; 0: each is written


LAST_PORT = 65535

CHECKED_APART = ("server.port", "server.metrics_port", "server.health_port")

POSITIVE = frozenset(
    {
        "step.lane_rows",
        "step.max_step_tokens",
        "step.timeout_seconds",
        "balance.interval_seconds",
        "balance.staging_slots",
        "balance.prepare_timeout_seconds",
        "balance.copy_seconds",
        "server.max_concurrent_calls",
        "server.max_streams",
        "server.max_held_bytes",
        "server.request_seconds",
        "server.unread_seconds",
        "server.max_message_bytes",
        "server.max_held_rows",
        "server.queue_seconds",
        "server.stalled_seconds",
        "cluster.start_timeout_seconds",
        "cluster.connect_seconds",
        "cluster.hello_seconds",
        "cluster.answer_seconds",
        "cluster.prepare_seconds",
        "cluster.join_seconds",
        "cluster.adopt_seconds",
        "cluster.send_seconds",
        "keys.handshake_seconds",
        "cluster.begin_seconds",
    }
)
"""Keys whose numbers must be more than 0; no other number but a port may be under 0."""


@dataclass(frozen=True)
class Config:
    """Everything an operator can say."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    step: StepConfig = field(default_factory=StepConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    members: MembersConfig = field(default_factory=MembersConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Reads a TOML file; relative paths in it start at the file's own folder.

        Raises ConfigError for an unknown key or a value of another type.
        """
        try:
            document = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
        config: Config = from_mapping(cls, document)
        return config.resolved(Path(path).absolute().parent)

    def resolved(self, folder: Path) -> Config:
        """This configuration with its relative paths taken from `folder` and `~` expanded.

        Empty ones stay empty. `org/name` stays where no such folder exists: it is a repository of a hub.
        """
        paths: dict[str, str] = {}
        if self.model.checkpoint:
            paths["model.checkpoint"] = path_from(folder, self.model.checkpoint)
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
        _one_of("cluster.launcher", self.cluster.launcher, ("ray", "local"))
        _one_of("model.dtype", self.model.dtype, (AUTO, "fp32", "bf16", "fp16"))
        _one_of("balance.policy", self.balance.policy, (OFF, *BALANCERS))
        _one_of("balance.replica_choice", self.balance.replica_choice, tuple(REPLICA_CHOICES))
        _one_of("plan.device", self.plan.device, (AUTO, "cpu", "cuda"))
        _one_of("plan.measure", self.plan.measure, MEASURES)
        _one_of("step.on_late", self.step.on_late, (FAIL, DROP))
        _one_of("log.level", self.log.level, LOG_LEVELS)
        _one_of("log.format", self.log.format, LOG_FORMATS)
        for table in fields(self):
            _check_numbers(table.name, getattr(self, table.name))
        try:
            _ = self.parallel.mesh, self.plan.wanted
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_members()
        self._check_ports()
        self._check_load_as()
        self._check_keys()
        return self

    def _check_keys(self) -> None:
        """What is beyond loopback is encrypted unless the operator says otherwise; tokens always are."""
        keys, host = self.keys, self.server.host
        if bool(keys.certificate) != bool(keys.private_key):
            raise ConfigError("keys.certificate and keys.private_key need each other: give both, or neither")
        if keys.client_ca and not keys.certificate:
            raise ConfigError("keys.client_ca asks callers for certificates, which needs keys.certificate")
        if keys.certificate and not keys.ca:
            raise ConfigError(
                "keys.ca is not set: processes of the service know each other's certificates by it"
            )
        if keys.certificate and not keys.grants:
            raise ConfigError(
                "keys.grants is not set: with keys.certificate nobody may do anything that it does not grant "
                "(a line `call,observe,operate anyone` grants all to everyone)"
            )
        if keys.certificate or is_loopback(host):
            return
        if keys.grants:
            raise ConfigError(
                f"server.host = {host!r} is not loopback: tokens of keys.grants would travel as plain text; "
                "set keys.certificate and keys.private_key"
            )
        if not keys.allow_plaintext:
            raise ConfigError(
                f"server.host = {host!r} is not loopback, and nothing is encrypted; set keys.certificate and "
                "keys.private_key, or say keys.allow_plaintext = true (--allow-plaintext)"
            )

    def _check_members(self) -> None:
        """Room for fewer than the ranks is refused here, room for more than a dispatcher has in its plan."""
        mesh = self.parallel.mesh
        for name, what in (("max_lanes", "lane"), ("max_owners", "place that holds experts")):
            count = getattr(self.members, name)
            if 0 < count < mesh.ranks:
                raise ConfigError(
                    f"members.{name} = {count} is less than the {mesh.ranks} ranks, "
                    f"each of which has a {what}; give 0 (as many as ranks), or {mesh.ranks} or more"
                )
        if mesh.sliced and self.members.max_owners > mesh.ranks:
            raise ConfigError(
                f"members.max_owners = {self.members.max_owners} is more than the {mesh.ranks} ranks, "
                "which hold slices of every expert, so that no other member can hold experts; "
                "set parallel.enable_expert_parallel"
            )

    def _check_ports(self) -> None:
        """gRPC takes a port over 65535 modulo 65536, and would listen at another one than was said."""
        port, first = self.server.port, self.server.metrics_port
        if not 0 <= port <= LAST_PORT:
            raise ConfigError(f"server.port = {port} must be 0 (any free one) to {LAST_PORT}")
        if not -1 <= self.server.health_port <= LAST_PORT:
            raise ConfigError(
                f"server.health_port = {self.server.health_port} must be -1 (none) or 0 (any free one) "
                f"to {LAST_PORT}"
            )
        last = first + self.parallel.mesh.ranks if first > 0 else first
        if not -1 <= first <= last <= LAST_PORT:
            ranks = self.parallel.mesh.ranks
            raise ConfigError(
                f"server.metrics_port = {first} must be -1 (none), 0 (any free ones), or leave room up to "
                f"{LAST_PORT} for one port of the head and one of each of {ranks} ranks"
            )

    def _check_load_as(self) -> None:
        """Whether the name is known; the checkpoint's own sizes are checked when it is opened."""
        if self.model.load_as:
            try:
                scheme_to_load_as(self.model.load_as, BF16)
            except ValueError as error:
                raise ConfigError(f"model.load_as: {error}") from error

    def lines(self) -> list[str]:
        """The configuration as lines of TOML, every key with its value."""
        out: list[str] = []
        for table in fields(self):
            out.append(f"[{table.name}]")
            value = getattr(self, table.name)
            out += [f"{f.name} = {_toml(getattr(value, f.name))}" for f in fields(value)]
        return out


KEY_FILES = ("certificate", "private_key", "ca", "client_ca", "grants")
"""Keys of `KeysConfig` that are paths."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener at `host`, an address or a name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


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
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{key} must be {hint.__name__}, not {value!r}")
    return value


def _check_numbers(table: str, values: Any) -> None:
    """Raises ConfigError for a number of `table` that is infinite, not a number, negative, or 0 where a
    positive one is needed. Ports are checked apart.
    """
    for name in (each.name for each in fields(values)):
        key, value = f"{table}.{name}", getattr(values, name)
        if not isinstance(value, int | float) or key in CHECKED_APART:
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{key} = {value} must be a finite number")
        if key in POSITIVE and value <= 0:
            raise ConfigError(f"{key} = {value} must be positive")
        if value < 0:
            raise ConfigError(f"{key} = {value} must not be negative")


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{key} = {value!r}; known: {', '.join(known)}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(list(value)) if isinstance(value, tuple) else str(value)
