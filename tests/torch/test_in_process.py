"""Experts in the model server's own processes: ranks with unlike rows stay in step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import make_checkpoint
from houses import Alone, house_config
from parallel import parallel_launch
from torch_ranks import (
    PASSES,
    joins,
    left_by_one,
    moving,
    out_of_step,
    refused_alone,
    refusing,
    told_by_submit,
    unlike_rows,
)

from moeserve.runtime.launch.torchrun import join_torchrun
from moeserve.runtime.rank.all2all import PeersLate
from moeserve.torch import MoeExperts, Settings, WrongRows, connect
from moeserve.torch.in_process import InProcess
from moeserve.torch.meeting import FOLLOWS, Exchange


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


@pytest.fixture
def way(path: Path) -> Iterator[InProcess]:
    way = InProcess(join_torchrun(house_config(path)))
    yield way
    way.close()


@pytest.mark.parametrize("backend", ["all2allv", "nvlink_ll"])
def test_ranks_with_unlike_rows_and_with_none_stay_in_step(path: Path, backend: str) -> None:
    calls = parallel_launch(3, unlike_rows, path, backend, timeout=200)
    assert calls == [2 * len(PASSES) + sum(2 for lanes in PASSES if lanes[rank]) for rank in range(3)]


def test_a_submitted_step_has_the_rows_that_were_told_as_it_was_submitted(path: Path) -> None:
    """Not those that are told when its turn comes, which may be none."""
    assert parallel_launch(2, told_by_submit, path, "all2allv", timeout=100) == [4, 4]


def test_a_rank_with_another_checkpoint_joins_nobody(path: Path, tmp_path: Path) -> None:
    """A copy elsewhere is the same one; files with other experts, at whatever path, are not."""
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(path, copy)
    make_checkpoint("qwen3_moe", other, seed=1)
    (why, one), (other_why, two) = parallel_launch(2, joins, [path, copy], timeout=100)
    assert (why, other_why) == ("", "") and one == two
    told = parallel_launch(2, joins, [path, other], timeout=100)
    assert [why for why, _ in told] == [
        f"{at}: ranks [1] have read other experts there than rank 0; all hosts need the same checkpoint at "
        "this path"
        for at in (path, other)
    ]


@pytest.mark.parametrize("backend", ["all2allv", "nvlink_ll"])
def test_experts_move_while_passes_run(path: Path, backend: str) -> None:
    """Eight experts and a replica on three ranks, of which two experts are hot."""
    found = parallel_launch(3, moving, path, backend, timeout=200)
    changes, passes, slots = found[0]
    assert changes > 0 and passes >= changes, "each pass commits one change at most"
    assert found == [(changes, passes, slots)] * 3, "all ranks commit alike"
    for layer in slots:
        assert sorted(set(layer)) == list(range(8))


def test_one_rank_that_cannot_stage_keeps_all_where_they_are(path: Path) -> None:
    told = parallel_launch(3, refusing, path, "all2allv", timeout=200)
    assert "the disk is gone" in told[0][0], told
    assert all("ranks [0] could not stage it" in said for said, _ in told[1:]), told


def test_what_one_rank_refuses_leaves_the_others_in_step(path: Path) -> None:
    told = parallel_launch(2, refused_alone, path, "nvlink_ll", timeout=100)
    assert told == [["this layer takes a choice", "layer 0: 5000 rows, and step.lane_rows is 4096"], []]


@pytest.mark.parametrize("backend", ["all2allv", "naive", "allgather_reducescatter"])
def test_a_step_that_one_rank_has_left_names_who_waited_and_where(path: Path, backend: str) -> None:
    """Where they do not meet, the step itself is the first to hear of it, in words of gloo's."""
    told = parallel_launch(3, left_by_one, path, backend, timeout=100)
    assert told[1] == ""
    for rank in (0, 2):
        assert told[rank].startswith(
            f"rank {rank}, in a step of layer 0, did not meet all other ranks within step.timeout_seconds: "
            "one is late or gone; all close their ways and connect again: "
        ), told


def test_layers_that_were_not_asked_for_the_late_are_kept_once(way: InProcess) -> None:
    for _ in range(100):
        way.expect([(0, 4), (1, 4), (0, 4)])
    assert len(way._unasked) == 2


def test_ranks_at_different_layers_are_told_who_is_where(path: Path) -> None:
    for told in parallel_launch(2, out_of_step, path, "all2allv", timeout=200):
        assert told[0].startswith("ranks are not at one layer: rank 0 at layer 0, rank 1 at layer 1;")
        assert "3 rows, and `rows` was told 2 of rank" in told[1]


@pytest.mark.parametrize(("layer", "place"), [(3, "at layer 3"), (FOLLOWS, "at the end of its pass")])
def test_ranks_that_are_not_met_in_time_are_late(
    monkeypatch: pytest.MonkeyPatch, layer: int, place: str
) -> None:
    """Over a group of gloo's, which says so in words of its own."""

    class Group:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    def all_gather(*_: Any, **__: Any) -> None:
        raise RuntimeError("Timed out waiting 5000ms for send operation to complete")

    monkeypatch.setattr(dist, "all_gather", all_gather)
    with pytest.raises(PeersLate, match=f"rank 1, {place}, did not meet all other ranks .*: Timed out"):
        Exchange(cast(Any, Group())).agree(layer, 5)
    with pytest.raises(PeersLate, match="rank 1, about to move experts, did not meet all other ranks"):
        Exchange(cast(Any, Group())).sum(np.zeros((1, 2)))


def test_a_rank_alone_needs_no_group(way: InProcess, path: Path) -> None:
    alone = Alone(path)
    experts = MoeExperts(way, 1)
    for rows in (0, 1, 7):
        batch = alone.batch(rows, seed=rows)
        torch.testing.assert_close(experts(*batch), alone.forward(1, *batch), rtol=1e-4, atol=1e-4)
    way.follow()  # nobody else has a layer to run


def test_hidden_states_of_any_leading_shape_and_dtype_keep_both(way: InProcess, path: Path) -> None:
    hidden, ids, weights = Alone(path).batch(6, seed=3)
    given = hidden.bfloat16(), ids.long(), weights.bfloat16()
    flat = MoeExperts(way, 0)(*given)
    found = MoeExperts(way, 0)(*(tensor.reshape(2, 3, -1) for tensor in given))
    assert found.dtype == torch.bfloat16 and found.shape == (2, 3, hidden.shape[1])
    assert torch.equal(found.reshape(6, -1), flat)


def test_the_layer_s_gate_routes_logits(way: InProcess, path: Path) -> None:
    alone = Alone(path)
    hidden, _, _ = alone.batch(5, seed=4)
    logits = torch.randn(5, alone.checkpoint.num_experts, generator=torch.Generator().manual_seed(5))
    ids, weights = alone.checkpoint.gate(0).route(logits)
    torch.testing.assert_close(
        MoeExperts(way, 0)(hidden, logits), alone.forward(0, hidden, ids, weights), rtol=1e-4, atol=1e-4
    )


def test_tensors_that_do_not_fit_are_named_before_others_are_met(way: InProcess, path: Path) -> None:
    hidden, ids, weights = Alone(path).batch(3, seed=6)
    experts = MoeExperts(way, 0)
    wrong = {
        "hidden is float32 [3, 63]": (hidden[:, 1:], ids, weights),
        "ids are int32 [2, 2]": (hidden, ids[1:], weights),
        "ids are float32 [3, 2]": (hidden, weights, weights),
        "weights are int32 [3, 2]": (hidden, ids, ids),
        "id 8 is out of range": (hidden, ids.clamp(min=8), weights),
        "id -2 is out of range": (hidden, ids * 0 - 2, weights),
        "logits are float32 [3, 2]": (hidden, weights),
        "logits are int32 [3, 8]": (hidden, torch.zeros(3, 8, dtype=torch.int32)),
    }
    for said, rows in wrong.items():
        with pytest.raises(WrongRows) as raised:
            experts(*rows)
        assert said in str(raised.value), str(raised.value)
    with pytest.raises(WrongRows, match=r"layer 7 has no experts here; layers \[0, 1\] have"):
        MoeExperts(way, 7)(hidden, ids, weights)


def test_an_answer_is_waited_for_once(way: InProcess, path: Path) -> None:
    experts, batch = MoeExperts(way, 0), Alone(path).batch(3, seed=6)
    ticket = experts.submit(*batch)
    experts.wait(ticket)
    with pytest.raises(KeyError, match="waited for once"):
        experts.wait(ticket)


def test_it_says_that_it_has_no_gradient(way: InProcess, path: Path) -> None:
    hidden, ids, weights = Alone(path).batch(3, seed=6)
    answer = MoeExperts(way, 0)(hidden.requires_grad_(), ids, weights)
    with pytest.raises(RuntimeError, match=r"give no gradients; call the model under torch\.no_grad"):
        answer.sum().backward()


def test_a_closed_way_says_so(path: Path) -> None:
    way = InProcess(join_torchrun(house_config(path)))
    experts, batch = MoeExperts(way, 0), Alone(path).batch(1, seed=1)
    ticket = experts.submit(*batch)
    way.close()
    way.close()
    with pytest.raises(RuntimeError, match="was closed"):
        experts(*batch)
    with pytest.raises(RuntimeError, match="was closed"):
        experts.wait(ticket)


def test_one_option_says_where_experts_are(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "experts.toml"
    file.write_text(f'[model]\ncheckpoint = "{path}"\n[plan]\ndevice = "cpu"\n')
    way = connect(Settings(mode="in_process", config=str(file)))
    batch = Alone(path).batch(2, seed=2)
    torch.testing.assert_close(
        MoeExperts(way, 0)(*batch), Alone(path).forward(0, *batch), rtol=1e-4, atol=1e-4
    )
    way.close()
    with pytest.raises(ValueError, match="mode='nowhere' is not one of in_process"):
        Settings(mode="nowhere")
    with pytest.raises(ValueError, match="mode='remote' needs `address`"):
        Settings()
