"""Reading experts: what comes out is what transformers computes with, and nothing more is read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import (
    CONFIGS,
    edit_config,
    experts_of,
    fuse,
    make_checkpoint,
    make_tokenizer,
    quantize_fp8_block,
    rewrite,
    shard,
    unfuse,
)

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.experts.batch import ExpertWeights
from moeserve.experts.placement import Placement
from moeserve.quant.formats.floats import FLOATS
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP

PER_EXPERT = sorted(set(CONFIGS) - {"gpt_oss", "llama4_text"})


def assert_reads(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    for layer in checkpoint.layers:
        weights = checkpoint.experts(layer, range(checkpoint.num_experts))
        gate_up, down = experts_of(model, layer)
        assert weights.gate_up.format == weights.down.format == FLOATS[checkpoint.dtype]
        assert torch.equal(weights.gate_up.parts[0], gate_up)
        assert torch.equal(weights.down.parts[0], down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_reads_back_exactly(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path, dtype=dtype)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dtype == dtype
    assert (checkpoint.hidden, checkpoint.inner, checkpoint.num_experts) == (64, 128, 8)
    assert checkpoint.top_k == model.config.num_experts_per_tok
    assert checkpoint.scheme(checkpoint.layers[0]).name == FLOATS[dtype].name
    assert_reads(checkpoint, model)


@pytest.mark.parametrize("fused", [True, "transposed"])
@pytest.mark.parametrize("family", PER_EXPERT)
def test_stacked_tensors_are_read_in_either_orientation(
    family: str, fused: bool | str, tmp_path: Path
) -> None:
    model = make_checkpoint(family, tmp_path, fused=fused)
    assert_reads(Checkpoint(tmp_path), model)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_stacked_families_are_also_read_one_tensor_a_projection(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path)
    rewrite(tmp_path, lambda tensors: unfuse(tensors, interleaved=family == "gpt_oss"))
    assert_reads(Checkpoint(tmp_path), model)


@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp", "feed_forward"])
@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_every_family_may_use_every_spelling(
    block: str, names: tuple[str, ...], prefix: str, tmp_path: Path
) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path)
    spelling = dict(zip(("gate_proj", "up_proj", "down_proj"), names, strict=True))

    def respell(name: str) -> str:
        if ".experts." in name:
            for ours, theirs in spelling.items():
                name = name.replace(ours, theirs)
        return name.replace(".mlp.", f".{block}.").replace("model.", prefix, 1)

    rewrite(tmp_path, lambda tensors: {respell(name): tensor for name, tensor in tensors.items()})
    assert_reads(Checkpoint(tmp_path), model)


@pytest.mark.parametrize(("family", "fused"), [("mixtral", True), ("llama4_text", False)])
def test_square_stacks_take_their_orientation_from_the_family(
    family: str, fused: bool, tmp_path: Path
) -> None:
    model = make_checkpoint(family, tmp_path, fused=fused, hidden=64, inner=32)
    assert_reads(Checkpoint(tmp_path), model)


def test_a_square_down_follows_gate_up(tmp_path: Path) -> None:
    model = make_checkpoint("mixtral", tmp_path, fused="transposed", hidden=64, inner=64)
    assert_reads(Checkpoint(tmp_path), model)


@pytest.mark.parametrize("fused", [False, True])
def test_shards_read_as_one_file(fused: bool, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path, fused=fused, shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert_reads(Checkpoint(tmp_path), model)


def test_files_of_transformers_own_sharding_are_read(tmp_path: Path) -> None:
    model = make_checkpoint("mixtral", tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_reads(Checkpoint(tmp_path / "sharded"), model)


def test_gpt_oss_biases_are_in_halves_and_float32(tmp_path: Path) -> None:
    model = make_checkpoint("gpt_oss", tmp_path, dtype=torch.bfloat16)
    experts = model.model.layers[1].mlp.experts
    weights = Checkpoint(tmp_path).experts(1, [5, 2])
    bias = experts.gate_up_proj_bias[[5, 2]]
    assert torch.equal(weights.gate_up_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1).float())
    assert torch.equal(weights.down_bias, experts.down_proj_bias[[5, 2]].float())
    activation = Checkpoint(tmp_path).shape(1).activation
    assert (activation.name, activation.limit, activation.alpha) == ("swigluoai", 7.0, 1.702)


def test_gpt_oss_activation_takes_its_numbers_from_the_config(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path, swiglu_limit=5.0, swiglu_alpha=1.5)
    activation = Checkpoint(tmp_path).shape(0).activation
    assert (activation.limit, activation.alpha) == (5.0, 1.5)


def joined(slices: list[ExpertWeights]) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole experts from slices along I: gate rows of all slices, then up rows; down columns."""
    halves = [part.gate_up.dequantize().chunk(2, dim=1) for part in slices]
    gate_up = torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=1)
    return gate_up, torch.cat([part.down.dequantize() for part in slices], dim=2)


@pytest.mark.parametrize("fused", [False, True, "transposed"])
@pytest.mark.parametrize("of", [1, 2, 4])
def test_slices_make_the_whole(of: int, fused: bool | str, tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, fused=fused)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shape(0, of).inner == 128 // of
    whole = checkpoint.experts(0, [6, 1])
    before = checkpoint.bytes_read
    gate_up, down = joined([checkpoint.experts(0, [6, 1], part=(index, of)) for index in range(of)])
    assert torch.equal(gate_up, whole.gate_up.dequantize())
    assert torch.equal(down, whole.down.dequantize())
    assert checkpoint.bytes_read - before == 2 * checkpoint.expert_nbytes(0)


def test_slices_of_interleaved_experts_share_one_down_bias(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    whole = checkpoint.experts(0, [3])
    slices = [checkpoint.experts(0, [3], part=(index, 4)) for index in range(4)]
    gate_up, down = joined(slices)
    assert torch.equal(gate_up, whole.gate_up.dequantize())
    assert torch.equal(down, whole.down.dequantize())
    assert torch.equal(slices[0].down_bias, whole.down_bias)
    assert all(not part.down_bias.any() for part in slices[1:])
    halves = [part.gate_up_bias.chunk(2, dim=1) for part in slices]
    bias = torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=1)
    assert torch.equal(bias, whole.gate_up_bias)


@pytest.mark.parametrize(("family", "fused"), [("mixtral", False), ("mixtral", True), ("gpt_oss", False)])
def test_a_rank_reads_only_the_experts_it_owns(family: str, fused: bool, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, fused=fused)
    ranks = [Checkpoint(tmp_path) for _ in range(4)]
    placement = Placement.even(2, 8, 4)
    for rank, checkpoint in enumerate(ranks):
        for layer in checkpoint.layers:
            owned = [int(expert) for expert in placement.of_owner(layer, rank)]
            assert checkpoint.experts(layer, owned).experts == len(owned)
        assert checkpoint.bytes_read == 2 * 2 * checkpoint.expert_nbytes(0)
    named = [name for layer in ranks[0].layers for name in ranks[0].tensors(layer)]
    total = sum(ranks[0].tensor_nbytes(name) for name in named)
    assert sum(checkpoint.bytes_read for checkpoint in ranks) == total == 2 * 8 * ranks[0].expert_nbytes(0)


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.expert_nbytes(1)
    checkpoint.shape(1)
    assert checkpoint.bytes_read == 0


def test_no_experts_is_a_valid_wish(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    weights = Checkpoint(tmp_path).experts(0, [])
    assert weights.gate_up.shape == (0, 256, 64)
    assert weights.down.shape == (0, 64, 128)
    assert weights.nbytes == 0


def test_what_was_read_stays_when_the_file_changes(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    weights = Checkpoint(tmp_path).experts(0, [0])
    before = weights.down.parts[0].clone()
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(weights.down.parts[0], before)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4", "glm4_moe", "minimax_m2"])
def test_gate_has_the_layers_own_correction_bias(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    layer = checkpoint.layers[-1]
    biases = [tensor for name, tensor in model.model.layers[layer].state_dict().items() if "e_score" in name]
    assert torch.equal(checkpoint.gate(layer).bias, biases[0].float())
    assert biases[0].any()


@pytest.mark.parametrize("by_legacy_key", [False, True])
def test_layers_that_choose_by_token_id_have_no_correction_bias(by_legacy_key: bool, tmp_path: Path) -> None:
    make_checkpoint("deepseek_v4", tmp_path)
    if by_legacy_key:
        edit_config(tmp_path, mlp_layer_types=None, num_hash_layers=1)
    gates = [Checkpoint(tmp_path).gate(layer) for layer in (0, 1)]
    assert [gate.by_token for gate in gates] == [True, False]
    logits = torch.randn(3, 8)
    with pytest.raises(ValueError, match="logits do not tell the experts of a layer that chooses them by"):
        gates[0].route(logits)
    assert gates[0].weigh(logits, torch.tensor([[0, 5]] * 3)).sum(-1).tolist() == pytest.approx([1.5] * 3)
    assert gates[1].route(logits)[0].shape == (3, 2)


def test_gate_of_llama4_weights_the_input(tmp_path: Path) -> None:
    make_checkpoint("llama4_text", tmp_path)
    assert Checkpoint(tmp_path).gate(0).weight_on_input


def test_text_config_of_a_multimodal_model_is_read(tmp_path: Path) -> None:
    model = make_checkpoint("llama4_text", tmp_path)
    text = model.config.to_dict()
    (tmp_path / "config.json").write_text("{}")
    edit_config(tmp_path, model_type="llama4", architectures=["Llama4ForConditionalGeneration"])
    edit_config(tmp_path, text_config=text, dtype="float32")
    checkpoint = Checkpoint(tmp_path)
    assert (checkpoint.architecture, checkpoint.model_type) == (
        "Llama4ForConditionalGeneration",
        "llama4_text",
    )
    assert_reads(checkpoint, model)


def test_kimi_k2_is_deepseek_v3_with_one_group(tmp_path: Path) -> None:
    model = make_checkpoint("deepseek_v3", tmp_path, n_group=1)
    edit_config(tmp_path, model_type="kimi_k2")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.model_type == "kimi_k2"
    assert checkpoint.gate(1).groups == 1
    assert_reads(checkpoint, model)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_blocks_are_read_as_stored(scales: torch.dtype, tmp_path: Path) -> None:
    model = make_checkpoint("deepseek_v3", tmp_path, dtype=torch.bfloat16, hidden=192, inner=256)
    quantize_fp8_block(tmp_path, scales)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dialect.name == "fp8_block"
    assert (checkpoint.scheme(1).weights, checkpoint.scheme(1).activations) == (FP8_BLOCK, FP8_GROUP)
    weights = checkpoint.experts(1, [7, 0])
    gate_up, down = (tensor[[7, 0]] for tensor in experts_of(model, 1))
    assert weights.gate_up.parts[1].shape == (2, 4, 2)
    for read, source in ((weights.gate_up, gate_up), (weights.down, down)):
        codes, scale = FP8_BLOCK.quantize(source.float()).parts
        assert torch.equal(read.parts[0].float(), codes.float())
        assert torch.equal(read.parts[1], scale.to(scales).float())
    slices = [checkpoint.experts(1, [7, 0], part=(index, 2)) for index in range(2)]
    sliced = joined(slices)
    assert torch.equal(sliced[0], weights.gate_up.dequantize())
    assert torch.equal(sliced[1], weights.down.dequantize())


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_fp8_blocks_are_those_of_one_tensor_a_projection(transposed: bool, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, inner=256)
    quantize_fp8_block(tmp_path)
    apart = Checkpoint(tmp_path).experts(1, [7, 0], part=(1, 2))
    rewrite(tmp_path, lambda tensors: fuse(tensors, transposed=transposed))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors(1)[0] == "model.layers.1.mlp.experts.down_proj"
    stacked = checkpoint.experts(1, [7, 0], part=(1, 2))
    for name, tensor in apart.tensors().items():
        assert torch.equal(stacked.tensors()[name].float(), tensor.float())


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_a_layer_left_out_of_quantization_is_plain(key: str, tmp_path: Path) -> None:
    model = make_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16)
    quantize_fp8_block(tmp_path, only_layer=1)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    listed = ["lm_head", "model.layers.0.block_sparse_moe.experts"]
    edit_config(tmp_path, quantization_config=settings | {key: listed})
    checkpoint = Checkpoint(tmp_path)
    assert [checkpoint.scheme(layer).weights.name for layer in checkpoint.layers] == ["bf16", "fp8_block128"]
    assert torch.equal(checkpoint.experts(0, [4]).gate_up.parts[0][0], experts_of(model, 0)[0][4])


def test_a_checkpoint_travels_as_its_path(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.experts(0, [0])
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again.bytes_read == 0
    assert_reads(again, model)


def test_the_same_seed_makes_the_same_checkpoint(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_checkpoint("qwen2_moe", tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_tokenizer_has_a_token_for_each_byte(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    text = "héllo, wörld 123\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_shard_of_a_test_checkpoint_places_every_tensor(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path)
    before = Checkpoint(tmp_path).tensors(0)
    shard(tmp_path, 2)
    assert Checkpoint(tmp_path).tensors(0) == before


def test_a_mark_tells_experts_from_others_and_not_where_they_lie(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / name for name in ("one", "copy", "other"))
    for path in (one, copy, other):
        path.mkdir()
        make_checkpoint("qwen3_moe", path)
    shard(copy, 3)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    rewrite(other, lambda tensors: tensors | {name: tensors[name] + 1})
    assert Checkpoint(copy).mark == Checkpoint(one).mark != Checkpoint(other).mark
    rewrite(one, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    assert Checkpoint(copy).mark == Checkpoint(one).mark, "experts alone count"
    edit_config(copy, rope_theta=5e5)
    assert Checkpoint(copy).mark == Checkpoint(one).mark, "and how they are chosen"
    edit_config(copy, norm_topk_prob=not Checkpoint(one).config["norm_topk_prob"])
    assert Checkpoint(copy).mark != Checkpoint(one).mark


def test_a_mark_is_of_what_is_read(tmp_path: Path) -> None:
    """A file that another one replaces is read on; one that is written to is read as it is now."""
    make_checkpoint("qwen3_moe", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.0.down_proj.weight"
    good, checkpoint = file.read_bytes(), Checkpoint(tmp_path)
    mark, weights = checkpoint.mark, checkpoint.experts(0, [0])
    file.rename(tmp_path / "before")
    file.write_bytes(good)
    rewrite(tmp_path, lambda tensors: tensors | {name: tensors[name] + 1})
    changed = file.read_bytes()
    assert checkpoint.mark == mark
    assert torch.equal(checkpoint.experts(0, [0]).down.parts[0], weights.down.parts[0])
    (tmp_path / "before").write_bytes(changed)
    checkpoint.unmap()
    assert checkpoint.mark == Checkpoint(tmp_path).mark != mark
    assert torch.equal(checkpoint.experts(0, [0]).down.parts[0], weights.down.parts[0] + 1)
