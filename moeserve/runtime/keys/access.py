"""The table of access: every RPC, HTTP path and frame type with the roles that may use it; and the table of
every socket that a process of the service listens on. What is in neither is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What whoever asks may do. Nothing follows from another role."""

    CALL = "call"  # run layers, on lanes and through the front door, and share memory with a lane
    OBSERVE = "observe"  # read status and metrics
    OPERATE = "operate"  # change the running service: rebalance, reload, scale
    MEMBER = "member"  # be a process of this service; shown by the run's token, which nobody can be granted


GRANTED = (Role.CALL, Role.OBSERVE, Role.OPERATE)
"""The roles that a file of grants may name."""

OPEN: frozenset[Role] = frozenset()
"""Of an entry that needs no role: a probe."""

_ANY = frozenset(GRANTED)
_CALL, _OBSERVE, _OPERATE = frozenset({Role.CALL}), frozenset({Role.OBSERVE}), frozenset({Role.OPERATE})
_MEMBER = frozenset({Role.MEMBER})

_LANE = {
    "Forward": _CALL | _MEMBER,  # the front door hands calls on as a member
    "ForwardStream": _CALL,
    "CreateRegion": _CALL,
    "RegisterRegion": _CALL,
    "ListRegions": _CALL,
    "ReleaseRegion": _CALL,
}
_NEW_LANE = _LANE | {"OpenDataConnection": _CALL}  # the old service does not have it
_DEVICE_LANE = {"AttachLane": _CALL, "DetachLane": _CALL, "ListDeviceLanes": _CALL | _OBSERVE}
_FRONT = {
    "Forward": _CALL,
    "ForwardStream": _CALL,
    "GetTopology": _ANY,
    "GetModel": _ANY,
    "GetStatus": _OBSERVE,
}
_OLD_ADMIN = {"Rebalance": _OPERATE, "Reload": _OPERATE}
_ADMIN = _OLD_ADMIN | {"SetLogLevel": _OPERATE, "Scale": _OPERATE}

RPCS: dict[str, frozenset[Role]] = {
    **{f"/moeserve.v1.LaneService/{name}": roles for name, roles in _NEW_LANE.items()},
    **{f"/moeserve.v1.DeviceLaneService/{name}": roles for name, roles in _DEVICE_LANE.items()},
    **{f"/moeserve.v1.FrontService/{name}": roles for name, roles in _FRONT.items()},
    **{f"/moeserve.v1.AdminService/{name}": roles for name, roles in _ADMIN.items()},
    # the old names, for one release
    **{f"/moeserve.v1.MoeService/{name}": roles for name, roles in (_LANE | _FRONT | _OLD_ADMIN).items()},
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
}
"""By a method's full name; the sockets are the front door's and the lanes'."""

PATHS: dict[str, frozenset[Role]] = {
    "/metrics": _OBSERVE,
    "/livez": OPEN,
    "/readyz": OPEN,
    "/startupz": OPEN,
    "/health": OPEN,
}
"""By an HTTP path of the exporters."""


class Frames(Enum):
    """A protocol of frames, and who sends them."""

    TO_HEAD = "what a rank sends the head"
    TO_RANK = "what the head sends a rank"
    TO_OWNER = "what a rank asks the owner of an expert"
    FROM_OWNER = "what the owner of an expert answers"
    LEASE = "what a client sends over a region's lease"
    DATA = "what a client sends over a data connection"


_TO_HEAD = (
    "hello",
    "announce",
    "withdraw",
    "run",
    "done",
    "ordered",
    "report",
    "held",
    "here",
    "prepared",
    "loaded",
    "joined",
    "restored",
    "voted",
    "adopted",
    "drained",
    "failed",
    "store",
    "moved",
    "shadowed",
)
_TO_RANK = (
    "open_layers",
    "steady",
    "welcome",
    "load",
    "prepare",
    "join",
    "step",
    "run",
    "company",
    "commit",
    "stage",
    "abandon",
    "ask",
    "drain",
    "log_levels",
    "abort",
    "stop",
    "stored",
    "ring",
    "moved",
    "peers",
)

FRAMES: dict[Frames, dict[str, frozenset[Role]]] = {
    Frames.TO_HEAD: dict.fromkeys(_TO_HEAD, _MEMBER),
    Frames.TO_RANK: dict.fromkeys(_TO_RANK, _MEMBER),
    Frames.TO_OWNER: dict.fromkeys(("weights", "slots", "handles"), _MEMBER),
    Frames.FROM_OWNER: dict.fromkeys(("slots", "handles", "refused"), _MEMBER),
    # The socket is for this user's processes only, and a region's whole name is told to who made it, which
    # took the role; a call goes over the lease of a region that was fetched by its name.
    Frames.LEASE: {"name": _CALL, "call": _CALL},
    # A secret lets in one connection, and is told to who took the role for that over gRPC.
    Frames.DATA: {"secret": _CALL, "call": _CALL},
}
"""By a protocol and the kind of a frame. A stream's first frame shows the run's token, which stands for the
role on all that follow.
"""


def known_frame(frames: Frames, kind: object) -> str:
    """`kind`, where the table has it. Raises ValueError for a frame that nobody may send there."""
    if not isinstance(kind, str) or kind not in FRAMES[frames]:
        raise ValueError(f"a frame of kind {str(kind)[:40]!r} is not in the table of {frames.value}")
    return kind


def allowed(needed: frozenset[Role] | None, has: Set[Role]) -> bool:
    """Whether an entry's roles let in who has these; None, a thing without an entry, lets in nobody."""
    return needed is not None and (not needed or not needed.isdisjoint(has))


def named(roles: Iterable[Role]) -> str:
    """Roles as people read them."""
    return " or ".join(role.value for role in GRANTED if role in roles) or "none that can be granted"


class Lets(Enum):
    """Whom a socket lets in."""

    KEYED = "who shows what the tables of access ask for"
    PROBES = "anyone, over TLS, who is told whether layers can be served, and nothing else"
    LIBRARY = "whom its library lets in: not encrypted by us"


@dataclass(frozen=True)
class Listener:
    """A kind of socket that processes of the service listen on."""

    name: str
    opened_by: str  # head, rank, prober (the process that answers probes), or launcher
    kind: str  # tcp, unix
    admits: str  # how it knows whom to let in
    most: int = 1  # of one process
    lets_in: Lets = Lets.KEYED


LISTENERS = (
    Listener("front door", "head", "tcp", "TLS; the table of RPCs"),
    Listener("control streams", "head", "tcp", "TLS; the run's token; the table of frames"),
    Listener("rings", "head", "unix", "folder of mode 0700; the peer's uid; the ring's name"),
    Listener("metrics of the head", "head", "tcp", "TLS; the table of HTTP paths"),
    Listener("probes", "head", "tcp", "TLS; anyone", lets_in=Lets.PROBES),
    Listener("gRPC of probes", "prober", "unix", "folder of mode 0700"),
    Listener("lane", "rank", "tcp", "TLS; the table of RPCs"),
    Listener("data connections", "rank", "tcp", "TLS; a secret that a caller got over gRPC"),
    Listener("weights", "rank", "tcp", "TLS; the run's token; the table of frames"),
    Listener("metrics of a rank", "rank", "tcp", "TLS; the table of HTTP paths"),
    Listener("gloo", "rank", "tcp", "not encrypted by us", lets_in=Lets.LIBRARY),
    Listener("region handover", "rank", "unix", "folder of mode 0700; the peer's uid; the region's name"),
    Listener("weights' handles", "rank", "unix", "folder of mode 0700; the peer's uid; the run's token"),
    Listener(
        "fork server", "launcher", "unix", "multiprocessing: folder of mode 0700; one for each launcher"
    ),
)
"""Every listening socket; a test compares it with those of a running service's processes."""
