"""Gates of model families: what a config gives and what is refused, judged by transformers' own routers."""

import pytest
import torch
from torch import Tensor

from moeserve.experts.routing.families import gate_for
from moeserve.experts.routing.gate import Gate

COUNTS = {"num_experts_per_tok": 2, "num_local_experts": 16}


@pytest.mark.parametrize(
    ("config", "method", "settings"),
    [
        ({"model_type": "mixtral"}, "RenormalizeNaive", {}),
        ({"model_type": "qwen2_moe"}, "Default", {"logits_dtype_weights": True}),
        ({"model_type": "qwen3_moe"}, "Default", {"logits_dtype_weights": True}),
        (
            {"model_type": "qwen3_moe", "norm_topk_prob": True},
            "RenormalizeNaive",
            {"logits_dtype_weights": True},
        ),
        ({"model_type": "olmoe"}, "Default", {"logits_dtype_weights": True}),
        ({"model_type": "deepseek_v2", "routed_scaling_factor": 16.0}, "Default", {"scaling": 16.0}),
        (
            {
                "model_type": "deepseek_v2",
                "topk_method": "group_limited_greedy",
                "n_group": 8,
                "topk_group": 3,
            },
            "DeepSeekV2",
            {"groups": 8, "topk_groups": 3, "scaling": 1.0, "renormalize": False},
        ),
        (
            {"model_type": "deepseek_v3"},
            "DeepSeekV3",
            {"groups": 8, "topk_groups": 4, "scaling": 2.5, "biased": True},
        ),
        (
            {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
            "DeepSeekV3",
            {"groups": 1, "topk_groups": 1, "scaling": 2.827, "biased": True},
        ),
        (
            {"model_type": "deepseek_v3", "norm_topk_prob": False},
            "Unspecified",
            {"renormalize": False, "biased": True},
        ),
        (
            {"model_type": "deepseek_v4"},
            "DeepseekV4",
            {"scaling": 1.5, "biased": True, "logits_dtype_scores": True, "by_token": False},
        ),
        ({"model_type": "glm4_moe"}, "DeepSeekV3", {"groups": 1, "scaling": 1.0, "biased": True}),
        ({"model_type": "minimax_m2"}, "MiniMax2", {"biased": True, "logits_dtype_weights": False}),
        ({"model_type": "gpt_oss"}, "Renormalize", {"logits_dtype_weights": True}),
        (
            {"model_type": "llama4_text", "num_experts_per_tok": 1},
            "Llama4",
            {"top_k": 1, "weight_on_input": True},
        ),
    ],
)
def test_presets(config: dict[str, object], method: str, settings: dict[str, object]) -> None:
    gate = gate_for(COUNTS | config)
    assert gate.method == method
    assert (gate.experts, gate.top_k) == (16, config.get("num_experts_per_tok", 2))
    assert {name: getattr(gate, name) for name in settings} == settings
    assert gate.bias is None


def test_preset_of_a_multimodal_config() -> None:
    text = {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1}
    assert gate_for({"model_type": "llama4", "text_config": text}).method == "Llama4"


def test_a_family_without_a_router_is_told_when_it_is_asked_to_route() -> None:
    gate = gate_for({"model_type": "next_month"} | COUNTS)
    assert (gate.experts, gate.top_k, gate.takes_logits) == (16, 2, False)
    for ask in (gate.route, lambda logits: gate.weigh(logits, torch.zeros(1, 2))):
        with pytest.raises(ValueError, match="not logits: no router is known for model_type 'next_month'"):
            ask(torch.zeros(1, 16))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mixtral", "num_experts_per_tok": None},
            "config of mixtral has none of the keys num_experts_per",
        ),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=True is not supported, only"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (
            {"model_type": "deepseek_v3", "n_group": None},
            "config of deepseek_v3 has none of the keys n_group",
        ),
        ({"model_type": "deepseek_v4", "norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        (
            {"model_type": "minimax_m2", "use_routing_bias": False},
            "use_routing_bias=False is not supported, only",
        ),
        ({"model_type": "llama4_text"}, "routing Llama4 needs top_k=1, got top_k=2"),
    ],
)
def test_presets_refuse(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate_for(COUNTS | config)


ROUTERS = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2TopkRouter"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3TopkRouter"),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4TopKRouter"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeTopkRouter"),
    "gpt_oss": ("GptOssConfig", "GptOssTopKRouter"),
    "llama4_text": ("Llama4TextConfig", "Llama4Router"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2TopKRouter"),
    "mixtral": ("MixtralConfig", "MixtralTopKRouter"),
    "olmoe": ("OlmoeConfig", "OlmoeTopKRouter"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeTopKRouter"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeTopKRouter"),
}
SETTINGS: dict[str, list[dict[str, object]]] = {
    "deepseek_v2": [
        {"topk_method": "greedy", "routed_scaling_factor": 16.0},
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ],
    "deepseek_v3": [
        {"n_group": 4, "topk_group": 2},
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
        {"n_group": 4, "topk_group": 3, "norm_topk_prob": False},
    ],
    "glm4_moe": [{}, {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}],
    "qwen2_moe": [{}, {"norm_topk_prob": True}],
    "qwen3_moe": [{}, {"norm_topk_prob": True}],
    "olmoe": [{}, {"norm_topk_prob": True}],
}
CASES = [(family, settings) for family in ROUTERS for settings in SETTINGS.get(family, [{}])]


def their_answer(
    family: str, router: torch.nn.Module, hidden: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, ids) of transformers' router, whatever it calls and orders them."""
    if family == "minimax_m2":
        return router(hidden, bias)  # type: ignore[no-any-return]
    if family == "llama4_text":
        scores, logits = router(hidden)
        return logits, scores.max(-1).values[:, None], logits.argmax(-1)[:, None]
    return router(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_against_transformers(family: str, settings: dict[str, object], dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config_name, router_name = ROUTERS[family]
    config_class = getattr(transformers, config_name)
    module = family.removesuffix("_text")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    top_k = 1 if family == "llama4_text" else 4
    count = {"qwen2_moe": "num_experts", "olmoe": "num_experts", "deepseek_v2": "n_routed_experts"}
    config = config_class(
        hidden_size=32, num_experts_per_tok=top_k, **{count.get(family, "num_local_experts"): 16}, **settings
    )
    generator = torch.Generator().manual_seed(7)
    router = getattr(modeling, router_name)(config)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    bias = torch.randn(16, generator=generator) * 0.2
    if "e_score_correction_bias" in dict(router.named_buffers()):
        router.e_score_correction_bias.copy_(bias)
    hidden = torch.randn(300, 32, generator=generator).to(dtype)
    router.to(dtype)
    if "e_score_correction_bias" in dict(router.named_buffers()):
        router.e_score_correction_bias.data = router.e_score_correction_bias.float()  # as models keep it
    with torch.no_grad():
        logits, weights, ids = their_answer(family, router, hidden, bias)

    gate = gate_for(config.to_dict())
    ours_ids, ours = (gate.with_bias(bias.to(dtype)) if gate.biased else gate).route(logits)
    # bf16 logits are often equal, and transformers leaves open which of two equal experts is chosen
    decided = torch.ones(len(logits), dtype=torch.bool) if gate.biased else decided_rows(logits, gate)
    assert decided.sum() > 200
    order, ours_order = ids[decided].argsort(-1), ours_ids[decided].long().argsort(-1)
    assert torch.equal(ours_ids[decided].long().gather(-1, ours_order), ids[decided].gather(-1, order))
    tolerance = 2e-7 * max(1.0, gate.scaling)
    theirs = weights[decided].float().gather(-1, order)
    torch.testing.assert_close(ours[decided].gather(-1, ours_order), theirs, rtol=0, atol=tolerance)


def decided_rows(logits: Tensor, gate: Gate) -> Tensor:
    """Which rows [T] have no equal logits among the first K + 1, or at all where there are groups."""
    reach = gate.experts if gate.groups > 1 else gate.top_k + 1
    best = logits.sort(dim=-1, descending=True).values[:, :reach]
    return (best[:, 1:] != best[:, :-1]).all(-1)
