"""A program's text for the compiler: files of one folder and generated structs, one after the other."""

from __future__ import annotations

from importlib.resources import files

from moeserve.device.arguments import Arguments

FOLDER = "text"
"""The folder of a package that holds its CUDA C++ text."""

Part = str | Arguments
"""A file's name in the folder, or what a kernel takes."""


def source(package: str, *parts: Part) -> str:
    """The files of the folder `text` of `package`, and the structs of arguments, as one text in that order.

    Each may use what those before it declare. Raises FileNotFoundError for a file that is not there.
    """
    folder = files(package) / FOLDER
    return "\n".join(
        part.text if isinstance(part, Arguments) else folder.joinpath(part).read_text() for part in parts
    )
