"""`transformers serve`, the OpenAI-compatible server, with its models' experts behind moeserve.

    python -m moeserve.proto.integrations.transformers_serve --experts 127.0.0.1:50051 MODEL --port 8000

All other arguments are those of `transformers serve`. Needs the extra `serving`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from moeserve.proto.client import MoeClient
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import MoeError
from moeserve.proto.passes.lane_client import LaneClient

PROGRAM = "python -m moeserve.proto.integrations.transformers_serve"
INSTALL = "pip install 'moeserve[serving]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is stopped. The exit status is 2 for what cannot be served; stderr says why."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=plain, allow_abbrev=False
    )
    parser.add_argument("--experts", required=True, metavar="HOST:PORT", help="address of the service")
    parser.add_argument(
        "--experts-timeout", type=float, default=60.0, metavar="SECONDS", help="of one layer's call"
    )
    parser.add_argument(
        "--experts-credentials", metavar="TOML", help="file of what to trust and show (proto/credentials.py)"
    )
    parser.add_argument(
        "--experts-lanes",
        type=int,
        default=0,
        metavar="N",
        help="device lanes of a rank on this host, for calls, one at a time each (LaneClient); 0: none",
    )
    own, others = parser.parse_known_args(arguments)
    try:
        serve = server_command()
        shown = Credentials.load(own.experts_credentials) if own.experts_credentials else None
        with client_of(own.experts, own.experts_lanes, own.experts_timeout, shown) as client:
            put_behind(client)
            serve(args=others, prog_name=PROGRAM)
    except (ImportError, ValueError, MoeError) as failed:
        print(f"{PROGRAM}: {failed}", file=sys.stderr)
        return 2
    return 0


def client_of(address: str, lanes: int, timeout: float, credentials: Credentials | None) -> MoeClient:
    """Whose calls go over so many device lanes where they can; 0: as messages. ValueError for fewer."""
    if not lanes:
        return MoeClient(address, timeout=timeout, credentials=credentials)
    return LaneClient(address, lanes=lanes, timeout=timeout, credentials=credentials)


def server_command() -> Any:
    """The command `transformers serve`, to be called with `args`; ImportError says how to install it."""
    try:
        import typer
        from transformers.cli.serve import Serve
        from transformers.utils.import_utils import is_serve_available
    except ImportError as failed:
        raise ImportError(f"{failed}; install it with: {INSTALL}") from failed
    if not is_serve_available():
        raise ImportError(
            f"transformers' server needs packages that are missing here; install them with: {INSTALL}"
        )
    app = typer.Typer(add_completion=False)
    app.command(name="serve")(Serve)
    return typer.main.get_command(app)


def put_behind(client: MoeClient) -> None:
    """Models that this process serves from now on come without experts' weights, attached to `client`."""
    from transformers.cli.serving import model_manager

    from moeserve.proto.integrations.transformers import attach, without_expert_weights

    class RemoteExpertsModels(model_manager.ModelManager):  # type: ignore[misc]
        """The models of the server, with their experts behind moeserve."""

        def _load_model(self, *arguments: Any, **options: Any) -> Any:
            with without_expert_weights():
                model = super()._load_model(*arguments, **options)
            attach(model, client)
            return model

    # the command looks the class up when it starts, and takes none from outside
    model_manager.ModelManager = RemoteExpertsModels


if __name__ == "__main__":
    sys.exit(main())
