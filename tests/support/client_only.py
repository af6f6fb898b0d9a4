"""An import hook that leaves an interpreter with what `pip install moeserve` brings, and nothing more.

Run as a script, it takes the words of a `moeserve` command line: `python client_only.py simulate --help`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

BASE = {"moeserve", "numpy", "grpc", "google", "typing_extensions"}
"""Top-level modules of the base install; grpcio brings typing_extensions."""


class ClientOnly(MetaPathFinder):
    """Answers every import of another distribution as Python does where it is not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Returns None for a module of the base install. Raises ModuleNotFoundError for any other."""
        first = name.partition(".")[0]
        if first not in BASE and first not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.path.pop(0)  # tests/support, which the interpreter put there
    sys.meta_path.insert(0, ClientOnly())
    from moeserve.cli import main

    sys.exit(main(sys.argv[1:]))
