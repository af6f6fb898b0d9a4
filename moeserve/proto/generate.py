"""Remakes the generated stubs of `moe.proto`: `python -m moeserve.proto.generate [directory]`.

The stubs are committed, so that a client needs no compiler; a test compares them with a fresh run. They are
generated with the repository root as the include path, which is what makes them import each other as
`moeserve.proto.moe_pb2`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

ROOM = Path(__file__).resolve().parent
PROTO = "moeserve/proto/moe.proto"
STUBS = ("moe_pb2.py", "moe_pb2.pyi", "moe_pb2_grpc.py")


def generate(directory: Path) -> tuple[Path, ...]:
    """Writes the stubs of `moe.proto` into `directory` and returns their paths.

    Raises RuntimeError when protoc refuses the file, ModuleNotFoundError without grpcio-tools (extra `dev`).
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    well_known = resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as out:
        arguments = [
            "protoc",
            f"--proto_path={ROOM.parent.parent}",
            f"--proto_path={well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            PROTO,
        ]
        code = protoc.main(arguments)
        if code != 0:
            raise RuntimeError(f"protoc refused {PROTO} with exit code {code}; its reason is on stderr above")
        made = Path(out, PROTO).parent
        return tuple(Path(shutil.copyfile(made / stub, directory / stub)) for stub in STUBS)


def main(arguments: Sequence[str]) -> None:
    """Writes the stubs beside `moe.proto`, or into the directory named as the only argument."""
    for path in generate(Path(arguments[0]) if arguments else ROOM):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
