"""Probes over TLS: nobody shows a certificate, and each connection is shown the one of its time."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from keyed import SECONDS, Keyring, Shown, code_of
from made_certificates import padded_alike, replaced, written_over

from moeserve.runtime.telemetry.probe_process import Certificate
from moeserve.runtime.telemetry.probes import Probes

HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path, "tls")


@pytest.fixture
def address(ring: Keyring) -> Iterator[str]:
    made = Probes(("127.0.0.1", 0), ["a.service"], 5.0, lambda: "", ring.pair)
    until = time.monotonic() + SECONDS
    while True:
        try:
            assert ring.get(f"127.0.0.1:{made.port}", "/livez", Shown()) == 200
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
    yield f"127.0.0.1:{made.port}"
    made.close()


def serial(address: str, ring: Keyring) -> str:
    host, port = address.rsplit(":", 1)
    context = ring.context(Shown())
    assert context is not None
    with (
        socket.create_connection((host, int(port)), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as made,
    ):
        certificate = made.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def test_they_are_answered_over_tls_and_not_without(address: str, ring: Keyring) -> None:
    assert ring.get(address, "/readyz", Shown()) == 200
    with ring.channel(address, Shown()) as channel:
        assert code_of(channel, HEALTH, b"", Shown()) == "OK"
        assert code_of(channel, HEALTH, b"\n\x09a.service", Shown()) == "OK"
        assert code_of(channel, HEALTH, b"\n\x01b", Shown()) == "NOT_FOUND"
    with grpc.insecure_channel(address) as channel:
        assert code_of(channel, HEALTH, b"", Shown()) == "UNAVAILABLE"
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), SECONDS) as plain:
        plain.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in plain.recv(1000)


def test_who_offers_http_2_too_is_answered_by_get(address: str, ring: Keyring) -> None:
    """As curl and the kubelet do; gRPC's clients offer that alone."""
    host, port = address.rsplit(":", 1)
    context = ring.context(Shown())
    assert context is not None
    for offered in (["h2", "http/1.1"], ["http/1.1"], []):
        if offered:
            context.set_alpn_protocols(offered)
        with (
            socket.create_connection((host, int(port)), SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as made,
        ):
            assert made.selected_alpn_protocol() in ("http/1.1", None)
            made.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert made.recv(1000).split(b"\r\n")[0].split()[1] == b"200"


def test_a_new_certificate_is_shown_without_a_restart(address: str, ring: Keyring) -> None:
    first = serial(address, ring)
    certificate, key = map(Path, ring.pair)
    other = ring.service.sign("moeserve", "localhost", "127.0.0.1", file="other")
    replaced(certificate, Path(other[0]).read_bytes())  # its key is not there yet
    assert serial(address, ring) == first
    replaced(key, Path(other[1]).read_bytes())
    assert serial(address, ring) != first
    with ring.channel(address, Shown()) as channel:
        assert code_of(channel, HEALTH, b"", Shown()) == "OK"
    certificate.unlink()
    assert ring.get(address, "/readyz", Shown()) == 200


def shown(context: ssl.SSLContext, ring: Keyring) -> str:
    """The serial of the certificate that one connection is shown by a server with `context`."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            with context.wrap_socket(listener.accept()[0], server_side=True) as made:
                made.recv(1)

        served = threads.submit(serve)
        host, port = listener.getsockname()
        found = serial(f"{host}:{port}", ring)
        served.result(SECONDS)
        return found


def test_a_certificate_that_could_not_be_read_is_tried_again(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with too many open files, or before the new one has its owner."""
    certificate = Certificate(*ring.pair)
    context = certificate.context()
    first = shown(context, ring)
    ring.service.sign("moeserve", "localhost", "127.0.0.1")

    def fails() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(certificate, "_read", fails)
        assert shown(context, ring) == first
    assert shown(context, ring) != first


def test_a_certificate_that_does_not_fit_is_read_once(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, reads = Certificate(*ring.pair), []
    context, read = certificate.context(), certificate._read
    first = shown(context, ring)
    monkeypatch.setattr(certificate, "_read", lambda: reads.append(1) or read())
    replaced(Path(ring.pair[0]), b"nothing")
    assert shown(context, ring) == shown(context, ring) == first and len(reads) == 1


def test_a_certificate_is_read_again_though_time_and_size_stay(ring: Keyring) -> None:
    made = [ring.pair, ring.service.sign("moeserve", "localhost", "127.0.0.1", file="other")]
    padded_alike(*made)
    context = Certificate(*ring.pair).context()
    first = shown(context, ring)
    written_over(*made)
    assert shown(context, ring) != first
