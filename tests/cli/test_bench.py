"""What `moeserve bench` says of a service that answers no call, or not each."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from moeserve.cli.bench import BenchLoad, measure, text
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError, Overloaded

LOAD = BenchLoad(
    0,
    np.zeros((2, 4), dtype=np.float32),
    np.zeros((2, 1), dtype=np.int32),
    np.ones((2, 1), dtype=np.float32),
    "",
    "auto",
)


class Refusing:
    """A client each of whose calls is refused, or but for every `answers`-th."""

    def __init__(self, answers: int) -> None:
        self.numbers, self.answers = itertools.count(1), answers

    def status(self) -> Any:
        return SimpleNamespace(jobs=0, steps=0)

    def forward(self, *args: object, **named: object) -> None:
        if not self.answers or next(self.numbers) % self.answers:
            raise Overloaded("RESOURCE_EXHAUSTED", "queue_full", "the lane is full")


def test_calls_that_cannot_be_made_end_it_with_what_the_client_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Refusing, *args: object, **named: object) -> None:
        raise ValueError("rows cannot be placed here")

    monkeypatch.setattr(Refusing, "forward", forward)
    with pytest.raises(ValueError, match="rows cannot be placed here"):
        measure(cast(MoeClient, Refusing(1)), LOAD, 3, 30.0)


@pytest.mark.parametrize("answers", [0, 2])
def test_errors_are_told_with_their_reason_and_nothing_is_no_number(answers: int) -> None:
    result = measure(cast(MoeClient, Refusing(answers)), LOAD, 2, 0.2)
    said = json.loads(json.dumps(asdict(result), allow_nan=False))
    assert set(said["errors"]) == {"RESOURCE_EXHAUSTED"} and said["errors"]["RESOURCE_EXHAUSTED"] > 0
    assert said["reasons"] == {"RESOURCE_EXHAUSTED": "RESOURCE_EXHAUSTED (queue_full): the lane is full"}
    assert "RESOURCE_EXHAUSTED (queue_full): the lane is full" in text(result)
    if answers:
        assert said["calls"] > 0 and said["longest"] >= said["p50"] > 0
    else:
        assert said["calls"] == 0 and (said["p50"], said["longest"]) == (None, None)
        assert "p50 - ms" in text(result)


@pytest.mark.parametrize("told", [0, 1])
def test_a_status_that_is_not_told_costs_no_measurement(
    told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As to a token of the role `call` alone, or where the head is away when the measurement ends."""

    class Silent(Refusing):
        left = told

        def status(self) -> Any:
            self.left -= 1
            if self.left < 0:
                raise MoeError("PERMISSION_DENIED", "wrong_role", "GetStatus needs the role observe")
            return super().status()

    result = measure(cast(MoeClient, Silent(2)), LOAD, 1, 0.1)
    assert result.calls > 0 and result.jobs_per_step is None and "- jobs a step" in text(result)
    assert "is not told: PERMISSION_DENIED (wrong_role): GetStatus needs" in capsys.readouterr().err


def test_a_head_that_started_again_meanwhile_tells_nothing_of_jobs_in_a_step() -> None:
    """Its counts begin at 0: there were -1073 jobs a step."""

    class Restarted(Refusing):
        counts: ClassVar[list[int]] = [1100, 20]

        def status(self) -> Any:
            count = self.counts.pop(0)
            return SimpleNamespace(jobs=count, steps=count)

    result = measure(cast(MoeClient, Restarted(2)), LOAD, 1, 0.1)
    assert result.jobs_per_step is None and "- jobs a step" in text(result)
