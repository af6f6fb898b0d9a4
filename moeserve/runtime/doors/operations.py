"""`Operations`: checks and runs what an operator asks of the running group: rebalance, reload, scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePath

import numpy as np

from moeserve.checkpoints.hub import HubId, located, located_in_cache
from moeserve.checkpoints.store import CheckpointError
from moeserve.experts.balance import balancer_named
from moeserve.experts.placement import Move
from moeserve.proto import moe_pb2
from moeserve.proto.texts import clipped, quoted
from moeserve.runtime.epoch import marked
from moeserve.runtime.errors import GroupUnavailable
from moeserve.runtime.head.rebalancer import Cycle, RebalancePlan, Rebalancer, Wanted, always
from moeserve.runtime.head.scaling import CannotScale, Scaling
from moeserve.runtime.served import Served

JOIN_SECONDS = 2.0  # at most, until a group serves in which members join, before an operation is refused


class BadRequest(ValueError):
    """A request that can never be carried out; names the field and the value."""


class NothingToBalance(RuntimeError):
    """Every rank holds a slice of every expert, so none can be elsewhere."""


class Operations:
    """Checks requests and has the rebalancer carry them out; each call blocks until it is done.

    Raises BadRequest, NothingToBalance, CannotScale, or GroupUnavailable where the group does not serve, and
    CallerLeft where an operation is not `wanted` any more before it begins. What goes wrong later is told in
    the reply: its outcome and reason.
    """

    def __init__(self, served: Served, rebalancer: Rebalancer, reload_root: str) -> None:
        self._served = served
        self._reload_root = reload_root  # below which checkpoints may be loaded
        self._rebalancer = rebalancer
        self.scaling: Scaling | None = None  # None: ranks neither come nor go
        # sets a logger's level in every process, unless it is empty; returns all that were set. ValueError
        self.on_log_level: Callable[[str, str], Mapping[str, str]] = lambda logger, level: {}

    def rebalance(self, request: moe_pb2.RebalanceRequest, wanted: Wanted = always) -> moe_pb2.RebalanceReply:
        """Plans and moves, or with `dry_run` only plans."""
        if self._served.mesh.sliced:
            mesh = self._served.mesh
            text = (
                f"each of the {mesh.ranks} ranks holds a slice of every expert, so there is nothing to move"
            )
            raise NothingToBalance(f"{text}; parallel.enable_expert_parallel serves whole experts")
        try:
            policy = balancer_named(clipped(request.policy)) if request.policy else None
        except ValueError as error:
            raise BadRequest(f"policy: {error}") from error
        self._check_serving()
        if request.dry_run:
            plan = self._rebalancer.plan(policy, request.max_moves)
            return self._rebalanced(plan, Cycle("planned"))
        return self._rebalanced(*self._rebalancer.rebalance(policy, request.max_moves, wanted))

    def reload(self, request: moe_pb2.ReloadRequest, wanted: Wanted = always) -> moe_pb2.ReloadReply:
        """Reloads every layer, once the checkpoint is seen to fit."""
        given = f"checkpoint: {quoted(request.checkpoint)}"
        if "\0" in request.checkpoint:
            raise BadRequest(f"{given} has a character that no path has")
        path = request.checkpoint
        path = str(_snapshot_of(path)) if PurePath(path).is_absolute() else cached(path)
        self._check_folder(Path(path))
        try:
            name = marked(path, self._served.reloaded_from(path).mark)
        except ValueError as error:
            raise BadRequest(f"checkpoint: {error}") from error
        self._check_serving()
        cycle = self._rebalancer.reload(name, wanted)
        epoch = self._rebalancer.coordinator.epoch
        return moe_pb2.ReloadReply(
            outcome=cycle.outcome,
            reason=cycle.reason,
            weights_version=epoch.weights_version,
            epochs=cycle.epochs,
            nbytes=cycle.nbytes,
            seconds=cycle.seconds,
            epoch=epoch.number,
            corrupted=cycle.corrupted,
        )

    def scale(self, request: moe_pb2.ScaleRequest, wanted: Wanted = always) -> moe_pb2.ScaleReply:
        """Has the group go on with as many ranks as asked for. Raises CannotScale where it cannot."""
        if request.ranks < 1:
            raise BadRequest("ranks: 0 must be 1 or more; a service without ranks is one that was stopped")
        self._check_serving()
        if self.scaling is None:
            raise CannotScale("this service cannot be scaled")
        done = self.scaling.scale(request.ranks, wanted)
        coordinator = self._rebalancer.coordinator
        return moe_pb2.ScaleReply(
            outcome=done.outcome,
            reason=done.reason,
            seats=coordinator.epoch.members.seats,
            joined=done.joined,
            left=done.left,
            moves=done.moved.moves,
            nbytes=done.moved.nbytes,
            epochs=done.moved.epochs,
            epoch=coordinator.epoch.number,
            generation=coordinator.generation,
            seconds=done.seconds,
        )

    def set_log_level(self, request: moe_pb2.SetLogLevelRequest) -> moe_pb2.SetLogLevelReply:
        """Sets from which level on processes of the service log; also while the group does not serve."""
        try:
            levels = self.on_log_level(request.logger, request.level)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return moe_pb2.SetLogLevelReply(
            levels=[moe_pb2.LogLevel(logger=logger, level=level) for logger, level in levels.items()]
        )

    def _check_folder(self, folder: Path) -> None:
        """Raises BadRequest for a folder that may not be loaded, or holds what can be waited on for ever."""
        given = f"checkpoint: {quoted(str(folder))}"
        if not folder.resolve().is_relative_to(Path(self._reload_root).resolve()):
            raise BadRequest(f"{given} is not below server.reload_root, {self._reload_root}")
        try:
            odd = next((path.name for path in folder.iterdir() if not stored(path)), None)
        except (OSError, ValueError):
            return  # whoever reads the checkpoint says what is wrong with it
        if odd is not None:
            raise BadRequest(f"{given} holds {quoted(odd)}, which is neither a file nor a folder")

    def _check_serving(self) -> None:
        """Waits while members join, at most JOIN_SECONDS. Raises GroupUnavailable where none serves then."""
        coordinator = self._rebalancer.coordinator
        try:
            coordinator.wait_serving(JOIN_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            state = coordinator.progress()
            raise GroupUnavailable(state.reason or f"the group is {state.state}") from error

    def _rebalanced(self, plan: RebalancePlan, cycle: Cycle) -> moe_pb2.RebalanceReply:
        return moe_pb2.RebalanceReply(
            outcome=cycle.outcome,
            reason=cycle.reason,
            epoch=self._rebalancer.coordinator.epoch.number,
            moves=[self._move(move, plan.target.slots_per_owner) for move in plan.moves],
            planned_bytes=plan.nbytes,
            layers=self._gains(plan),
            gain=plan.gain,
            committed_moves=cycle.moves,
            epochs=cycle.epochs,
            moved_bytes=cycle.nbytes,
            seconds=cycle.seconds,
            corrupted=cycle.corrupted,
        )

    def _move(self, move: Move, width: int) -> moe_pb2.MoveInfo:
        (from_rank, from_slot), (to_rank, to_slot) = divmod(move.source, width), divmod(move.slot, width)
        return moe_pb2.MoveInfo(
            layer=self._served.layers[move.layer],
            expert=move.expert,
            from_rank=from_rank,
            from_slot=from_slot,
            to_rank=to_rank,
            to_slot=to_slot,
        )

    def _gains(self, plan: RebalancePlan) -> list[moe_pb2.LayerGain]:
        """What each layer that changes gains."""
        moves = np.bincount([move.layer for move in plan.moves], minlength=len(self._served.layers))
        return [
            moe_pb2.LayerGain(layer=layer, before=plan.before[at], after=plan.after[at], moves=int(moves[at]))
            for at, layer in enumerate(self._served.layers)
            if moves[at]
        ]


def stored(path: Path) -> bool:
    """Whether what is at `path` is a file, a folder or not there, and no pipe, socket or device."""
    return path.is_file() or path.is_dir() or not path.exists()


def _snapshot_of(path: str) -> Path:
    """The folder that is read for an absolute path: of a repository of a hub cache, one of its snapshots.

    Raises BadRequest where the repository has none.
    """
    try:
        return located(path)
    except CheckpointError as error:
        raise BadRequest(f"checkpoint: {error}") from error
    except OSError as error:  # a name that no file may have, or a folder that is not this user's
        raise BadRequest(f"checkpoint: {quoted(path)}: {error.strerror}") from error


def cached(named: str) -> str:
    """The snapshot of `org/name[@revision]` in this host's hub cache; every host needs it at that path.

    Raises BadRequest for what names no repository, and for one that is not there.
    """
    if HubId.of(named) is None:
        raise BadRequest(
            f"checkpoint: {quoted(named)} must be an absolute path, which every host of the service knows, "
            "or org/name of a repository in its hub cache"
        )
    try:
        return str(located_in_cache(named))
    except CheckpointError as error:
        raise BadRequest(f"checkpoint: {error}") from error
