"""The package's CUDA C++ texts: short parts without headers, each of them part of some kernel."""

import re
from importlib.resources import files

import pytest

from moeserve.device.source import FOLDER, source
from moeserve.dispatch.peers import kernels as peers
from moeserve.dispatch.peers import rounding
from moeserve.experts.kernels.cuda import (
    decode_codes,
    few,
    prefill,
    prefill_codes,
    prefill_wide,
    rounded,
    steps,
)

EXPERTS = (
    steps.SHARED,
    steps.ROWS_SOURCES,
    *(few.sources(kind) for kind in few.KINDS),
    *(module.SOURCES for module in (decode_codes, prefill, prefill_codes, prefill_wide, rounded)),
)
USED = {
    steps.__package__: {part for parts in EXPERTS for part in parts if isinstance(part, str)},
    peers.__package__: {
        part for part in (*peers.SOURCES, *rounding.SOURCES_OF_ROUNDING) if isinstance(part, str)
    },
}
MOST_LINES = 600


@pytest.mark.parametrize("package", USED)
def test_every_text_is_part_of_a_kernel_and_stands_in_the_package(package: str) -> None:
    folder = files(package) / FOLDER
    found = [
        *folder.iterdir(),
        *(text for part in folder.iterdir() if part.is_dir() for text in part.iterdir()),
    ]
    names = {str(text).removeprefix(f"{folder}/") for text in found if text.name.endswith(".cu")}
    assert names == USED[package]


@pytest.mark.parametrize(
    ("package", "name"), [(p, name) for p, names in USED.items() for name in sorted(names)]
)
def test_a_text_is_short_and_includes_no_header(package: str, name: str) -> None:
    text = source(package, name)
    assert text.startswith("//"), "it opens with what it holds"
    assert text.count("\n") <= MOST_LINES
    assert not re.search(r"^\s*#\s*include", text, re.MULTILINE), "a user's machine has no headers"


@pytest.mark.parametrize("name", sorted(USED[steps.__package__]))
def test_what_other_blocks_write_is_waited_for_within_a_bound(name: str) -> None:
    """A word that other blocks of a launch write is read with acquire: here only by `await_blocks`."""
    text = source(steps.__package__, name)
    acquired = len(re.findall(r"\bld\.acquire\.(gpu|sys)\b|\batomicCAS\b", text))
    assert acquired == len(re.findall(r"^\s*await_blocks\(", text, re.MULTILINE))
    assert name == "waits.cu" or "__nanosleep" not in text


def test_parts_stand_in_the_order_in_which_they_are_named() -> None:
    together = source(peers.__package__, "memory.cu", "liveness.cu")
    assert together == "\n".join(source(peers.__package__, name) for name in ("memory.cu", "liveness.cu"))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.cu"):
        source(peers.__package__, "nowhere.cu")
