"""Operations: what is refused before anything happens, and what replies say of plans and of what was done."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from checkpoints import make_checkpoint
from houses import EP4, TP4, house_config
from safetensors.torch import load_file, save_file

from moeserve.experts.balance import Policy, balancer_named
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Placement
from moeserve.proto import moe_pb2
from moeserve.runtime.control.orders import StagedCopy
from moeserve.runtime.doors.admin_door import AdminDoor
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.operations import BadRequest, NothingToBalance, Operations
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.errors import GroupUnavailable
from moeserve.runtime.head.coordinator import Progress
from moeserve.runtime.head.placing.pending_change import Outcome
from moeserve.runtime.head.rebalancer import Cycle, Rebalancer
from moeserve.runtime.head.scaling import ScaleSeconds, Scaling
from moeserve.runtime.launch.head_process import reload_root_of
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.sections import BalanceConfig
from moeserve.runtime.served import served_from

LAYERS, EXPERTS, NBYTES = (1, 2), 8, 1000
HOT = np.array([[8.0, 8, 1, 1, 1, 1, 1, 1], [1.0, 1, 1, 1, 1, 1, 1, 1]])  # both hot ones on rank 0


def test_a_reload_takes_only_what_lies_below_its_root(checkpoint: Path, tmp_path: Path) -> None:
    served = served_from(house_config(checkpoint, **EP4))
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    make_checkpoint("qwen3_moe", outside)
    (root / "link").symlink_to(outside)
    made = Operations(served, rebalancer(Group(), balancer_named("incremental"), BalanceConfig()), str(root))
    for path in (outside, root / "link", root / ".." / "outside"):
        with pytest.raises(BadRequest, match=r"is not below server\.reload_root"):
            made.reload(moe_pb2.ReloadRequest(checkpoint=str(path)))
    with pytest.raises(BadRequest, match=r"config\.json: No such file"):
        made.reload(moe_pb2.ReloadRequest(checkpoint=str(root / "none")))
    with pytest.raises(BadRequest, match="File name too long"):
        made.reload(moe_pb2.ReloadRequest(checkpoint=str(root / ("a" * 300))))


def test_a_reload_takes_another_revision_of_a_repository(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = "0123456789abcdef", "fedcba9876543210"
    snapshots = tmp_path / "models--org--qwen3" / "snapshots"
    for commit in (old, new):
        shutil.copytree(checkpoint, snapshots / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = house_config(Path("org/qwen3"), model__layers=LAYERS, **EP4)
    config = config.with_values({"model.checkpoint": f"org/qwen3@{old}"})
    root = reload_root_of(config)
    assert root == str(snapshots)
    made = Operations(
        served_from(config), rebalancer(Group(), balancer_named("incremental"), BalanceConfig()), root
    )
    reply = made.reload(moe_pb2.ReloadRequest(checkpoint=f"org/qwen3@{new[:8]}"))
    assert reply.outcome == "reloaded"
    for named, why in (
        ("org/other", "the hub cache .* has no models--org--other"),
        ("org/qwen3@v9", "has no revision v9"),
        ("qwen3", "must be an absolute path, .* or org/name of a repository in its hub cache"),
    ):
        with pytest.raises(BadRequest, match=f"checkpoint: .*{why}"):
            made.reload(moe_pb2.ReloadRequest(checkpoint=named))


def test_a_snapshot_that_leads_out_of_the_root_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """The folder of a repository is below the root, and its snapshot is a link to elsewhere."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    make_checkpoint("qwen3_moe", outside)
    repository = root / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / "0123456789").symlink_to(outside)
    served = served_from(house_config(checkpoint, **EP4))
    made = Operations(served, rebalancer(Group(), balancer_named("incremental"), BalanceConfig()), str(root))
    for path in (repository, repository / "snapshots"):
        with pytest.raises(BadRequest, match=r"is not below server\.reload_root"):
            made.reload(moe_pb2.ReloadRequest(checkpoint=str(path)))


def test_a_reload_takes_no_other_router(tmp_path: Path) -> None:
    """Calls with logits would be routed in another way, or not at all."""
    served_one, other, without = (tmp_path / name for name in ("served", "other", "without"))
    make_checkpoint("deepseek_v3", served_one)
    for path in (other, without):
        shutil.copytree(served_one, path)
    config = json.loads((other / "config.json").read_text())
    config["routed_scaling_factor"] = 1.5
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(without / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if "correction_bias" not in name}
    save_file(kept, without / "model.safetensors", {"format": "pt"})
    served = served_from(house_config(served_one, **EP4))
    group = Group()
    made = Operations(served, rebalancer(group, balancer_named("incremental"), BalanceConfig()), "/")
    for path, why in (
        (other, r"layer \d has routing\.scaling = 1\.5, and 2\.5 is"),
        (without, "correction_bias"),
    ):
        with pytest.raises(BadRequest, match=why):
            made.reload(moe_pb2.ReloadRequest(checkpoint=str(path)))
    assert group.epoch.weights_version == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-1.safetensors"])
def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    served = served_from(house_config(checkpoint, **EP4))
    made = Operations(served, rebalancer(Group(), balancer_named("incremental"), BalanceConfig()), "/")
    os.mkfifo(tmp_path / name)
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadRequest, match=f"holds '{name}', which is neither a file nor a folder"):
        made.reload(moe_pb2.ReloadRequest(checkpoint=str(tmp_path)))


JOINED = "generation 1 is aborted: ranks [2] join"


class Group:
    """A coordinator whose ranks prepare at once; `outcomes` are how its next changes end, committed when none
    is left. With each of `JOINED` a member has joined, in an epoch and a generation of its own.
    """

    tokens = HOT

    def __init__(self, outcomes: Sequence[str] = (), state: str = "serving") -> None:
        self.epoch = Epoch.first(Mesh(4, 1, 4), len(LAYERS), EXPERTS)
        self.outcomes = list(outcomes)
        self.state = state
        self.generation = 1
        self.back = True  # serves again after a generation has ended

    def load(self) -> Load:
        return Load(self.tokens)

    def wait_turned(self, timeout: float) -> None:
        """Nobody is about to join."""

    def wait_serving(self, timeout: float) -> None:
        if (not self.back and self.generation > 1) or self.state != "serving":
            raise TimeoutError("the group did not serve")

    def progress(self) -> Progress:
        return Progress(self.state, "", 1, 0, 0, 0, 0)

    def change(self, change: Change, timeout: float) -> Outcome:
        if reason := self.outcomes.pop(0) if self.outcomes else "":
            if reason == JOINED:
                self.epoch = replace(self.epoch, number=self.epoch.number + 1)
                self.generation += 1
            return Outcome(reason)
        self.epoch = change.epoch
        staged = tuple(StagedCopy(0, move.expert, "", "stream", 7, 0.0, 1) for move in change.moves)
        return Outcome("", 0.0, staged)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which two are served."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path, layers=3)
    return path


def operations(checkpoint: Path, group: Group, mesh: dict[str, object] = EP4) -> Operations:
    served = served_from(house_config(checkpoint, model__layers=LAYERS, **mesh))
    return Operations(served, rebalancer(group, balancer_named("incremental"), BalanceConfig()), "/")


def rebalancer(group: Group, policy: Policy, settings: BalanceConfig) -> Rebalancer:
    return Rebalancer(group, settings, policy, (NBYTES,) * len(LAYERS))  # type: ignore[arg-type]


def test_a_dry_run_names_moves_bytes_and_gain_and_moves_nothing(checkpoint: Path) -> None:
    group = Group()
    reply = operations(checkpoint, group).rebalance(moe_pb2.RebalanceRequest(dry_run=True))
    assert (reply.outcome, reply.epoch, reply.epochs, reply.committed_moves) == ("planned", 1, 0, 0)
    assert len(reply.moves) == 2 and reply.planned_bytes == 2 * NBYTES  # a swap of the hot layer
    for move in reply.moves:
        assert move.layer == 1  # the decoder's index
        assert (move.from_rank, move.from_slot) == divmod(move.expert, 2)  # as even placement has it
        assert move.from_rank != move.to_rank and 0 <= move.to_slot < 2
    (gain,) = reply.layers
    assert (gain.layer, gain.moves) == (1, 2)
    assert (gain.before, gain.after) == (pytest.approx(16 / 5.5), pytest.approx(9 / 5.5))
    assert reply.gain == pytest.approx((gain.before - gain.after) / 2)  # the other layer is even
    assert group.epoch.number == 1


def test_a_rebalance_says_what_was_done(checkpoint: Path) -> None:
    group = Group()
    reply = operations(checkpoint, group).rebalance(moe_pb2.RebalanceRequest())
    assert (reply.outcome, reply.reason, reply.epoch) == ("moved", "", 2)
    assert (reply.committed_moves, reply.epochs, reply.moved_bytes, reply.corrupted) == (2, 1, 14, 2)
    assert group.epoch.placement.imbalance(HOT).max() == pytest.approx(9 / 5.5)
    again = operations(checkpoint, group).rebalance(moe_pb2.RebalanceRequest())
    assert (again.outcome, len(again.moves), again.gain) == ("even", 0, 0)


def test_policy_and_budget_are_the_callers(checkpoint: Path) -> None:
    group = Group()
    for policy, most in (("incremental", 1), ("eplb", 1), ("eplb", 3), ("even", 0)):
        request = moe_pb2.RebalanceRequest(policy=policy, max_moves=most, dry_run=True)
        reply = operations(checkpoint, group).rebalance(request)
        assert len(reply.moves) <= most
    wide = moe_pb2.RebalanceRequest(policy="eplb", dry_run=True)
    assert len(operations(checkpoint, group).rebalance(wide).moves) > 3


class Caller:
    """Of an operation: it leaves, and hears how the call ends."""

    def __init__(self) -> None:
        self.here, self.code = True, ""

    def is_active(self) -> bool:
        return self.here

    def set_trailing_metadata(self, metadata: object) -> None: ...

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        self.code = code.name
        raise RuntimeError(message)


@pytest.mark.parametrize("leaves, code", [(True, "CANCELLED"), (False, "UNAVAILABLE")])
@pytest.mark.parametrize("name", ["Rebalance", "Reload", "Scale"])
def test_a_change_that_waited_for_another_begins_only_where_it_is_wanted(
    checkpoint: Path, name: str, leaves: bool, code: str
) -> None:
    """Its caller leaves meanwhile, or the service stops."""
    served, group = served_from(house_config(checkpoint, model__layers=LAYERS, **EP4)), Group()
    leading = rebalancer(group, balancer_named("incremental"), BalanceConfig())
    asked, caller = Operations(served, leading, "/"), Caller()
    asked.scaling = Scaling(leading, None, ScaleSeconds(1.0, 1.0, 1.0))  # type: ignore[arg-type]
    request = {
        "Rebalance": moe_pb2.RebalanceRequest(),
        "Reload": moe_pb2.ReloadRequest(checkpoint=str(checkpoint)),
        "Scale": moe_pb2.ScaleRequest(ranks=2),
    }[name]
    with ThreadPoolExecutor(1) as pool:
        with leading.alone():
            called = pool.submit(getattr(AdminDoor(asked), name), request, caller)
            if leaves:
                caller.here = False
            else:
                leading.stop()
        assert called.exception(60) is not None
    assert (caller.code, group.epoch.number) == (code, 1)


def test_a_change_that_is_abandoned_keeps_what_was_committed_before(checkpoint: Path) -> None:
    group = Group(["", "rank 2 is lost"])
    group.tokens = HOT[[0, 0]]
    reply = operations(checkpoint, group).rebalance(moe_pb2.RebalanceRequest())
    assert (reply.outcome, reply.reason) == ("abandoned", "rank 2 is lost")
    assert (len(reply.moves), reply.committed_moves, reply.epochs, reply.epoch) == (4, 2, 1, 2)


class Turned:
    """A policy that has the two experts of rank 0 change places."""

    def __call__(self, placement: Placement, load: Load, budget: int) -> Placement:
        slots = placement.slots.copy()
        slots[0, :2] = slots[0, 1::-1]
        return placement.with_slots(slots)

    def first(self, placement: Placement, load: Load) -> Placement:
        return placement


def test_what_does_not_fit_into_the_staging_slots_failed() -> None:
    group = Group()
    _, cycle = rebalancer(group, Turned(), BalanceConfig(staging_slots=1)).rebalance()
    assert (cycle.outcome, cycle.epochs, group.epoch.number) == ("failed", 0, 1)
    assert "raise balance.staging_slots to 2" in cycle.reason
    _, cycle = rebalancer(group, Turned(), BalanceConfig(staging_slots=2)).rebalance()
    assert (cycle.outcome, cycle.epochs, cycle.moves) == ("moved", 1, 2)


@pytest.mark.parametrize(
    ("outcomes", "outcome", "version", "epochs"),
    [
        ([], "reloaded", 2, 2),
        (["", "rank 0: it is not there"], "abandoned", 1, 1),
    ],
)
def test_a_reload_says_how_far_it_came(
    checkpoint: Path,
    outcomes: list[str],
    outcome: str,
    version: int,
    epochs: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="moeserve.runtime.head.rebalancer")
    group = Group(outcomes)
    seen: list[Cycle] = []
    asked = operations(checkpoint, group)
    asked._rebalancer.observe_reload = seen.append
    reply = asked.reload(moe_pb2.ReloadRequest(checkpoint=str(checkpoint)))
    assert (reply.outcome, reply.weights_version, reply.epochs) == (outcome, version, epochs)
    assert (reply.epoch, reply.nbytes) == (1 + epochs, 7 * EXPERTS * epochs)
    assert [cycle.outcome for cycle in seen] == [outcome]
    (said,) = caplog.messages
    assert said.startswith(f"weights {outcome}: ") and said.endswith(("s", *filter(None, outcomes)))
    assert group.epoch.placement == Placement.even(len(LAYERS), EXPERTS, 4)
    assert EMPTY not in group.epoch.placement.slots


@pytest.mark.parametrize("joins", [[JOINED], ["", JOINED], [JOINED, "", JOINED]])
def test_a_reload_goes_on_where_members_join_meanwhile(checkpoint: Path, joins: list[str]) -> None:
    group = Group(joins)
    reply = operations(checkpoint, group).reload(moe_pb2.ReloadRequest(checkpoint=str(checkpoint)))
    assert (reply.outcome, reply.reason, reply.weights_version) == ("reloaded", "", 2)
    assert (reply.epochs, reply.nbytes) == (2, 7 * EXPERTS * 2), "each layer once"
    assert group.epoch.weights == ("", str(checkpoint)) and group.epoch.versions == (2, 2)


def test_a_reload_is_abandoned_where_the_group_is_not_back_or_never_stays(checkpoint: Path) -> None:
    group = Group(["", JOINED])
    group.back = False
    reply = operations(checkpoint, group).reload(moe_pb2.ReloadRequest(checkpoint=str(checkpoint)))
    assert (reply.outcome, reply.reason, reply.epochs) == ("abandoned", JOINED, 1)
    group = Group([JOINED] * 100)
    reply = operations(checkpoint, group).reload(moe_pb2.ReloadRequest(checkpoint=str(checkpoint)))
    assert (reply.outcome, reply.reason, reply.epochs) == ("abandoned", JOINED, 0)


def test_slices_are_nothing_to_move(checkpoint: Path) -> None:
    with pytest.raises(
        NothingToBalance, match="each of the 4 ranks holds a slice of every expert"
    ) as refused:
        operations(checkpoint, Group(), TP4).rebalance(moe_pb2.RebalanceRequest(dry_run=True))
    status = status_of(refused.value)
    assert (status.code, status.reason) == ("FAILED_PRECONDITION", "nothing_to_balance")


def test_an_unknown_policy_is_named_with_those_there_are(checkpoint: Path) -> None:
    with pytest.raises(BadRequest, match="policy: unknown balancing policy 'wish'; known: even, eplb"):
        operations(checkpoint, Group()).rebalance(moe_pb2.RebalanceRequest(policy="wish"))


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_group_that_does_not_serve_is_unavailable(checkpoint: Path, dry_run: bool) -> None:
    asked = operations(checkpoint, Group(state="forming"))
    with pytest.raises(GroupUnavailable, match="the group is forming"):
        asked.rebalance(moe_pb2.RebalanceRequest(dry_run=dry_run))
    with pytest.raises(GroupUnavailable, match="the group is forming"):
        asked.reload(moe_pb2.ReloadRequest(checkpoint=str(checkpoint)))
