"""A program's text for the compiler: files of one folder, one after the other."""

from __future__ import annotations

from importlib.resources import files

FOLDER = "text"
"""The folder of a package that holds its CUDA C++ text."""


def source(package: str, *names: str) -> str:
    """The files `names` of the folder `text` of `package` as one text, in that order.

    Each may use what those before it declare. Raises FileNotFoundError for a file that is not there.
    """
    folder = files(package) / FOLDER
    return "\n".join(folder.joinpath(name).read_text() for name in names)
