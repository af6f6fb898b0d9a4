"""A rank inside a program that owns torch's default group: neither disturbs the other; and nothing but a
launcher uses that group.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from host_program import hosted
from parallel import parallel_launch

import moeserve

BACKENDS = ("allgather_reducescatter", "all2allv", "nvlink_ll")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_lives_beside_the_groups_of_its_program(backend: str, checkpoint_path: Path) -> None:
    for during in parallel_launch(4, hosted, checkpoint_path, backend, "cpu", timeout=200):
        assert len(during) == 2 and min(during) > 0


@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_gpus_the_program_has_groups_of_nccl_and_gloo(backend: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, hidden=256, inner=256)
    for during in parallel_launch(2, hosted, tmp_path, backend, "cuda", timeout=280, device="cuda"):
        assert len(during) == 2 and min(during) > 0


HOMES = ("runtime/launch/", "dispatch/group.py")
"""Where the default group may be asked for: launchers, and what forms groups beside it."""

FREE = {"batch_isend_irecv", "HashStore", "FileStore"}
"""Functions of torch.distributed that take a group by another way, or none."""

FIRST = {"get_backend", "destroy_process_group"}
"""Those whose first argument is the group."""

ALWAYS = {"get_rank", "is_initialized", "init_process_group", "new_group"}
"""Those that ask for the default group whatever group they are given."""


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that use torch.distributed's default group, and how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            for alias in node.names:
                if alias.name[0].islower() and alias.name != "is_available":
                    yield node.lineno, f"imports {alias.name}"
        if isinstance(node, ast.Attribute) and node.attr == "WORLD":
            yield node.lineno, "group.WORLD"
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        home, name = node.func.value, node.func.attr
        if not (isinstance(home, ast.Name) and home.id in ("dist", "distributed")):
            continue
        if name not in FREE and (name in ALWAYS or not _names_a_group(node, name)):
            yield node.lineno, f"{name} without a group of its own"


def _names_a_group(call: ast.Call, name: str) -> bool:
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "group"), None)
    if given is None and name in FIRST and call.args:
        given = call.args[0]
    return given is not None and not (isinstance(given, ast.Constant) and given.value is None)


def test_only_launchers_use_the_default_group() -> None:
    root = Path(moeserve.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}: {how}"
        for path in sorted(root.rglob("*.py"))
        if not str(path.relative_to(root)).startswith(HOMES)
        for line, how in uses(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "dist.barrier()",
        "dist.all_gather_object(found, mine)",
        "dist.all_to_all_single(a, b, group=None)",
        "dist.get_rank(group)",
        "dist.get_backend()",
        "Buffer(dist.group.WORLD)",
        "dist.new_group([0])",
        "dist.init_process_group('gloo')",
        "dist.destroy_process_group()",
        "from torch.distributed import all_reduce",
        "dist.P2POp(dist.isend, tensor, 1)",
    ],
)
def test_a_use_of_the_default_group_is_found(text: str) -> None:
    assert list(uses(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "dist.barrier(group=group)",
        "dist.get_backend(group)",
        "dist.P2POp(dist.isend, tensor, group=group, group_peer=1)",
        "dist.batch_isend_irecv(pairs)",
        "from torch.distributed import ProcessGroup, TCPStore",
    ],
)
def test_a_use_of_another_group_is_none(text: str) -> None:
    assert not list(uses(ast.parse(text)))
