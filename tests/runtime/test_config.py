"""The configuration: one frozen value, every wrong key or value named."""

import threading
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from moeserve.proto.timeouts import LONGEST_SECONDS
from moeserve.runtime.config import Config, from_mapping
from moeserve.runtime.rank.weights.copies import PIECE, Abandoned, Copier
from moeserve.runtime.rank.weights.peers import unread_seconds
from moeserve.runtime.sections import ConfigError


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "moeserve.toml"
    path.write_text(text)
    return Config.load(path)


def test_a_file_is_read_and_flags_override_it(tmp_path: Path) -> None:
    config = load(
        tmp_path, '[model]\ncheckpoint = "a"\nlayers = [1, 2]\n[parallel]\ndata_parallel_size = 4\n'
    )
    config = config.with_values({"model.checkpoint": "b", "server.port": 0})
    assert (config.model.checkpoint, config.model.layers, config.server.port) == ("b", (1, 2), 0)
    assert config.parallel.mesh.ranks == 4


def test_what_is_printed_reads_back_the_same(tmp_path: Path) -> None:
    config = Config().with_values(
        {"model.checkpoint": 'with "quotes" and \\', "step.gather_seconds": 0.25, "model.layers": (3,)}
    )
    assert load(tmp_path, "\n".join(config.lines())) == config.resolved(tmp_path)


@pytest.mark.parametrize(("key", "name"), [("model.checkpoint", "weights"), ("plan.costs", "../costs")])
def test_relative_paths_start_at_the_folder_of_the_file(
    tmp_path: Path, key: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "elsewhere").mkdir()
    table, field = key.split(".")
    (tmp_path / "files" / "service.toml").write_text(f'[{table}]\n{field} = "{name}"\n')
    monkeypatch.chdir(tmp_path)  # the file is named by a relative path too
    config = Config.load("files/service.toml")
    monkeypatch.chdir(tmp_path / "elsewhere")  # as in a process that a launcher starts somewhere else
    assert getattr(getattr(config, table), field) == str(tmp_path / "files" / name)
    assert config.resolved(Path.cwd()) == config


def test_absolute_and_empty_paths_stay(tmp_path: Path) -> None:
    config = load(tmp_path, '[model]\ncheckpoint = "/srv/weights"\n')
    assert (config.model.checkpoint, config.plan.costs) == ("/srv/weights", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]\n", "unknown key modle; known: model, parallel"),
        ("[model]\ncheckpiont = 'x'\n", "unknown key model.checkpiont; known: model.checkpoint"),
        ("[server]\nport = 'x'\n", "server.port must be int, not 'x'"),
        ("[server]\nport = true\n", "server.port must be int, not True"),
        ("[model]\nlayers = 'all'\n", "model.layers must be a list of integers, not 'all'"),
        ("model = 3\n", "model must be a table, not 3"),
        ("[model\n", "is not TOML"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model.checkpoint is not set"),
        ({"cluster.launcher": "slurm"}, "cluster.launcher = 'slurm'; known: ray, local"),
        (
            {"cluster.launcher": "local", "cluster.spares": 2},
            "cluster.spares = 2 needs cluster.launcher = 'ray'",
        ),
        ({"cluster.recover_seconds": 0.0}, "cluster.recover_seconds = 0.0 must be positive"),
        ({"model.dtype": "fp8"}, "model.dtype = 'fp8'; known: auto, fp32, bf16, fp16"),
        (
            {"model.load_as": "fp9"},
            "model.load_as: experts cannot be loaded as 'fp9'; known: fp8, .*nvfp4 x bf16",
        ),
        (
            {"model.load_as": "fp8_tensor x fp8_static"},
            "cannot be loaded as 'fp8_tensor x fp8_static'; known",
        ),
        ({"step.lane_rows": 0}, "step.lane_rows = 0 must be positive"),
        ({"step.on_late": "wait"}, "step.on_late = 'wait'; known: fail, drop"),
        ({"step.late_seconds": -1.0}, "step.late_seconds = -1.0 must not be negative"),
        ({"step.graph_rows": -1}, "step.graph_rows = -1 must not be negative"),
        ({"step.timeout_seconds": float("nan")}, "step.timeout_seconds = nan must be a finite number"),
        ({"step.timeout_seconds": float("inf")}, "step.timeout_seconds = inf must be a finite number"),
        ({"step.gather_seconds": -1.0}, "step.gather_seconds = -1.0 must not be negative"),
        ({"balance.redundant_experts": -1}, "balance.redundant_experts = -1 must not be negative"),
        ({"balance.redundant_experts": 1 << 40}, "balance.redundant_experts = .* must be 1048576 or less"),
        ({"members.max_lanes": 1 << 40}, "members.max_lanes = .* must be 4096 or less"),
        ({"members.max_owners": 100_000}, "members.max_owners = 100000 must be 4096 or less"),
        ({"cluster.start_timeout_seconds": 0}, "cluster.start_timeout_seconds = 0.0 must be positive"),
        ({"server.port": 70000}, r"server.port = 70000 must be 0 \(any free one\) to 65535"),
        ({"server.port": -1}, "server.port = -1 must be 0"),
        ({"server.metrics_port": -2}, "server.metrics_port = -2 must be -1"),
        ({"server.metrics_port": 65535}, "server.metrics_port = 65535 must be .* leave room up to 65535"),
        (
            {"server.metrics_port": 65533, "members.max_lanes": 4},
            "server.metrics_port = 65533 must be .* leave room up to 65535 .* each of 4 ranks",
        ),
        (
            {"cluster.launcher": "local", "server.port": 9401, "parallel.data_parallel_size": 2},
            "server.port = 9401 is rank 0's port for metrics: server.metrics_port = 9400 takes 9400 to 9402",
        ),
        ({"server.health_port": 9400}, "server.health_port = 9400 is the head's port for metrics"),
        ({"server.health_port": 50051}, "server.health_port = 50051 is server.port"),
        (
            {"server.connection_rest_seconds": 1e9},
            "server.connection_rest_seconds = 1e.09 must be 2e.06 .* or less",
        ),
        ({"cluster.connect_seconds": 10**400}, "cluster.connect_seconds = inf must be a finite number"),
        (
            {"server.max_message_bytes": 4 << 30},
            "server.max_message_bytes = 4294967296 must be 2147483647 or",
        ),
        ({"step.lane_rows": 1 << 32}, "step.lane_rows = 4294967296 must be 2147483647 or less"),
        ({"server.max_held_bytes": 10**400}, "server.max_held_bytes = 10*.* must be"),
        ({"plan.measure": "often"}, "plan.measure = 'often'; known: auto, always, never"),
        ({"parallel.tensor_parallel_size": 0}, "must be at least 1"),
        ({"members.max_lanes": -1}, "members.max_lanes = -1 must not be negative"),
        ({"members.held_multiprocessors": -1}, "members.held_multiprocessors = -1 must not be negative"),
        (
            {"members.max_lanes": 1, "parallel.data_parallel_size": 2},
            "members.max_lanes = 1 is less than the 2 ranks, each of which has a lane; give 0 .*2 or more",
        ),
        (
            {"members.max_owners": 3, "parallel.tensor_parallel_size": 4},
            "members.max_owners = 3 is less than the 4 ranks, each of which has a place that holds experts",
        ),
        (
            {"members.max_owners": 3, "parallel.tensor_parallel_size": 2},
            "members.max_owners = 3 is more than the 2 ranks, which hold slices .*enable_expert_parallel",
        ),
        ({"balance.cover_owners": 2}, r"balance.cover_owners = 2 must be 0 .* or 1 \(of any one\)"),
        ({"balance.cover_owners": 1}, "balance.cover_owners = 1: there is one rank, and no other takes over"),
        (
            {"balance.cover_owners": 1, "parallel.tensor_parallel_size": 2},
            "balance.cover_owners = 1: ranks hold slices of every expert.*enable_expert_parallel",
        ),
        (
            {"balance.shadows": True, "parallel.tensor_parallel_size": 2},
            "balance.shadows = true: ranks hold slices of every expert.*enable_expert_parallel",
        ),
        ({"balance.shadow_bytes": -1}, "balance.shadow_bytes = -1 must not be negative"),
        (
            {"server.host": "127.0.0.1:50051"},
            "server.host = '127.0.0.1:50051' is no address; give the port as server.port",
        ),
        ({"server.max_message_bytes": 64}, "server.max_message_bytes = 64 must be 1048576 or more"),
        ({"server.max_message_bytes": 0}, "server.max_message_bytes = 0 must be positive"),
        (
            {"balance.shadow_bytes_per_second": 1e-300},
            "balance.shadow_bytes_per_second = 1e-300 must be 65536 or more, or 0$",
        ),
        ({"balance.move_bytes_per_second": 65535.9}, "balance.move_bytes_per_second = 65535.9 must be 65536"),
        (
            {"step.timeout_seconds": 1e-300},
            r"step.timeout_seconds = 1e-300 must be 0.001 \(a millisecond\) or more$",
        ),
        ({"cluster.cpus_per_rank": 1e308}, r"cluster.cpus_per_rank = 1e\+308 must be 4096 or less"),
        ({"cluster.threads_per_rank": 100000}, "cluster.threads_per_rank = 100000 must be 4096 or less"),
        ({"cluster.ring_bytes": 1 << 62}, "cluster.ring_bytes = .* must be 1073741824 or less"),
    ],
)
def test_values_that_make_no_sense_are_named(values: dict[str, object], message: str) -> None:
    given = values if not values else {"model.checkpoint": "x"} | values
    with pytest.raises(ConfigError, match=message):
        Config().with_values(given).checked()


@pytest.mark.parametrize("rate", [0.0, -0.0, 65536.0, 1e308])
def test_rates_that_a_copier_keeps_to_are_taken(rate: float) -> None:
    config = Config().with_values(
        {
            "model.checkpoint": "x",
            "balance.move_bytes_per_second": rate,
            "balance.shadow_bytes_per_second": rate,
        }
    )
    balance = config.checked().balance
    assert unread_seconds(balance.move_bytes_per_second) < LONGEST_SECONDS
    copier = Copier(balance.shadow_bytes_per_second, "cpu")
    enough = threading.Timer(0.1, copier.abandoned.set)
    enough.start()
    with suppress(Abandoned):  # at the least rate a piece takes a minute
        copier.spent(PIECE)
    enough.join()


def test_room_for_members_is_the_ranks_unless_there_is_to_be_more() -> None:
    config = Config().with_values(
        {
            "model.checkpoint": "x",
            "parallel.data_parallel_size": 2,
            "parallel.enable_expert_parallel": True,
            "members.max_lanes": 12,
            "members.max_owners": 3,
            "members.held_multiprocessors": 8,
        }
    )
    members = config.checked().members
    assert (members.max_lanes, members.max_owners, members.held_multiprocessors) == (12, 3, 8)
    lines = config.lines()
    assert lines[lines.index("[members]") + 1 :][:3] == [
        "max_lanes = 12",
        "max_owners = 3",
        "held_multiprocessors = 8",
    ]
    assert config.parallel.mesh.members(12, 3).max_lanes == 12
    assert config.parallel.mesh.members() == config.parallel.mesh.members(2, 2)


def test_a_late_rank_is_waited_for_ten_seconds_unless_said_otherwise() -> None:
    step = Config().with_values({"step.timeout_seconds": 7.0, "step.late_seconds": 0.0}).step
    assert step.patience == 7.0
    assert replace(step, late_seconds=0.5).patience == 0.5
    assert Config().step.patience == 10.0


def test_launched_steps_have_longer_to_end_than_a_collective_in_one_may_wait() -> None:
    step = Config().with_values({"step.finish_seconds": 90.0, "step.timeout_seconds": 40.0}).step
    assert step.finishing == 90.0
    assert replace(step, timeout_seconds=50.0).finishing == 100.0
    assert Config().step.finishing == 120.0


@pytest.mark.parametrize("name", ["", "fp8_per_block", "nvfp4 x bf16", "mxfp4"])
def test_names_of_schemes_to_load_as_are_taken(name: str) -> None:
    config = Config().with_values({"model.checkpoint": "x", "model.load_as": name}).checked()
    assert config.model.load_as == name


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml"):
        Config.load(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ['a"b\\c', "two\nlines", "\x00\x1f\x7f", "Eisvögel 🐦"])
def test_what_is_printed_is_toml_and_says_the_same(name: str) -> None:
    config = Config().with_values({"model.checkpoint": "x", "model.name": name})
    assert from_mapping(Config, tomllib.loads("\n".join(config.lines()))) == config
