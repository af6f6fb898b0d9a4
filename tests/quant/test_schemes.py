"""The table of schemes: names, the OCP MX strings, and that each can be served."""

import pytest

from moeserve.quant.formats import FORMATS, STATIC, WIRES
from moeserve.quant.formats.floats import BF16, FLOATS
from moeserve.quant.schemes import OCP_MX, OCP_MX_DTYPES, SCHEMES, WEIGHT_ONLY, scheme_named

STRINGS = [
    "w_mxfp4",
    "w_mxfp4_a_mxfp4",
    "w_mxfp4_a_mxfp6_e3m2",
    "w_mxfp4_a_mxfp6_e2m3",
    "w_mxfp4_a_fp8",
    "w_mxfp6_e3m2",
    "w_mxfp6_e3m2_a_mxfp6_e3m2",
    "w_mxfp6_e3m2_a_fp8",
    "w_mxfp6_e2m3",
    "w_mxfp6_e2m3_a_mxfp6_e2m3",
    "w_mxfp6_e2m3_a_fp8",
]


@pytest.mark.parametrize("string", STRINGS)
def test_ocp_mx_strings_say_what_they_mean(string: str) -> None:
    scheme = scheme_named(string)
    weights, _, activations = string.removeprefix("w_").partition("_a_")
    assert scheme.weights.name == weights
    assert scheme.activations.name == (activations or "bf16").replace("fp8", "fp8_static")
    assert SCHEMES[scheme.name] == scheme


@pytest.mark.parametrize("weights", OCP_MX_DTYPES)
@pytest.mark.parametrize("activations", ["", "fp8", *OCP_MX_DTYPES])
def test_every_string_of_ocp_mx_has_a_scheme_or_a_reason(weights: str, activations: str) -> None:
    string = f"w_{weights}_a_{activations}" if activations else f"w_{weights}"
    if string in STRINGS:
        assert scheme_named(string).weights == OCP_MX_DTYPES[weights]
        return
    with pytest.raises(ValueError, match=f"{string} is no scheme: OCP MX weights {weights} do not run with"):
        scheme_named(string)


def test_there_are_no_other_mx_strings() -> None:
    assert set(OCP_MX) == set(STRINGS)


def test_schemes_are_keyed_by_name_and_made_of_known_formats() -> None:
    for name, scheme in SCHEMES.items():
        assert scheme.name == name and scheme_named(name) is scheme
        assert scheme.weights.name in FORMATS
        assert scheme.activations.name in FORMATS.keys() | STATIC.keys()
        assert scheme.activations.row_wise, f"{name}: an answer would depend on the rows beside it"


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ValueError, match="unknown scheme 'w_mxfp8_a_int4'; known: bf16, fp16"):
        scheme_named("w_mxfp8_a_int4")


def test_wires_are_row_wise_and_know_their_scale() -> None:
    assert all(form.row_wise and form.given is None and FORMATS[name] is form for name, form in WIRES.items())


def test_weight_only_schemes_stand_with_bf16() -> None:
    assert {s.weights for s in SCHEMES.values() if s.activations == BF16} == {*WEIGHT_ONLY, BF16}
    assert not set(WEIGHT_ONLY) & set(FLOATS.values())
