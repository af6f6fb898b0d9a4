"""`Keys`: what one process of a service asks before it lets anybody in, and what it shows to others."""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Callable

import grpc

from moeserve.proto.credentials import Credentials
from moeserve.proto.transports.tls import TlsSocket
from moeserve.runtime.keys.access import RPCS
from moeserve.runtime.keys.certificates import Certificates
from moeserve.runtime.keys.grants import Grants
from moeserve.runtime.keys.guard import Guard, RpcGuard, let_in, shown_in
from moeserve.runtime.sections import KeysConfig

Connection = socket.socket | TlsSocket


class Keys:
    """The keys of one process. With an empty configuration all is plain and everyone may do everything.

    token: of this run of the service, which its processes show each other. Raises ConfigError or BadGrants
    for files that cannot be used.
    """

    def __init__(self, config: KeysConfig, token: str) -> None:
        self._config = config
        self.token = token
        self._certificates = Certificates(config) if config.certificate else None
        self.guard: Guard | None = None
        if config.grants:
            self.guard = Guard(
                Grants(config.grants), self.is_member, encrypted=self._certificates is not None
            )

    def is_member(self, token: object) -> bool:
        """Whether `token` is the run's, compared in constant time."""
        if not self.token:
            return False
        return hmac.compare_digest(str(token).encode(errors="replace"), self.token.encode())

    # -- gRPC

    def interceptors(self) -> tuple[grpc.ServerInterceptor, ...]:
        """What a gRPC server asks before each call."""
        if self.guard is None:
            return ()
        return (RpcGuard(self.guard, certificates=self._asks_callers),)

    def still(self, method: str, context: grpc.ServicerContext) -> Callable[[], None]:
        """What asks, of the caller of an RPC that was let in, whether it would be now. It raises Refused."""
        if self.guard is None:
            return let_in
        return self.guard.still(method, RPCS[method], *shown_in(context, certificates=self._asks_callers))

    @property
    def _asks_callers(self) -> bool:
        return self._certificates is not None and self._certificates.asks_callers

    def server_options(self) -> list[tuple[str, int]]:
        """How long gRPC waits for a connection's TLS, and for its first frames."""
        if self._certificates is None:
            return []
        return [("grpc.server_handshake_timeout_ms", int(self._config.handshake_seconds * 1000))]

    def listen(self, server: grpc.Server, address: str) -> int:
        """Has `server` listen at `address`; returns the port. Raises RuntimeError where it cannot."""
        if self._certificates is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self._certificates.grpc_server()))

    def to_lanes(self) -> Credentials | None:
        """What the front door shows the lanes; None where they ask for nothing."""
        config = self._config
        if not (config.certificate or config.grants):
            return None
        mutual = bool(config.client_ca)
        return Credentials(
            ca=config.ca,
            certificate=config.certificate if mutual else "",
            private_key=config.private_key if mutual else "",
            server_name=config.server_name,
            token=self.token,
        )

    # -- sockets of our own

    def accept(self, connection: socket.socket) -> Connection:
        """A connection from another process of the service, or from a caller, encrypted where TLS is
        configured.

        Blocks for `keys.handshake_seconds` at most; raises OSError where the other end does not fit.
        """
        if self._certificates is None:
            return connection
        return self._shaken(TlsSocket(connection, self._certificates.accepting()))

    def dial(self, connection: socket.socket, host: str) -> Connection:
        """A connection to the process of the service at `host`, as `accept`."""
        if self._certificates is None:
            return connection
        name = self._certificates.server_name(host)
        return self._shaken(TlsSocket(connection, self._certificates.dialling(), name))

    def _shaken(self, made: TlsSocket) -> TlsSocket:
        """`made`, once its ends agree; closed where they do not."""
        try:
            made.handshake(self._config.handshake_seconds)
        except BaseException:
            made.close()
            raise
        return made

    def http_context(self) -> ssl.SSLContext | None:
        """For a connection to an exporter; None where it is plain."""
        return None if self._certificates is None else self._certificates.probed()


NO_KEYS = Keys(KeysConfig(), "")
"""Everything is plain, and everyone may do everything."""
