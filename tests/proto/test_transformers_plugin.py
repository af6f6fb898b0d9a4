"""The transformers plug-in, against a service in this process that uses the whole model's own experts."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import CONFIGS, make_checkpoint, make_model, quantize_fp8_block
from proto_fake import FakeService
from quantized_models import write_gpt_oss
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import hub_kernels
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.quantizers import quantizer_mxfp4

from moeserve.proto import moe_pb2
from moeserve.proto.integrations.seams import SEAMS
from moeserve.proto.integrations.transformers import (
    IMPLEMENTATION,
    attach,
    drop_expert_weights,
    experts_modules,
    load,
    register,
    without_expert_weights,
)

FAMILIES = sorted(set(CONFIGS) - {"llama4_text"})
RUNNABLE = {
    "deepseek_v3": {"head_dim": 8}
}  # transformers rotates head_dim numbers, which must be qk_rope_head_dim
TOKENS = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(3))


class Whole:
    """A service that runs transformers' grouped_mm on the experts of a whole model, and notes its calls."""

    def __init__(self, model: Any, **told: Any) -> None:
        self.modules = {layer: module for layer, (_, module) in experts_modules(model).items()}
        self.calls: list[tuple[int, Tensor, Tensor, Tensor]] = []
        hidden = model.config.hidden_size
        layers = [
            moe_pb2.LayerInfo(layer=layer, experts=module.num_experts, hidden=hidden)
            for layer, module in self.modules.items()
        ]
        facts = {"model": "tiny", "architecture": type(model).__name__, "layers": layers}
        self.told = moe_pb2.GetModelReply(**facts | told)

    @torch.no_grad()
    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        self.calls.append((layer, hidden, experts, weights))
        weights = weights.masked_fill(experts < 0, 0)
        return grouped_mm_experts_forward(self.modules[layer], hidden, experts.clamp(min=0), weights)

    def model(self) -> moe_pb2.GetModelReply:
        return self.told


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint and its whole model."""
    path = tmp_path_factory.mktemp("qwen3")
    return path, make_checkpoint("qwen3_moe", path)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits


def whole_of(path: Path, dtype: torch.dtype) -> Any:
    options = {"dtype": dtype, "experts_implementation": "grouped_mm"}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def held(model: Any) -> int:
    """Numbers in the experts of `model`."""
    modules = (module for _, module in experts_modules(model).values())
    return sum(weight.numel() for module in modules for weight in module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_without_expert_weights_answers_as_the_whole_one(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    make_checkpoint(family, tmp_path, dtype=dtype, **RUNNABLE.get(family, {}))
    whole = whole_of(tmp_path, dtype)
    service = Whole(whole)
    model = load(str(tmp_path), service, dtype=dtype)
    rest = sum(weight.numel() for weight in whole.parameters()) - held(whole)
    assert held(whole) > 0
    assert sum(weight.numel() for weight in model.parameters()) == rest
    assert torch.equal(logits(model), logits(whole))
    assert [layer for layer, *_ in service.calls] == sorted(service.modules)
    for _, hidden, experts, weights in service.calls:
        assert (hidden.shape, hidden.dtype) == ((TOKENS.numel(), 64), dtype)
        assert (experts.dtype, experts.shape) == (torch.int64, weights.shape)


@pytest.mark.parametrize("form", ["one a projection", "fused", "sharded"])
def test_loading_reads_no_expert_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    whole = make_checkpoint(
        "qwen3_moe", tmp_path, fused=form == "fused", shards=3 if form == "sharded" else None
    )
    read: list[str] = []
    opened = transformers.modeling_utils.safe_open

    class Recorded:
        def __init__(self, file: Any, **options: Any) -> None:
            self.file = opened(file, **options)

        def get_slice(self, name: str) -> Any:
            return RecordedSlice(name, self.file.get_slice(name))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __exit__(self, *ended: Any) -> None:
            self.file.__exit__(*ended)

    class RecordedSlice:
        def __init__(self, name: str, found: Any) -> None:
            self.name, self.found = name, found

        def __getitem__(self, index: Any) -> Any:
            read.append(self.name)
            return self.found[index]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.found, name)

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", Recorded)
    whole_of(tmp_path, torch.float32)
    assert any(".experts." in name for name in read)
    read.clear()
    load(str(tmp_path), Whole(whole))
    assert "model.embed_tokens.weight" in read
    assert [name for name in read if ".experts." in name] == []


def test_what_is_left_out_is_not_reported_as_unexpected(qwen: tuple[Path, Any]) -> None:
    with without_expert_weights():
        model, found = transformers.AutoModelForCausalLM.from_pretrained(qwen[0], output_loading_info=True)
    assert (held(model), len(found["unexpected_keys"]), len(found["missing_keys"])) == (0, 0, 0)


def test_an_fp8_checkpoint_is_loaded_without_its_experts(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    quantize_fp8_block(tmp_path)
    whole = whole_of(tmp_path, torch.float32)
    model = load(str(tmp_path), Whole(whole), dtype=torch.float32)
    assert (held(whole) > 0, held(model)) == (True, 0)
    assert torch.equal(logits(model), logits(whole))


def test_the_fp8_experts_that_transformers_puts_in_their_place_are_dropped_too() -> None:
    config = make_model("qwen3_moe", dtype=torch.float32, seed=0, hidden=64).config
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    model = replace_with_fp8_linear(
        model, ["lm_head"], quantization_config=transformers.FineGrainedFP8Config(), pre_quantized=True
    )
    kinds = {type(module).__name__ for _, module in experts_modules(model).values()}
    assert (kinds, held(model) > 0) == ({"FP8Experts"}, True)
    drop_expert_weights(model)
    assert held(model) == 0


def test_gpt_oss_is_loaded_where_transformers_keeps_its_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with the package `kernels`: its blocks are others there, and choose in a kernel."""
    whole = write_gpt_oss(tmp_path).alone()
    monkeypatch.setattr(quantizer_mxfp4.Mxfp4HfQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: None)
    model = load(str(tmp_path), Whole(whole), dtype=torch.float32)
    kinds = {type(module).__name__ for _, module in experts_modules(model).values()}
    assert (kinds, held(model)) == ({"Mxfp4GptOssMLP"}, sum(p.numel() for p in _routers(model)))
    torch.testing.assert_close(logits(model), logits(whole))


def _routers(model: Any) -> list[Any]:
    return [weight for name, weight in model.named_parameters() if ".router." in name]


def test_a_device_map_places_a_model_that_has_no_experts(qwen: tuple[Path, Any]) -> None:
    model = load(str(qwen[0]), Whole(qwen[1]), device_map="cpu")
    torch.testing.assert_close(logits(model), logits(qwen[1]))


def test_a_model_that_holds_its_experts_can_be_attached(qwen: tuple[Path, Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen[0])
    service = Whole(qwen[1])
    assert attach(model, service) is service
    logits(model)
    assert len(service.calls) == 2
    full = held(model)
    assert drop_expert_weights(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert (full > 0, held(model)) == (True, 0)
    torch.testing.assert_close(logits(model), logits(qwen[1]))


def test_a_model_without_a_head_can_be_loaded(qwen: tuple[Path, Any]) -> None:
    model = load(str(qwen[0]), Whole(qwen[1]), cls=transformers.AutoModel)
    with torch.no_grad():
        found, expected = (each(TOKENS).last_hidden_state for each in (model, qwen[1].model))
    torch.testing.assert_close(found, expected)


def test_greedy_tokens_are_those_of_the_whole_model(qwen: tuple[Path, Any]) -> None:
    model = load(str(qwen[0]), Whole(qwen[1]))
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(TOKENS, **settings), qwen[1].generate(TOKENS, **settings))


def test_ids_of_experts_elsewhere_become_none(qwen: tuple[Path, Any]) -> None:
    service = Whole(qwen[1])
    model = load(str(qwen[0]), service)
    experts = torch.tensor([[8, 3], [1, 9], [8, 8]])
    chosen = experts.clone()
    answer = model.model.layers[0].mlp.experts(torch.ones(3, 64), experts, torch.ones(3, 2))
    assert service.calls[-1][2].tolist() == [[-1, 3], [1, -1], [-1, -1]]
    assert torch.equal(experts, chosen)
    assert not answer[2].any() and answer[:2].any(dim=1).all()


def test_the_answer_may_be_changed_in_place(qwen: tuple[Path, Any]) -> None:
    class Remembering(Whole):
        def forward(self, *arguments: Any) -> Tensor:
            self.answer = super().forward(*arguments)
            return self.answer

    service = Remembering(qwen[1])
    model = load(str(qwen[0]), service)
    with torch.no_grad():
        answer = model.model.layers[0].mlp.experts(
            torch.ones(2, 64), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)
        )
    before = service.answer.clone()
    answer += 1
    assert torch.equal(service.answer, before)


def test_gradients_are_refused_and_not_left_out(qwen: tuple[Path, Any]) -> None:
    model = load(str(qwen[0]), Whole(qwen[1]))
    with pytest.raises(RuntimeError, match=r"give no gradients; call the model under torch\.no_grad"):
        model(TOKENS).logits.sum().backward()


class Zeros:
    """A service whose answers are zeros, and that compilers must not look into."""

    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        data = bytes(hidden.nbytes)
        return torch.from_numpy(np.frombuffer(data, np.float32).reshape(hidden.shape).copy())

    def model(self) -> moe_pb2.GetModelReply:
        layers = [moe_pb2.LayerInfo(layer=layer, experts=4, hidden=16, top_k=1) for layer in range(2)]
        return moe_pb2.GetModelReply(model="l4", architecture="Llama4ForCausalLM", layers=layers)


@pytest.fixture
def seamed() -> Any:
    """A model whose blocks have a seam, attached."""
    config = transformers.Llama4TextConfig(
        hidden_size=16,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=32,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    attach(model, Zeros())
    return model


def test_nllb_s_choice_is_made_where_the_rows_are() -> None:
    class Experts:
        num_experts, training, moe_token_dropout = 4, False, 0.2

    forward = SEAMS["NllbMoeExperts"].forward(Experts(), lambda rows, ids, weights: rows)
    with FakeTensorMode():  # no GPU is needed for tensors without numbers
        rows, probs = torch.empty(3, 8, device="cuda"), torch.empty(3, 4, device="cuda")
        assert forward(rows, torch.empty(3, 4, dtype=torch.int64, device="cuda"), probs).is_cuda


@torch.no_grad()
def test_compilers_do_not_look_into_the_call_of_a_module_with_a_seam(seamed: Any) -> None:
    block, rows = seamed.model.layers[0].feed_forward, torch.randn(1, 3, 16)
    compiled = torch.compile(block, backend="eager", dynamic=True)
    assert torch.equal(compiled(rows)[0], block(rows)[0])


@torch.no_grad()
def test_a_copy_of_a_module_with_a_seam_is_a_module_of_its_own(seamed: Any) -> None:
    block, rows = seamed.model.layers[0].feed_forward, torch.randn(1, 3, 16)
    other, before = copy.deepcopy(seamed), block(rows)[0]
    with pytest.raises(RuntimeError, match=r"this Llama4TextMoe has no service; call attach\("):
        other.model.layers[0].feed_forward(rows)
    attach(other, Zeros())
    for parameter in other.model.layers[0].feed_forward.shared_expert.parameters():
        parameter.zero_()
    assert not other.model.layers[0].feed_forward(rows)[0].any()
    assert torch.equal(block(rows)[0], before)


def test_experts_that_were_never_attached_say_so(qwen: tuple[Path, Any]) -> None:
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen[0], experts_implementation=IMPLEMENTATION)
    with pytest.raises(RuntimeError, match=r"Qwen3MoeExperts has no service; call attach\(model, service\)"):
        logits(model)


def dense() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dense, "LlamaForCausalLM .llama. cannot be put behind moeserve: none of its modules uses"),
    ],
)
def test_models_that_do_not_use_the_interface_are_refused_with_the_reason(
    tmp_path: Path, qwen: tuple[Path, Any], make: Any, reason: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=reason):
        attach(model, Whole(qwen[1]))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        load(str(tmp_path), Whole(qwen[1]))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            {"layers": [moe_pb2.LayerInfo(layer=0, experts=8, hidden=64)]},
            r"layers \[1\] .* serves only \[0\]",
        ),
        (
            {"architecture": "MixtralForCausalLM"},
            "is Qwen3MoeForCausalLM, but tiny is served, MixtralForCausalLM",
        ),
        (
            {"layers": [moe_pb2.LayerInfo(layer=layer, experts=8, hidden=128) for layer in (0, 1)]},
            r"model.layers.0.mlp.experts: E, H = \(8, 64\) in the model, \(8, 128\) in what tiny serves",
        ),
    ],
    ids=["layer", "architecture", "shape"],
)
def test_another_model_than_the_served_one_is_refused(
    qwen: tuple[Path, Any], told: dict[str, Any], reason: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen[0], experts_implementation="grouped_mm")
    with pytest.raises(ValueError, match=reason):
        attach(model, Whole(qwen[1], **told))
    assert model.config._experts_implementation == "grouped_mm"


def test_an_address_where_another_model_is_served_is_refused(qwen: tuple[Path, Any]) -> None:
    service = FakeService()
    try:
        with pytest.raises(ValueError, match="but fake is served"):
            load(str(qwen[0]), service.address)
    finally:
        service.stop()


@pytest.fixture
def pristine() -> Iterator[None]:
    """Fails where the test leaves transformers' classes changed."""
    before = dict(vars(transformers.PreTrainedModel))
    yield
    assert dict(vars(transformers.PreTrainedModel)) == before


def test_leaving_out_ends_with_its_context(pristine: None, qwen: tuple[Path, Any]) -> None:
    with pytest.raises(KeyError, match="inside"), without_expert_weights():
        raise KeyError("inside")
    with without_expert_weights(), without_expert_weights():
        assert held(transformers.AutoModelForCausalLM.from_pretrained(qwen[0])) == 0
    assert held(transformers.AutoModelForCausalLM.from_pretrained(qwen[0])) == held(qwen[1])


def test_leaving_out_is_the_affair_of_one_thread(pristine: None, qwen: tuple[Path, Any]) -> None:
    found: list[int] = []

    def load_elsewhere() -> None:
        found.append(held(transformers.AutoModelForCausalLM.from_pretrained(qwen[0])))

    with without_expert_weights():
        other = threading.Thread(target=load_elsewhere)
        other.start()
        other.join(60)
    assert found == [held(qwen[1])]
