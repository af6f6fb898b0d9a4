"""Real engines, and services for them. A test whose engine is not installed is not collected."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_models import EngineModel, make_engine_model
from engine_runs import ROOT, Run, run_engine

HERE = Path(__file__).parent

collect_ignore = [
    path.name
    for engine in ("vllm", "sglang")
    if importlib.util.find_spec(engine) is None
    for path in HERE.glob(f"test_{engine}_*.py")
]


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], EngineModel]:
    """Checkpoints by family and dtype, each written once."""
    made: dict[tuple[str, str], EngineModel] = {}

    def model(family: str, dtype: str) -> EngineModel:
        if (family, dtype) not in made:
            made[family, dtype] = make_engine_model(family, dtype, tmp_path_factory.mktemp(family))
        return made[family, dtype]

    return model


@pytest.fixture(scope="session")
def run_vllm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs vLLM once in a process of its own. What vLLM alone answered to the same job is remembered."""
    alone: dict[str, dict[str, Any]] = {}

    def run(
        model: Path, address: str | None, *, environ: dict[str, str] | None = None, **job: Any
    ) -> dict[str, Any]:
        options = {"max_model_len": 256, "enforce_eager": True} | job.pop("options", {})
        asked = json.dumps([str(model), environ, options, job], sort_keys=True)
        if address is None and asked in alone:
            return alone[asked]
        folder = tmp_path_factory.mktemp("vllm")
        found = run_engine("vllm_generate.py", folder, model, address, environ or {}, options=options, **job)
        if address is None:
            alone[asked] = found
        return found

    return run


@pytest.fixture(scope="session")
def run_sglang(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs SGLang's engine once in processes of its own."""

    def run(model: Path, address: str | None, **job: Any) -> dict[str, Any]:
        path = f"{ROOT}:{HERE / 'stubs'}"
        folder = tmp_path_factory.mktemp("sglang")
        return run_engine("sglang_generate.py", folder, model, address, {"PYTHONPATH": path}, **job)

    return run
