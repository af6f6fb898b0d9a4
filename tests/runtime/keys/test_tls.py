"""TLS of our own streams and of gRPC: what fits is let in, with the certificate of its time."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography.x509 import load_pem_x509_certificate
from keyed import SECONDS, Keyring, Shown, code_of
from made_certificates import padded_alike, replaced, written_over

from moeserve.runtime.control.stream import Stream, StreamClosed, StreamSilent
from moeserve.runtime.doors.calls.admission import DoorLimits
from moeserve.runtime.doors.endpoint import Endpoint
from moeserve.runtime.doors.lane_door import NOT_THE_FRONT_DOOR
from moeserve.runtime.keys.certificates import Certificates
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.sections import ConfigError, KeysConfig

TOKEN = "the token of this run"
HEALTH = "/grpc.health.v1.Health/Check"


def config_of(ring: Keyring, **more: str) -> KeysConfig:
    settings = {key.removeprefix("keys__"): value for key, value in ring.settings().items()}
    return KeysConfig(**(settings | more))


@pytest.fixture(params=["tls", "mutual"])
def ring(request: pytest.FixtureRequest, tmp_path: Path) -> Keyring:
    return Keyring(tmp_path, request.param)


def joined(server: Keys, client: Keys) -> tuple[Stream, Stream]:
    """Both ends of a stream between two processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(lambda: server.accept(listener.accept()[0]))
        dialled = client.dial(socket.create_connection(listener.getsockname()), "127.0.0.1")
        return Stream(accepted.result(SECONDS)), Stream(dialled)


def test_streams_say_the_same_over_tls(ring: Keyring) -> None:
    keys = Keys(config_of(ring), TOKEN)
    near, far = joined(keys, keys)
    long = {"kind": "hello", "text": "x" * (3 << 20)}
    data = os.urandom(5 << 20)

    def send() -> None:
        near.send(long)
        near.send_bytes(memoryview(data))
        near.send({"kind": "last"})

    sender = threading.Thread(target=send)
    sender.start()
    assert far.receive() == long
    room = bytearray(len(data))
    far.receive_bytes(memoryview(room))
    assert bytes(room) == data
    assert far.receive() == {"kind": "last"}
    sender.join()
    near.close()
    with pytest.raises(StreamClosed):
        far.receive()
    far.close()


def test_one_thread_waits_while_others_send(ring: Keyring) -> None:
    """With SSLSocket the thread that waits and those that send would share OpenSSL's state."""
    keys = Keys(config_of(ring), TOKEN)
    near, far = joined(keys, keys)
    got: dict[str, list[int]] = {"near": [], "far": []}

    def receive(stream: Stream, name: str) -> None:
        for _ in range(800):
            got[name].append(stream.receive()["number"])

    def send(stream: Stream, first: int) -> None:
        for number in range(first, first + 200):
            stream.send({"kind": "n", "number": number, "filling": "x" * (number % 977)})

    ends = ((near, "near"), (far, "far"))
    threads = [threading.Thread(target=receive, args=end) for end in ends]
    threads += [threading.Thread(target=send, args=(end, 200 * k)) for end, _ in ends for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for found in got.values():
        assert sorted(found) == list(range(800))
        for first in range(0, 800, 200):  # of one sender, in its order
            mine = [number for number in found if first <= number < first + 200]
            assert mine == sorted(mine)
    near.close()
    far.close()


def test_a_session_is_not_resumed_past_its_certificate(tmp_path: Path) -> None:
    """Who resumes a session shows no certificate, so that one which has expired meanwhile would do."""
    ring = Keyring(tmp_path, "mutual")
    keys = Keys(config_of(ring), TOKEN)
    for context in (Certificates(config_of(ring)).accepting(), keys.http_context()):
        assert context is not None
        ends, resumed = [], []
        client = ring.context(Shown(pair=ring.pair))
        assert client is not None
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

                def serve(
                    listener: socket.socket = listener, context: ssl.SSLContext = context
                ) -> bool | None:
                    with context.wrap_socket(listener.accept()[0], server_side=True) as made:
                        made.sendall(b"x")
                        made.recv(1)
                        return made.session_reused

                served = threads.submit(serve)
                plain = socket.create_connection(listener.getsockname(), SECONDS)
                session = ends[-1] if ends else None
                with client.wrap_socket(plain, server_hostname="localhost", session=session) as made:
                    made.recv(1)
                    ends.append(made.session)
                resumed.append(served.result(SECONDS))
        assert resumed == [False, False]


def test_grpc_resumes_no_session_either(tmp_path: Path) -> None:
    ring = Keyring(tmp_path, "mutual")
    door = Door(config_of(ring))
    host, port = door.address.rsplit(":", 1)
    client = ring.context(ring.shown("right", frozenset()))
    assert client is not None
    client.set_alpn_protocols(["h2"])
    session, resumed = None, []
    try:
        for _ in range(3):
            plain = socket.create_connection((host, int(port)), SECONDS)
            with client.wrap_socket(plain, server_hostname="localhost", session=session) as made:
                made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
                assert made.recv(1)
                session = made.session
                resumed.append(made.session_reused)
        assert resumed == [False, False, False]
    finally:
        door.endpoint.stop(0)


def test_bounds_hold_over_tls(ring: Keyring) -> None:
    keys = Keys(config_of(ring), TOKEN)
    near, far = joined(keys, keys)
    near.bound_sends(0.2)
    with pytest.raises(StreamSilent, match="takes nothing"):
        for _ in range(10_000):
            near.send({"kind": "n", "filling": "x" * 65536})
    other, silent = joined(keys, keys)
    other.bound_receives(0.2)
    with pytest.raises(StreamSilent, match="timed out"):
        other.receive()
    last, slow = joined(keys, keys)
    with pytest.raises(StreamClosed, match="timed out"):
        last.receive_first(0.2)
    for stream in (near, far, other, silent, last, slow):
        stream.close()


def test_a_handshake_has_a_bound(ring: Keyring) -> None:
    keys = Keys(KeysConfig(**(vars(config_of(ring)) | {"handshake_seconds": 0.2})), TOKEN)
    one, other = socket.socketpair(socket.AF_UNIX)
    begun = time.monotonic()
    with other, pytest.raises(TimeoutError, match=r"timed out: TLS took longer than 0\.2 s"):
        keys.accept(one)
    assert time.monotonic() - begun < 5 and one.fileno() == -1


@pytest.mark.parametrize(
    "sent", [b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 99, b""]
)
def test_what_is_no_tls_is_closed(ring: Keyring, sent: bytes) -> None:
    keys = Keys(config_of(ring), TOKEN)
    one, other = socket.socketpair(socket.AF_UNIX)
    other.sendall(sent)
    other.shutdown(socket.SHUT_WR)
    with other, pytest.raises(OSError, match=r".+"):
        keys.accept(one)
    assert one.fileno() == -1


def test_processes_know_each_other_by_authority_and_name(tmp_path: Path) -> None:
    ring = Keyring(tmp_path, "mutual")
    keys = Keys(config_of(ring), TOKEN)
    wrong = ring.strangers.sign("moeserve", "localhost", "127.0.0.1", file="other")
    stranger = Keys(config_of(ring, certificate=wrong[0], private_key=wrong[1]), TOKEN)
    with pytest.raises(ssl.SSLCertVerificationError):
        joined(stranger, keys)  # the server is none of ours
    late = ring.service.sign("moeserve", "localhost", "127.0.0.1", days=-1.0, file="late")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        joined(Keys(config_of(ring, certificate=late[0], private_key=late[1]), TOKEN), keys)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"other\.example"):
        joined(keys, Keys(config_of(ring, server_name="other.example"), TOKEN))
    named = ring.service.sign("moeserve", "moeserve.example", file="named")
    paths = {"certificate": named[0], "private_key": named[1], "server_name": "moeserve.example"}
    for stream in joined(Keys(config_of(ring, **paths), TOKEN), Keys(config_of(ring, **paths), TOKEN)):
        stream.close()


class Door:
    """A lane's endpoint without a lane: health alone is asked for."""

    def __init__(self, config: KeysConfig) -> None:
        keys = Keys(config, TOKEN)
        self.endpoint = Endpoint({}, NOT_THE_FRONT_DOOR, DoorLimits(calls=4), 1 << 20, keys)
        self.address = self.endpoint.start("127.0.0.1", 0)

    def health(self, ring: Keyring, shown: Shown) -> str:
        with ring.channel(self.address, shown) as channel:
            return code_of(channel, HEALTH, b"", shown)


def test_a_service_whose_certificate_has_expired_is_refused(ring: Keyring) -> None:
    shown = ring.shown("right", frozenset())
    late = ring.service.sign("moeserve", "localhost", "127.0.0.1", days=-1.0, file="late")
    door = Door(config_of(ring, certificate=late[0], private_key=late[1]))
    try:
        assert door.health(ring, shown) == "UNAVAILABLE"
    finally:
        door.endpoint.stop(0)


@pytest.mark.parametrize(
    "name", ["spiffe://cluster/ns/a/sa/b", "monitor.example", "192.0.2.7", "common-name"]
)
def test_a_certificate_s_names_are_its_common_one_and_its_alternatives(tmp_path: Path, name: str) -> None:
    ring = Keyring(tmp_path, "mutual")
    replaced(ring.grants, f"observe name {name}\n".encode())
    names = (name,) if name == "common-name" else ("somebody", "other.example", name)
    granted = Shown(pair=ring.callers.sign(*names, file="granted"))
    other = Shown(pair=ring.callers.sign("somebody", "other.example", "monitor.example.org", file="other"))
    door = Door(config_of(ring))
    try:
        for shown, code in ((granted, "FAILED_PRECONDITION"), (other, "PERMISSION_DENIED")):
            with ring.channel(door.address, shown) as channel:
                assert code_of(channel, "/moeserve.v1.FrontService/GetStatus", b"", shown) == code
                assert code_of(channel, "/moeserve.v1.AdminService/Reload", b"", shown) == "PERMISSION_DENIED"
    finally:
        door.endpoint.stop(0)


def test_an_authority_can_be_replaced_while_it_serves(tmp_path: Path) -> None:
    """Callers of the new one are let in after, and those of the old one no more, once it is taken out."""
    ring = Keyring(tmp_path, "mutual")
    old, new = ring.shown("right", frozenset()), Shown(pair=ring.strangers.sign("call.callers", file="new"))
    door, authorities = Door(config_of(ring)), Path(ring.callers.path)
    first, second = authorities.read_bytes(), Path(ring.strangers.path).read_bytes()
    try:
        assert (door.health(ring, old), door.health(ring, new)) == ("OK", "UNAVAILABLE")
        replaced(authorities, first + second)
        assert (door.health(ring, old), door.health(ring, new)) == ("OK", "OK")
        replaced(authorities, second)
        assert (door.health(ring, old), door.health(ring, new)) == ("UNAVAILABLE", "OK")
    finally:
        door.endpoint.stop(0)


def test_files_that_do_not_fit_leave_what_was(ring: Keyring, caplog: pytest.LogCaptureFixture) -> None:
    """As between the writes of a certificate and of its key."""
    caplog.set_level(logging.INFO)
    shown, door = ring.shown("right", frozenset()), Door(config_of(ring))
    certificate, key = map(Path, ring.pair)
    other = ring.service.sign("moeserve", "localhost", "127.0.0.1", file="other")
    before = door.health(ring, shown)
    try:
        replaced(certificate, Path(other[0]).read_bytes())
        assert door.health(ring, shown) == before == "OK"
        assert door.health(ring, shown) == before
        assert caplog.text.count("the certificate before stays") == 1
        key.unlink()
        assert door.health(ring, shown) == before
        replaced(key, Path(other[1]).read_bytes())
        assert door.health(ring, shown) == before
        assert "connections from now on show it" in caplog.text
    finally:
        door.endpoint.stop(0)


@pytest.mark.parametrize("text", [b"", b"\n", b"nothing"])
@pytest.mark.parametrize("key", ["ca", "client_ca"])
def test_authorities_that_are_none_leave_those_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, text: bytes
) -> None:
    """As while somebody writes over the file."""
    ring = Keyring(tmp_path, "mutual")
    certificates = Certificates(config := config_of(ring))
    before = certificates.accepting(), certificates.dialling()
    path = Path(getattr(config, key))
    authority = path.read_bytes()
    path.write_bytes(text)
    assert (certificates.accepting(), certificates.dialling()) == before
    assert f"the certificate before stays: keys.{key} holds no authority in PEM" in caplog.text
    path.write_bytes(authority)
    assert certificates.accepting() not in before


def serial(certificates: Certificates) -> int:
    """Of the certificate that is shown to a new connection."""
    read = certificates._now()
    return load_pem_x509_certificate(read.texts["certificate"]).serial_number


@pytest.mark.parametrize(("where", "name"), [(Path, "read_bytes"), (ssl.SSLContext, "load_cert_chain")])
def test_files_that_could_not_be_read_are_tried_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: type,
    name: str,
) -> None:
    """As with too many open files, or before the new ones have their owner."""
    ring = Keyring(tmp_path, "mutual")
    certificates = Certificates(config_of(ring))
    first = serial(certificates)
    ring.service.sign("moeserve", "localhost", "127.0.0.1")

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fails)
        assert serial(certificates) == serial(certificates) == first
        assert caplog.text.count("Too many open files") == 1
    assert serial(certificates) != first


def test_files_that_do_not_fit_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, reads = Keyring(tmp_path, "tls"), []
    certificates = Certificates(config_of(ring))
    first, load = serial(certificates), certificates._load
    monkeypatch.setattr(certificates, "_load", lambda stamps: reads.append(stamps) or load(stamps))
    replaced(Path(ring.pair[0]), b"nothing")
    assert serial(certificates) == serial(certificates) == first and len(reads) == 1


def test_files_are_read_again_though_time_and_size_stay(tmp_path: Path) -> None:
    """As `rsync --inplace --times` writes files that were made in the same tick."""
    ring = Keyring(tmp_path, "tls")
    made = [ring.pair, ring.service.sign("moeserve", "localhost", "127.0.0.1", file="other")]
    padded_alike(*made)
    certificates = Certificates(config_of(ring))
    first = serial(certificates)
    written_over(*made)
    assert serial(certificates) != first


def test_grpc_closes_who_does_not_finish_tls(tmp_path: Path) -> None:
    ring = Keyring(tmp_path, "tls")
    door = Door(KeysConfig(**(vars(config_of(ring)) | {"handshake_seconds": 0.3})))
    host, port = door.address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), SECONDS) as silent:
            begun = time.monotonic()
            assert silent.recv(1) == b""
            assert time.monotonic() - begun < 5.0
    finally:
        door.endpoint.stop(0)


def test_open_connections_keep_what_they_have(ring: Keyring) -> None:
    shown, door = ring.shown("right", frozenset()), Door(config_of(ring))
    try:
        with ring.channel(door.address, shown) as channel:
            assert code_of(channel, HEALTH, b"", shown) == "OK"
            ring.service.sign("moeserve", "localhost", "127.0.0.1", days=-1.0)  # the files' own, expired
            assert code_of(channel, HEALTH, b"", shown) == "OK"
            assert door.health(ring, shown) == "UNAVAILABLE"
    finally:
        door.endpoint.stop(0)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("certificate", b"nothing", "do not make a pair that TLS takes"),
        ("private_key", b"nothing", "do not make a pair that TLS takes"),
        ("ca", b"nothing", "keys.ca holds no authority in PEM"),
        ("client_ca", b"\xff", "keys.client_ca holds no authority in PEM"),
        ("client_ca", b"nothing", "keys.client_ca holds no authority in PEM"),
        ("client_ca", b"", "keys.client_ca holds no authority in PEM"),
        ("ca", b"", "keys.ca holds no authority in PEM"),
        ("ca", None, "cannot read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_at_the_start(
    tmp_path: Path, key: str, text: bytes | None, said: str
) -> None:
    ring = Keyring(tmp_path, "mutual")
    path = tmp_path / "wrong"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=said) as wrong:
        Certificates(config_of(ring, **{key: str(path)}))
    assert "PRIVATE KEY" not in str(wrong.value)


def test_an_encrypted_key_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    ring = Keyring(tmp_path, "tls")
    key = serialization.load_pem_private_key(Path(ring.pair[1]).read_bytes(), None)
    hidden = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    (tmp_path / "encrypted").write_bytes(hidden)
    with pytest.raises(ConfigError, match="encrypted"):
        Certificates(config_of(ring, private_key=str(tmp_path / "encrypted")))


def test_without_keys_nothing_is_asked() -> None:
    keys = Keys(KeysConfig(), TOKEN)
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert keys.accept(one) is one and keys.dial(other, "localhost") is other
    assert keys.interceptors() == () and keys.to_lanes() is None and keys.http_context() is None
    assert keys.is_member(TOKEN) and not keys.is_member("") and not Keys(KeysConfig(), "").is_member("")
    assert isinstance(grpc.server(None, interceptors=keys.interceptors()), grpc.Server)
