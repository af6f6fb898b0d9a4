"""Keys for a service under test: its files, what callers show, and what a caller meets at a socket."""

from __future__ import annotations

import http.client
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from made_certificates import Authority, replaced

from moeserve.proto.credentials import Credentials
from moeserve.runtime.keys.access import GRANTED, Role

MODES = ("plain", "tls", "mutual")
CASES = ("right", "wrong", "expired", "none", "wrong role")
HOSTS = ("localhost", "127.0.0.1")
SECONDS = 20.0


@dataclass(frozen=True)
class Shown:
    """What a caller shows: a token, a certificate and its key, or nothing."""

    token: str = ""
    pair: tuple[str, str] | None = None


class Keyring:
    """The files of one service and of its callers, in `folder`."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.mode, self.folder = mode, folder
        self.service, self.strangers = Authority(folder, "service"), Authority(folder, "strangers")
        self.callers = Authority(folder, "callers")
        self.pair = self.service.sign("moeserve", *HOSTS)
        self.tokens = {role: secrets.token_hex(16) for role in GRANTED}
        self.former = secrets.token_hex(16)  # was valid once
        self.grants = folder / "grants"
        self.write_grants(self.tokens)

    def write_grants(self, tokens: Mapping[Role, str], *more: str) -> None:
        """Replaces the file of grants: these tokens, a certificate's name for each role, and more lines."""
        lines = [f"{role.value} token {token}" for role, token in tokens.items()]
        lines += [f"{role.value} name {role.value}.callers" for role in GRANTED]
        replaced(self.grants, "\n".join([*lines, *more, ""]).encode())

    def settings(self) -> dict[str, Any]:
        """Keys of the configuration."""
        found: dict[str, Any] = {"keys__grants": str(self.grants)}
        if self.mode != "plain":
            certificate, key = self.pair
            found |= {
                "keys__certificate": certificate,
                "keys__private_key": key,
                "keys__ca": self.service.path,
            }
        if self.mode == "mutual":
            found["keys__client_ca"] = self.callers.path
        return found

    def shown(self, case: str, needed: frozenset[Role]) -> Shown:
        """What a caller shows in a case of the matrix, for what needs one of these roles."""
        role = next((role for role in GRANTED if (role in needed) == (case != "wrong role")), Role.CALL)
        if self.mode != "mutual":
            known = {"right": self.tokens[role], "wrong role": self.tokens[role], "expired": self.former}
            return Shown(known.get(case, "" if case == "none" else secrets.token_hex(16)))
        name = f"{role.value}.callers"
        match case:
            case "wrong":
                return Shown(pair=self.strangers.sign(name, file=f"wrong-{role.value}"))
            case "expired":
                return Shown(pair=self.callers.sign(name, days=-1.0, file=f"expired-{role.value}"))
            case "none":
                return Shown()
        return Shown(pair=self.callers.sign(name))

    def credentials(self, shown: Shown) -> Credentials | None:
        """The same for a client of ours."""
        certificate, key = shown.pair or ("", "")
        ca = "" if self.mode == "plain" else self.service.path
        if not (ca or shown.token):
            return None
        return Credentials(ca=ca, certificate=certificate, private_key=key, token=shown.token)

    def channel(self, address: str, shown: Shown) -> grpc.Channel:
        """A channel made by nothing of ours; calls on it carry `metadata`."""
        if self.mode == "plain":
            return grpc.insecure_channel(address)
        key = Path(shown.pair[1]).read_bytes() if shown.pair else None
        chain = Path(shown.pair[0]).read_bytes() if shown.pair else None
        roots = Path(self.service.path).read_bytes()
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots, key, chain))

    def context(self, shown: Shown) -> ssl.SSLContext | None:
        """A client's context, made by nothing of ours; None where the service is plain."""
        if self.mode == "plain":
            return None
        context = ssl.create_default_context(cafile=self.service.path)
        if shown.pair:
            context.load_cert_chain(*shown.pair)
        return context

    def get(self, address: str, path: str, shown: Shown) -> int:
        """The status of an HTTP request. Raises OSError where TLS refuses it."""
        host, port = address.rsplit(":", 1)
        context = self.context(shown)
        connection: http.client.HTTPConnection = http.client.HTTPConnection(host, int(port), timeout=SECONDS)
        if context is not None:
            connection = http.client.HTTPSConnection(host, int(port), timeout=SECONDS, context=context)
        headers = {"Authorization": f"Bearer {shown.token}"} if shown.token else {}
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status
        finally:
            connection.close()


def metadata(shown: Shown) -> tuple[tuple[str, str], ...]:
    """What a call carries."""
    return (("authorization", f"Bearer {shown.token}"),) if shown.token else ()


def code_of(channel: grpc.Channel, path: str, payload: bytes, shown: Shown) -> str:
    """How a call ends, by the name of its code. Every method is called as a stream of one message: on the
    wire that is the same.
    """
    try:
        for _ in channel.stream_stream(path)(iter([payload]), metadata=metadata(shown), timeout=SECONDS):
            break
    except grpc.RpcError as failed:
        return str(failed.code().name)
    return "OK"
