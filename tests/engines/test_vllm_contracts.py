"""Names and parameters of vLLM that the plug-in rests on, in the release that is run and in the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.proto.integrations.vllm import contracts

ROOT = Path(__file__).parent.parent.parent
NEXT = os.environ.get("MOESERVE_VLLM_NEXT", "")
"""A folder with the wheel of vLLM's next release, installed there without its dependencies."""

SAY = """
from moeserve.proto.integrations.vllm import contracts
from vllm.version import __version__
import vllm
print(__version__, vllm.__file__)
print(contracts.broken())
"""


def test_what_the_plug_in_knows_is_so_in_the_release_that_runs() -> None:
    from vllm.version import __version__

    assert __version__.startswith(contracts.RUN), __version__
    assert contracts.broken() == []


@pytest.mark.skipif(not NEXT, reason="MOESERVE_VLLM_NEXT names no folder with vLLM's next release")
def test_what_the_plug_in_knows_is_so_in_the_next_release() -> None:
    environment = os.environ | {"PYTHONPATH": f"{NEXT}:{ROOT}", "VLLM_TARGET_DEVICE": "cpu"}
    told = subprocess.run(
        [sys.executable, "-c", SAY], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert told.returncode == 0, told.stderr[-3000:]
    *_, version, differences = told.stdout.strip().splitlines()
    assert version.startswith(contracts.COMPARED) and NEXT in version
    assert differences == "[]"


def test_a_release_in_which_a_name_is_another_is_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    def renamed(self: object, prefix: str, config: object) -> None: ...

    monkeypatch.setattr(RoutedExperts, "_get_quant_method", renamed)
    with pytest.raises(
        contracts.ContractError, match=r"RoutedExperts\._get_quant_method takes self, prefix, config"
    ):
        contracts.check()
    monkeypatch.delattr(RoutedExperts, "_get_quant_method")
    with pytest.raises(contracts.ContractError, match=r"_get_quant_method is not there"):
        contracts.check()


@pytest.mark.parametrize("folder", {"", NEXT})
def test_no_class_of_vllms_own_chooses_its_method_elsewhere(folder: str) -> None:
    if not folder:
        import vllm

        folder = str(Path(vllm.__file__).parent.parent)
    defined = {
        str(path.relative_to(folder))
        for path in Path(folder, "vllm").rglob("*.py")
        if "def _get_quant_method(" in path.read_text(errors="replace")
    }
    assert defined - contracts.ELSEWHERE == {"vllm/model_executor/layers/fused_moe/routed_experts.py"}
