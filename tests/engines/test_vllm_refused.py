"""What vLLM cannot run with its experts elsewhere: each is refused by name, and nothing computes experts of
its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from checkpoints import edit_config
from engine_runs import HERE, environment, house_of
from torch import nn

from moeserve.proto.integrations.expert_names import EXPERT
from moeserve.proto.integrations.remote_layers import RemoteLayers
from moeserve.proto.integrations.settings import Settings
from moeserve.proto.integrations.vllm import caches, config, model, weights


def vllm_config(**changed: Any) -> Any:
    """A configuration that can be served, but for what is `changed`, by `part__name`."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_dbo": False,
            "use_ubatching": False,
            "ubatch_size": 0,
            "enable_elastic_ep": False,
            "enable_eplb": False,
            "eplb_config": SimpleNamespace(num_redundant_experts=0),
        },
        "load_config": {"load_format": "auto", "safetensors_load_strategy": None},
        "model_config": {
            "is_hybrid": False,
            "has_inner_state": False,
            "enforce_eager": False,
            "architecture": "Qwen3MoeForCausalLM",
        },
        "device_config": {"device_type": "cpu"},
    }
    whole: dict[str, Any] = {"lora_config": None, "speculative_config": None}
    for key, value in changed.items():
        part, _, name = key.partition("__")
        (parts[part] if name else whole)[name or part] = value
    return SimpleNamespace(**{part: SimpleNamespace(**values) for part, values in parts.items()}, **whole)


def draft(method: str, *, is_moe: bool) -> Any:
    return SimpleNamespace(method=method, draft_model_config=SimpleNamespace(is_moe=is_moe))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"parallel_config__use_ubatching": True, "parallel_config__ubatch_size": 2}, "ubatch_size=2"),
        ({"parallel_config__enable_elastic_ep": True}, "enable_elastic_ep"),
        ({"lora_config": object()}, "enable_lora"),
        ({"speculative_config": draft("mtp", is_moe=False)}, "speculative_config method 'mtp'"),
        (
            {"speculative_config": draft("draft_model", is_moe=True)},
            "speculative_config method 'draft_model'",
        ),
        ({"load_config__load_format": "sharded_state"}, "load_format='sharded_state'"),
        ({"load_config__safetensors_load_strategy": "eager"}, "safetensors_load_strategy='eager'"),
        ({"model_config__is_hybrid": True}, "Qwen3MoeForCausalLM: its layers keep a state"),
        ({"device_config__device_type": "cuda"}, "compiled graphs on cuda"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="with its experts behind moeserve, vLLM cannot run ") as refused:
        config.check(vllm_config(**changed))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"speculative_config": draft("ngram", is_moe=True)},
        {"speculative_config": draft("eagle", is_moe=False)},
        {"device_config__device_type": "cuda", "model_config__enforce_eager": True},
    ],
)
def test_what_can_be_served_reads_its_files_tensor_by_tensor(changed: dict[str, Any]) -> None:
    made = vllm_config(**changed)
    config.check(made)
    assert made.load_config.safetensors_load_strategy == "lazy"


def test_a_draft_model_is_told_from_the_engines_own_also_where_it_has_a_configuration_of_its_own() -> None:
    """vLLM makes a dense draft model with a configuration whose model it is."""
    own, other = (SimpleNamespace(runner_type=kind) for kind in ("generate", "draft"))
    whole = SimpleNamespace(model_config=own)
    assert not model.is_draft(whole, own)
    assert model.is_draft(whole, other) and model.is_draft(SimpleNamespace(model_config=other), other)


class Seeing(nn.Module):
    """A model that keeps what an image adds to layers, and forgets it as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.added = torch.ones(2, 4)

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        self.added[:num_tokens].zero_()


def test_what_an_image_adds_to_layers_is_forgotten_when_the_pass_counts() -> None:
    theirs = Path(vllm.__file__).parent / "model_executor" / "models" / "qwen3_vl.py"
    assert f"def {model.CLEAR}(self, num_tokens: int)" in theirs.read_text(), "its imports need torchvision"
    seeing = Seeing()
    with model.inputs_kept(seeing, []):
        seeing._clear_deepstack_input_embeds(1)
        assert seeing.added.sum() == 8, "the pass may be run again"
        seeing._clear_deepstack_input_embeds(1)
    assert seeing.added.sum() == 4
    seeing._clear_deepstack_input_embeds(2)
    assert seeing.added.sum() == 0, "outside of a pass at once"


def test_a_reload_is_followed_while_batches_are_under_way() -> None:
    """With async scheduling there is always one; vLLM drops the answers of those that it preempts."""
    done: list[dict[str, bool]] = []
    engine = SimpleNamespace(
        batch_queue=["a batch"],
        scheduler=SimpleNamespace(reset_prefix_cache=lambda **how: done.append(how)),
    )
    ended = iter([False, True, False])
    reloads: Any = SimpleNamespace(ended=lambda: next(ended))
    step = caches._recomputing(lambda engine: "stepped", reloads)
    assert [step(engine) for _ in range(3)] == ["stepped"] * 3
    assert done == [{"reset_running_requests": True, "reset_connector": True}]


def test_balancing_is_the_services(caplog: pytest.LogCaptureFixture) -> None:
    redundant = SimpleNamespace(num_redundant_experts=32)
    made = vllm_config(parallel_config__enable_eplb=True, parallel_config__eplb_config=redundant)
    config.check(made)
    assert (made.parallel_config.enable_eplb, redundant.num_redundant_experts) == (False, 0)
    assert "enable_eplb is turned off in vLLM: moeserve balances" in caplog.text


OURS = "with its experts behind moeserve, vLLM cannot run "
STARTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "ngram": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        None,
    ),
    "pipeline": ({"pipeline_parallel_size": 2}, f"{OURS}pipeline_parallel_size=2"),
    "lora": ({"enable_lora": True}, f"{OURS}enable_lora"),
    "mtp": (
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        f"{OURS}speculative_config method 'mtp'",
    ),
    "sharded": ({"load_format": "sharded_state"}, f"{OURS}load_format='sharded_state'"),
    "whole files": ({"safetensors_load_strategy": "eager"}, f"{OURS}safetensors_load_strategy='eager'"),
    "sleep": ({"enable_sleep_mode": True}, "Sleep mode is not supported on current platform"),
}
"""Options of vLLM, and what its start is refused with; vLLM itself has no sleep mode on a CPU."""


def test_vllms_own_start_is_refused_by_name(engine_model: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(engine_model("deepseek_v3", "float32").path, model)
    edit_config(model, num_nextn_predict_layers=1)
    job = {"model": str(model), "configurations": {name: options for name, (options, _) in STARTS.items()}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    ended = subprocess.run(
        [sys.executable, HERE / "vllm_configure.py", tmp_path / "job.json", tmp_path / "answer.json"],
        env=environment("127.0.0.1:1"),  # no configuration asks for the service
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads((tmp_path / "answer.json").read_text())
    for name, (_, text) in STARTS.items():
        assert said[name] is None if text is None else text in str(said[name]), f"{name}: {said[name]}"


@pytest.mark.parametrize(
    ("name", "is_expert"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", True),
        ("transformer.blocks.7.ffn.experts.mlp.w1", True),
        ("experts.0.w1.weight", True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", False),
        ("model.layers.3.mlp.gate.e_score_correction_bias", False),
        ("model.layers.3.mlp.experts.e_score_correction_bias", False),
        ("model.layers.3.mlp.gate.weight", False),
    ],
)
def test_experts_are_known_by_their_names(name: str, is_expert: bool) -> None:
    assert bool(EXPERT.search(name)) is is_expert


def test_iterators_that_read_whole_files_are_refused() -> None:
    for name in weights.WHOLE_FILES:
        with pytest.raises(ValueError, match=f"{name} of vLLM reads whole files"):
            weights._refuse(name)([])
        assert callable(getattr(weights.default_loader, name)), name


class MoeBlock(nn.Module):
    """A MoE layer that is made of nothing that the plug-in knows."""


def test_a_layer_that_was_not_taken_over_is_named() -> None:
    whole, layers = nn.Module(), RemoteLayers(Settings("a:1"))
    whole.layers = nn.ModuleList([nn.Module(), nn.Module()])
    whole.layers[1].mlp = MoeBlock()
    layers.missing = lambda: [1]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"did not take over layers\.1\.mlp \(MoeBlock\) of Module"):
        model.check_taken(whole, layers)
    whole.layers[1].mlp.experts = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.weight of Module is an expert's tensor"):
        model.check_taken(whole, layers)


@pytest.mark.parametrize("sabotage", ["another plug-in", "another model", "nobody"])
def test_a_start_that_would_compute_experts_stops_with_the_name(
    engine_model: Any, run_vllm: Any, sabotage: str
) -> None:
    served = engine_model("qwen3_moe", "float32")
    if sabotage == "nobody":
        ended = run_vllm(served.path, "127.0.0.1:1", environ={"MOESERVE_EXPERTS_TIMEOUT": "3"})
    else:
        asked = engine_model("olmoe", "float32") if sabotage == "another model" else served
        with house_of(served.path) as house:
            ended = run_vllm(asked.path, house.address, sabotage=sabotage)
    text = {
        "another plug-in": "experts.routed_experts (Own, UnquantizedFusedMoEMethod) would compute",
        "another model": "the engine's model is OlmoeForCausalLM, but",
        "nobody": "UNAVAILABLE",
    }[sabotage]
    assert ended.get("failed") and text in ended["said"], ended["said"][-3000:]
