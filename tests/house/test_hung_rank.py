"""A rank that hangs while its process runs: a step that stands still ends, and the one that holds it up is
named, killed and replaced; those that waited for it are left alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from houses import Alone
from hung import hang, hung_config

from bench.service.chaos import Case, unnamed
from bench.service.faults.service import Service

RANKS = 3
EP3 = {"parallel__data_parallel_size": RANKS, "parallel__enable_expert_parallel": True}
LATE_SECONDS = 3.0
HUNG = 1


@pytest.mark.timed
@pytest.mark.parametrize(
    ("state", "action"),
    [
        ("in a step", "hang"),  # a thread that waits for ever, and all else answers
        ("in combine", "hold"),  # the interpreter is held, and nothing answers
        ("in dispatch", "hang"),  # where those are that wait for it
    ],
)
def test_a_hung_rank_is_named_killed_and_replaced(
    checkpoint_path: Path, alone: Alone, tmp_path: Path, state: str, action: str
) -> None:
    config = hung_config(checkpoint_path, LATE_SECONDS, **EP3)
    with Service(config, tmp_path / "service") as service:
        before, mark = service.living(), service.logged()
        met = hang(service, alone, (state, HUNG, action))
        after, told = service.living(), service.log(mark)
        assert met == before[HUNG][0] != after[HUNG][0]
        assert {rank: after[rank] for rank in (0, 2)} == {rank: before[rank] for rank in (0, 2)}, told
        others = {before[0][0], before[2][0]}
        assert unnamed(told, Case(state, HUNG, action), met, others) == ""
        found = "it has not left its step" if state == "in dispatch" else "it is late: "
        assert f"rank {HUNG} (pid {met}) is given up: {found}" in told
