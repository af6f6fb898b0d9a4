"""`Credentials`: what a client trusts and what it shows, and `KeyedChannel`, a gRPC channel that does so."""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # between looks whether a file has changed
WRITTEN_SECONDS = 0.5  # at most, for a file that is being written when a client begins

FILE_KEYS = ("ca", "certificate", "private_key", "token_file", "server_name")
"""What a file of credentials may say: no token itself."""

Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Credentials:
    """Paths of PEM files, and where the token is; empty ones are not used. ValueError where they do not fit.

    Files are read again when they change: calls from then on show what is new, and streams that are open
    keep what they have.
    """

    ca: str = ""  # authorities that may have signed the service's certificate; without it, no TLS
    certificate: str = ""  # of this client
    private_key: str = ""  # of the certificate
    token_file: str = ""  # holds one token, and nothing else
    server_name: str = ""  # that the service's certificate has; empty: the host of each address
    token: str = field(default="", repr=False)  # in place of a file

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("a certificate and its private key need each other: give both, or neither")
        if self.certificate and not self.ca:
            raise ValueError("a client's certificate is shown over TLS alone: give the authorities too (ca)")
        if self.server_name and not self.ca:
            raise ValueError("server_name is looked for in the service's certificate: give ca too")
        if self.token and self.token_file:
            raise ValueError("give a token or the file that holds it, not both")

    @classmethod
    def load(cls, path: str) -> Credentials:
        """What a TOML file says: `ca`, `certificate`, `private_key`, `token_file`, `server_name`.

        Relative paths start at the file's own folder. Raises ValueError.
        """
        try:
            given = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
        wrong = [name for name, value in given.items() if name not in FILE_KEYS or not isinstance(value, str)]
        if wrong:
            raise ValueError(f"{path}: {wrong[0]!r} is not one of {', '.join(FILE_KEYS)} with a text")
        folder = Path(path).absolute().parent
        files = {name: str(folder / Path(text).expanduser()) for name, text in given.items() if text}
        return cls(**(files | ({"server_name": given["server_name"]} if "server_name" in given else {})))

    @property
    def shows_token(self) -> bool:
        """Whether calls carry a token."""
        return bool(self.token or self.token_file)

    def stamps(self) -> tuple[Stamps, Stamps]:
        """Those of TLS's files and of the token's: others than before once a file has changed.

        Raises OSError.
        """
        return _stamps(self.ca, self.certificate, self.private_key), _stamps(self.token_file)

    def check_address(self, address: str) -> None:
        """Raises ValueError for an address beyond loopback to which a token would go as plain text."""
        if self.shows_token and not self.ca and not is_loopback(address):
            raise ValueError(
                f"a token is not sent to {address} as plain text; "
                "give the authorities that signed its certificate"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries. Raises OSError, and ValueError for a file that holds no token."""
        token = self.token
        if self.token_file:
            token = Path(self.token_file).read_text().strip()
            if not token or not token.isprintable() or " " in token:
                raise ValueError(f"{self.token_file} must hold one token, and nothing else")
        return (("authorization", f"Bearer {token}"),) if token else ()

    def grpc_channel(self) -> grpc.ChannelCredentials | None:
        """TLS as gRPC has it; None for a plain connection. Raises OSError, and ValueError that names a file
        which gRPC could not use: it would say later that nobody answers.
        """
        if not self.ca:
            return None
        self.context()
        pair = [Path(path).read_bytes() if path else None for path in (self.private_key, self.certificate)]
        return grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), *pair)

    def context(self) -> ssl.SSLContext:
        """What a caller asks of a service's certificate, and its own, as the files are now. Raises OSError,
        and ValueError for a file that holds something else.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with _named(f"ca: {self.ca} holds no authority's certificate in PEM"):
            context.load_verify_locations(cafile=self.ca)
        if self.certificate:
            pair = self.certificate, self.private_key
            with _named("certificate: {} and private_key: {} are no pair in PEM".format(*pair)):
                context.load_cert_chain(*pair, password="")
        return context

    def options(self) -> list[tuple[str, Any]]:
        """Options of a channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


@contextmanager
def _named(wrong: str) -> Iterator[None]:
    """A context in which what TLS cannot use is a ValueError that says so."""
    try:
        yield
    except ssl.SSLError as error:
        raise ValueError(f"{wrong}: {error.reason or error}") from error


def _stamps(*paths: str) -> Stamps:
    found = [os.stat(path) for path in paths if path]
    return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


def is_loopback(address: str) -> bool:
    """Whether `host:port` stays on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


Metadata = tuple[tuple[str, str], ...]
Make = Callable[[grpc.ChannelCredentials | None], Any]
"""Makes a channel, of grpc or of grpc.aio, with TLS or without."""


class KeyedChannel:
    """A channel that shows `credentials`, as the stubs of the contract use one. Safe from any thread.

    When a file changes, calls that begin from then on go over a new channel; the one before stays for calls
    and streams that are on it, until the next change. A file that cannot be read leaves what there is.
    """

    def __init__(self, credentials: Credentials, make: Make) -> None:
        self._credentials, self._make = credentials, make
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._stamps, self._metadata, tls = _settled(credentials)
        self._channel = make(tls)
        self._before: Any = None
        self._said = ""  # in the log, of files that cannot be used
        self.closed = False

    def unary_unary(self, path: str, *given: Any, **options: Any) -> KeyedMethod:
        """As of the channel; and so are the other three."""
        return KeyedMethod(self, "unary_unary", path, given, options)

    def unary_stream(self, path: str, *given: Any, **options: Any) -> KeyedMethod:
        """As of the channel."""
        return KeyedMethod(self, "unary_stream", path, given, options)

    def stream_unary(self, path: str, *given: Any, **options: Any) -> KeyedMethod:
        """As of the channel."""
        return KeyedMethod(self, "stream_unary", path, given, options)

    def stream_stream(self, path: str, *given: Any, **options: Any) -> KeyedMethod:
        """As of the channel."""
        return KeyedMethod(self, "stream_stream", path, given, options)

    def now(self) -> tuple[Any, tuple[tuple[str, str], ...]]:
        """The channel and the metadata of a call that begins."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            with self._lock:
                if now - self._looked > LOOK_SECONDS and not self.closed:
                    self._looked = now
                    self._renew()
        return self._channel, self._metadata

    def channels(self) -> list[Any]:
        """Ends renewing; returns the channels, to be closed."""
        with self._lock:
            self.closed = True
            return [self._channel] if self._before is None else [self._channel, self._before]

    def close(self) -> None:
        """Closes the channels, where they are of grpc; calls on them are cancelled."""
        for channel in self.channels():
            channel.close()

    def _renew(self) -> None:
        try:
            stamps = self._credentials.stamps()
            if stamps == self._stamps:
                self._said = ""
                return
            metadata = self._credentials.metadata()
            tls = None if stamps[0] == self._stamps[0] else self._credentials.grpc_channel()
        except (OSError, ValueError) as error:
            # a file is being replaced, or gone: what was read before may still be valid
            if str(error) != self._said:
                self._said = str(error)
                log.error("what this client showed before stays: %s", error)
            return
        self._said = ""
        self._stamps, self._metadata = stamps, metadata
        if tls is not None:
            self._before, self._channel = self._channel, self._make(tls)


def _settled(credentials: Credentials) -> tuple[tuple[Stamps, Stamps], Metadata, Any]:
    """The stamps of the files, and what a call carries and a channel shows. A file that is being written in
    place may be read half or empty: then all are read again, for WRITTEN_SECONDS at most.

    Raises OSError, and ValueError for a file that holds something else, or files that do not cease to change.
    """
    until = time.monotonic() + WRITTEN_SECONDS
    while True:
        stamps = credentials.stamps()
        wrong = ValueError(f"files of {credentials} changed while they were read")
        try:
            metadata, tls = credentials.metadata(), credentials.grpc_channel()
            if credentials.stamps() == stamps:
                return stamps, metadata, tls
        except ValueError as error:
            wrong = error
        if time.monotonic() > until:
            raise wrong
        time.sleep(0.01)


class KeyedMethod:
    """A method of the contract over a KeyedChannel: called as gRPC's, it adds what the client shows."""

    def __init__(
        self, channel: KeyedChannel, kind: str, path: str, given: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._make: Callable[[Any], Any] = lambda made: getattr(made, kind)(path, *given, **options)
        self._made: tuple[Any, Any] = (None, None)  # the channel, and its method

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Calls it."""
        method, metadata = self._now()
        return method(*given, metadata=metadata, **options)

    def future(self, *given: Any, **options: Any) -> Any:
        """Begins to call it."""
        method, metadata = self._now()
        return method.future(*given, metadata=metadata, **options)

    def _now(self) -> tuple[Any, tuple[tuple[str, str], ...]]:
        channel, metadata = self._channel.now()
        of, method = self._made
        if of is not channel:
            method = self._make(channel)
            self._made = channel, method
        return method, metadata
