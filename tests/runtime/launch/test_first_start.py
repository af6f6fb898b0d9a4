"""What a rank that cannot start says of it: whether to start it again would change anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moeserve.checkpoints.hub import located
from moeserve.checkpoints.store import CheckpointError, TensorStore
from moeserve.runtime.planning.given import is_for_good
from moeserve.runtime.planning.plan import NoPlan
from moeserve.runtime.sections import ConfigError


def failure(work: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as failed:  # any, to be looked at
        work()
    return failed.value


@pytest.mark.parametrize("error", [ConfigError("a"), CheckpointError("b"), NoPlan("c")])
def test_what_was_given_is_as_wrong_the_next_time(error: Exception) -> None:
    assert is_for_good(error)


@pytest.mark.parametrize("error", [OSError("the disk"), RuntimeError("the GPU"), ValueError("anything else")])
def test_what_the_host_does_may_be_otherwise_the_next_time(error: Exception) -> None:
    assert not is_for_good(error)


def test_what_the_host_refuses_is_told_by_its_cause(tmp_path: Path) -> None:
    def unreadable() -> None:
        try:
            (tmp_path / "config.json").read_text()
        except OSError as error:
            raise CheckpointError(f"cannot read: {error.strerror}") from error

    assert not is_for_good(failure(unreadable))


def test_a_checkpoint_that_is_not_there_yet_may_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache, or a folder, on a disk that is mounted a moment later."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not is_for_good(failure(lambda: located("org/name")))
    (tmp_path / "empty").mkdir()
    assert not is_for_good(failure(lambda: TensorStore(tmp_path / "empty")))
