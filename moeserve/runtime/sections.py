"""The sections of the configuration: every key with its default, and what it means in a line."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.dispatch.backends import dispatcher_named
from moeserve.proto.texts import clipped
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
    measure_timeout_seconds: float = 300.0  # for a rank to build and measure, while the others wait for it

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
    gather_seconds: float = (
        0.004  # who is back later than this, and a step's time, is not waited for; 0: nobody
    )
    due_seconds: float = 1.0  # a job is due so long after it came, or at its deadline where that is earlier
    timeout_seconds: float = 30.0  # of one collective; a rank that does not answer by then is lost
    finish_seconds: float = 120.0  # for launched steps to end on their device; at least 2 timeout_seconds
    blocks_seconds: float = 10.0  # for which blocks of a kernel wait for those that have yet to begin
    late_seconds: float = 10.0  # a step may stand still so long; then who holds it up; 0: timeout_seconds
    on_late: str = FAIL  # what becomes of a step without a late rank's rows: fail, or drop them and go on
    graph_rows: int = 2048  # of the fullest lane, up to which a GPU's steps are CUDA graphs; 0: none are

    @property
    def patience(self) -> float:
        """Seconds a dispatcher waits for a rank before it names it late."""
        return self.late_seconds or self.timeout_seconds

    @property
    def finishing(self) -> float:
        """Seconds for launched steps to end, which may wait in a collective."""
        return max(self.finish_seconds, 2 * self.timeout_seconds)


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
    cover_owners: int = 0  # whose loss the slots have to stand: 1: of any one owner; 0: nobody's
    shadows: bool = False  # copies in host memory of experts that an owner takes over when another is lost
    shadow_bytes: int = 0  # of them, on one owner; 0: no limit
    shadow_bytes_per_second: float = 2e8  # that are copied into host memory; 0: as fast as they come


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
    leaving_seconds: float = 0.2  # of these: calls that come though the topology has no lane are still taken
    unread_seconds: float = 30.0  # within which the caller of a stream has to take a reply
    connection_hello_seconds: float = (
        5.0  # within which a data connection has to be made, and show its secret
    )
    connection_rest_seconds: float = 10.0  # without a call, after which a data connection holds no memory
    reload_root: str = ""  # folder below which a checkpoint may be reloaded; empty: the served one's parent
    region_bytes: int = 4 << 30  # of shared memory a rank may hand out
    region_seconds: float = 10.0  # for a client to fetch a region that was made for it, or to name one
    allow_named_regions: bool = False  # unsafe: clients may register any shared-memory object by name
    max_held_rows: int = 65536  # of the calls that a lane holds; it refuses more, with pushback
    queue_seconds: float = 10.0  # that a call may wait for others at a lane; who would longer is refused
    health_port: int = 0  # of probes; 0 picks a free one, -1 has none
    stalled_seconds: float = 10.0  # after which a head that does not answer is not ready, nor alive
    registered_bytes: int = 4 << 30  # of regions, that a GPU copies from and to by itself; 0: none
    data_connections: bool = True  # lanes take calls over TCP connections past gRPC, too


@dataclass(frozen=True)
class ClusterConfig:
    """The launcher that starts the ranks, and what it gives each."""

    launcher: str = "ray"  # ray, local
    ray_address: str = ""  # an existing cluster; empty starts one on this machine
    cpus_per_rank: float = 1.0
    threads_per_rank: int = 0  # torch threads at most; 0: usable cores / ranks of a host, at least 1
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
    end_seconds: float = (
        60.0  # for a rank's process to end, once it has stopped; then it kills itself; 0: never
    )
    stop_seconds: float = 10.0  # for ranks that were told to stop to end; then they are killed
    watch_seconds: float = 5.0  # for a node's watch to answer under Ray; then Ray is asked for the node
    ring_bytes: int = 1 << 18  # of memory that head and a rank of its host share, each way; 0: they use TCP
    spin_seconds: float = 0.0  # that a reader of a ring looks again and again; only with cores to spare
    head_seconds: float = 60.0  # for which ranks look for a head that has ended; then they stop
    recover_seconds: float = 5.0  # for which a head that starts again waits for the ranks of the one before
    others_first_seconds: float = 0.5  # before a lost rank is started again while others go on without it
    spares: int = 0  # actors under Ray that have imported all and hold no weights; one takes a lost seat
    spare_rest_seconds: float = 30.0  # after one took a seat, without another, unless all members serve


@dataclass(frozen=True)
class MembersConfig:
    """How many members the group has room for, and what its GPUs leave to others."""

    max_lanes: int = 0  # that bring rows, callers' own ones with them; 0: as many as ranks
    max_owners: int = 0  # that hold experts; 0: as many as ranks
    held_multiprocessors: int = 0  # of each GPU: that waiting kernels of others may hold
    serve_on: bool = True  # without a lost member, where the others have slots for its experts
    hold_seconds: float = 30.0  # that lanes keep calls while the group comes together again; then they fail
    scale_seconds: float = 600.0  # for ranks that `moeserve scale` adds to load and join, or others to leave


HOST_AHEAD = ("auto", "always", "never")
"""Values of `passes.host_ahead`; auto: while no other process computes on the rank's GPU. And of
`passes.connections`; auto: where lanes' steps are launched ahead.
"""


@dataclass(frozen=True)
class PassesConfig:
    """Callers that are attached to a rank by a device lane, and their passes."""

    lanes: int = 8  # attached to one rank at once; 0: none
    lane_bytes: int = 256 << 20  # of shared memory, of one lane
    patience_seconds: float = 2.0  # for the rows of a step that is next; then the pass ends
    ahead_seconds: float = 0.02  # that what was launched before its rows may wait for them; 0: nothing is
    graph_steps: int = 4096  # that a GPU rank keeps recorded, over all runs of passes; 0: none is recorded
    short_rows: int = 0  # of a step that overtakes larger ones, of a GPU rank that is alone; 0: none does
    host_ahead: str = "auto"  # steps of a lone caller with rows in host memory are launched ahead, too
    connections: str = "auto"  # calls of data connections go over device lanes of their rank
    spin_seconds: float = 0.0005  # that a rank looks for their answers and next calls again and again
    share_gpu: bool = False  # processes may share a GPU: a caller's and a rank's, and ranks; they take turns


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


KEY_FILES = ("certificate", "private_key", "ca", "client_ca", "grants")
"""Keys of `KeysConfig` that are paths."""

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class LogConfig:
    """What each process of the service logs to its stderr."""

    level: str = "info"  # from which on: debug, info, warning, error
    format: str = "text"  # text, or json: one object a line
    bytes_per_minute: int = 1 << 20  # of one process; what is over it is counted and left out; 0: no limit
    repeat_seconds: float = 10.0  # within which a line that comes again is counted; 0: each is written
