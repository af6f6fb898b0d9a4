"""`moeserve quantize`: what it writes reads back bit for bit, whatever the source, however often it stops."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, make_checkpoint, make_tokenizer, quantize_fp8_block, rewrite
from safetensors import safe_open
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.checkpoints.dialects.compressed_config import PRESETS
from moeserve.checkpoints.requantization import relative_error
from moeserve.checkpoints.store import INDEX
from moeserve.checkpoints.writing import units
from moeserve.checkpoints.writing.record import RECORD
from moeserve.checkpoints.writing.rewrite import Rewrite
from moeserve.checkpoints.writing.shards import ShardFile
from moeserve.checkpoints.writing.targets import TARGETS, target_named
from moeserve.cli import main
from moeserve.cli.quantize import size_of
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_TENSOR

SCHEMES = {
    "fp8": "fp8_channel x fp8_token",
    "fp8_block": "fp8_block128 x fp8_group128",
    "nvfp4": "nvfp4 x bf16",
    "mxfp4": "mxfp4 x bf16",
    "mxfp4_w4a4": "mxfp4",
    "mxfp8": "mxfp8",
    "int8": "int8_channel x int8_token",
    "int4": "int4_group128 x bf16",
    "int4_asym": "int4_asym_group128 x bf16",
}
LARGEST_ERROR = {"fp8": 0.028, "mxfp8": 0.03, "int8": 0.01, "nvfp4": 0.1, "mxfp4": 0.12, "int4": 0.125}
SMALL = {"hidden": 128, "inner": 128, "experts": 3, "layers": 2}
SHARD = 200_000  # bytes: several files of the model above


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small unquantized checkpoint with a tokenizer; not to be changed."""
    path = tmp_path_factory.mktemp("model") / "source"
    make_checkpoint("qwen3_moe", path, dtype=torch.bfloat16, **SMALL)
    make_tokenizer(path)
    return path


@pytest.fixture
def source(model: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(model, tmp_path / "source"))


def quantize(source: Path, destination: Path, form: str, *more: str) -> int:
    return main(["quantize", str(source), str(destination), "--to", form, "--quiet", *more])


def tensors_of(path: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return found


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def check_law(source: Checkpoint, written: Checkpoint, form: str) -> None:
    """Every expert reads back as the format's own encoding of what the source says."""
    target = target_named(form, source.dtype)
    for layer in source.layers:
        ids = range(source.num_experts)
        ours, theirs = written.experts(layer, ids), source.experts(layer, ids)
        for mine, wanted in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
            for expert in ids:
                encoded = target.form.quantize(wanted.dequantize()[expert])
                for part, tensor in zip(mine.parts, encoded.parts, strict=True):
                    assert same_bits(part[expert], tensor)
        for mine_bias, wanted_bias in (
            (ours.gate_up_bias, theirs.gate_up_bias),
            (ours.down_bias, theirs.down_bias),
        ):
            assert (mine_bias is None) == (wanted_bias is None)
            assert mine_bias is None or torch.equal(mine_bias, wanted_bias)


@pytest.mark.parametrize("form", TARGETS)
def test_what_is_written_reads_back_bit_for_bit(form: str, model: Path, tmp_path: Path) -> None:
    before, after = tensors_of(model), tmp_path / "written"
    assert quantize(model, after, form, "--shard-size", str(SHARD)) == 0
    source, written = Checkpoint(model), Checkpoint(after)
    check_law(source, written, form)
    assert {written.scheme(layer).name for layer in written.layers} == {SCHEMES[form]}
    error = next(error for name, error in LARGEST_ERROR.items() if form.startswith(name))
    for layer in source.layers:
        mine, wanted = (each.experts(layer, [1]).down.dequantize() for each in (written, source))
        assert 0 < relative_error(mine, wanted) < error
    found = tensors_of(after)
    experts = {name for layer in source.layers for name in source.tensors(layer)}
    assert all(same_bits(found[name], before[name]) for name in before.keys() - experts)
    placed = json.loads((after / INDEX).read_text())
    assert placed["weight_map"].keys() == found.keys()
    assert placed["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert len(set(placed["weight_map"].values())) > 2
    assert (after / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not [path.name for path in after.iterdir() if path.name.endswith(".part")]


def test_config_leaves_out_all_but_the_experts(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "written", "nvfp4")
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())
    kept = ["q_proj", "k_proj", "v_proj", "o_proj"]
    names = {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in kept}
    assert set(said["ignore"]) == names | {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    (group,) = said["config_groups"].values()
    assert (group["targets"], group["format"]) == (["Linear"], "nvfp4-pack-quantized")
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("tensor_group", 16)


def test_gate_and_up_share_nvfp4s_global_scale(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "written", "nvfp4")
    found = tensors_of(tmp_path / "written")
    stem = "model.layers.0.mlp.experts.2"
    gate, up, down = (found[f"{stem}.{side}_proj.weight_global_scale"] for side in ("gate", "up", "down"))
    assert gate.shape == (1,) and torch.equal(gate, up) and not torch.equal(gate, down)


@pytest.mark.parametrize(
    ("family", "options", "name"),
    [
        ("mixtral", {}, "model.layers.0.block_sparse_moe.experts.1.w1.weight_packed"),
        ("deepseek_v3", {"layers": 3, "experts": 4}, "model.layers.1.mlp.experts.1.gate_proj.weight_packed"),
        ("qwen3_moe", {"fused": True}, "model.layers.0.mlp.experts.1.gate_proj.weight_packed"),
        ("qwen3_moe", {"fused": "transposed"}, "model.layers.0.mlp.experts.1.down_proj.weight_packed"),
        ("gpt_oss", {}, "model.layers.0.mlp.experts.1.gate_proj.bias"),
        ("llama4_text", {}, "model.layers.0.feed_forward.experts.1.up_proj.weight_packed"),
    ],
)
def test_families_are_written_an_expert_by_itself(
    family: str, options: dict[str, object], name: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path / "source", dtype=torch.bfloat16, **(SMALL | {"inner": 96} | options))
    quantize(tmp_path / "source", tmp_path / "written", "mxfp4")
    check_law(Checkpoint(tmp_path / "source"), Checkpoint(tmp_path / "written"), "mxfp4")
    assert name in tensors_of(tmp_path / "written")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["fp8", "fp8_block", "int4_asym"])
def test_scales_of_other_dtypes_are_float32(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path / "source", dtype=dtype, **(SMALL | {"layers": 1}))
    quantize(tmp_path / "source", tmp_path / "written", form)
    check_law(Checkpoint(tmp_path / "source"), Checkpoint(tmp_path / "written"), form)
    found = tensors_of(tmp_path / "written")
    assert {t.dtype for name, t in found.items() if name.endswith("weight_scale")} == {torch.float32}


def test_zero_experts_stay_zero(source: Path, tmp_path: Path) -> None:
    rewrite(source, lambda tensors: {n: t * ("experts.1." not in n) for n, t in tensors.items()})
    for form in TARGETS:
        quantize(source, tmp_path / form, form)
        weights = Checkpoint(tmp_path / form).experts(0, [1])
        assert not weights.gate_up.dequantize().any() and not weights.down.dequantize().any(), form


@pytest.mark.parametrize("form", TARGETS)
def test_presets_mean_what_compressed_tensors_has_under_their_names(form: str) -> None:
    target = target_named(TARGETS[form].preset, torch.bfloat16)
    assert target == target_named(form, torch.bfloat16)
    (group,) = target.config([])["config_groups"].values()
    preset = PRESETS[target.entry.preset]
    assert preset["weights"].items() <= group["weights"].items()
    assert (group["input_activations"] is None) == (preset["input_activations"] is None)
    assert (preset["input_activations"] or {}).items() <= (group["input_activations"] or {}).items()


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_group_sizes(group: int, model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "written", "W4A16", "--group-size", str(group))
    name = "channel" if group == -1 else f"group{group}"
    assert Checkpoint(tmp_path / "written").scheme(0).weights.name == f"int4_{name}"


def test_large_tensors_are_copied_in_pieces(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(model, tmp_path / "whole", "fp8")
    monkeypatch.setattr(units, "PIECE_BYTES", 1000)
    unit = units.Copied(units.TensorStore(model), "model.embed_tokens.weight")
    assert max(piece.nbytes for _, piece in unit.pieces()) <= 1000
    quantize(model, tmp_path / "pieces", "fp8")
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "pieces")


def test_a_quantized_source_is_decoded(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_fp8_block(source)
    name = "model.layers.0.self_attn.q_proj.weight"
    matrix = tensors_of(source)[name].float()
    packed = FP8_BLOCK.quantize(matrix)
    rewrite(source, lambda tensors: tensors | {name: packed.parts[0], f"{name}_scale_inv": packed.parts[1]})
    assert main(["quantize", str(source), str(tmp_path / "written"), "--to", "nvfp4"]) == 0
    check_law(Checkpoint(source), Checkpoint(tmp_path / "written"), "nvfp4")
    found = tensors_of(tmp_path / "written")
    assert torch.equal(found[name], packed.dequantize().bfloat16())
    assert not any("scale_inv" in name for name in found)
    said = capsys.readouterr().out
    assert "the source was quantized already" in said and "1 FP8 matrices beside the experts" in said


def test_a_family_that_transformers_would_misread_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("gpt_oss", tmp_path / "source", dtype=torch.bfloat16, **(SMALL | {"layers": 1}))
    assert main(["quantize", str(tmp_path / "source"), str(tmp_path / "written"), "--to", "mxfp4"]) == 0
    assert "transformers' own gpt_oss does not look for them so" in capsys.readouterr().out


def interrupted(source: Path, destination: Path, after: int, error: BaseException) -> None:
    """A run that ends by `error` once it has done more than `after` bytes."""
    checkpoint = Checkpoint(source)
    work = Rewrite(checkpoint, destination, target_named("fp8", checkpoint.dtype), SHARD)
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done > after:
            raise error

    with pytest.raises(type(error)):
        work.run(progress)


def test_an_interrupted_run_goes_on(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(model), str(tmp_path / "whole"), "--to", "fp8", "--shard-size", str(SHARD)]
    main(arguments)
    arguments[2] = str(tmp_path / "parts")
    for after in (0, SHARD * 3 // 2, SHARD * 3):
        interrupted(model, tmp_path / "parts", after, KeyboardInterrupt())
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path / "parts")
        assert not list((tmp_path / "parts").glob("*.part"))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("*.safetensors")}
    assert len(kept) >= 2
    capsys.readouterr()
    assert main(arguments) == 0
    assert f"{len(kept)} files of an earlier run were kept" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_a_killed_run_goes_on(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "whole", "fp8", "--shard-size", str(SHARD))
    parts = tmp_path / "parts"
    slow = (
        "import sys, time\n"
        "from moeserve.checkpoints.writing import shards\n"
        "write = shards.ShardFile.write\n"
        "shards.ShardFile.write = lambda *a: (time.sleep(0.02), write(*a))[1]\n"
        "from moeserve.cli import main\n"
        "main(sys.argv[1:])"
    )
    words = ["quantize", str(model), str(parts), "--to", "fp8", "--quiet", "--shard-size", str(SHARD)]
    running = subprocess.Popen([sys.executable, "-c", slow, *words])
    try:
        until = time.monotonic() + 60
        while not list(parts.glob("*-00002-of-*.safetensors")):
            assert time.monotonic() < until and running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    finally:
        running.kill()
        running.wait(10)
    assert not (parts / "config.json").exists() and not (parts / INDEX).exists()
    assert main(words) == 0
    assert files_of(parts) == files_of(tmp_path / "whole")


def test_a_finished_folder_is_checked_and_mended(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "written"
    quantize(model, written, "int4", "--shard-size", str(SHARD))
    before = files_of(written)
    broken = sorted(written.glob("*.safetensors"))[1]
    broken.write_bytes(before[broken.name][:-1] + bytes([before[broken.name][-1] ^ 1]))
    words = ["quantize", str(model), str(written), "--to", "int4", "--shard-size", str(SHARD)]
    assert main(words) == 0
    assert f"written anew: {broken.name}" in capsys.readouterr().out
    assert files_of(written) == before
    assert main(words) == 0
    assert f"{len(list(written.glob('*.safetensors')))} files of an earlier run" in capsys.readouterr().out


def nothing(_: Path, __: Path) -> None:
    """Leaves source and destination as they are."""


def begun(source: Path, destination: Path) -> None:
    quantize(source, destination, "fp8")


def begun_of_another(source: Path, destination: Path) -> None:
    quantize(source, destination, "fp8")
    edit_config(source, rms_norm_eps=1e-5)


def other_files(_: Path, destination: Path) -> None:
    destination.mkdir()
    (destination / "notes.txt").write_text("mine")


def a_file(_: Path, destination: Path) -> None:
    destination.write_text("mine")


def damaged(source: Path, destination: Path) -> None:
    quantize(source, destination, "fp8")
    (destination / RECORD).write_text('{"source": {}}')


def not_a_number(source: Path, _: Path) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    rewrite(source, lambda tensors: tensors | {name: tensors[name] * torch.nan})


def attention_too(source: Path, _: Path) -> None:
    quantize_fp8_block(source)
    name = "model.layers.0.self_attn.q_proj.weight"
    codes, scale = FP8_TENSOR.quantize(tensors_of(source)[name].float()).parts
    rewrite(source, lambda tensors: tensors | {name: codes, f"{name}_scale": scale})


@pytest.mark.parametrize(
    ("prepare", "arguments", "said"),
    [
        (nothing, ("fp9",), "experts cannot be written as 'fp9'; known: fp8 (FP8_DYNAMIC), fp8_block"),
        (
            nothing,
            ("fp8", "--group-size", "64"),
            "group size 64: fp8 has none to choose, only int4, int4_asym",
        ),
        (
            nothing,
            ("int4", "--group-size", "48"),
            "group size 48 of int4 is not supported; known: -1, 32, 64",
        ),
        (nothing, ("int4", "--shard-size", "big"), "--shard-size='big' must be a size, as 500MiB"),
        (
            begun,
            ("int4",),
            "was begun with format='FP8_DYNAMIC', now format='W4A16'; run with that, or delete it",
        ),
        (begun, ("fp8", "--shard-size", "1MB"), "was begun with shard_bytes="),
        (begun_of_another, ("fp8",), "was begun with another config.json of the source"),
        (damaged, ("fp8",), "is damaged"),
        (other_files, ("fp8",), "holds other files, as notes.txt, and no moeserve_quantize.json"),
        (a_file, ("fp8",), "is a file; name a folder"),
        (not_a_number, ("fp8",), "layer 1, expert 2: down of"),
        (attention_too, ("fp8",), "as model.layers.0.self_attn.q_proj.weight_scale; only experts"),
    ],
)
def test_what_cannot_be_done_is_said(
    prepare: Callable[[Path, Path], None],
    arguments: tuple[str, ...],
    said: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(source, tmp_path / "written")
    assert quantize(source, tmp_path / "written", *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "sizes", "said"),
    [
        ("fp8_block", {"inner": 192}, "I=192 must be a multiple of 128"),
        ("fp8_block", {"hidden": 64}, "H=64 must be a multiple of 128"),
        ("nvfp4", {"inner": 24}, "I=24 must be a multiple of 16"),
        ("mxfp4", {"inner": 48}, "I=48 must be a multiple of 32"),
        ("int4", {"inner": 64}, "I=64 must be a multiple of 128"),
    ],
)
def test_sizes_that_a_format_cannot_have(
    form: str, sizes: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("mixtral", tmp_path / "source", dtype=torch.bfloat16, **(SMALL | {"layers": 1} | sizes))
    assert quantize(tmp_path / "source", tmp_path / "written", form) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "written").exists()


def test_a_disk_that_is_full_is_said_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert quantize(model, tmp_path / "written", "fp8") == 1
    assert "bytes more, and its disk has 1000: free some and run again" in capsys.readouterr().err
    assert not list((tmp_path / "written").glob("*.safetensors*"))


def test_a_disk_that_fills_up_keeps_what_is_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = ShardFile.write

    def fail_in_the_second(file: ShardFile, name: str, piece: Tensor) -> None:
        if "-00002-of-" in file.path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, name, piece)

    with monkeypatch.context() as patched:
        patched.setattr(ShardFile, "write", fail_in_the_second)
        assert quantize(model, tmp_path / "written", "fp8", "--shard-size", str(SHARD)) == 1
    assert "is full; free some and run again: the files that are whole are kept" in capsys.readouterr().err
    (kept,) = (tmp_path / "written").glob("*.safetensors*")
    assert "-00001-of-" in kept.name
    assert quantize(model, tmp_path / "written", "fp8", "--shard-size", str(SHARD)) == 0
    check_law(Checkpoint(model), Checkpoint(tmp_path / "written"), "fp8")


def test_two_runs_do_not_write_one_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Checkpoint(model)
    work = Rewrite(checkpoint, tmp_path / "written", target_named("fp8", checkpoint.dtype), SHARD)
    codes: list[int] = []

    def progress(_: int) -> None:
        if not codes:
            codes.append(quantize(model, tmp_path / "written", "fp8"))

    work.run(progress)
    assert codes == [2]
    assert "another run is writing" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rewrite, "run", stop)
    assert quantize(model, tmp_path / "written", "fp8") == 130
    assert "run it again to go on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("1.5 kib", 1536), ("5GB", 5 * 10**9), ("77", 77), ("2mib", 2 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "4 gallons", "0.0001KiB", "9" * 400])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        size_of(text)
