"""What the subcommands that ask a running service share: its address, the timeout, JSON and tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from moeserve.cli.arguments.names import named
from moeserve.proto.channel import check_address
from moeserve.proto.client import MoeClient
from moeserve.proto.credentials import Credentials

Message = Any  # a generated protobuf message


def add_address(parser: argparse.ArgumentParser, *, timeout: float) -> None:
    """Adds the address of the front door, --timeout (`timeout` seconds by default) and --json."""
    parser.add_argument(
        "address", type=address, metavar="HOST:PORT", help="address of the service's front door"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout,
        metavar="SECONDS",
        help=f"longest wait for an answer; {timeout:g} by default",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_credentials(parser)


CREDENTIALS = {
    "--ca": ("ca", "PEM", "authorities that signed the service's certificate; the connection is then TLS"),
    "--cert": ("certificate", "PEM", "certificate of this client"),
    "--key": ("private_key", "PEM", "private key of that certificate"),
    "--token-file": ("token_file", "FILE", "file that holds this client's token"),
    "--server-name": ("server_name", "NAME", "name in the service's certificate, where it is not the host's"),
}
"""Flag -> (field of Credentials, metavar, help)."""


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what to trust and what to show."""
    for flag, (field, metavar, text) in CREDENTIALS.items():
        parser.add_argument(flag, dest=field, type=named, metavar=metavar, help=text)


def credentials_of(args: argparse.Namespace) -> Credentials | None:
    """What the flags say; None where they say nothing. Raises ValueError where they do not fit together, or
    name a file that cannot be read.
    """
    given = {field: value for field, _, _ in CREDENTIALS.values() if (value := getattr(args, field))}
    for flag, (field, metavar, _) in CREDENTIALS.items():
        if metavar != "NAME" and (path := given.get(field)):
            try:
                open(path, "rb").close()
            except OSError as error:
                raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error
    return Credentials(**given) if given else None


def client_of(args: argparse.Namespace, **options: Any) -> MoeClient:
    """Makes a client of the service. Raises ValueError for a timeout that is not positive."""
    return MoeClient(args.address, timeout=args.timeout, credentials=credentials_of(args), **options)


def address(text: str) -> str:
    """Returns the text if it says where a service is. Raises ArgumentTypeError."""
    try:
        check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def as_json(message: Message) -> str:
    """Formats a message as JSON, with every field."""
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(fields, indent=2)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Formats rows as columns of text; numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(not isinstance(row[at], str) for row in rows[1:]) for at in range(len(widths))]
    lines = (
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
