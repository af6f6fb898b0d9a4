"""The law of dialects: checkpoints that real producers wrote read as the formulas say, near to their source.

The data are in tests/producers, with how each was made; `NOT_RUN` says why a dialect has none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.numbers import formulas
from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.dialects import DIALECTS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "producers"
ERRORS: dict[str, dict[str, Any]] = json.loads((DATA / "errors.json").read_text())
"""Relative error of each checkpoint's matrices against its source, as it was when it was made."""

NOT_RUN = {
    "deepseek_fp4": "its producer is not public",
}
"""Why a dialect has no data."""


def dialect_of(name: str) -> str:
    return name.partition("-")[0]


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_real_producer(name: str) -> None:
    checkpoint = Checkpoint(DATA / name)
    source = Checkpoint(DATA / ERRORS[name]["source"])
    assert checkpoint.dialect.name == dialect_of(name)
    found = list(formulas.experts(DATA / name))
    assert len(found) == checkpoint.num_experts * len(checkpoint.layers)
    errors = []
    for one in found:
        read, true = (each.experts(one.layer, [one.expert]) for each in (checkpoint, source))
        pairs = ((read.gate_up, one.gate_up, true.gate_up), (read.down, one.down, true.down))
        for packed, meant, plain in pairs:
            values, truth = packed.dequantize()[0], plain.dequantize()[0]
            assert torch.equal(values, meant)
            errors.append(float((values - truth).norm() / truth.norm()))
    assert sum(errors) / len(errors) == pytest.approx(ERRORS[name]["mean"], abs=2e-6)
    assert max(errors) == pytest.approx(ERRORS[name]["max"], abs=2e-6)
    assert max(errors) <= formulas.KNOWN_ERROR[found[0].kind]


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_dialect_has_data_or_a_reason(dialect: str) -> None:
    folders = {
        path.parent.name for path in DATA.glob("*/config.json") if dialect_of(path.parent.name) == dialect
    }
    assert folders == {name for name in ERRORS if dialect_of(name) == dialect}
    assert bool(folders) != (dialect in NOT_RUN)
