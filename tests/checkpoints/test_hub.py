"""Checkpoints named as a hub names them: `org/name` in the local cache, and what is said where it is not."""

from __future__ import annotations

import os
import re
import shutil
from argparse import ArgumentParser
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from moeserve.checkpoints.checkpoint import Checkpoint, CheckpointError
from moeserve.checkpoints.hub import (
    MOST_REF,
    HubId,
    cache,
    located,
    located_in_cache,
    pinned,
    repository_of,
)
from moeserve.cli import main
from moeserve.cli.arguments.configured import add_config_flags, config_of
from moeserve.runtime.config import Config
from moeserve.runtime.served import model_name, served_from

OLD, NEW = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"
FOLDER = "models--org--qwen3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_checkpoint("qwen3_moe", path)
    return path


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two snapshots of org/qwen3, of which main is the older one; no hub is reached."""
    for variable in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    folder = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blobs = folder / FOLDER / "blobs"
    shutil.copytree(model, blobs)
    for seconds, commit in enumerate((OLD, NEW)):
        snapshot = folder / FOLDER / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in blobs.iterdir():
            (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
        os.utime(snapshot, (1000 + seconds, 1000 + seconds))
    (folder / FOLDER / "refs").mkdir()
    (folder / FOLDER / "refs" / "main").write_text(OLD)
    (folder / FOLDER / "refs" / "v2").write_text(NEW)
    return folder


@pytest.mark.parametrize(
    ("named", "commit"),
    [
        ("org/qwen3", OLD),
        ("org/qwen3@main", OLD),
        ("org/qwen3@v2", NEW),
        (f"org/qwen3@{NEW}", NEW),
        (f"org/qwen3@{NEW[:7]}", NEW),
    ],
)
def test_a_repository_is_opened_from_the_cache(hub: Path, named: str, commit: str) -> None:
    checkpoint = Checkpoint(named)
    assert checkpoint.path == hub / FOLDER / "snapshots" / commit
    assert checkpoint.experts(0, [1]).gate_up.shape == (1, 256, 64)
    assert pinned(named) == f"org/qwen3@{commit}"


def test_the_newest_snapshot_is_taken_without_a_ref(hub: Path) -> None:
    (hub / FOLDER / "refs" / "main").unlink()
    assert located("org/qwen3").name == NEW


@pytest.mark.parametrize("under", ["", "snapshots", f"snapshots/{OLD}"])
def test_a_folder_of_the_cache_stands_for_its_snapshot(hub: Path, under: str) -> None:
    folder = hub / FOLDER / under
    assert Checkpoint(folder).path == hub / FOLDER / "snapshots" / OLD
    assert repository_of(folder) == "org/qwen3"


def test_a_folder_of_the_cache_without_snapshots_is_told(hub: Path) -> None:
    shutil.rmtree(hub / FOLDER / "snapshots")
    for named in ("org/qwen3", str(hub / FOLDER)):
        told = f"{named}: {hub / FOLDER} has no folder in snapshots/; fetch it with `hf download org/qwen3`"
        with pytest.raises(CheckpointError, match=re.escape(told)):
            Checkpoint(named)


def test_the_cache_is_where_the_hubs_own_variables_say(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache() == hub
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(hub.parent))
    assert cache() == hub
    assert Checkpoint("org/qwen3").path.name == OLD
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache() == Path("/somewhere/huggingface/hub")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache() == Path.home() / ".cache" / "huggingface" / "hub"


def test_a_folder_comes_before_a_repository(hub: Path, model: Path) -> None:
    shutil.copytree(model, "org/qwen3")
    assert Checkpoint("org/qwen3").path == Path("org/qwen3")
    assert pinned("org/qwen3") == "org/qwen3"


def test_what_was_looked_for_is_told_in_one_line(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = (
        f"org/other: there is no folder {Path.cwd() / 'org/other'}, and the hub cache {hub} has no "
        f"models--org--other; fetch it with `hf download org/other`, or give a folder"
    )
    with pytest.raises(CheckpointError) as raised:
        Checkpoint("org/other")
    assert str(raised.value) == told
    assert main(["inspect", "org/other"]) == 2
    shown = capsys.readouterr().err
    assert shown == f"moeserve inspect: {told} (nothing was downloaded: HF_HUB_OFFLINE is set)\n"


def test_a_revision_that_the_cache_lacks_is_told(hub: Path) -> None:
    told = (
        f"org/qwen3@v3: {hub / FOLDER} has no revision v3 (neither in refs/ nor in snapshots/, which has "
        f"{OLD}, {NEW}); fetch it with `hf download org/qwen3 --revision v3`, or give a folder"
    )
    with pytest.raises(CheckpointError, match=re.escape(told)):
        Checkpoint("org/qwen3@v3")


def test_inspect_and_plan_take_a_repository(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "org/qwen3", "--json"]) == 0
    by_id = capsys.readouterr().out
    assert main(["inspect", str(hub / FOLDER / "snapshots" / OLD), "--json"]) == 0
    by_folder = capsys.readouterr().out
    assert '"experts": 8' in by_folder
    assert by_id == by_folder
    assert main(["plan", "org/qwen3", "--device", "cpu"]) == 0
    assert main(["plan", "org/none", "--device", "cpu"]) != 0
    assert "hub cache" in capsys.readouterr().err


def configured(*words: str) -> Config:
    """What `serve` makes of these words."""
    parser = ArgumentParser()
    add_config_flags(parser, serving=True)
    return config_of(parser.parse_args(words))


def test_a_configuration_names_the_commit_and_the_repository(hub: Path, tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('[model]\ncheckpoint = "org/qwen3"\n')
    for config in (configured(str(file)), configured("org/qwen3"), configured("--checkpoint", "org/qwen3")):
        assert config.model.checkpoint == f"org/qwen3@{OLD}"
        assert model_name(config) == "org/qwen3"
        (hub / FOLDER / "refs" / "main").write_text(NEW)  # another process, after the branch went on
        assert served_from(config).checkpoint.path.name == OLD
        (hub / FOLDER / "refs" / "main").write_text(OLD)
    snapshot = Config().with_values({"model.checkpoint": str(hub / FOLDER / "snapshots" / OLD)})
    assert model_name(snapshot) == "org/qwen3"


def test_a_file_finds_its_folder_beside_itself_first(hub: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "service.toml"
    file.write_text('[model]\ncheckpoint = "org/qwen3"\n')
    shutil.copytree(model, tmp_path / "files" / "org" / "qwen3")
    assert configured(str(file)).model.checkpoint == str(tmp_path / "files" / "org" / "qwen3")


def test_a_file_does_not_find_a_folder_of_the_working_directory(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "service.toml"
    file.write_text('[model]\ncheckpoint = "org/qwen3"\n')
    Path("org/qwen3").mkdir(parents=True)
    config = configured(str(file))
    assert config.model.checkpoint == f"org/qwen3@{OLD}"
    assert served_from(config).checkpoint.path == hub / FOLDER / "snapshots" / OLD
    assert configured("org/qwen3").model.checkpoint == str(Path.cwd() / "org/qwen3")


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "service.toml"
    file.write_text('[model]\ncheckpoint = "~/weights"\n[plan]\ncosts = "~/costs"\n')
    config = Config.load(file)
    assert config.model.checkpoint == str(tmp_path / "weights")
    assert config.plan.costs == str(tmp_path / "costs")
    shutil.copytree(model, tmp_path / "weights")
    assert Checkpoint("~/weights").path == tmp_path / "weights"


@pytest.mark.parametrize("lost", ["models--org--qwen3", f"{FOLDER}/blobs/model.safetensors"])
def test_what_the_cache_lacks_is_downloaded(
    hub: Path, lost: str, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked: list[tuple[str, str, Path]] = []

    def download(repository: str, *, revision: str, cache_dir: Path, **_: object) -> str:
        asked.append((repository, revision, cache_dir))
        snapshot = hub / FOLDER / "snapshots" / NEW
        shutil.rmtree(snapshot, ignore_errors=True)
        shutil.copytree(model, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    path = hub / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    config = configured("org/qwen3")
    assert asked == [("org/qwen3", "main", hub)]
    assert served_from(config).checkpoint.path == hub / FOLDER / "snapshots" / NEW


@pytest.mark.parametrize("kind", [OSError, Exception], ids=["no route", "of the HTTP library"])
def test_a_hub_that_cannot_be_reached_is_told(
    kind: type[Exception], hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def unreachable(*_: object, **__: object) -> str:
        raise kind("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    told = r"hub cache .* has no models--org--other; .* \(it could not be downloaded: no route to host\)$"
    with pytest.raises(CheckpointError, match=told):
        pinned("org/other")


def test_a_link_whose_blob_is_gone_is_named(hub: Path) -> None:
    (hub / FOLDER / "blobs" / "model.safetensors").unlink()
    file = hub / FOLDER / "snapshots" / OLD / "model.safetensors"
    with pytest.raises(CheckpointError, match=re.escape(f"cannot read {file}: No such file")):
        Checkpoint("org/qwen3")


def test_a_shard_that_a_download_left_out_is_told(hub: Path) -> None:
    snapshot = hub / FOLDER / "snapshots" / OLD
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "lost.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lacks 1 of 1 shards, as lost.safetensors .*HF_HUB_OFFLINE"):
        pinned("org/qwen3")


@pytest.mark.parametrize("revision", ["/etc/passwd", "../../../secret", "a/../../secret", "./main", "a//b"])
def test_a_revision_names_nothing_beside_the_refs(hub: Path, revision: str) -> None:
    (hub.parent / "secret").write_text("x" * 100)
    assert HubId.of(f"org/qwen3@{revision}") is None


def test_a_ref_that_is_no_commit_is_told_and_not_read_whole(hub: Path) -> None:
    (hub / FOLDER / "refs" / "odd").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="cannot be read as a commit"):
        located("org/qwen3@odd")
    (hub / FOLDER / "refs" / "long").write_text(OLD + "\n" + " " * MOST_REF + NEW)
    assert located("org/qwen3@long").name == OLD
    with pytest.raises(CheckpointError, match="too long"):
        located_in_cache(f"org/{'n' * 300}")


def test_only_what_was_looked_for_is_told(hub: Path) -> None:
    with pytest.raises(CheckpointError) as failed:
        located_in_cache("org/other")
    assert "there is no folder" not in str(failed.value)
