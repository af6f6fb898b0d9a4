"""The table of what is fuzzed: whatever reads bytes that another process, or a person, has written."""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import torch
from checkpoints import make_checkpoint
from fuzzing import LONGEST_TEXT, Broken, Run, Target
from houses import EP4, house_config
from made_experts import activation_named, make_weights

from bench.lib.mutations import NUMBERS, TEXTS, Mutations
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.store import LENGTH_BYTES, CheckpointError
from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertShape
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.proto.tensors import TensorError
from moeserve.proto.transports.shared_memory import GRANTED, GRANTED_WITH_CALLS, socket_address
from moeserve.quant.format import Scheme
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.runtime.config import Config
from moeserve.runtime.control import messages
from moeserve.runtime.control.acceptor import Guest
from moeserve.runtime.control.frames import LENGTH, decoded, encoded
from moeserve.runtime.control.shadowed import addresses_from
from moeserve.runtime.control.stream import Stream, StreamClosed
from moeserve.runtime.doors.admin_door import AdminDoor
from moeserve.runtime.doors.calls.framing import check_framing
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.lane_door import LaneDoor
from moeserve.runtime.doors.operations import Operations
from moeserve.runtime.doors.passes.announced import LaneMemory, LaneTerms
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.host_steps import HostSteps
from moeserve.runtime.doors.passes.service import begin_at
from moeserve.runtime.doors.payloads import Payloads, RegionLimits, Regions
from moeserve.runtime.doors.payloads.errors import NamedRegionRefused, RegionLimit, UnknownRegion
from moeserve.runtime.doors.request import RequestReader
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator, Progress
from moeserve.runtime.head.placing.changes import rebalance
from moeserve.runtime.head.reception import Seat, refusal_of
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.rank.weights.peers import PeerRefused, Peers, WeightsServer
from moeserve.runtime.sections import ConfigError, KeysConfig
from moeserve.runtime.served import Served, model_name, served_from
from moeserve.runtime.step import Header
from moeserve.runtime.telemetry.exporter import RankTelemetry
from moeserve.runtime.telemetry.logs import checked_level

Opened = Iterator[tuple[list[bytes], Run]]

ANSWER_SECONDS = 4.0  # for a call that has a thread of its own to end

INTERNAL = grpc.StatusCode.INTERNAL.value[0]
MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
"""What `Reception` takes as a message that is no message; the stream ends with a line."""


# -- calls --------------------------------------------------------------------------------------------------


def model_in(folder: Path) -> Path:
    """A tiny checkpoint, made once."""
    path = folder / "model"
    if not path.exists():
        make_checkpoint("qwen3_moe", path, hidden=32, inner=32, experts=4, layers=2)
    return path


def forward_requests(served: Served, name: str) -> list[bytes]:
    """Requests that are right: a choice, logits, none of them, no rows, a region."""
    random = np.random.default_rng(0)
    hidden, experts = served.checkpoint.hidden, served.checkpoint.num_experts

    def tensor(array: np.ndarray, code: int) -> moe_pb2.Tensor:
        return moe_pb2.Tensor(dtype=code, shape=array.shape, data=array.tobytes())  # type: ignore[arg-type]

    def rows(count: int) -> moe_pb2.Tensor:
        return tensor(random.standard_normal((count, hidden), dtype=np.float32), moe_pb2.DTYPE_FP32)

    ids = np.array([[0, 1], [2, 3], [-1, 1]], dtype=np.int32)
    choice = moe_pb2.Choice(
        ids=tensor(ids, moe_pb2.DTYPE_INT32),
        weights=tensor(np.full((3, 2), 0.5, dtype=np.float32), moe_pb2.DTYPE_FP32),
    )
    logits = tensor(random.standard_normal((3, experts), dtype=np.float32), moe_pb2.DTYPE_FP32)
    region = moe_pb2.Region(name="region-1-" + "0" * 32, offset=0, size=3 * hidden * 4)
    placed = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(3, hidden), region=region)
    layer = served.layers[0]
    made = [
        moe_pb2.ForwardRequest(layer=layer, hidden=rows(3), choice=choice, model=name, job_id="a"),
        moe_pb2.ForwardRequest(layer=layer, hidden=rows(3), logits=logits, timeout_ms=1000),
        moe_pb2.ForwardRequest(layer=layer, hidden=rows(3)),
        moe_pb2.ForwardRequest(layer=layer, hidden=rows(0), logits=tensor(logits_of(0, experts), 1)),
        moe_pb2.ForwardRequest(layer=layer, hidden=placed, choice=choice, output=region),
    ]
    return [each.SerializeToString() for each in made]


def logits_of(rows: int, experts: int) -> np.ndarray:
    return np.zeros((rows, experts), dtype=np.float32)


class Door:
    """A lane's door over a lane that nobody runs steps of."""

    def __init__(self, folder: Path) -> None:
        config = house_config(model_in(folder), **EP4)
        self.served = served_from(config)
        self.regions = Regions(RegionLimits(max_bytes=1 << 20))
        name = model_name(config)
        self.reader = RequestReader(
            name, self.served, lambda layer: (self.served.checkpoint.gate(layer), 1), Payloads(self.regions)
        )
        self.lane = Lane(0, 64, 8)
        self.lane.open()
        self.door = LaneDoor(self.reader, self.lane, self.regions, lambda: 1, lambda *seen: None)
        self.seeds = forward_requests(self.served, name)
        region, _ = self.regions.create(4096)
        with_region = moe_pb2.ForwardRequest.FromString(self.seeds[-1])
        with_region.hidden.region.name = with_region.output.name = region
        self.seeds.append(with_region.SerializeToString())

    def close(self) -> None:
        self.regions.close()

    def check_nothing_held(self) -> None:
        """Raises Broken where an input has left something behind."""
        held = self.lane, self.regions
        within(ANSWER_SECONDS, lambda: not (held[0].in_flight or any(one.in_use for one in held[1].list())))
        if self.lane.in_flight:
            raise Broken(f"{self.lane.in_flight} calls are left in the lane")
        if any(region.in_use for region in self.regions.list()):
            raise Broken("a region is still in use")


def within(seconds: float, true: Callable[[], bool]) -> None:
    """Waits until it is true, so long at most."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.001)


def check_status(error: Exception) -> None:
    """Raises Broken where a failure is none of the table's, or its text is too long."""
    status = status_of(error)
    if status.code == "INTERNAL":
        raise Broken(f"INTERNAL: {type(error).__name__}: {str(error)[:200]}") from error
    if len(status.message.encode(errors="replace")) > LONGEST_TEXT:
        raise Broken(f"{status.reason} has a text of {len(status.message)} characters") from error


@contextmanager
def requests(folder: Path) -> Opened:
    """ForwardRequest: framing, parsing, checks, routing, and what the lane takes."""
    with closing(Door(folder)) as door:

        def run(data: bytes) -> None:
            try:
                check_framing(data, forward=True)
                asked = door.reader.read(moe_pb2.ForwardRequest.FromString(data))
                with closing(asked):
                    call = door.lane.submit(asked.batch)
                    door.lane.cancel(call)
            except Exception as error:
                check_status(error)
            door.check_nothing_held()

        yield door.seeds, run


@contextmanager
def packets(folder: Path) -> Opened:
    """Calls over a region's lease."""
    with closing(Door(folder)) as door:

        def run(data: bytes) -> None:
            answers: list[bytes] = []
            leave = door.door.leases.take_packet(data, answers.append)
            leave()
            within(
                ANSWER_SECONDS, lambda: bool(answers)
            )  # requests that take long have a thread of their own
            if len(answers) != 1:
                raise Broken(f"a call over a lease has {len(answers)} answers")
            reply = moe_pb2.ForwardStreamReply.FromString(answers[0])
            if reply.error.code == INTERNAL or len(reply.error.message.encode()) > LONGEST_TEXT:
                raise Broken(f"a call over a lease is answered {reply.error.message[:200]}")
            door.check_nothing_held()

        yield door.seeds, run


def of_request(mutations: Mutations, data: bytes, others: list[bytes]) -> bytes:
    """A variant of a ForwardRequest."""
    return mutations.of_message(moe_pb2.ForwardRequest(), data)


@contextmanager
def mailboxes(folder: Path) -> Opened:
    """A device lane whose caller writes any words at any time: an input is a list of writes and looks."""
    house = Door(folder)
    checkpoint = house.served.checkpoint
    model = (checkpoint.hidden, checkpoint.num_experts, checkpoint.top_k)
    layout = MailboxLayout.of((2, 2), model, "fp32", buffers=2)
    layer, head = house.served.layers[0], layout.header(0)
    together = HostSteps(
        house.lane,
        (torch.float32, checkpoint.num_experts, ANSWER_SECONDS),
        lambda: house.door.admission,
        lambda: "",
        lambda *seen: None,
    )
    announced = [[m.STEPS, 1], [m.STAGES, 2], [m.FLAGS, 1], [m.LAYERS, layer], [m.ANNOUNCED, 1]]
    posted = [[head + m.LAYER, layer], [head + m.COUNT, 1], [head + m.TAG, m.tag_of(1, 0)]]
    seeds = [
        [*announced, "look", *posted, "look"],
        [*announced, "look", "look", *posted, [head + m.KIND, 1], "look", [m.GIVEN_UP, 1], "look"],
        [*announced, [head + m.BUFFER, 1], *posted, "look", "look", [m.ANNOUNCED, 2], "look"],
    ]

    def run(data: bytes) -> None:
        try:
            steps = json.loads(data)
        except (ValueError, RecursionError):
            return
        names = [house.regions.create(size)[0] for size in (layout.mailbox_bytes, layout.answers_bytes)]
        held = [house.regions.hold(n, 0, s) for n, s in zip(names, _sizes(layout), strict=True)]
        terms = LaneTerms(frozenset(house.served.layers), 5.0, 5.0, lambda status: None)
        lane = DeviceLane(
            LaneMemory(*names, (held[0], held[1]), layout, lambda: True),
            terms,
            begin_at(house.door)("tester"),
        )
        lane.steps, lane.peer = together, "tester"
        words = held[0].memory.cast("B").cast("Q")
        for step in steps if isinstance(steps, list) else []:
            if isinstance(step, list) and len(step) == 2 and all(type(n) is int for n in step):
                words[step[0] % len(words)] = step[1] % 2**64
            elif step == "look":
                lane.look(time.monotonic())
                together.begin()
        lane.detach("the input has ended")
        within(ANSWER_SECONDS, lambda: not lane.in_pass)
        told = held[1].memory.cast("B").cast("Q")
        if lane.in_pass or told[m.TEXT_BYTES] > LONGEST_TEXT:
            raise Broken(f"a pass is left, or has a text of {told[m.TEXT_BYTES]} bytes")
        if told[m.ENDED] and told[m.STATUS] not in set(m.Status):
            raise Broken(f"a pass ended with {told[m.STATUS]}")
        lane.close()
        for name in names:
            house.regions.release(name)
        house.check_nothing_held()

    with closing(house):
        yield [json.dumps(seed).encode() for seed in seeds], run


def _sizes(layout: MailboxLayout) -> tuple[int, int]:
    return layout.mailbox_bytes, layout.answers_bytes


@contextmanager
def regions(folder: Path) -> Opened:
    """Everything that callers may do with regions: an input is a list of such things, as JSON."""
    seeds = [
        [["create", 4096], ["hold", 0, 0, 64], ["release", 0], ["list"]],
        [["create", 1], ["create", 1 << 19], ["create", 1 << 20], ["hold", 1, 5000, 1], ["release", 5]],
        [["register", "a", "/moeserve-none", 0, 64], ["hold", "a", 0, 1], ["release", "a"], ["grant", 0]],
    ]
    named = (TensorError, RegionLimit, UnknownRegion, NamedRegionRefused)
    made = Regions(RegionLimits(max_bytes=1 << 20, max_regions=8, allow_named=True))

    def run(data: bytes) -> None:
        try:
            steps = json.loads(data)
        except (ValueError, RecursionError):
            return
        names: list[str] = []
        for step in steps if isinstance(steps, list) else []:
            if isinstance(step, list) and step and all(_plain(part) for part in step):
                try:
                    _one_step(made, step, names)
                except named as error:
                    check_status(error)
        for name in names:
            try:
                made.release(name)
            except UnknownRegion:
                continue  # released by the input
        if made.bytes or made.list():
            raise Broken(f"{made.bytes} bytes are taken when every region is released")

    with closing(made):
        yield [json.dumps(seed).encode() for seed in seeds], run


def _plain(part: Any) -> bool:
    """Whether a contract's field can hold it: a name, or a number of 64 bits."""
    if isinstance(part, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in part)
    return type(part) is int and 0 <= part < 1 << 64


def _one_step(made: Regions, step: list[Any], names: list[str]) -> None:
    def name(part: Any) -> str:
        return names[part % len(names)] if isinstance(part, int) and names else str(part)

    match step:
        case ["create", int(size)]:
            names.append(made.create(size, "tester")[0])
        case ["register", str(wanted), str(key), int(offset), int(size)]:
            made.register(wanted, key, offset, size)
            names.append(wanted)
        case ["hold", wanted, int(offset), int(size)]:
            made.hold(name(wanted), offset, size).close()
        case ["release", wanted]:
            made.release(name(wanted))
        case ["list"]:
            made.list()


def of_json(mutations: Mutations, data: bytes, others: list[bytes]) -> bytes:
    """A variant of a JSON text."""
    return mutations.of_json(data)


def of_bytes(mutations: Mutations, data: bytes, others: list[bytes]) -> bytes:
    """A variant of bytes."""
    return mutations.of_bytes(data, others)


@contextmanager
def handover(folder: Path) -> Opened:
    """Packets of one connection to the socket that hands regions over, each with two bytes of length."""
    made = Regions(RegionLimits(max_bytes=1 << 20))
    name, _ = made.create(4096)
    made.take_call = lambda packet, answer: lambda: None

    def run(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(5.0)
            client.connect(socket_address(made.socket))
            try:
                while data:
                    size = int.from_bytes(data[:2], "little") % 4096
                    client.send(data[2 : 2 + size] or b"\x00")
                    data = data[2 + size :]
            except (BrokenPipeError, ConnectionResetError):
                pass  # what was wrong has ended the connection
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as good:
            good.settimeout(5.0)
            good.connect(socket_address(made.socket))
            kept, _ = made.create(4096)
            good.send(kept.encode())
            said, descriptors, _, _ = socket.recv_fds(good, 64, 1)
            for descriptor in descriptors:
                socket.close(descriptor)
            if said not in (GRANTED, GRANTED_WITH_CALLS):
                raise Broken(f"a good client was answered {said!r}")
            made.release(kept)

    def packed(*parts: bytes) -> bytes:
        return b"".join(struct.pack("<H", len(part)) + part for part in parts)

    with closing(made):
        seeds = [
            packed(name.encode(), b"a call"),
            packed(b"region-1"),
            packed(b"\xff" * 300),
            packed(b"", b""),
        ]
        yield seeds, run


# -- control streams ----------------------------------------------------------------------------------------


def frame(value: Any) -> bytes:
    """A message as it travels."""
    return struct.pack("<I", len(value)) + value if isinstance(value, bytes) else encoded(value)


def text_of(message: dict[str, Any]) -> bytes:
    """A message as JSON, which mutations know; bytes in it are maps of their digits."""
    return json.dumps(message, default=lambda value: {"bytes": bytes(value).hex()}).encode()


def message_of(text: bytes) -> dict[str, Any]:
    """What a stream would hand over of a message whose text this is. Raises StreamClosed where it is none."""

    def plain(value: dict[str, Any]) -> Any:
        return bytes.fromhex(value["bytes"]) if value.keys() == {"bytes"} else value

    try:
        message = json.loads(text, object_hook=plain)
        return decoded(encoded(message)[LENGTH.size :])
    except (AttributeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise StreamClosed(f"it is no message: {type(error).__name__}") from error


@contextmanager
def frames(folder: Path) -> Opened:
    """Frames of a control stream, the first and those behind it."""

    def run(data: bytes) -> None:
        with closing_pair() as (mine, other):
            _fed(other, data)
            with closing(Stream(mine)) as stream:
                stream.receive_first(5.0)
                while True:
                    stream.receive()

    seeds = [
        frame({"kind": "hello", "rank": 0}) + frame({"kind": "done"}),
        frame(b"[]"),
        frame(b'{"kind":') + b"\x00",
        struct.pack("<I", 1 << 30) + b"{}",
    ]
    yield seeds, run


@contextmanager
def closing_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected TCP sockets of loopback, as control streams are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname(), 5.0)
        other, _ = listener.accept()
    with mine, other:
        yield mine, other


def _fed(other: socket.socket, data: bytes) -> None:
    """Has a thread send `data` and then nothing, and read what comes back until nothing does."""

    def feed() -> None:
        try:
            other.settimeout(10.0)
            other.sendall(data)
            other.shutdown(socket.SHUT_WR)
            while other.recv(1 << 16):
                continue
        except OSError:
            return  # the other end has closed

    threading.Thread(target=feed, daemon=True).start()


class Told:
    """A member's stream as the head has it: keeps nothing of what is sent."""

    def send(self, message: dict[str, Any]) -> None:
        self.send_bytes(encoded(message))

    def send_bytes(self, data: bytes) -> None:
        return

    def close(self) -> None:
        return


def member_messages() -> list[dict[str, Any]]:
    """What members say to the head, each kind."""
    tokens = np.zeros((2, 2, 4), dtype=np.int64)
    said: list[dict[str, Any]] = [
        {"kind": "announce", "job": 1, "layer": 3, "rows": 2, "left": None},
        {"kind": "announce", "job": 2, "layer": 4, "rows": 2, "left": 5.0},
        {"kind": "withdraw", "jobs": [1, 2]},
        {"kind": "done", "step": 1},
        messages.report_message(1, (3, 4), tokens),
        {"kind": "here"},
        {"kind": "prepared", "bytes_read": 1, "weight_bytes": 2, "lacks": []},
        {"kind": "joined", "plans": [[3, "kernel", "dispatcher", "bf16"]]},
        {"kind": "voted", "change": 1, "staged": [[0, 1, "ab", "stream", 10, 0.1, 0]], "refused": ""},
        {"kind": "adopted", "change": 1},
        {"kind": "shadowed", "epoch": 1, "layers": [0, 1], "nbytes": 10},
        {"kind": "drained"},
        {"kind": "failed", "reason": "rank 0: a step failed"},
    ]
    return [{"generation": 1} | each for each in said]


class Head:
    """A group of two members that serves, without threads: a new one where an input has ended it."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(
            Epoch.first(Mesh(2, 1, 2), layers=2, experts=4), (3, 4), StepPace(8, 16), "127.0.0.1", "token"
        )
        self.coordinator._reception.close()
        for rank in (0, 1):
            hello = {"kind": "hello", "rank": rank, "token": "token", "pid": 100 + rank, "host_id": "here"}
            self.introduce(hello | {"address": f"door {rank}"})
        self.tick()
        for kind in (
            {"kind": "prepared", "bytes_read": 0, "weight_bytes": 0, "lacks": []},
            {"kind": "joined", "plans": []},
        ):
            for rank in (0, 1):
                self.hear(rank, kind | {"generation": 1})

    def introduce(self, hello: dict[str, Any]) -> None:
        rank, seat = self.coordinator._reception._introduced(hello, Told())  # type: ignore[arg-type]
        self.coordinator.rank_connected(rank, seat, refusal_of(hello))

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        self.coordinator.message_received(rank, self.coordinator.seats()[rank], message)

    def tick(self) -> None:
        """What the thread that keeps the pace does; whatever it raises ends the service."""
        try:
            with self.coordinator._lock:
                self.coordinator.generations.advance(1e12)
                self.coordinator._steps.begin()
        except Exception as error:
            raise Broken(f"the head's own thread ends: {type(error).__name__}: {error}") from error

    @property
    def steady(self) -> bool:
        state = self.coordinator.generations
        return state.steady and self.coordinator.generation == 1 and len(self.coordinator.seats()) == 2


@contextmanager
def steady_head(kept: list[Head]) -> Iterator[Head]:
    """The head that is kept, or a new one where that one is not steady; it ticks afterwards."""
    if not kept[0].steady:
        kept[0] = Head()
    try:
        yield kept[0]
    finally:
        kept[0].tick()


@contextmanager
def member_says(folder: Path) -> Opened:
    """What the head hears of a member that has shown the token."""
    head = [Head()]

    def run(data: bytes) -> None:
        message = message_of(data)
        with steady_head(head) as hearing:
            hearing.hear(0, message)

    yield [text_of(each) for each in member_messages()], run


class HeadAgain:
    """A head that has started again, and two members of the one before it, without threads."""

    def __init__(self, first: Epoch) -> None:
        self.coordinator = Coordinator(first, (3, 4), StepPace(8, 16), "127.0.0.1", "token")
        self.coordinator._reception.close()
        self.coordinator.recover(60.0)
        hello = {"kind": "hello", "token": "token", "host_id": "here", "address": "door", "again": True}
        self.seats = [self._introduced(hello | {"rank": rank, "pid": 100 + rank}) for rank in (0, 1)]

    def _introduced(self, hello: dict[str, Any]) -> Seat:
        rank, seat = self.coordinator._reception._introduced(hello, Told())  # type: ignore[arg-type]
        self.coordinator.rank_connected(rank, seat, None)
        return seat

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        self.coordinator.message_received(rank, self.seats[rank], message)

    def tick(self) -> None:
        """What the thread that keeps the pace does; whatever it raises ends the service."""
        try:
            with self.coordinator._lock:
                assert self.coordinator._recovering is not None
                self.coordinator._recovering.advance(1e12)
                self.coordinator.generations.advance(1e12)
        except Exception as error:
            raise Broken(f"the head's own thread ends: {type(error).__name__}: {error}") from error


@contextmanager
def member_held(folder: Path) -> Opened:
    """What a head that has started again hears of a member that comes back."""
    first = Epoch.first(Mesh(2, 1, 2), layers=2, experts=4)
    moved = first.moved(1, np.array([1, 0, 2, 3], dtype=np.int32))
    seeds = [messages.held_message(7, moved), messages.held_message(0, None)]

    def run(data: bytes) -> None:
        head = HeadAgain(first)
        try:
            head.hear(0, message_of(data) | {"kind": "held"})
        finally:
            head.hear(1, messages.held_message(3, first))
            head.tick()

    yield [text_of(each) for each in seeds], run


@contextmanager
def hellos(folder: Path) -> Opened:
    """What the head hears first of whoever connects."""
    hello = {"kind": "hello", "rank": 1, "token": "token", "pid": 7, "host_id": "here", "address": "a:1"}
    more = {"metrics": "m:1", "weights": "w:1", "plans": [[3, "k", "d", "w"]]}
    seeds = [hello, hello | more, hello | {"refused": "it cannot start"}, {"kind": "hello"}]
    head = [Head()]

    def run(data: bytes) -> None:
        message = message_of(data)
        with steady_head(head) as hearing:
            hearing.introduce(message)

    yield [text_of(each) for each in seeds], run


@contextmanager
def head_says(folder: Path) -> Opened:
    """What a rank reads of the head's messages."""
    epoch = Epoch.first(Mesh(2, 1, 2), layers=2, experts=4)
    slots = epoch.placement.slots.copy()
    slots[0, [0, 2]] = slots[0, [2, 0]]
    (change, *_) = rebalance(epoch, epoch.placement.with_slots(slots), staging_slots=2)
    step = messages.header_message(Header(1, 1, 3, (2, 0), ((1, 2),)), 1)
    stage = messages.stage_message(1, change, 3, 0) | {"generation": 1, "peers": {"0": ["a:1", "here"]}}
    peers = {"kind": "peers", "addresses": {"0": "a:1", "1": ""}}
    seeds = [messages.epoch_message(epoch), step, stage, messages.commit_message(1, change, 1), peers]
    reads: dict[Any, Callable[[dict[str, Any]], object]] = {
        "epoch": messages.epoch_from,
        "step": messages.header_from,
        "stage": messages.order_from,
        "peers": addresses_from,
        "commit": lambda message: messages.committed_epoch(message, epoch),
    }

    def run(data: bytes) -> None:
        message = message_of(data)
        kind = message["kind"]
        if isinstance(kind, str) and kind in reads:
            reads[kind](message)

    yield [text_of(each) for each in seeds], run


# -- movers -------------------------------------------------------------------------------------------------

LAYER, TOKEN, SLOTS = 3, "secret", 2
SCHEME = Scheme(FP8_BLOCK, FP8_GROUP)
SHAPE = ExpertShape(128, 128, activation_named("silu"), bias=False)


def bank() -> Bank:
    """Two prepared experts."""
    made = Bank()
    kernel = KERNELS["torch_grouped_mm"].build(KernelSpec(SCHEME, SHAPE, torch.bfloat16))
    weights = make_weights(SHAPE, SLOTS, SCHEME.weights, torch.Generator().manual_seed(0))
    made.load(LAYER, kernel, weights, list(range(SLOTS)))
    return made


@contextmanager
def weights_asked(folder: Path) -> Opened:
    """What a rank hears of whoever wants its experts."""
    made = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", bank())
    made.holds = lambda slot, which: which.expert == slot + 1
    hello = frame({"kind": "weights", "token": TOKEN})
    asked = {"kind": "slots", "layer": LAYER, "slots": [0], "how": "stream"}
    seeds = [
        hello + frame(asked),
        hello + frame(asked | {"layer": 9}),
        hello + frame(asked | {"experts": [1], "version": 1}),
        frame({"kind": "weights", "token": "x"}),
    ]

    def run(data: bytes) -> None:
        with closing_pair() as (mine, other):
            _fed(other, data)
            stream = Stream(mine)
            stream.bound_sends(5.0)
            strangers = threading.BoundedSemaphore()
            strangers.acquire()
            made._streams.add(stream)
            made._serve(stream, Guest(mine, "a peer", strangers), near=False)
        if made._streams:
            raise Broken("a stream that has ended is still counted")

    with closing(made):
        yield seeds, run


def of_frames(mutations: Mutations, data: bytes, others: list[bytes]) -> bytes:
    """A variant of frames: of their bytes, or of one body, with its right length."""
    bodies, rest = [], data
    while len(rest) >= 4 and (size := int.from_bytes(rest[:4], "little")) <= len(rest) - 4:
        bodies.append(rest[4 : 4 + size])
        rest = rest[4 + size :]
    if not bodies or mutations.random.random() < 0.3:
        return mutations.of_bytes(data, others)
    at = mutations.random.randrange(len(bodies))
    try:
        bodies[at] = encoded(message_of(mutations.of_json(text_of(decoded(bodies[at])))))[LENGTH.size :]
    except (ValueError, StreamClosed):
        return mutations.of_bytes(data, others)
    return b"".join(map(frame, bodies)) + rest


@contextmanager
def weights_given(folder: Path) -> Opened:
    """What a rank hears of a peer that it asked for experts: the answer, and bytes behind it."""
    held = bank()
    (slot,) = [held.slot(LAYER, 0)]
    rooms = [{name: torch.zeros_like(tensor) for name, tensor in slot.items()}]
    sizes = [[name, slot[name].nbytes] for name in sorted(slot)]
    body = b"".join(
        slot[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in sorted(slot)
    )
    reply = {"kind": "slots", "checksums": ["ab"], "tensors": [sizes]}
    seeds = [frame(reply) + body, frame({"kind": "refused", "reason": "no"}), frame(reply)]
    copier = Copier(0, "cpu")

    def run(data: bytes) -> None:
        peers = Peers(Keys(KeysConfig(), TOKEN), "cpu", within=5.0)
        with closing_pair() as (mine, other), closing(peers):
            _fed(other, data)
            stream = Stream(mine)
            stream.bound_receives(5.0)
            peers._links["peer:1"] = stream
            peers.fetch("peer:1", LAYER, [0], rooms, copier)

    yield seeds, run


# -- files --------------------------------------------------------------------------------------------------


@contextmanager
def headers(folder: Path) -> Opened:
    """The header of a safetensors file, with the length before it; the tensors' bytes follow."""
    source, path = model_in(folder), folder / "headers"
    shutil.copytree(source, path, dirs_exist_ok=True)
    file = path / "model.safetensors"
    whole = (source / "model.safetensors").read_bytes()
    size = LENGTH_BYTES + int.from_bytes(whole[:LENGTH_BYTES], "little")

    def run(data: bytes) -> None:
        file.write_bytes(data + whole[size:])
        opened = Checkpoint(path)
        for layer in opened.layers:
            opened.experts(layer, [0])

    yield [whole[:size]], run


def of_header(mutations: Mutations, data: bytes, others: list[bytes]) -> bytes:
    """A variant of a header: of its bytes, or of its values with the right length before them."""
    if mutations.random.random() < 0.3:
        return mutations.of_bytes(data, others)
    text = mutations.of_json(data[LENGTH_BYTES:])
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@contextmanager
def model_configs(folder: Path) -> Opened:
    """A checkpoint's config.json."""
    source, path = model_in(folder), folder / "configs"
    shutil.copytree(source, path, dirs_exist_ok=True)
    producers = sorted((Path(__file__).parents[1] / "producers").glob("*/config.json"))
    seeds = [(source / "config.json").read_bytes(), *(each.read_bytes() for each in producers)]

    def run(data: bytes) -> None:
        (path / "config.json").write_bytes(data)
        opened = Checkpoint(path)
        for layer in opened.layers:
            opened.gate(layer)
            opened.shape(layer)
            opened.scheme(layer)

    yield seeds, run


@contextmanager
def indexes(folder: Path) -> Opened:
    """The index of a checkpoint of several files."""
    path = folder / "indexes"
    make_checkpoint("qwen3_moe", path, hidden=32, inner=32, experts=4, layers=1, shards=2)
    index = path / "model.safetensors.index.json"

    def run(data: bytes) -> None:
        index.write_bytes(data)
        Checkpoint(path)

    yield [index.read_bytes()], run


CONFIG = """
[model]
checkpoint = "/model"
layers = [0, 2]
[parallel]
data_parallel_size = 4
tensor_parallel_size = 2
enable_expert_parallel = true
[step]
lane_rows = 512
timeout_seconds = 30.0
[balance]
policy = "incremental"
[members]
max_lanes = 9
[server]
port = 50051
metrics_port = 0
[log]
level = "info"
format = "json"
"""


@contextmanager
def configurations(folder: Path) -> Opened:
    """The configuration file."""
    file = folder / "config.toml"

    def run(data: bytes) -> None:
        file.write_bytes(data)
        Config.load(file).checked()

    yield [CONFIG.encode(), "\n".join(Config().lines()).encode()], run


def of_toml(mutations: Mutations, data: bytes, others: list[bytes]) -> bytes:
    """A variant of a TOML text: of its bytes, or of one value."""
    values = list(re.finditer(rb"= (.*)", data))
    if not values or mutations.random.random() < 0.4:
        return mutations.of_bytes(data, others)
    found = mutations.random.choice(values)
    value = mutations.random.choice(
        (
            str(mutations.random.choice(NUMBERS)),
            json.dumps(mutations.random.choice(TEXTS)),
            mutations.random.choice(("nan", "-inf", "1e400", "true", "[]", "{a = 1}", "1979-05-27", "[[1]]")),
        )
    )
    return data[: found.start(1)] + value.encode() + data[found.end(1) :]


# -- operators, probes --------------------------------------------------------------------------------------


class Aborted(Exception):
    """An RPC that ended with a status."""


class Context:
    """An RPC's context that keeps how it ended."""

    def is_active(self) -> bool:
        return True

    def set_trailing_metadata(self, metadata: object) -> None:
        return

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        if code is grpc.StatusCode.INTERNAL:
            raise Broken(f"INTERNAL: {text[:200]}")
        raise Aborted(text)


@contextmanager
def operations(folder: Path) -> Opened:
    """Rebalance, Reload, SetLogLevel or Scale, as the first byte tells, at a group that does not serve."""
    served = served_from(house_config(model_in(folder), **EP4))
    progress = Progress("forming", "ranks are missing", 1, 0, 0, 0, 0)

    def wait_serving(timeout: float) -> None:
        raise TimeoutError(progress.reason)

    coordinator: Any = SimpleNamespace(
        progress=lambda: progress, set_log_levels=lambda levels: None, wait_serving=wait_serving
    )
    made = Operations(served, SimpleNamespace(coordinator=coordinator), str(folder))  # type: ignore[arg-type]
    made.on_log_level = lambda logger, level: dict([checked_level(logger, level)])  # sets none here
    door, context = AdminDoor(made), Context()
    kinds: list[tuple[Any, Callable[..., object]]] = [
        (moe_pb2.RebalanceRequest, door.Rebalance),
        (moe_pb2.ReloadRequest, door.Reload),
        (moe_pb2.SetLogLevelRequest, door.SetLogLevel),
        (moe_pb2.ScaleRequest, door.Scale),
    ]

    def run(data: bytes) -> None:
        kind, answer = kinds[data[0] % len(kinds) if data else 0]
        try:
            request = kind.FromString(data[1:])
        except Exception as error:
            check_status(error)
            return
        answer(request, context)

    seeds = [
        b"\x00" + moe_pb2.RebalanceRequest(policy="eplb", max_moves=3, dry_run=True).SerializeToString(),
        b"\x01" + moe_pb2.ReloadRequest(checkpoint=str(folder / "model")).SerializeToString(),
        b"\x01" + moe_pb2.ReloadRequest(checkpoint="/\x00").SerializeToString(),
        b"\x02" + moe_pb2.SetLogLevelRequest(level="info", logger="moeserve.runtime").SerializeToString(),
        b"\x03" + moe_pb2.ScaleRequest(ranks=3).SerializeToString(),
    ]
    yield seeds, run


def of_operation(mutations: Mutations, data: bytes, others: list[bytes]) -> bytes:
    """A variant of an operator's request, with its first byte."""
    kinds = (
        *(moe_pb2.RebalanceRequest, moe_pb2.ReloadRequest),
        *(moe_pb2.SetLogLevelRequest, moe_pb2.ScaleRequest),
    )
    first = data[0] if data else 0
    return bytes([first]) + mutations.of_message(kinds[first % len(kinds)](), data[1:])


@contextmanager
def scrapes(folder: Path) -> Opened:
    """Bytes to an exporter."""
    telemetry = RankTelemetry("model", 0, "1", {3: ["naive"]})
    port = telemetry.serve("127.0.0.1", 0)

    def run(data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), 5.0) as client:
            client.settimeout(5.0)
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    continue
            except ConnectionError:
                pass  # refused in the middle of it
        with socket.create_connection(("127.0.0.1", port), 5.0) as good:
            good.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            if b" 200 " not in good.recv(1 << 16):
                raise Broken("a good probe has another answer")

    try:
        get = b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
        yield [get, b"GET /readyz HTTP/1.0\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET /livez\r\n"], run
    finally:
        telemetry.close()


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("requests", requests, of_request, ()),
        Target("packets", packets, of_request, ()),
        Target("mailboxes", mailboxes, of_json, ()),
        Target("regions", regions, of_json, ()),
        Target("handover", handover, of_bytes, ()),
        Target("frames", frames, of_frames, (StreamClosed,)),
        Target("member_held", member_held, of_json, (StreamClosed, *MALFORMED), texts=False),
        Target("hellos", hellos, of_json, (StreamClosed, *MALFORMED), texts=False),
        Target("member_says", member_says, of_json, (StreamClosed, *MALFORMED), texts=False),
        Target("head_says", head_says, of_json, (Exception,), texts=False),  # as a rank reports them
        Target("weights_asked", weights_asked, of_frames, ()),
        Target("weights_given", weights_given, of_frames, (StreamClosed, PeerRefused)),
        Target("headers", headers, of_header, (CheckpointError,)),
        Target("model_configs", model_configs, of_json, (ValueError,)),
        Target("indexes", indexes, of_json, (CheckpointError,)),
        Target("configurations", configurations, of_toml, (ConfigError,)),
        Target("operations", operations, of_operation, (Aborted,)),
        Target("scrapes", scrapes, of_bytes, ()),
    )
}
"""The table; a new one is a function and a line here."""
