"""Pipes, sockets, devices and folders in place of a checkpoint's files: refused at once, in any place."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.store import INDEX, CheckpointError

pytestmark = pytest.mark.timeout(20)  # a pipe that is waited for has nobody who writes


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


ODD = (a_pipe, a_socket, a_device, a_folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "qwen3"
    make_checkpoint("qwen3_moe", made)
    return made


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["config.json", "weights", INDEX, "hf_quant_config.json"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    folder: Path, name: str, make: Callable[[Path], None]
) -> None:
    file = folder / name if name != "weights" else next(folder.glob("*.safetensors"))
    file.unlink(missing_ok=True)
    make(file)
    try:
        opened = Checkpoint(folder)
    except CheckpointError as refused:
        assert file.name in str(refused) or "pipe" in str(refused)
    else:  # what only may be there is passed by
        assert name in (INDEX, "hf_quant_config.json") and opened.layers


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_a_file_that_becomes_something_else_is_not_waited_for_when_it_is_read(
    folder: Path, make: Callable[[Path], None]
) -> None:
    opened = Checkpoint(folder)
    file = next(folder.glob("*.safetensors"))
    file.unlink()
    make(file)
    with pytest.raises(CheckpointError, match=r"cannot read|is no file"):
        opened.experts(0, (0,))
