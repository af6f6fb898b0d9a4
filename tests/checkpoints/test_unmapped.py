"""Files of a checkpoint are mapped while experts are read, and not for as long as a process serves."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moeserve.checkpoints.read_ahead import Span
from moeserve.checkpoints.store import CheckpointError, TensorStore

NAME = "model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    save_file({"one": torch.arange(1 << 16), "two": torch.zeros(3)}, tmp_path / NAME)
    return TensorStore(tmp_path)


def mapped(folder: Path) -> bool:
    gc.collect()
    return str(folder / NAME) in Path("/proc/self/maps").read_text()


def test_nothing_stays_mapped_and_all_can_be_read_again(store: TensorStore, tmp_path: Path) -> None:
    first = store.read("one", slice(2, 5)).clone()
    assert mapped(tmp_path)
    store.unmap()
    assert not mapped(tmp_path)
    assert torch.equal(store.read("one", slice(2, 5)), first)
    view = store.read("one")
    store.unmap()
    assert mapped(tmp_path) and int(view[-1]) == (1 << 16) - 1, "what was read stays"


def test_what_is_read_later_comes_from_the_same_file(store: TensorStore, tmp_path: Path) -> None:
    store.read("two")
    store.unmap()
    save_file({"one": torch.zeros(1 << 16), "two": torch.ones(3)}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / NAME)
    assert not store.read("two").any()


def test_what_was_opened_can_be_read_when_it_is_deleted(store: TensorStore, tmp_path: Path) -> None:
    """A rank takes over experts of one that is lost: also where the folder was cleared meanwhile."""
    (entry,) = [entry for name, entry in store.entries.items() if name == "one"]
    span = Span(entry.file, entry.start, entry.start + entry.nbytes)
    assert store.read_ahead([span]) == entry.nbytes
    (tmp_path / NAME).unlink()
    assert store.read_ahead([span]) == entry.nbytes
    assert store.read("one")[3] == 3


def test_a_file_that_is_gone_before_it_was_opened_is_named(store: TensorStore, tmp_path: Path) -> None:
    (tmp_path / NAME).unlink()
    for ask in (lambda: store.read("one"), lambda: store.read_ahead([Span(tmp_path / NAME, 0, 1)])):
        with pytest.raises(CheckpointError, match=re.escape(f"cannot read {tmp_path / NAME}: No such file")):
            ask()


def test_no_descriptor_outlives_its_store(tmp_path: Path) -> None:
    save_file({"one": torch.zeros(3)}, tmp_path / NAME)

    def held() -> int:
        gc.collect()
        return sum(str(tmp_path) in target for target in map(_target, os.listdir("/proc/self/fd")))

    made = TensorStore(tmp_path)
    made.read("one")
    assert held() == 1
    del made
    assert held() == 0


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # of the listing itself
        return ""
