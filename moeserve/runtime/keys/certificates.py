"""`Certificates`: what this process shows and trusts, as the files have it now.

Files are looked at whenever a connection begins, so a new certificate serves without a restart; connections
that stand keep what they have. Files that do not fit together, as between the writes of two of them, leave
what was read before until one of them changes; files that could not be read are tried again at the next look.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from moeserve.runtime.sections import KEY_FILES, ConfigError, KeysConfig

log = logging.getLogger(__name__)

FILES = tuple(name for name in KEY_FILES if name != "grants")

Stamps = tuple[tuple[int, int, int, int], ...]


class _Unfit(ConfigError):
    """Files that were read and cannot be used as they are."""


@dataclass(frozen=True, repr=False)
class _Read:
    """The files' contents at one moment, and contexts made of them."""

    stamps: Stamps
    texts: dict[str, bytes]
    server: ssl.SSLContext  # asks for no certificate
    mutual: ssl.SSLContext  # demands one, where client_ca is configured
    probed: ssl.SSLContext  # asks for one, where client_ca is configured, and goes on without
    client: ssl.SSLContext


class Certificates:
    """The files that `keys` names. Safe from any thread. Raises ConfigError where they cannot be used."""

    def __init__(self, keys: KeysConfig) -> None:
        self._keys = keys
        self._paths = {name: path for name in FILES if (path := getattr(keys, name))}
        self._lock = threading.Lock()
        self._refused: Stamps | None = None  # files that were read and could not be used
        self._said = ""  # why, in the log
        self._read = self._load(self._stamps())

    @property
    def asks_callers(self) -> bool:
        """Whether callers must show a certificate."""
        return bool(self._keys.client_ca)

    def accepting(self) -> ssl.SSLContext:
        """For a connection from another process of the service, or from a caller."""
        return self._now().mutual

    def probed(self) -> ssl.SSLContext:
        """For a connection to an exporter: a probe shows no certificate."""
        return self._now().probed

    def dialling(self) -> ssl.SSLContext:
        """For a connection to another process of the service."""
        return self._now().client

    def server_name(self, host: str) -> str:
        """The name that the certificate of a process at `host` must have."""
        return self._keys.server_name or host.strip("[]")

    def grpc_server(self) -> grpc.ServerCredentials:
        """For a gRPC server: each connection gets the certificate of its time."""
        shown = self._now()

        def fetch() -> Any:
            nonlocal shown
            now = self._now()
            # Each configuration has keys of its own for sessions. Where callers show certificates, no two
            # connections share one, or a session could be resumed after its certificate has expired.
            if now is shown and not self.asks_callers:
                return None
            shown = now
            return self._grpc_configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(shown), fetch, require_client_authentication=self.asks_callers
        )

    def _grpc_configuration(self, read: _Read) -> Any:
        pair = (read.texts["private_key"], read.texts["certificate"])
        roots = _callers_roots(read.texts) if self.asks_callers else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def _now(self) -> _Read:
        with self._lock:
            try:
                stamps = self._stamps()
                if stamps not in (self._read.stamps, self._refused):
                    self._read = self._load_once(stamps)
                    log.info("read %s anew: connections from now on show it", self._keys.certificate)
                self._said = ""
            except ConfigError as error:
                if str(error) != self._said:
                    self._said = str(error)
                    log.error("the certificate before stays: %s", error)
            return self._read

    def _stamps(self) -> Stamps:
        try:
            found = [os.stat(path) for path in self._paths.values()]
        except OSError as error:
            raise ConfigError(f"keys: cannot read {error.filename}: {error.strerror}") from error
        return tuple((one.st_mtime_ns, one.st_ctime_ns, one.st_size, one.st_ino) for one in found)

    def _load_once(self, stamps: Stamps) -> _Read:
        """Loads the files, and remembers those that do not fit: they are not loaded again."""
        try:
            return self._load(stamps)
        except _Unfit:
            self._refused = stamps
            raise

    def _load(self, stamps: Stamps) -> _Read:
        texts = {}
        for name, path in self._paths.items():
            try:
                texts[name] = Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"keys.{name}: cannot read {path}: {error.strerror}") from error
        read = _Read(
            stamps,
            texts,
            self._server(texts, ssl.CERT_NONE),
            self._server(texts, ssl.CERT_REQUIRED if self.asks_callers else ssl.CERT_NONE),
            self._server(texts, ssl.CERT_OPTIONAL if self.asks_callers else ssl.CERT_NONE),
            self._client(texts),
        )
        if self._stamps() != stamps:
            raise ConfigError(f"keys: {', '.join(self._paths.values())} changed while they were read")
        return read

    def _server(self, texts: dict[str, bytes], demands: ssl.VerifyMode) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET  # a session that is resumed shows no certificate again
        context.num_tickets = 0
        self._show(context)
        if demands is not ssl.CERT_NONE:
            # each alone first: beside the other's authorities a file without any would pass
            _trust(context, texts["client_ca"], "keys.client_ca")
            _trust(context, texts["ca"], "keys.ca")
        context.verify_mode = demands
        return context

    def _client(self, texts: dict[str, bytes]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._show(context)
        _trust(context, texts["ca"], "keys.ca")
        return context

    def _show(self, context: ssl.SSLContext) -> None:
        keys = self._keys
        try:
            context.load_cert_chain(keys.certificate, keys.private_key, password=_no_password)
        except (OSError, ValueError) as error:
            read = isinstance(error, ssl.SSLError | ValueError)  # else a file could not be opened
            raise (_Unfit if read else ConfigError)(
                f"keys.certificate = {keys.certificate} and keys.private_key = {keys.private_key} "
                f"do not make a pair that TLS takes: {error}"
            ) from error


def _callers_roots(texts: dict[str, bytes]) -> bytes:
    """Who signs callers' certificates, the service's own processes among them."""
    return texts["client_ca"].rstrip() + b"\n" + texts["ca"]


def _trust(context: ssl.SSLContext, roots: bytes, key: str) -> None:
    try:
        context.load_verify_locations(cadata=roots.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:  # ValueError: an empty file, or no ASCII
        raise _Unfit(f"{key} holds no authority in PEM: {error}") from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted, and a service cannot ask for its password")
