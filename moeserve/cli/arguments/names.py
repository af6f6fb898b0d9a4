"""`named`: an argument that names something, which an empty text does not."""

from __future__ import annotations

import argparse


def named(text: str) -> str:
    """Returns the text unless it is empty, as of a variable of a shell that is not set: to `Path` that is the
    working directory, and to a flag as if it were not there. Raises ArgumentTypeError.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give a name, or leave it out")
    return text
