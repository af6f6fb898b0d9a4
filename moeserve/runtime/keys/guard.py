"""`Guard`: asks the table of access for each RPC and each HTTP path, with what the caller shows."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from moeserve.proto.errors import REASON_KEY
from moeserve.proto.texts import clipped
from moeserve.runtime.config_checks import is_loopback
from moeserve.runtime.keys.access import OPEN, PATHS, RPCS, Role, allowed, named
from moeserve.runtime.keys.grants import Grants, NotAuthenticated, Refused, Roles, WrongRole

log = logging.getLogger(__name__)

SAY_SECONDS = 5.0  # between two lines of the log about callers that were refused

BEARER = "bearer "

MOST_REMEMBERED = 4096  # combinations of method, names and host that were let in lately


Still = Callable[[], None]
"""Raises Refused where a caller is not let in any more."""


def let_in() -> None:
    """Refuses nobody."""


class Guard:
    """Decides by the table and the grants. Safe from any thread.

    is_member: tells the run's token, which processes of the service show. encrypted: whether callers come
    over TLS; without it, a token is only taken from loopback.
    """

    def __init__(self, grants: Grants, is_member: Callable[[str], bool], *, encrypted: bool) -> None:
        self.grants = grants
        self._is_member = is_member
        self._encrypted = encrypted
        self._refusals = _Refusals()
        self._let_in: dict[tuple[str, tuple[str, ...], str], tuple[object, bytes]] = {}

    def check(
        self, what: str, needed: Roles | None, bearer: str | None, names: Iterable[str], peer: str
    ) -> None:
        """Lets the caller at `peer` do `what`, which one of the roles `needed` lets; None: nothing does.

        bearer: the token it shows, names: those of its certificate. Raises NotAuthenticated or WrongRole.
        """
        asked, granted = (what, tuple(names), peer), self.grants.version
        if bearer is not None and self._was_let_in(asked, granted, bearer):
            return
        try:
            self._check(what, needed, bearer, asked[1], peer)
        except Refused as refused:
            self._refusals.note(peer, what, str(refused))
            raise
        if bearer is not None:
            if len(self._let_in) >= MOST_REMEMBERED:
                self._let_in.clear()
            self._let_in[asked] = granted, bearer.encode(errors="surrogatepass")

    def _was_let_in(self, asked: tuple[str, tuple[str, ...], str], granted: object, bearer: str) -> bool:
        """Whether the last one who was let in with the same names, from the same host, showed the same token,
        and nothing else has been granted since. A caller's second call then costs a comparison.
        """
        of, shown = self._let_in.get(asked, (None, b""))
        return of is granted and hmac.compare_digest(shown, bearer.encode(errors="surrogatepass"))

    def still(
        self, what: str, needed: Roles | None, bearer: str | None, names: Iterable[str], peer: str
    ) -> Callable[[], None]:
        """What asks, of a caller that was let in, whether it would be now; as `check` raises. It was let in
        before this is called, perhaps by what another version granted: the first time is asked in any case.
        """
        shown = tuple(names)
        granted: object = None

        def ask() -> None:
            nonlocal granted
            if (now := self.grants.version) is not granted:
                self.check(what, needed, bearer, shown, peer)
                granted = now

        return ask

    def check_path(self, path: str, authorization: str, names: Iterable[str], peer: str) -> None:
        """Lets an HTTP request through. Raises NotAuthenticated or WrongRole."""
        needed = PATHS.get(path)
        if needed != OPEN:
            self.check(path, needed, token_in(authorization), names, peer)

    def _check(
        self, what: str, needed: Roles | None, bearer: str | None, names: tuple[str, ...], peer: str
    ) -> None:
        roles = self.grants.of_anyone()
        if names:
            roles |= self.grants.of_names(names)
        if bearer is not None:
            if not (self._encrypted or is_loopback(peer)):
                raise NotAuthenticated("a token is not taken as plain text from beyond loopback")
            member = frozenset({Role.MEMBER})
            roles |= member if self._is_member(bearer) else self.grants.of_token(bearer)
        if allowed(needed, roles):
            return
        if bearer is None and not names:
            raise NotAuthenticated(f"{what} needs a token or a certificate, and neither was shown")
        raise WrongRole(f"{what} needs the role {named(needed or OPEN)}, which the caller does not have")


class RpcGuard(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Asks `guard` before a handler of the server runs, in the handler's own thread."""

    def __init__(self, guard: Guard, *, certificates: bool) -> None:
        self._guard = guard
        self._certificates = certificates  # whether callers show any
        self._made: dict[str, grpc.RpcMethodHandler] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The handler of a call, behind the check."""
        method = details.method
        if method in self._made:
            return self._made[method]
        needed, handler = RPCS.get(method), continuation(details)
        if needed == OPEN:
            return handler
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._unknown)
        made = self._made[method] = self._guarded(handler, method, needed)
        return made

    def _guarded(self, handler: Any, method: str, needed: Roles | None) -> grpc.RpcMethodHandler:
        kinds = {
            (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        }
        behavior, make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]

        def answer(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
            self._check(method, needed, context)
            return behavior(request, context, *more)

        answer.__dict__.update(vars(behavior))  # the threads that it runs in
        return make(answer, handler.request_deserializer, handler.response_serializer)

    def _unknown(self, requests: Any, context: grpc.ServicerContext) -> Any:
        """A method that the server has not: who shows nothing is told no more than of any other."""
        self._check("a method that is not in the contract", None, context)
        raise AssertionError("no role allows what is not in the table")

    def _check(self, method: str, needed: Roles | None, context: grpc.ServicerContext) -> None:
        try:
            self._guard.check(method, needed, *shown_in(context, certificates=self._certificates))
        except NotAuthenticated as refused:
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, "not_authenticated", refused)
        except WrongRole as refused:
            _abort(context, grpc.StatusCode.PERMISSION_DENIED, "wrong_role", refused)


def shown_in(context: grpc.ServicerContext, *, certificates: bool) -> tuple[str | None, Iterable[str], str]:
    """What the caller of an RPC shows: its token, the names of its certificate, and its host."""
    bearer = None
    for key, value in context.invocation_metadata():
        if key == "authorization":
            bearer = token_in(value if isinstance(value, str) else value.decode(errors="replace"))
    names = names_of(context.auth_context()) if certificates else ()
    return bearer, names, host_of(context.peer())


def token_in(authorization: str) -> str | None:
    """The token of an `authorization` header; empty for one of another scheme, None where there is none."""
    if not authorization:
        return None
    return authorization[len(BEARER) :].strip() if authorization.lower().startswith(BEARER) else ""


def names_of(auth_context: Any) -> list[str]:
    """Common name and alternative names of the certificate behind a gRPC connection."""
    found = (
        *auth_context.get("x509_common_name", ()),
        *auth_context.get("x509_subject_alternative_name", ()),
    )
    return [name.decode(errors="replace") for name in found]


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer, such as `ipv4:127.0.0.1:5000`; a Unix socket is on loopback."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return "localhost"
    return rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]")


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, why: Exception) -> None:
    context.set_trailing_metadata(((REASON_KEY, reason),))
    context.abort(code, clipped(str(why)))


class _Refusals:
    """One line of the log now and then, however many callers are refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = -SAY_SECONDS
        self._unsaid = 0

    def note(self, peer: str, what: str, why: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._said < SAY_SECONDS:
                self._unsaid += 1
                return
            unsaid, self._unsaid, self._said = self._unsaid, 0, now
        log.warning("refused %s to %s: %s (%d others since the last such line)", what, peer, why, unsaid)
