"""Every socket of a running service, with every sort of keys: each caller gets what the table says."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from houses import Alone, house_config, request_of
from keyed import CASES, MODES, SECONDS, Keyring, Shown, code_of, metadata
from reported import until_reported

from moeserve.cli import main
from moeserve.proto import moe_pb2
from moeserve.proto.client import AsyncMoeClient, Choice, MoeClient
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import MoeError
from moeserve.proto.transports.shared_memory import REFUSED
from moeserve.proto.transports.tls import TlsSocket
from moeserve.runtime.control.stream import Stream, StreamClosed
from moeserve.runtime.keys.access import OPEN, PATHS, RPCS, Role
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.keys.sockets import private_folder
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.sections import KeysConfig
from moeserve.torch import MoeExperts, Settings, connect

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
PAYLOADS = {"Rebalance": moe_pb2.RebalanceRequest(dry_run=True).SerializeToString()}
CALL = frozenset({Role.CALL})


@dataclass
class Service:
    """A running service, and the files of its keys."""

    cluster: LocalCluster
    ring: Keyring
    channels: dict[tuple[str, Shown], grpc.Channel] = field(default_factory=dict)
    shown: dict[tuple[str, frozenset[Role]], Shown] = field(default_factory=dict)

    @property
    def addresses(self) -> dict[str, str]:
        """The TCP sockets by name."""
        head, seat = self.cluster.head, self.cluster.head.coordinator.seats()[1]
        return {
            "front door": head.address,
            "lane": seat.address,
            "metrics of the head": head.metrics_address,
            "metrics of a rank": seat.metrics,
            "control streams": head.streams,
            "weights": seat.weights,
        }

    def case(self, case: str, needed: frozenset[Role]) -> Shown:
        """What is shown in a case; made once."""
        key = (case, needed)
        if key not in self.shown:
            self.shown[key] = self.ring.shown(case, needed)
        return self.shown[key]

    def channel(self, address: str, shown: Shown) -> grpc.Channel:
        """One for each address and certificate."""
        key = (address, Shown(pair=shown.pair))
        if key not in self.channels:
            self.channels[key] = self.ring.channel(address, shown)
        return self.channels[key]

    def client(self, role: Role = Role.CALL, **options: Any) -> MoeClient:
        """A client that shows what it should."""
        shown = self.case("right", frozenset({role}))
        return MoeClient(self.cluster.address, credentials=self.ring.credentials(shown), **options)


@pytest.fixture(scope="module", params=MODES)
def service(
    request: pytest.FixtureRequest, checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    ring = Keyring(tmp_path_factory.mktemp(request.param), request.param)
    with LocalCluster(
        house_config(checkpoint_path, server__allow_named_regions=True, **EP2, **ring.settings())
    ) as cluster:
        made = Service(cluster, ring)
        yield made
        for channel in made.channels.values():
            channel.close()


cases = pytest.mark.parametrize("case", CASES)


def refused(ring: Keyring, case: str) -> bool:
    """Whether TLS already refuses the caller."""
    return ring.mode == "mutual" and case in ("wrong", "expired", "none")


@cases
@pytest.mark.parametrize("name", ["front door", "lane"])
def test_each_call_gets_what_the_table_says(service: Service, name: str, case: str) -> None:
    address, found, said = service.addresses[name], {}, {}
    for path, needed in RPCS.items():
        shown = service.case(case, needed)
        payload = PAYLOADS.get(path.rpartition("/")[2], b"")
        code = code_of(service.channel(address, shown), path, payload, shown)
        found[path] = code if code in ("UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED") else "let in"
        if refused(service.ring, case):
            said[path] = "UNAVAILABLE"
        elif case == "right" or needed == OPEN:
            said[path] = "let in"
        elif case == "wrong role":
            said[path] = "PERMISSION_DENIED" if needed != frozenset(Role) - {Role.MEMBER} else "let in"
        else:
            said[path] = "UNAUTHENTICATED"
    assert found == said


@cases
@pytest.mark.parametrize("name", ["front door", "lane"])
def test_what_the_contract_has_not_tells_strangers_nothing(service: Service, name: str, case: str) -> None:
    shown = service.case(case, CALL)
    channel = service.channel(service.addresses[name], shown)
    code = code_of(channel, "/moeserve.v1.Nobody/Drop", b"", shown)
    if refused(service.ring, case):
        assert code == "UNAVAILABLE"
    else:
        assert code == ("PERMISSION_DENIED" if case in ("right", "wrong role") else "UNAUTHENTICATED")


@cases
@pytest.mark.parametrize("name", ["metrics of the head", "metrics of a rank"])
def test_each_path_gets_what_the_table_says(service: Service, name: str, case: str) -> None:
    address = service.addresses[name]
    for path, needed in (PATHS | {"/nothing": frozenset({Role.OBSERVE})}).items():
        shown = service.case(case, needed)
        # A probe shows no certificate, so TLS lets in who shows none.
        if refused(service.ring, case) and case != "none":
            with pytest.raises(OSError):
                service.ring.get(address, path, shown)
            continue
        status = service.ring.get(address, path, shown)
        if needed == OPEN:
            assert status in (200, 404), path  # a path that the table knows may be without an answer
        elif path == "/nothing":
            assert status == (403 if case in ("right", "wrong role") else 401)
        else:
            said = {"right": 200, "wrong role": 403}
            assert status == said.get(case, 401), path


@cases
def test_probes_need_nothing(service: Service, case: str) -> None:
    shown = service.case(case, CALL)
    address = service.cluster.probes_address()
    for path in ("/livez", "/readyz", "/startupz"):
        assert service.ring.get(address, path, shown) == 200, path
    assert code_of(service.channel(address, shown), "/grpc.health.v1.Health/Check", b"", shown) == "OK"
    for path in ("/metrics", "/"):
        assert service.ring.get(address, path, shown) == 404
    path = "/moeserve.v1.FrontService/GetTopology"
    assert code_of(service.channel(address, shown), path, b"", shown) == "UNIMPLEMENTED"


def _member_shows(service: Service, case: str) -> tuple[str, ssl.SSLContext | None]:
    """The token in the first frame of a stream between processes of the service, and the certificate."""
    ring, right = service.ring, service.cluster.head.token
    pair = {
        "right": ring.pair,
        "wrong": ring.strangers.sign("moeserve", file="wrong-moeserve"),
        "expired": ring.service.sign("moeserve", days=-1.0, file="expired-moeserve"),
        "wrong role": ring.callers.sign("call.callers"),
    }
    tokens = {"right": right, "none": "", "wrong role": ring.tokens[Role.CALL], "expired": ring.former}
    shown = Shown(tokens.get(case, "f" * 32), pair.get(case) if ring.mode == "mutual" else None)
    return shown.token, ring.context(shown)


def _stream(address: str, context: ssl.SSLContext | None) -> Stream:
    """A stream as a process of the service opens one. Raises OSError."""
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), SECONDS)
    if context is None:
        return Stream(connection)
    made = TlsSocket(connection, context, host)
    made.handshake(SECONDS)
    return Stream(made)


@cases
def test_a_control_stream_is_for_members(
    service: Service, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    token, context = _member_shows(service, case)
    caplog.set_level(logging.WARNING)
    with pytest.raises((StreamClosed, OSError)):
        stream = _stream(service.addresses["control streams"], context)
        stream.bound_receives(SECONDS)
        # A seat that the group has not: who is let in is told so, and takes nobody's seat.
        stream.send({"kind": "hello", "token": token, "rank": 99, "pid": 1, "address": "", "host_id": ""})
        stream.receive()
    said = "seat 99 is outside" if case == "right" else "the group's token"
    said = "ended before its hello" if refused(service.ring, case) else said
    until = time.monotonic() + SECONDS
    while said not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.01)
    assert token not in caplog.text or not token


@cases
@pytest.mark.parametrize("near", [False, True], ids=["tcp", "unix"])
def test_weights_are_for_members(service: Service, near: bool, case: str) -> None:
    token, context = _member_shows(service, case)
    address = service.addresses["weights"]
    # The Unix socket knows its peers by their user, and has no TLS.
    if refused(service.ring, case) and not near:
        with pytest.raises((StreamClosed, OSError)):
            stream = _stream(address, context)
            stream.send({"kind": "weights", "token": service.cluster.head.token})
            stream.send({"kind": "slots", "layer": 0, "slots": [0], "how": "stream"})
            stream.receive()
        return
    if near:
        first = _stream(address, _member_shows(service, "right")[1])
        first.send({"kind": "weights", "token": service.cluster.head.token})
        first.send({"kind": "handles"})
        path = first.receive()["socket"]
        first.close()
        assert Path(path).parent == private_folder()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        stream = Stream(connection)
    else:
        stream = _stream(address, context)
    stream.bound_receives(SECONDS)

    def asked() -> str:
        stream.send({"kind": "weights", "token": token})
        stream.send({"kind": "slots", "layer": 0, "slots": [0], "how": "stream"})
        return str(stream.receive()["kind"])

    if case == "right":
        assert asked() == "slots"
    else:
        with pytest.raises(StreamClosed):
            asked()
    stream.close()


def test_device_handles_do_not_leave_over_tcp(service: Service) -> None:
    stream = _stream(service.addresses["weights"], _member_shows(service, "right")[1])
    stream.bound_receives(SECONDS)
    stream.send({"kind": "weights", "token": service.cluster.head.token})
    stream.send({"kind": "slots", "layer": 0, "slots": [0], "how": "cuda_ipc", "unknown": [0]})
    with pytest.raises(StreamClosed):
        stream.receive()


@cases
def test_a_region_goes_to_who_was_told_its_name(service: Service, case: str) -> None:
    shown = service.case("right", CALL)
    make = "/moeserve.v1.LaneService/CreateRegion"
    request = moe_pb2.CreateRegionRequest(size=4096).SerializeToString()
    channel = service.channel(service.addresses["lane"], shown)
    made = moe_pb2.CreateRegionReply.FromString(channel.unary_unary(make)(request, metadata=metadata(shown)))
    folder = Path(made.socket).parent
    assert folder == private_folder() and folder.stat().st_mode & 0o777 == 0o700
    assert Path(made.socket).stat().st_mode & 0o777 == 0o600
    if case == "wrong role":
        other = service.case(case, CALL)
        channel = service.channel(service.addresses["lane"], other)
        assert code_of(channel, make, request, other) == "PERMISSION_DENIED"
        return
    if case == "expired":
        released = moe_pb2.ReleaseRegionRequest(name=made.name).SerializeToString()
        channel.unary_unary("/moeserve.v1.LaneService/ReleaseRegion")(released, metadata=metadata(shown))
    names = {"right": made.name, "wrong": f"region-1-{'0' * 32}", "expired": made.name}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(SECONDS)
        asking.connect(made.socket)
        if case == "none":
            asking.shutdown(socket.SHUT_WR)
            assert asking.recv(256) == b""
            return
        asking.send(names[case].encode())
        answer, descriptors, _, _ = socket.recv_fds(asking, 256, 1)
        for descriptor in descriptors:
            os.close(descriptor)
    assert (len(descriptors) == 1) == (case == "right")
    assert case == "right" or answer.startswith(REFUSED)


def test_answers_are_right_on_every_way(service: Service, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(40, seed=1)
    expected = alone.forward(0, hidden, experts, weights)
    with service.client(transport="inline") as client:
        torch.testing.assert_close(client.forward(0, hidden, experts, weights), expected, **CLOSE)
    with service.client(transport="shared_memory") as client:
        torch.testing.assert_close(client.forward(0, hidden, experts, weights), expected, **CLOSE)
    torch.testing.assert_close(through_the_front(service, hidden, experts, weights), expected, **CLOSE)


def through_the_front(service: Service, *batch: torch.Tensor) -> torch.Tensor:
    """What a simple client of the front door gets, which hands its calls on to the lanes."""
    shown = service.case("right", CALL)
    channel = service.channel(service.cluster.address, shown)
    forward = channel.unary_unary("/moeserve.v1.FrontService/Forward")
    hidden, experts, weights = batch
    request = request_of(0, (hidden, experts, weights)).SerializeToString()
    reply = moe_pb2.ForwardReply.FromString(forward(request, metadata=metadata(shown), timeout=SECONDS))
    return torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)


@pytest.mark.parametrize("mode", ["attached", "remote"])
def test_a_module_of_torch_shows_the_same(service: Service, alone: Alone, mode: str) -> None:
    credentials = service.ring.credentials(service.case("right", frozenset({Role.CALL})))
    address, batch = service.cluster.address, alone.batch(5, seed=6)
    way = connect(Settings(mode, address, timeout=20.0, dtype="fp32", credentials=credentials))
    torch.testing.assert_close(MoeExperts(way, 1)(*batch), alone.forward(1, *batch), **CLOSE)
    way.close()
    if mode == "attached":
        with pytest.raises(MoeError):
            connect(Settings(mode, address, timeout=5.0))


def test_a_client_on_asyncio_shows_the_same(service: Service, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(4, seed=4)
    shown = service.case("right", CALL)

    async def ask(transport: str) -> torch.Tensor:
        credentials, address = service.ring.credentials(shown), service.cluster.address
        async with AsyncMoeClient(address, transport=transport, credentials=credentials) as client:
            assert await client.health() == "SERVING"
            return await client.forward(0, hidden, experts, weights)

    for transport in ("inline", "shared_memory"):
        answer = asyncio.run(ask(transport))
        torch.testing.assert_close(answer, alone.forward(0, hidden, experts, weights), **CLOSE)


def test_commands_show_what_their_flags_name(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = service.case("right", frozenset({Role.OBSERVE}))
    flags = []
    if service.ring.mode != "plain":
        flags += ["--ca", service.ring.service.path]
    if shown.pair is not None:
        flags += ["--cert", shown.pair[0], "--key", shown.pair[1]]
    if shown.token:
        (tmp_path / "token").write_text(f"{shown.token}\n")
        flags += ["--token-file", str(tmp_path / "token")]
    assert main(["status", service.cluster.address, *flags]) == 0
    assert "state  serving" in capsys.readouterr().out
    assert main(["rebalance", service.cluster.address, "--dry-run", *flags]) == 1
    assert "PERMISSION_DENIED" in capsys.readouterr().err
    assert main(["health", service.cluster.address, *flags]) == 0


def test_experts_move_over_streams_that_are_encrypted(service: Service, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(64, seed=2)
    hot = torch.zeros_like(experts)
    hot[:, 1] = 1  # both of rank 0
    with service.client() as client, service.client(Role.OPERATE) as operator:
        for _ in range(20):
            client.forward(0, hidden, hot, weights)
        with service.client(Role.OBSERVE) as observer:
            until_reported(observer, [0], pairs=20 * hot.numel())
        moved = operator.rebalance(policy="eplb", timeout=60)
        assert moved.outcome in ("moved", "even"), moved.reason
        expected = alone.forward(0, hidden, experts, weights)
        torch.testing.assert_close(client.forward(0, hidden, experts, weights), expected, **CLOSE)
    if service.ring.mode == "mutual":
        assert moved.outcome == "moved"


def test_who_may_call_may_not_operate(service: Service) -> None:
    with service.client(timeout=5.0) as client:
        with pytest.raises(MoeError) as denied:
            client.rebalance(dry_run=True)
        assert (denied.value.code, denied.value.reason) == ("PERMISSION_DENIED", "wrong_role")
        assert client.health() == "SERVING"


def test_a_plain_client_gets_nothing_of_an_encrypted_service(service: Service) -> None:
    if service.ring.mode == "plain":
        pytest.skip("it is not encrypted")
    for name in ("front door", "lane"):
        with grpc.insecure_channel(service.addresses[name]) as channel:
            assert code_of(channel, "/grpc.health.v1.Health/Check", b"", Shown()) == "UNAVAILABLE"
    for name in ("control streams", "weights"):
        with pytest.raises((StreamClosed, OSError)):
            stream = _stream(service.addresses[name], None)
            stream.bound_receives(SECONDS)
            stream.send({"kind": "hello", "token": service.cluster.head.token, "rank": 99})
            stream.receive()


def test_a_client_refuses_a_service_that_it_does_not_know(service: Service) -> None:
    if service.ring.mode == "plain":
        pytest.skip("it shows no certificate")
    shown = service.case("right", CALL)
    stranger = Credentials(ca=service.ring.strangers.path, token=shown.token)
    with (
        MoeClient(service.cluster.address, timeout=1.0, credentials=stranger) as client,
        pytest.raises(MoeError, match=r"UNAVAILABLE|DEADLINE"),
    ):
        client.topology()


def _serial(address: str, ring: Keyring, pair: tuple[str, str]) -> int:
    """The serial number of the certificate that a socket shows."""
    host, port = address.rsplit(":", 1)
    context = ring.context(Shown(pair=pair))
    assert context is not None
    context.check_hostname = False
    with (
        socket.create_connection((host, int(port)), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as made,
    ):
        certificate = made.getpeercert()
        assert certificate is not None
        return int(str(certificate["serialNumber"]), 16)


def test_a_rotation_under_load_loses_no_call(service: Service, alone: Alone) -> None:
    """Tokens and certificates, of the service and of its callers."""
    ring, shown = service.ring, service.case("right", CALL)
    token_file = ring.folder / "token"
    token_file.write_text(ring.tokens[Role.CALL])
    pair = ("", "") if shown.pair is None else ring.callers.sign("call.callers", file="rotated")
    ca = "" if ring.mode == "plain" else ring.service.path
    credentials = Credentials(ca=ca, certificate=pair[0], private_key=pair[1], token_file=str(token_file))
    batch, failed, answered, stop = alone.batch(4, seed=3), [], [0, 0], threading.Event()

    def call(at: int) -> None:
        try:
            while not stop.is_set():
                with MoeClient(
                    service.cluster.address, credentials=credentials, transport="inline"
                ) as client:
                    for _ in range(20):
                        client.call(0, batch[0], Choice(batch[1], batch[2]), timeout=5.0)
                        answered[at] += 1
        except Exception as error:
            failed.append(error)

    before_it = service.client(transport="inline")
    stream = before_it.stream(0)
    stream.ask(request_of(0, batch), SECONDS)
    threads = [threading.Thread(target=call, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    before = {} if not ca else _serials(service)
    fresh = dict(ring.tokens) | {Role.CALL: os.urandom(16).hex()}
    ring.write_grants(ring.tokens, f"call token {fresh[Role.CALL]}")  # both are valid
    time.sleep(0.6)
    token_file.write_text(fresh[Role.CALL])
    if ca:
        ring.pair = ring.service.sign("moeserve", "localhost", "127.0.0.1")
    if shown.pair is not None:
        ring.callers.sign("call.callers", file="rotated")
    time.sleep(0.6)
    old, ring.tokens = ring.tokens, fresh
    ring.write_grants(fresh)  # the old one is taken out
    service.shown.clear()
    time.sleep(0.6)
    until, then = time.monotonic() + SECONDS, list(answered)
    while not failed and any(now <= max(20, was) for now, was in zip(answered, then, strict=True)):
        assert time.monotonic() < until, answered  # calls go on, and each caller has made a client anew
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(SECONDS)
    assert not failed and min(answered) > 20, (failed, answered)
    stream.ask(request_of(0, batch), SECONDS)  # an open stream keeps what it was let in with
    if shown.token:
        with pytest.raises(MoeError, match="UNAUTHENTICATED"):
            before_it.topology()
    before_it.close()
    if ca:
        now = _serials(service)
        assert all(now[name] != before[name] for name in before), (before, now)
    gone = Shown(old[Role.CALL], service.case("right", frozenset({Role.OBSERVE})).pair)
    channel = service.channel(service.cluster.address, gone)
    code = code_of(channel, "/moeserve.v1.FrontService/GetTopology", b"", gone)
    assert code == "UNAUTHENTICATED"


def _serials(service: Service) -> dict[str, int]:
    return {
        name: _serial(address, service.ring, service.ring.pair) for name, address in service.addresses.items()
    }


def test_no_secret_is_on_a_command_line_or_in_the_environment(service: Service) -> None:
    secrets = [*service.ring.tokens.values(), service.cluster.head.token]
    for process in psutil.Process().children(recursive=True):
        said = " ".join([*process.cmdline(), *process.environ().values()])
        assert not [secret for secret in secrets if secret in said], process


def test_no_secret_is_in_a_status_or_a_configuration(service: Service) -> None:
    with service.client(Role.OBSERVE) as client:
        said = [str(client.status()), str(client.model()), str(client.topology())]
    said += [*service.cluster._config.lines(), repr(service.cluster._config)]
    said += [repr(Keys(KeysConfig(), "s" * 32)), repr(service.ring.credentials(service.case("right", CALL)))]
    secrets = [*service.ring.tokens.values(), service.cluster.head.token, "s" * 32]
    assert not [secret for secret in secrets for text in said if secret in text]
