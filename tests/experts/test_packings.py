"""What kernels of ours prepare is what the layout of that name packs, at once and piece by piece."""

from __future__ import annotations

import pytest
import torch
from made_experts import activation_named, fresh_seed, make_scheme
from torch import Tensor

from moeserve.experts.batch import ExpertShape, ExpertWeights
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS, cuda_w4a8, triton_fp4
from moeserve.experts.kernels.triton.stored import Stored
from moeserve.experts.kernels.triton.words import holds, of_packed
from moeserve.quant.bits import pack_nibbles
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.floats import BF16
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.quant.formats.mx import MXFP4
from moeserve.quant.formats.nvfp4 import NVFP4, NVFP4_E4M3
from moeserve.quant.layouts import LAYOUTS, layout_named
from moeserve.quant.layouts.word_codes import HELD

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = ExpertShape(288, 192, activation_named("silu"))


def made(scheme: Scheme) -> ExpertWeights:
    return make_scheme(SHAPE, 3, scheme, torch.Generator().manual_seed(fresh_seed()))


def prepared(name: str, scheme: Scheme, weights: ExpertWeights) -> dict[str, Tensor]:
    return dict(KERNELS[name].build(KernelSpec(scheme, SHAPE, torch.bfloat16)).prepare(weights).per_slot)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("cuda_bf16_few", Scheme(BF16, BF16)), ("cuda_fp8_many", Scheme(FP8_BLOCK, FP8_GROUP))],
    ids=str,
)
def test_panels(name: str, scheme: Scheme) -> None:
    weights = made(scheme)
    found = prepared(name, scheme, weights)
    for side, layout, packed in (
        ("gate_up", "panels_gate_up", weights.gate_up),
        ("down", "panels", weights.down),
    ):
        for part, tensor in layout_named(layout).pack(packed).items():
            assert torch.equal(found[f"{side}.{part}"], tensor)
        back = layout_named(layout).unpack({"codes": found[f"{side}.codes"], **rest(found, side)}, packed)
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(back.parts, packed.parts, strict=True))


def rest(found: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    return {"scale": found[f"{side}.scale"]} if f"{side}.scale" in found else {}


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("form", [NVFP4, MXFP4], ids=str)
def test_words_of_bf16_products(form: Format) -> None:
    scheme = Scheme(form, BF16)
    weights = made(scheme)
    found = prepared("triton_fp4", scheme, weights)
    for side, packed in (("gate_up", weights.gate_up), ("down", weights.down)):
        codes, scale, row_scale = triton_fp4.folded(packed)
        scale = scale[..., :: packed.format.parts[1].columns // 16].contiguous()  # one of 32 stands twice
        packs = layout_named("hopper_fp4").pack(with_parts(packed, codes, scale))
        assert torch.equal(found[f"{side}.codes"], packs["codes"])
        assert torch.equal(found[f"{side}.scale"], packs["scale"])
        assert torch.equal(found[f"{side}.row_scale"], row_scale)


def with_parts(packed: Packed, codes: Tensor, scale: Tensor) -> Packed:
    """The same format over codes of a byte each and scales of a byte, whatever these mean."""
    own = scale.view(packed.parts[1].dtype)
    return Packed(packed.format, packed.shape, (pack_nibbles(codes), own, *packed.parts[2:]))


@pytest.mark.parametrize("form", [NVFP4_E4M3, MXFP4], ids=str)
def test_blocks_of_e4m3_products(form: Format) -> None:
    scheme = Scheme(form, FP8_GROUP)
    weights = made(scheme)
    found = prepared("cuda_w4a8", scheme, weights)
    for side, packed in (("gate_up", weights.gate_up), ("down", weights.down)):
        codes, scale, row_scale = cuda_w4a8.folded(packed)
        packs = layout_named("hopper_w4a8").pack(with_parts(packed, codes, scale))
        assert torch.equal(found[f"{side}.codes"], packs["codes"])
        assert torch.equal(found[f"{side}.row_scale"], row_scale)


@pytest.mark.parametrize("form", HELD, ids=str)
def test_words_of_the_portable_kernel(form: Format) -> None:
    """Codes alone: scales are rounded to the dtype of products, and zero points get a sign."""
    stored = Stored.of(form)
    assert holds(stored, torch.bfloat16)
    packed = form.quantize(torch.randn(2, 70, 288, generator=torch.Generator().manual_seed(fresh_seed())))
    found = of_packed(stored, packed, torch.bfloat16)
    packs = layout_named(f"word_codes_{HELD[form]}").pack(packed)
    assert torch.equal(found["codes"], packs["codes"])
    if "zero" in packs:
        offset = 128 if stored.element == "int8" else 0
        groups = packed.parts[2].shape[-1]  # past them there are zeros in both
        zero = found["zero"][:, :groups].int() + (1 << 15) - offset
        assert torch.equal(zero, packs["zero"][:, :groups].int())


def test_a_form_is_called_like_its_layout() -> None:
    assert {entry.form for entry in KERNELS.values() if entry.form} <= LAYOUTS.keys()
