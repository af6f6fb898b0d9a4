"""The table of access holds what there is: no RPC, path or frame is without its row, nor the other way."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from moeserve.proto import moe_pb2
from moeserve.runtime import control, head, launch, rank
from moeserve.runtime.keys.access import (
    FRAMES,
    GRANTED,
    LISTENERS,
    PATHS,
    RPCS,
    Frames,
    Role,
    allowed,
    known_frame,
)
from moeserve.runtime.telemetry import http

TALKING = [Path(str(room.__file__)).parent for room in (control, head, rank, launch)]
EMBEDDED = {"epoch"}
"""What is inside another frame."""
OWN = {"act"}
"""What a rank's own threads put among the entries that the head sends it: no stream brings it."""


def methods(file: object, but: tuple[str, ...] = ()) -> set[str]:
    services = file.DESCRIPTOR.services_by_name.values()  # type: ignore[attr-defined]
    found = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    return {path for path in found if path.rpartition("/")[2] not in but}


def test_every_rpc_has_its_row_and_every_row_its_rpc() -> None:
    known = methods(moe_pb2) | methods(health_pb2, ("List",)) | methods(reflection_pb2)
    assert RPCS.keys() == known


def test_old_names_need_what_the_new_ones_need() -> None:
    new = {path.rpartition("/")[2]: roles for path, roles in RPCS.items() if "FrontService" not in path}
    for path, roles in RPCS.items():
        name = path.rpartition("/")[2]
        if "MoeService" in path and "Forward" not in name:
            assert roles == new[name], path


def test_every_path_has_its_row_and_every_row_its_path() -> None:
    answered = {http.METRICS, http.ALIVE, *http.READY}
    assert answered <= PATHS.keys()
    assert PATHS.keys() - answered <= {"/startupz"}


def sent_kinds() -> Counter[str]:
    """Every literal kind of a message in the rooms that talk: in a dict under "kind", or compared with it."""
    found: Counter[str] = Counter()
    for file in (file for room in TALKING for file in room.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if (
                        isinstance(key, ast.Constant)
                        and key.value == "kind"
                        and isinstance(value, ast.Constant)
                    ):
                        found[str(value.value)] += 1
            elif isinstance(node, ast.Match) and "kind" in ast.unparse(node.subject):
                for case in node.cases:
                    for part in ast.walk(case.pattern):
                        if isinstance(part, ast.MatchValue) and isinstance(part.value, ast.Constant):
                            found[str(part.value.value)] += 1
    return found


def test_every_frame_that_is_sent_has_its_row() -> None:
    rows = {kind for frames in FRAMES if frames not in (Frames.LEASE, Frames.DATA) for kind in FRAMES[frames]}
    assert sent_kinds().keys() - EMBEDDED - OWN == rows


@pytest.mark.parametrize("kind", sorted(OWN))
@pytest.mark.parametrize("frames", Frames)
def test_a_stream_brings_no_entry_of_a_rank_s_own(frames: Frames, kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        known_frame(frames, kind)


def test_an_rpc_without_a_row_is_for_nobody() -> None:
    assert not allowed(RPCS.get("/moeserve.v1.AdminService/Added"), frozenset(Role))


def test_who_has_nothing_may_do_nothing_but_probe() -> None:
    rows = RPCS | PATHS
    for frames in FRAMES.values():
        rows = rows | frames
    may = {name for name, needed in rows.items() if allowed(needed, frozenset())}
    assert may == {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/livez",
        "/readyz",
        "/startupz",
        "/health",
    }


@pytest.mark.parametrize("role", GRANTED)
def test_no_role_brings_another(role: Role) -> None:
    alone = {name for name, needed in (RPCS | PATHS).items() if needed and needed == {role}}
    others = frozenset(Role) - {role}
    assert alone and not [name for name in alone if allowed((RPCS | PATHS)[name], others)]


@pytest.mark.parametrize("kind", ["step", "hello ", "", None, 7, ["hello"]])
def test_a_frame_without_a_row_is_refused(kind: object) -> None:
    with pytest.raises(ValueError, match="is not in the table of what a rank sends the head"):
        known_frame(Frames.TO_HEAD, kind)
    assert known_frame(Frames.TO_HEAD, "hello") == "hello"


def test_listeners_have_names_of_their_own() -> None:
    assert len({listener.name for listener in LISTENERS}) == len(LISTENERS)
