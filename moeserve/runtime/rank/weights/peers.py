"""`WeightsServer` gives peers the experts this rank holds; `Peers` are the links to theirs.

A copy is asked for on a stream of its own: the answer names the expert's tensors and its checksum, taken by
the owner, and then come the bytes, or, where both are GPUs of one host, what maps the owner's storage. The
tensors of one expert travel together: codes, scales, zero points, biases.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moeserve.experts.bank import Bank
from moeserve.experts.checksum import Slot
from moeserve.proto.texts import clipped, listed
from moeserve.runtime.control.acceptor import Acceptor, Guest
from moeserve.runtime.control.stream import Message, Stream, StreamClosed, StreamSilent, connect
from moeserve.runtime.keys.access import Frames, known_frame
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.keys.sockets import listen_privately, peer_of, remove
from moeserve.runtime.rank.weights.copies import PIECE, Copier
from moeserve.runtime.rank.weights.cuda_ipc import opened, shared

log = logging.getLogger(__name__)

T = TypeVar("T")

WITHIN_SECONDS = 20.0
UNREAD_SECONDS = 60.0  # a peer that takes no byte for so long gets no more
HELLO_SECONDS = 10.0  # within which whoever connects has to show the token


MALFORMED = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, IndexError)
"""What it raises to read a message that is of another form than expected."""


class HeldExpert(NamedTuple):
    """One expert as a slot may hold it."""

    layer: int  # decoder index
    expert: int
    version: int  # of the weights


class PeerRefused(RuntimeError):
    """A peer does not give an expert, and says why; or what it says cannot be understood."""

    def __init__(self, why: str) -> None:
        super().__init__(clipped(why))


def unread_seconds(rate: float) -> float:
    """How long a peer may take no byte: longer than a rate of bytes a second (0: none) pauses it."""
    return max(UNREAD_SECONDS, 4 * PIECE / rate) if rate else UNREAD_SECONDS


class WeightsServer:
    """Listens for peers. Every tensor it names is read as it stands: only slots no epoch under way writes to
    may be asked for, which is what an epoch's vote is for. Whoever asks beside an epoch says which experts it
    expects there, and is refused where `holds` says otherwise.
    """

    def __init__(
        self, host: str, keys: Keys, device: str, bank: Bank, unread: float = UNREAD_SECONDS
    ) -> None:
        self._keys, self._device, self._bank = keys, device, bank
        self._unread = unread  # seconds in which a peer has to take a byte
        self.hello_seconds = HELLO_SECONDS
        # whether a slot holds that expert, and nothing is about to be written there
        self.holds: Callable[[int, HeldExpert], bool] = lambda slot, which: False
        listener = socket.create_server((host, 0))
        near, self._near_path = listen_privately("weights", socket.SOCK_STREAM)
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._streams: set[Stream] = set()
        self._handles: dict[tuple[int, int], dict[str, object]] = {}
        self._acceptors = [Acceptor(one, "weights", self._admit) for one in (listener, near)]
        for acceptor in self._acceptors:
            acceptor.start()

    def close(self) -> None:
        """Refuses peers from now on."""
        for acceptor in self._acceptors:
            acceptor.close()
        remove(self._near_path)
        for stream in list(self._streams):
            stream.close()

    def _admit(self, guest: Guest) -> None:
        """Serves a peer, once its TLS fits, or on the Unix socket its user."""
        connection, near = guest.connection, guest.connection.family == socket.AF_UNIX
        if near:
            guest.peer = "a process of this host"
        try:
            if near and (user := peer_of(connection)[1]) != os.geteuid():
                raise PermissionError(f"device handles are not for processes of user {user}")
            stream = Stream(connection if near else self._keys.accept(connection))
        except OSError as error:
            log.warning("refused weights to %s: %s", guest.peer, clipped(str(error)))
            connection.close()
            return
        stream.bound_sends(self._unread)
        self._streams.add(stream)
        self._serve(stream, guest, near=near)

    def _serve(self, stream: Stream, guest: Guest, *, near: bool) -> None:
        try:
            self._introduced(stream.receive_first(self.hello_seconds))
            guest.known()
            copier = Copier(0, self._device, "weights port")
            while True:
                asked = stream.receive()
                known_frame(Frames.TO_OWNER, asked["kind"])
                if asked["kind"] == "handles":
                    stream.send({"kind": "handles", "socket": self._near_path})
                elif asked["how"] == "cuda_ipc" and not near:
                    raise ValueError("device handles go over the Unix socket alone")
                else:
                    self._answer(stream, asked, copier)
        except StreamClosed as closed:  # without a word: the peer has what it wanted
            if guest.is_stranger:
                log.warning("refused weights to %s: %s", guest.peer, closed)
            elif isinstance(closed, StreamSilent):
                log.warning("a copy of weights to %s ends: %s", guest.peer, closed)
        except MALFORMED as error:
            log.warning("refused weights to %s: %s", guest.peer, clipped(str(error)))
        finally:
            self._streams.discard(stream)
            stream.close()

    def _introduced(self, hello: Message) -> None:
        """Raises ValueError for a stranger without the run's token."""
        if hello["kind"] != "weights" or not self._keys.is_member(hello.get("token", "")):
            raise ValueError("a peer must begin with weights and the group's token")

    def _answer(self, stream: Stream, asked: Message, copier: Copier) -> None:
        layer, slots = int(asked["layer"]), [int(slot) for slot in asked["slots"]]
        expected = [HeldExpert(layer, int(one), int(asked["version"])) for one in asked.get("experts", ())]
        try:
            held = [self._bank.slot(layer, slot) for slot in slots]
            self._check_held(slots, expected)  # before: what was committed then is waited for
            copier.after_commit(self._bank)
            with copier.stream():
                # beside an epoch a slot may be written meanwhile: what is read then is not kept as its own
                read = self._bank.checksums if not expected else self._bank.checksums_now
                reply: Message = {"kind": "slots", "checksums": read(layer, slots)}
            self._check_held(slots, expected)  # after: bytes that change from here on miss the checksum
        except (KeyError, ValueError) as error:
            stream.send({"kind": "refused", "reason": clipped(str(error))})
            return
        with copier.stream():
            if asked["how"] == "cuda_ipc":
                unknown = [int(slot) for slot in asked["unknown"]]
                stream.send(reply | {"shared": [[slot, self._shared(layer, slot)] for slot in unknown]})
                return
            stream.send(reply | {"tensors": [[[n, one[n].nbytes] for n in sorted(one)] for one in held]})
            for one in held:
                for name in sorted(one):
                    stream.send_bytes(_host_bytes(one[name]))

    def _check_held(self, slots: list[int], expected: list[HeldExpert]) -> None:
        """Raises ValueError where a slot does not hold the expert that is expected there."""
        for slot, which in zip(slots, expected, strict=bool(expected)):
            if not self.holds(slot, which):
                raise ValueError(f"slot {slot} does not hold {which} now")

    def _shared(self, layer: int, slot: int) -> dict[str, object]:
        """What maps a slot's tensors; they stay where they are as long as this process lives."""
        if (layer, slot) not in self._handles:
            tensors = self._bank.slot(layer, slot)
            self._handles[layer, slot] = {name: shared(tensor) for name, tensor in tensors.items()}
        return self._handles[layer, slot]


def _host_bytes(tensor: Tensor) -> memoryview:
    data: Any = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return memoryview(data)


class Peers:
    """Links to other ranks' `WeightsServer`s, made when first used. One thread uses them.

    A peer has `within` seconds to take a question and to give the next bytes: one that is stopped holds
    nobody for longer.
    """

    def __init__(self, keys: Keys, device: str, within: float = WITHIN_SECONDS) -> None:
        self._keys, self._within = keys, within
        self._device = torch.device(device)
        self._links: dict[str, Stream] = {}  # also to Unix sockets, by their paths
        self._near: dict[str, str] = {}  # the Unix sockets of those whose address is asked
        self._mapped: dict[tuple[str, int, int], dict[str, Tensor]] = {}

    def fetch(
        self, address: str, layer: int, slots: list[int], rooms: list[Slot], copier: Copier
    ) -> list[str]:
        """Copies the peer's experts in its `slots` of `layer` (decoder index) into `rooms` over its stream.

        Returns the owner's checksums. Raises StreamClosed (StreamSilent if it gives nothing), PeerRefused or
        Abandoned.
        """
        return self._fetched(address, {"layer": layer, "slots": slots, "how": "stream"}, rooms, copier)

    def fetch_held(self, address: str, which: HeldExpert, slot: int, room: Slot, copier: Copier) -> str:
        """Copies one expert as `fetch` does, while no epoch keeps the peer's slots as they are; the peer
        refuses where its slot does not hold that expert. Returns the checksum: bytes that were written
        meanwhile miss it.
        """
        asked = {"layer": which.layer, "slots": [slot], "how": "stream"}
        expected = {"experts": [which.expert], "version": which.version}
        return self._fetched(address, asked | expected, [room], copier)[0]

    def _fetched(self, address: str, asked: Message, rooms: list[Slot], copier: Copier) -> list[str]:
        reply = self._ask(address, asked)
        stream = self._links[address]
        held, checksums = self._understood(address, lambda: _answered(reply, len(rooms)))
        for sizes, room in zip(held, rooms, strict=True):
            if sizes != _sizes(room):
                self._drop(address)
                raise PeerRefused(f"{address} holds tensors {sizes}, and this rank's slot is of another form")
            for name in sizes:
                self._receive(stream, address, room[name], copier)
        return checksums

    def map(self, address: str, layer: int, slots: list[int], rooms: list[Slot], copier: Copier) -> list[str]:
        """Copies as `fetch` does, between GPUs of one host: this GPU maps the peer's storage and reads it."""
        unknown = [slot for slot in slots if (address, layer, slot) not in self._mapped]
        asked = {"layer": layer, "slots": slots, "how": "cuda_ipc", "unknown": unknown}
        reply = self._ask(self._near_of(address), asked)
        index = self._device.index or 0
        forms = dict(zip(slots, rooms, strict=True))
        given, checksums = self._understood(address, lambda: _shared(reply, unknown))
        for slot, handles in given:
            found, room = {name: opened(one, index) for name, one in handles.items()}, forms[slot]
            if _sizes(found) != _sizes(room):
                raise PeerRefused(f"{address} holds {_sizes(found)}, and this rank's slot is of another form")
            self._mapped[address, layer, slot] = {
                name: found[name].view(own.dtype).view(own.shape) for name, own in room.items()
            }
        copier.copy([(self._mapped[address, layer, slot], room) for slot, room in forms.items()])
        return checksums

    def close(self) -> None:
        """Ends every link, and forgets what was mapped: the owners may be gone."""
        for address in list(self._links):
            self._drop(address)
        self._mapped, self._near = {}, {}

    def _near_of(self, address: str) -> str:
        """The Unix socket of the owner at `address`, over which it gives handles of its device."""
        if address not in self._near:
            reply = self._ask(address, {"kind": "handles"})
            self._near[address] = self._understood(address, lambda: str(reply["socket"]))
        return self._near[address]

    def _linked(self, address: str) -> Stream:
        if not address.startswith("/"):
            return connect(address, self._within, self._keys)
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.settimeout(self._within)
            near.connect(address)
            if (user := peer_of(near)[1]) != os.geteuid():
                raise PermissionError(f"a process of user {user} listens there")
        except OSError as error:
            near.close()
            raise StreamClosed(f"cannot reach {address}: {error}") from error
        return Stream(near)

    def _ask(self, address: str, asked: Message) -> Message:
        if address not in self._links:
            link = self._linked(address)
            link.bound_receives(self._within)
            link.send({"kind": "weights", "token": self._keys.token})
            self._links[address] = link
        try:
            self._links[address].send({"kind": "slots"} | asked)
            reply = self._links[address].receive()
            known_frame(Frames.FROM_OWNER, reply["kind"])
        except StreamClosed:
            self._drop(address)
            raise
        except ValueError as error:
            self._drop(address)
            raise StreamClosed(str(error)) from error
        if reply["kind"] == "refused":
            raise PeerRefused(f"{address}: {reply.get('reason')}")
        return reply

    def _understood(self, address: str, read: Callable[[], T]) -> T:
        """What `read` makes of a peer's answer. Raises PeerRefused where it is of another form."""
        try:
            return read()
        except MALFORMED as error:
            self._drop(address)
            raise PeerRefused(
                f"{address} answers what is no answer: {type(error).__name__}: {error}"
            ) from error

    def _receive(self, stream: Stream, address: str, target: Tensor, copier: Copier) -> None:
        own = target.view(-1).view(torch.uint8)
        data: Any = own if own.device.type == "cpu" else torch.empty(own.shape, dtype=torch.uint8)
        view = memoryview(data.numpy())
        try:
            for at in range(0, len(view), PIECE):
                stream.receive_bytes(view[at : at + PIECE])
                copier.spent(len(view[at : at + PIECE]))
        except BaseException:
            self._drop(address)  # what is still on its way cannot be told from the next answer
            raise
        if data is not own:
            with copier.stream():
                own.copy_(data)
            copier.wait()

    def _drop(self, address: str) -> None:
        if link := self._links.pop(address, None):
            link.close()


def _answered(reply: Message, count: int) -> tuple[list[dict[str, int]], list[str]]:
    """Bytes of the tensors of each of `count` experts, and the experts' checksums."""
    sizes = [{str(name): int(size) for name, size in one} for one in reply["tensors"]]
    return sizes, _checksums(reply, len(sizes), count)


def _shared(reply: Message, unknown: list[int]) -> tuple[list[tuple[int, Any]], list[str]]:
    """What maps the tensors of each slot in `unknown`, and the checksums of all that were asked for."""
    given = [(int(slot), dict(handles)) for slot, handles in reply["shared"]]
    slots = [slot for slot, _ in given]
    if slots != unknown:
        raise ValueError(f"slots {listed(slots)} came, and {listed(unknown)} were asked for")
    return given, [str(checksum) for checksum in reply["checksums"]]


def _checksums(reply: Message, given: int, count: int) -> list[str]:
    checksums = [str(checksum) for checksum in reply["checksums"]]
    if not given == len(checksums) == count:
        raise ValueError(f"{given} experts and {len(checksums)} checksums came, and {count} were asked for")
    return checksums


def _sizes(tensors: Slot) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in tensors.items()}
