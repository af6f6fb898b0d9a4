"""The portable kernel without a GPU: what it knows of formats, and its device code interpreted.

On a GPU the laws of all kernels hold it to the reference.
"""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from made_experts import activation_named

from moeserve.device.machine import machine_named
from moeserve.experts.batch import ExpertShape
from moeserve.experts.kernel import PLAIN, Problem
from moeserve.experts.kernels import KERNELS
from moeserve.experts.kernels.triton.stored import ROUNDINGS, Stored, product_dtype
from moeserve.experts.kernels.triton_dequant import UNREAD
from moeserve.quant.format import Scheme
from moeserve.quant.formats import format_named
from moeserve.quant.formats.floats import BF16
from moeserve.quant.layouts.word_codes import element_of
from moeserve.quant.schemes import SCHEMES, scheme_named

ENTRY = KERNELS["triton_dequant"]
E4M3 = frozenset({"e4m3"})


def test_every_scheme_it_reads_has_this_kernel_on_every_nvidia_gpu() -> None:
    shape = ExpertShape(133, 19, activation_named("silu"))
    for scheme, machine in (
        (s, m) for s in SCHEMES.values() for m in ("a100", "l40s", "h200", "b200", "b300")
    ):
        problem = Problem(scheme, BF16, shape, experts=8, lanes=4, owners=4, top_k=2, lane_rows=64)
        refused = ENTRY.refuses(problem, machine_named(machine))
        assert (refused is None) == (scheme.weights not in UNREAD), (scheme, machine, refused)


def test_codes_in_bytes_are_nobodys_until_their_element_is_named() -> None:
    """A new format with codes in bytes is refused, and not read as INT4."""
    new = replace(format_named("int4_group32"), name="nf4_group32")
    assert element_of(new) is None
    with pytest.raises(ValueError, match="nf4_group32 codes have no element; name it in ELEMENTS"):
        Stored.of(new)


@pytest.mark.parametrize("scheme", sorted(ENTRY.schemes, key=str), ids=str)
def test_the_kernel_knows_every_part_of_its_formats(scheme: Scheme) -> None:
    """Elements, scales and zero points of the weights are named once each; rows round, or stay plain."""
    stored, form = Stored.of(scheme.weights), scheme.weights
    known = [stored.fine is not None, stored.outer is not None, stored.zero is not None, stored.ordered]
    assert sum(known) == len(form.parts) - 1
    assert scheme.activations in ROUNDINGS or scheme.activations in PLAIN


@pytest.mark.parametrize(
    ("name", "fp8_products", "dtype"),
    [
        ("bf16", E4M3, torch.bfloat16),
        ("fp16", E4M3, torch.float16),
        ("fp8_channel x fp8_token", E4M3, torch.float8_e4m3fn),
        ("fp8_channel x fp8_token", frozenset(), torch.bfloat16),  # sm80 has no 8-bit floats
        ("fp8_block128 x fp8_group64", E4M3, torch.float8_e4m3fn),
        ("int8_channel x int8_static", E4M3, torch.int8),
        ("int8_channel x int8_token_asym", E4M3, torch.bfloat16),  # code - zero needs nine bits
        ("int8_group128", E4M3, torch.int8),
        ("int4_group128 x int8_token", E4M3, torch.int8),
        ("int4_group32 x int8_token", E4M3, torch.bfloat16),  # its scales multiply elements
        ("int4_group128 x fp8_token", E4M3, torch.bfloat16),
        ("mxfp8", E4M3, torch.bfloat16),
        ("nvfp4 x fp8_group128", E4M3, torch.bfloat16),
    ],
)
def test_codes_are_multiplied_as_they_are_where_scales_leave_them_alone(
    name: str, fp8_products: frozenset[str], dtype: torch.dtype
) -> None:
    scheme = scheme_named(name)
    assert product_dtype(Stored.of(scheme.weights), scheme.activations, fp8_products) == dtype


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("parts", [["decode", "round", "outside"], ["steps"]], ids="-".join)
def test_device_code_agrees_with_the_formats_and_the_reference_under_the_interpreter(
    parts: list[str],
) -> None:
    script = Path(__file__).parents[1] / "support" / "interpreted_dequant.py"
    command = [sys.executable, script, *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "checked" in done.stderr
