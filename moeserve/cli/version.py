"""`moeserve version`: shows the versions that a bug report needs."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from moeserve import __version__

PACKAGES = ("numpy", "grpcio", "protobuf", "torch", "safetensors", "ray", "transformers")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `version` and its arguments."""
    about = "show the versions of moeserve and of what it uses"
    parser = subparsers.add_parser("version", help=about, description=about)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints one line for each package; imports none of them."""
    print(f"moeserve      {__version__}")
    print(
        f"python        {platform.python_version()} on {platform.platform(terse=True)} {platform.machine()}"
    )
    for name in PACKAGES:
        print(f"{name:<13} {_installed(name)}")
    return 0


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
