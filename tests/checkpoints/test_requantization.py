"""What loading in another scheme loses: the distance between two views of one checkpoint."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from quantized import PRODUCERS, write

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.requantization import Loss, relative_error, requantization, sampled


def compared(path: Path, name: str):
    return requantization(Checkpoint(path), Checkpoint(path, load_as=name), Checkpoint(path).layers)


def test_the_error_is_that_of_the_format(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, experts=2, layers=1)
    found = compared(tmp_path, "mxfp8")
    stored, form = Checkpoint(tmp_path), Checkpoint(tmp_path, load_as="mxfp8").scheme(0).weights
    errors = []
    for expert in found.experts:
        down = stored.experts(0, [expert]).down.dequantize()
        lost = form.quantize(down).dequantize() - down
        errors.append(float(lost.double().norm() / down.double().norm()))
    assert found.experts == (0, 1)
    assert found.down.mean == pytest.approx(sum(errors) / 2, rel=1e-6)
    assert found.down.max == pytest.approx(max(errors), rel=1e-6)


def test_finer_formats_lose_less(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, experts=2, layers=1)
    lost = [compared(tmp_path, name).gate_up.mean for name in ("mxfp4", "mxfp6_e2m3", "mxfp8", "fp32")]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] == 0


def test_weights_that_stay_lose_nothing(tmp_path: Path) -> None:
    write(tmp_path, PRODUCERS["ct NVFP4"])
    found = compared(tmp_path, "nvfp4 x bf16")
    assert (found.gate_up, found.down) == (Loss(0, 0), Loss(0, 0))
    assert (found.stored, found.loaded) == (("nvfp4 x nvfp4_static",), ("nvfp4 x bf16",))


def test_nvfp4_read_with_e4m3s_precision_loses_what_its_products_round(tmp_path: Path) -> None:
    write(tmp_path, PRODUCERS["ct NVFP4"])
    found = compared(tmp_path, "nvfp4_e4m3 x fp8_group128")
    assert 0.018 < found.gate_up.mean <= found.gate_up.max < 0.025
    assert 0.018 < found.down.mean <= found.down.max < 0.025
    assert found.loaded == ("nvfp4_e4m3 x fp8_group128",)


def test_bytes_are_those_of_the_experts_when_loaded(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path, experts=4)  # has biases
    loaded = Checkpoint(tmp_path, load_as="mxfp4 x bf16")
    read = [loaded.experts(layer, range(4)).nbytes for layer in loaded.layers]
    assert compared(tmp_path, "mxfp4 x bf16").loaded_nbytes == sum(read)


def test_no_layers_are_named() -> None:
    with pytest.raises(ValueError, match="no layers were given"):
        requantization(None, None, ())  # type: ignore[arg-type]


def test_zeros_have_no_relative_error_and_what_replaces_them_an_infinite_one() -> None:
    zeros = torch.zeros(2, 3)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros + 1, zeros) == inf


@pytest.mark.parametrize(
    ("experts", "count", "ids"),
    [
        (1, 3, (0,)),
        (2, 3, (0, 1)),
        (3, 3, (0, 1, 2)),
        (8, 3, (0, 4, 7)),
        (256, 3, (0, 128, 255)),
        (8, 1, (0,)),
    ],
)
def test_experts_are_spread(experts: int, count: int, ids: tuple[int, ...]) -> None:
    assert sampled(experts, count) == ids


def test_of_a_very_large_model_one_expert_a_layer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("mixtral", tmp_path, experts=4)
    monkeypatch.setattr("moeserve.checkpoints.requantization.MOST_WEIGHTS", 1)
    seen: list[int] = []
    path = Checkpoint(tmp_path)
    found = requantization(
        path, Checkpoint(tmp_path, load_as="mxfp8"), path.layers, lambda layers: seen.extend(layers) or seen
    )
    assert found.experts == (0,)
    assert seen == [0, 1]
