from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FP32: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]
    DTYPE_FP16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
DTYPE_UNSPECIFIED: DType
DTYPE_FP32: DType
DTYPE_BF16: DType
DTYPE_FP16: DType
DTYPE_INT32: DType
DTYPE_INT64: DType

class Region(_message.Message):
    __slots__ = ("name", "offset", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    size: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data", "region")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    region: Region
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., region: _Optional[_Union[Region, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("ids", "weights")
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ids: Tensor
    weights: Tensor
    def __init__(self, ids: _Optional[_Union[Tensor, _Mapping]] = ..., weights: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("model", "layer", "job_id", "attempt", "hidden", "choice", "logits", "output", "timeout_ms", "weights_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    layer: int
    job_id: str
    attempt: int
    hidden: Tensor
    choice: Choice
    logits: Tensor
    output: Region
    timeout_ms: int
    weights_version: int
    def __init__(self, model: _Optional[str] = ..., layer: _Optional[int] = ..., job_id: _Optional[str] = ..., attempt: _Optional[int] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., logits: _Optional[_Union[Tensor, _Mapping]] = ..., output: _Optional[_Union[Region, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., weights_version: _Optional[int] = ...) -> None: ...

class ForwardReply(_message.Message):
    __slots__ = ("hidden", "epoch", "weights_version")
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    hidden: Tensor
    epoch: int
    weights_version: int
    def __init__(self, hidden: _Optional[_Union[Tensor, _Mapping]] = ..., epoch: _Optional[int] = ..., weights_version: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "reason", "message", "pushback_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PUSHBACK_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    pushback_ms: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., pushback_ms: _Optional[int] = ...) -> None: ...

class ForwardStreamReply(_message.Message):
    __slots__ = ("job_id", "reply", "error")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reply: ForwardReply
    error: Error
    def __init__(self, job_id: _Optional[str] = ..., reply: _Optional[_Union[ForwardReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Lane(_message.Message):
    __slots__ = ("rank", "address", "host_id", "capacity", "lane")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    host_id: str
    capacity: int
    lane: int
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ..., capacity: _Optional[int] = ..., lane: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("seat", "lane", "owner", "position", "slots", "generation")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    seat: int
    lane: int
    owner: int
    position: int
    slots: int
    generation: int
    def __init__(self, seat: _Optional[int] = ..., lane: _Optional[int] = ..., owner: _Optional[int] = ..., position: _Optional[int] = ..., slots: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class GetTopologyReply(_message.Message):
    __slots__ = ("lanes", "generation", "epoch", "serving", "reason", "max_message_bytes", "members", "max_lanes", "max_owners", "away", "begin_at")
    LANES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LANES_FIELD_NUMBER: _ClassVar[int]
    MAX_OWNERS_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    BEGIN_AT_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    generation: int
    epoch: int
    serving: bool
    reason: str
    max_message_bytes: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    max_lanes: int
    max_owners: int
    away: _containers.RepeatedScalarFieldContainer[int]
    begin_at: int
    def __init__(self, lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., serving: _Optional[bool] = ..., reason: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., max_lanes: _Optional[int] = ..., max_owners: _Optional[int] = ..., away: _Optional[_Iterable[int]] = ..., begin_at: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("placement",)
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    placement: bool
    def __init__(self, placement: _Optional[bool] = ...) -> None: ...

class LayerInfo(_message.Message):
    __slots__ = ("layer", "experts", "top_k", "hidden", "inner", "activation", "routing", "scheme", "kernel", "all2all_backend", "wire", "slots", "weights_version")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    ALL2ALL_BACKEND_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str
    routing: str
    scheme: str
    kernel: str
    all2all_backend: str
    wire: str
    slots: _containers.RepeatedScalarFieldContainer[int]
    weights_version: int
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[int] = ..., top_k: _Optional[int] = ..., hidden: _Optional[int] = ..., inner: _Optional[int] = ..., activation: _Optional[str] = ..., routing: _Optional[str] = ..., scheme: _Optional[str] = ..., kernel: _Optional[str] = ..., all2all_backend: _Optional[str] = ..., wire: _Optional[str] = ..., slots: _Optional[_Iterable[int]] = ..., weights_version: _Optional[int] = ...) -> None: ...

class GetModelReply(_message.Message):
    __slots__ = ("model", "architecture", "dtype", "layers", "epoch", "weights_version", "data_parallel_size", "tensor_parallel_size", "expert_parallel_size")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    dtype: DType
    layers: _containers.RepeatedCompositeFieldContainer[LayerInfo]
    epoch: int
    weights_version: int
    data_parallel_size: int
    tensor_parallel_size: int
    expert_parallel_size: int
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., layers: _Optional[_Iterable[_Union[LayerInfo, _Mapping]]] = ..., epoch: _Optional[int] = ..., weights_version: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., expert_parallel_size: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("experts",)
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    experts: bool
    def __init__(self, experts: _Optional[bool] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "up", "address", "steps", "tokens", "weight_bytes", "bytes_read", "pid", "member", "cover", "shadow_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    COVER_FIELD_NUMBER: _ClassVar[int]
    SHADOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    up: bool
    address: str
    steps: int
    tokens: int
    weight_bytes: int
    bytes_read: int
    pid: int
    member: Member
    cover: Cover
    shadow_bytes: int
    def __init__(self, rank: _Optional[int] = ..., up: _Optional[bool] = ..., address: _Optional[str] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., bytes_read: _Optional[int] = ..., pid: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., cover: _Optional[_Union[Cover, _Mapping]] = ..., shadow_bytes: _Optional[int] = ...) -> None: ...

class Cover(_message.Message):
    __slots__ = ("replicas", "shadows", "disk", "waits", "bytes", "why_waits")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WHY_WAITS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    shadows: int
    disk: int
    waits: int
    bytes: int
    why_waits: str
    def __init__(self, replicas: _Optional[int] = ..., shadows: _Optional[int] = ..., disk: _Optional[int] = ..., waits: _Optional[int] = ..., bytes: _Optional[int] = ..., why_waits: _Optional[str] = ...) -> None: ...

class LayerLoad(_message.Message):
    __slots__ = ("layer", "balancedness", "tokens", "prefill_tokens")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BALANCEDNESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    balancedness: float
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prefill_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., balancedness: _Optional[float] = ..., tokens: _Optional[_Iterable[int]] = ..., prefill_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatusReply(_message.Message):
    __slots__ = ("state", "reason", "generation", "epoch", "steps", "jobs", "queued", "in_flight", "ranks", "layers", "version", "max_lanes", "max_owners")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_LANES_FIELD_NUMBER: _ClassVar[int]
    MAX_OWNERS_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    generation: int
    epoch: int
    steps: int
    jobs: int
    queued: int
    in_flight: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    layers: _containers.RepeatedCompositeFieldContainer[LayerLoad]
    version: str
    max_lanes: int
    max_owners: int
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., steps: _Optional[int] = ..., jobs: _Optional[int] = ..., queued: _Optional[int] = ..., in_flight: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[LayerLoad, _Mapping]]] = ..., version: _Optional[str] = ..., max_lanes: _Optional[int] = ..., max_owners: _Optional[int] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("dry_run", "policy", "max_moves")
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_MOVES_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    policy: str
    max_moves: int
    def __init__(self, dry_run: _Optional[bool] = ..., policy: _Optional[str] = ..., max_moves: _Optional[int] = ...) -> None: ...

class MoveInfo(_message.Message):
    __slots__ = ("layer", "expert", "from_rank", "from_slot", "to_rank", "to_slot")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    FROM_RANK_FIELD_NUMBER: _ClassVar[int]
    FROM_SLOT_FIELD_NUMBER: _ClassVar[int]
    TO_RANK_FIELD_NUMBER: _ClassVar[int]
    TO_SLOT_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert: int
    from_rank: int
    from_slot: int
    to_rank: int
    to_slot: int
    def __init__(self, layer: _Optional[int] = ..., expert: _Optional[int] = ..., from_rank: _Optional[int] = ..., from_slot: _Optional[int] = ..., to_rank: _Optional[int] = ..., to_slot: _Optional[int] = ...) -> None: ...

class LayerGain(_message.Message):
    __slots__ = ("layer", "before", "after", "moves")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    before: float
    after: float
    moves: int
    def __init__(self, layer: _Optional[int] = ..., before: _Optional[float] = ..., after: _Optional[float] = ..., moves: _Optional[int] = ...) -> None: ...

class RebalanceReply(_message.Message):
    __slots__ = ("outcome", "reason", "epoch", "moves", "planned_bytes", "layers", "gain", "committed_moves", "epochs", "moved_bytes", "seconds", "corrupted")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_MOVES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CORRUPTED_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    reason: str
    epoch: int
    moves: _containers.RepeatedCompositeFieldContainer[MoveInfo]
    planned_bytes: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerGain]
    gain: float
    committed_moves: int
    epochs: int
    moved_bytes: int
    seconds: float
    corrupted: int
    def __init__(self, outcome: _Optional[str] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., moves: _Optional[_Iterable[_Union[MoveInfo, _Mapping]]] = ..., planned_bytes: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerGain, _Mapping]]] = ..., gain: _Optional[float] = ..., committed_moves: _Optional[int] = ..., epochs: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., corrupted: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    def __init__(self, checkpoint: _Optional[str] = ...) -> None: ...

class ReloadReply(_message.Message):
    __slots__ = ("outcome", "reason", "weights_version", "epochs", "nbytes", "seconds", "epoch", "corrupted")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CORRUPTED_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    reason: str
    weights_version: int
    epochs: int
    nbytes: int
    seconds: float
    epoch: int
    corrupted: int
    def __init__(self, outcome: _Optional[str] = ..., reason: _Optional[str] = ..., weights_version: _Optional[int] = ..., epochs: _Optional[int] = ..., nbytes: _Optional[int] = ..., seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., corrupted: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level", "logger")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    level: str
    logger: str
    def __init__(self, level: _Optional[str] = ..., logger: _Optional[str] = ...) -> None: ...

class LogLevel(_message.Message):
    __slots__ = ("logger", "level")
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    logger: str
    level: str
    def __init__(self, logger: _Optional[str] = ..., level: _Optional[str] = ...) -> None: ...

class SetLogLevelReply(_message.Message):
    __slots__ = ("levels",)
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    levels: _containers.RepeatedCompositeFieldContainer[LogLevel]
    def __init__(self, levels: _Optional[_Iterable[_Union[LogLevel, _Mapping]]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    def __init__(self, ranks: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("outcome", "reason", "seats", "joined", "left", "moves", "nbytes", "epochs", "epoch", "generation", "seconds")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    reason: str
    seats: _containers.RepeatedScalarFieldContainer[int]
    joined: _containers.RepeatedScalarFieldContainer[int]
    left: _containers.RepeatedScalarFieldContainer[int]
    moves: int
    nbytes: int
    epochs: int
    epoch: int
    generation: int
    seconds: float
    def __init__(self, outcome: _Optional[str] = ..., reason: _Optional[str] = ..., seats: _Optional[_Iterable[int]] = ..., joined: _Optional[_Iterable[int]] = ..., left: _Optional[_Iterable[int]] = ..., moves: _Optional[int] = ..., nbytes: _Optional[int] = ..., epochs: _Optional[int] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class OpenDataConnectionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenDataConnectionReply(_message.Message):
    __slots__ = ("port", "secret")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    port: int
    secret: bytes
    def __init__(self, port: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class CreateRegionRequest(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class CreateRegionReply(_message.Message):
    __slots__ = ("name", "size", "socket")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    socket: str
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., socket: _Optional[str] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("name", "key", "offset", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    offset: int
    size: int
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class RegisterRegionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRegionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegionInfo(_message.Message):
    __slots__ = ("name", "size", "in_use", "named")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    in_use: int
    named: bool
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., in_use: _Optional[int] = ..., named: _Optional[bool] = ...) -> None: ...

class ListRegionsReply(_message.Message):
    __slots__ = ("regions",)
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[RegionInfo]
    def __init__(self, regions: _Optional[_Iterable[_Union[RegionInfo, _Mapping]]] = ...) -> None: ...

class ReleaseRegionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReleaseRegionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachLaneRequest(_message.Message):
    __slots__ = ("model", "name", "device", "dtype", "rows", "stages", "answers_handle", "rows_wire", "answer_buffers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_HANDLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_WIRE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    name: str
    device: str
    dtype: DType
    rows: int
    stages: int
    answers_handle: bytes
    rows_wire: str
    answer_buffers: int
    def __init__(self, model: _Optional[str] = ..., name: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., rows: _Optional[int] = ..., stages: _Optional[int] = ..., answers_handle: _Optional[bytes] = ..., rows_wire: _Optional[str] = ..., answer_buffers: _Optional[int] = ...) -> None: ...

class AttachLaneReply(_message.Message):
    __slots__ = ("mailbox", "answers", "mailbox_bytes", "answers_bytes", "socket", "hidden", "experts", "top_k", "layers", "patience_seconds", "mailbox_handle", "rows_wire", "goes_ahead")
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_HANDLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_WIRE_FIELD_NUMBER: _ClassVar[int]
    GOES_AHEAD_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    answers: str
    mailbox_bytes: int
    answers_bytes: int
    socket: str
    hidden: int
    experts: int
    top_k: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    patience_seconds: float
    mailbox_handle: bytes
    rows_wire: str
    goes_ahead: bool
    def __init__(self, mailbox: _Optional[str] = ..., answers: _Optional[str] = ..., mailbox_bytes: _Optional[int] = ..., answers_bytes: _Optional[int] = ..., socket: _Optional[str] = ..., hidden: _Optional[int] = ..., experts: _Optional[int] = ..., top_k: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., patience_seconds: _Optional[float] = ..., mailbox_handle: _Optional[bytes] = ..., rows_wire: _Optional[str] = ..., goes_ahead: _Optional[bool] = ...) -> None: ...

class DetachLaneRequest(_message.Message):
    __slots__ = ("mailbox",)
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    mailbox: str
    def __init__(self, mailbox: _Optional[str] = ...) -> None: ...

class DetachLaneReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDeviceLanesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeviceLaneInfo(_message.Message):
    __slots__ = ("name", "device", "rows", "stages", "bytes", "in_pass", "passes", "steps", "ended", "rows_wire")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_PASS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ROWS_WIRE_FIELD_NUMBER: _ClassVar[int]
    name: str
    device: str
    rows: int
    stages: int
    bytes: int
    in_pass: bool
    passes: int
    steps: int
    ended: str
    rows_wire: str
    def __init__(self, name: _Optional[str] = ..., device: _Optional[str] = ..., rows: _Optional[int] = ..., stages: _Optional[int] = ..., bytes: _Optional[int] = ..., in_pass: _Optional[bool] = ..., passes: _Optional[int] = ..., steps: _Optional[int] = ..., ended: _Optional[str] = ..., rows_wire: _Optional[str] = ...) -> None: ...

class ListDeviceLanesReply(_message.Message):
    __slots__ = ("lanes",)
    LANES_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[DeviceLaneInfo]
    def __init__(self, lanes: _Optional[_Iterable[_Union[DeviceLaneInfo, _Mapping]]] = ...) -> None: ...
