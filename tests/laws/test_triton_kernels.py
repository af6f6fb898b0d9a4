"""Our Hopper kernels without a GPU: their weights' own form, their tiles, and their row kernels interpreted.

What the kernels compute is held to the reference by the laws of all kernels, on a GPU.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from error_model import bound_of
from made_experts import Arrival, activation_named, fresh_seed, make_weights
from torch import Tensor

from moeserve.device.machine import this_machine
from moeserve.experts.batch import ExpertBatch, ExpertShape, Grouping
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.support import hopper
from moeserve.experts.kernels.tiles import Tile, tile_for
from moeserve.experts.kernels.torch_reference import TorchReference
from moeserve.experts.kernels.triton_fp4 import from_e4m3, from_e8m0
from moeserve.quant.format import Format, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4
from moeserve.quant.layouts.hopper_fp4 import BITS

FOUR_BIT = [NVFP4, MXFP4]
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decoded(slot: dict[str, Tensor], side: str, n: int, k: int) -> Tensor:
    """What the device makes of one slot's words, `[n, k]`: the bits it masks, the order its threads hold."""
    words = slot[f"{side}.codes"]
    nb, kb = words.shape[:2]
    # half, warp, row 1-2, row 0, lane % 4, row 3, word -> row 64, column of the operand 16
    held = words.view(nb, kb, 2, 2, 4, 4, 2, 4, 2, 2).permute(0, 1, 2, 4, 8, 5, 6, 3, 7, 9)
    held = held.reshape(nb, kb, 2, 64, 8, 2)  # .., block of K, row, column pair, word of the pair
    found = torch.zeros(nb, kb, 2, 64, 2, 4, 8, 2, dtype=torch.long)  # .., word, place, column pair, half
    for (word, place, half, bit), (held_by, at) in BITS.items():
        found[..., word, place, :, half] |= (held[..., held_by] >> at & 1).long() << bit
    values = VALUES[found].view(nb, kb, 2, 64, 8, 16)
    scales = slot[f"{side}.scale"]
    turned = scales >> 4 & 0xFFFFFFF | scales << 28
    scale = turned.view(torch.uint8).view(nb, kb, 2, 4, 8, 2, 8)  # warp, row 0-2, row 3, group
    scale = scale.permute(0, 1, 2, 3, 5, 4, 6).reshape(nb, kb, 2, 64, 8, 1).int()
    factor = (1 + (scale & 7) / 8) * torch.exp2((scale >> 3) - 29.0)
    matrix = (values * factor).permute(0, 3, 1, 2, 4, 5).reshape(nb * 64, kb * 256)[:n, :k]
    return matrix * slot[f"{side}.row_scale"][:, None]


@pytest.mark.parametrize("form", FOUR_BIT, ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [(288, 96), (256, 64), (96, 160)])
def test_packed_codes_decode_to_the_weights_bit_for_bit(form: Format, hidden: int, inner: int) -> None:
    shape = ExpertShape(hidden, inner, activation_named("silu"))
    weights = make_weights(shape, 2, form, torch.Generator().manual_seed(fresh_seed()))
    prepared = (
        KERNELS["triton_fp4"].build(KernelSpec(Scheme(form, BF16), shape, torch.bfloat16)).prepare(weights)
    )
    for slot in range(2):
        for side, packed in (("gate_up", weights.gate_up), ("down", weights.down)):
            found = decoded(prepared.slot(slot), side, *packed.shape[1:])
            assert torch.equal(found, packed.dequantize()[slot]), (slot, side)


@pytest.mark.parametrize("form", FOUR_BIT, ids=str)
def test_an_expert_packed_alone_equals_its_slot_and_none_packs_to_the_same_shapes(form: Format) -> None:
    shape = ExpertShape(160, 96, activation_named("silu"), bias=True)
    weights = make_weights(shape, 3, form, torch.Generator().manual_seed(fresh_seed()))
    kernel = KERNELS["triton_fp4"].build(KernelSpec(Scheme(form, BF16), shape, torch.bfloat16))
    together, none = kernel.prepare(weights), kernel.prepare(weights.rows(slice(0, 0)))
    for slot in range(3):
        alone = kernel.prepare(weights.rows(torch.tensor([slot]))).slot(0)
        assert all(torch.equal(alone[name], t) for name, t in together.slot(slot).items())
    assert {n: t.shape[1:] for n, t in none.per_slot.items()} == {
        n: t.shape[1:] for n, t in together.per_slot.items()
    }


def test_every_e4m3_scale_keeps_its_value() -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    byte, zero, factor = from_e4m3(scales)
    values = (1 + (byte & 7) / 8) * torch.exp2((byte >> 3) - 29.0) * factor
    assert torch.equal(torch.where(zero, 0.0, values), scales.float())


def test_e8m0_scales_keep_their_value_down_to_a_billionth_of_the_rows_largest() -> None:
    scales = torch.tensor([[[127, 97, 96, 0], [255, 1, 0, 0], [3, 2, 1, 0]]], dtype=torch.uint8)
    byte, absent, factor = from_e8m0(scales)
    values = torch.exp2((byte >> 3) - 29.0) * factor[..., None]
    assert values[0, 0, :2].tolist() == [1.0, 2.0**-30]
    assert absent[0, 0].tolist() == [False, False, True, True]
    assert bool(values[0, 1].isnan().all())
    assert torch.equal(values[0, 2].double(), torch.exp2(scales[0, 2].double() - 127))


SHARED_MEMORY, REGISTERS = 227 * 1024, 65536


def ring_bytes(kind: str, tile: Tile) -> int:
    """Shared memory of the stages: weights of all consumers, and the rows."""
    blocks = tile.consumers * tile.blocks
    per_k = {"bf16": (128.0, 2), "fp8": (64.0, 1), "fp4": (36.0, 2)}[kind]
    return int(tile.stages * tile.depth * (blocks * per_k[0] + tile.rows * per_k[1]))


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("rows", [0.02, 1, 6, 7, 16, 32, 64, 65, 512, 32768])
def test_every_step_has_a_tile_that_fits_a_multiprocessor(device: str, kind: str, rows: float) -> None:
    tile = tile_for(device, kind, rows)
    assert tile.programs * (ring_bytes(kind, tile) + 1024) <= SHARED_MEMORY
    warp_groups = tile.consumers * tile.registers + 24
    assert tile.programs * 128 * warp_groups <= REGISTERS
    assert (tile.consumers, tile.blocks) in {(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_row_kernels_agree_with_the_activations_and_formats_under_the_interpreter() -> None:
    script = Path(__file__).parents[1] / "support" / "interpreted_rows.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "checked" in done.stderr


CASES = [("triton_bf16", BF16, BF16), ("triton_fp8", FP8_BLOCK, FP8_GROUP), ("triton_fp4", MXFP4, BF16)]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("name", "weights_form", "rows_form"), CASES)
@pytest.mark.parametrize("rows_per_slot", [0.5, 6, 24, 96, 512])
def test_every_shipped_tile_computes_the_same(
    name: str, weights_form: Format, rows_form: Format, rows_per_slot: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available() or this_machine().arch != "sm90":
        pytest.skip("needs a Hopper GPU: Gluon, which this kernel is written in, has no interpreter")
    generator = torch.Generator().manual_seed(fresh_seed())
    shape = ExpertShape(608, 352, activation_named("silu"), bias=True)
    arrival = Arrival((300, 0, 129, 1, 33), Grouping.RAGGED, poison=float("nan"), spare=3)
    weights = make_weights(shape, 5, weights_form, generator).to("cuda")
    batch = arrival.batch(arrival.rows(shape.hidden, generator), shape.hidden, rows_form)
    there = ExpertBatch(batch.tokens.to("cuda"), batch.grouping, batch.counts.cuda(), batch.offsets.cuda())
    spec = KernelSpec(Scheme(weights_form, rows_form), shape, torch.float32)
    monkeypatch.setattr(hopper, "tile_for", lambda device, kind, _: tile_for(device, kind, rows_per_slot))
    kernel, reference = KERNELS[name].build(spec), TorchReference(spec)
    found, wanted = (
        torch.cat(arrival.segments(k.apply(k.prepare(weights), there), batch)) for k in (kernel, reference)
    )
    carried = arrival.segments(there.tokens.dequantize(), batch)
    bound = bound_of(KERNELS[name], spec, weights, carried, rows_form)
    assert float((found - wanted).norm() / wanted.norm()) <= bound
