"""Bad input ends `plan` and `serve` before anything starts: one line that names it, and exit code 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, make_checkpoint

from moeserve.cli import main
from moeserve.device.machine import Machine
from moeserve.dispatch.backends import DISPATCHERS

SERVE = ("serve", "--launcher", "local", "--port", "0", "--metrics-port", "-1", "--device", "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command says."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"moeserve {words[0]}: ")
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            "[modle]\n",
            "unknown key modle; known: model, parallel, plan, step, balance, members, passes, server",
        ),
        ("[server]\nprot = 1\n", "unknown key server.prot; known: server.host, server.port"),
        ("[server]\nport = '50051'\n", "server.port must be int, not '50051'"),
        ("[parallel]\ndata_parallel_size = 0\n", "0"),
        ("[cluster]\nlauncher = 'slurm'\n", "cluster.launcher = 'slurm'; known: ray, local"),
        (
            "[plan]\nall2all_backend = 'fedex'\n",
            f"unknown dispatcher 'fedex'; dispatchers here: {min(DISPATCHERS)}",
        ),
        ("[plan]\nall2all_backend = 'pplx'\n", "dispatcher 'pplx' cannot serve: its library was withdrawn"),
        ("[server\n", "is not TOML"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_wrong_configuration(
    command: str,
    document: str,
    said: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "house.toml"
    file.write_text(document)
    assert said in refused([command, str(file), "--checkpoint", str(checkpoint)], capsys)


def test_a_configuration_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read nowhere.toml: No such file" in refused(["plan", "nowhere.toml"], capsys)


def test_no_checkpoint_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model.checkpoint is not set" in refused(["serve"], capsys)


@pytest.mark.parametrize("command", [SERVE, ("plan",)])
class TestACheckpoint:
    """What is wrong with it is found before a rank starts."""

    def test_is_missing(
        self, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "nowhere" in refused([*command, "--checkpoint", str(tmp_path / "nowhere")], capsys)

    def test_has_an_unknown_architecture(
        self, command: tuple[str, ...], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "other"
        shutil.copytree(checkpoint, path)
        edit_config(path, model_type="mamba", architectures=["MambaForCausalLM"])
        said = refused([*command, "--checkpoint", str(path)], capsys)
        assert "mamba" in said
        assert "qwen3_moe" in said  # what is supported

    def test_lacks_the_layers_asked_for(
        self, command: tuple[str, ...], checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = refused([*command, "--checkpoint", str(checkpoint), "--layers", "1,7-8"], capsys)
        assert "[7, 8] have no experts in this checkpoint; [0, 1] have" in said

    def test_cannot_be_served_by_the_kernel_named(
        self, command: tuple[str, ...], checkpoint: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = refused([*command, "--checkpoint", str(checkpoint), "--kernel", "fast"], capsys)
        assert "unknown kernel 'fast'; known: cuda_fp4" in said


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_redundant_experts_that_ranks_cannot_share_are_refused_before_a_process_starts(
    launcher: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moeserve.cli.serve._cluster", lambda config: pytest.fail("it was started"))
    file = tmp_path / "house.toml"
    file.write_text("[balance]\nredundant_experts = 3\n")
    words = [*SERVE, "--launcher", launcher, "--data-parallel-size", "2", "--enable-expert-parallel"]
    said = refused([*words, str(file), "--checkpoint", str(checkpoint)], capsys)
    assert "3 redundant experts do not divide over 2 ranks" in said


def test_a_bench_without_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in ("inf", "nan", "1e12"):
        said = refused(["bench", "127.0.0.1:1", "--duration", seconds], capsys)
        assert "--duration=" in said and "must be" in said


def test_a_bench_with_a_seed_below_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "127.0.0.1:1", "--seed", "-1"]) == 2
    assert "--seed=-1 must be 0 or more" in capsys.readouterr().err


def test_more_moves_than_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    for moves in ("-1", "99999999999"):
        assert f"--max-moves={moves} must be 0 to" in refused(
            ["rebalance", "127.0.0.1:1", "--max-moves", moves], capsys
        )


@pytest.mark.parametrize("flag", ["--ca", "--token-file"])
def test_keys_that_cannot_be_read_are_named_with_their_flag(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        said = refused(["status", "127.0.0.1:1", flag, str(path)], capsys)
        assert f"{flag} {path} cannot be read: {why}" in said


def test_cuda_without_a_gpu(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["serve", "--launcher", "local", "--checkpoint", str(checkpoint), "--device", "cuda"]
    assert "plan.device = 'cuda', and this process sees no CUDA device" in refused(words, capsys)


def test_fewer_gpus_than_ranks(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "moeserve.runtime.launch.environment.this_machine", lambda: Machine("h200", "sm90", 141 << 30)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = ["serve", "--launcher", "local", "--data-parallel-size", "4", "--enable-expert-parallel"]
    said = refused([*words, "--checkpoint", str(checkpoint), "--kernel", "torch_reference"], capsys)
    assert "4 ranks need a GPU each, and this machine has 2" in said


@pytest.mark.parametrize("layers", ["0-1000000000", "65536", "9" * 30])
def test_layers_that_no_model_has(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", f"--layers={layers}"])
    assert "names a layer beyond 65535, which no model has" in capsys.readouterr().err


@pytest.mark.parametrize("layers", ["two", "5-3", "1,,2", "-1"])
def test_layers_that_are_no_numbers(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"--layers={layers}"])
    assert ended.value.code == 2
    assert "must be numbers and ranges, such as 0,2-5" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["50051", "a\nb:1", "localhost:", ":1", "host:http", "host:70000", "::1", "::1:50051"]
)
def test_an_address_that_is_none(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["health", address])
    assert ended.value.code == 2
    assert "must be HOST:PORT, such as 127.0.0.1:50051" in capsys.readouterr().err


EMPTY = [
    ["inspect", "{}"],
    ["inspect", "model", "--against", "{}"],
    ["inspect", "--checkpoint", "{}"],
    ["quantize", "{}", "there", "--to", "fp8"],
    ["quantize", "model", "{}", "--to", "fp8"],
    ["plan", "{}"],
    ["plan", "model", "--machine", "{}"],
    ["plan", "--table", "{}"],
    ["serve", "{}"],
    ["simulate", "--load", "{}", "--ranks", "2"],
    ["simulate", "--load", "loads", "--ranks", "2", "--plot", "{}"],
    ["simulate", "--load", "loads", "--ranks", "2", "--measured", "{}"],
    ["simulate", "--load", "loads", "--ranks", "2", "--checkpoint", "{}"],
    ["record", "--from", "{}", "--out", "there"],
    ["record", "127.0.0.1:9", "--out", "{}"],
    ["log-level", "127.0.0.1:9", "{}"],
    ["status", "127.0.0.1:9", "--ca", "{}"],
    ["status", "127.0.0.1:9", "--token-file", "{}"],
]
"""Commands with a name that is empty, as of a variable that is not set."""


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_a_name_that_is_empty(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word.format(text) for word in words])
    assert ended.value.code == 2
    assert f"{text!r} names nothing" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("text", ["", "  "])
def test_a_reload_of_no_checkpoint(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["reload", "127.0.0.1:9", text], capsys)
    assert said == (
        f"moeserve reload: {text!r} names no checkpoint; give its folder, or org/name[@revision]\n"
    )


@pytest.mark.parametrize("ranks", ["0", "65537", "1000000000", "99999999999999999999"])
def test_ranks_that_no_experts_are_for(
    ranks: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["inspect", str(checkpoint), "--ranks", ranks], capsys)
    assert said == f"moeserve inspect: --ranks={ranks} must be 1 to 65536\n"


def test_more_ranks_than_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["scale", "127.0.0.1:9", "99999999999"], capsys)
    assert said == "moeserve scale: ranks=99999999999 must be a whole number of 1 to 4294967295\n"
