"""Whatever reads bytes of others ends each input with a result or a named error: a seeded, short run of every
target, and the inputs that once broke the law. `make fuzz` goes on for as long as it is told.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz_targets import TARGETS, TOKEN, frame, model_in
from fuzzing import LEAST_INPUTS, Broken, Target, fuzz

from bench.lib.mutations import Mutations
from moeserve.checkpoints.store import LENGTH_BYTES
from moeserve.proto import moe_pb2

INPUTS, SECONDS = 400, 0.7  # of each target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where targets keep their files."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Lines about what was refused are not what is looked at here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_ends_with_a_result_or_a_named_error(name: str, folder: Path) -> None:
    outcome = fuzz(TARGETS[name], folder, seed=16, inputs=INPUTS, seconds=SECONDS)
    broken = "\n\n".join(f"{data[:200]!r}\n{text}" for data, text in outcome.broken)
    assert not broken, broken[:20_000]
    assert outcome.inputs >= LEAST_INPUTS


def headed(**entry: Any) -> bytes:
    """A safetensors header with one odd tensor."""
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def asked(**more: Any) -> bytes:
    """A peer that shows the token and asks for experts."""
    return frame({"kind": "weights", "token": TOKEN}) + frame({"kind": "slots", "how": "stream"} | more)


def held(**more: Any) -> bytes:
    """A member that comes back with an odd epoch."""
    epoch = {"kind": "epoch", "number": 2, "mesh": [2, 1, 2], "versions": [], "weights": [""]}
    epoch |= {"slots": [[0, 1, 2, 3], [1, 0, 2, 3]], "owners": 2, "experts": 4, "room": [2, 2]}
    epoch |= {"members": [[0, 0, 0], [1, 1, 1]], "max_lanes": 2, "max_owners": 2}
    return json.dumps({"kind": "held", "generation": 7, "epoch": epoch | more}).encode()


LONG = "x" * 70_000

FOUND: dict[str, tuple[str, bytes]] = {
    "a layer that is infinite": ("weights_asked", asked(layer=float("inf"), slots=[0])),
    "an answer without tensors": ("weights_given", frame({"kind": "slots", "checksums": ["a"]})),
    "an answer without a kind that is known": ("weights_given", frame({"kind": -1.5})),
    "tensors that are none": ("weights_given", frame({"kind": "slots", "checksums": [], "tensors": [False]})),
    "too few tensors": ("weights_given", frame({"kind": "slots", "checksums": ["a"], "tensors": []})),
    "a size that is infinite": (
        "weights_given",
        frame({"kind": "slots", "checksums": ["a"], "tensors": [[["down", float("inf")]]]}),
    ),
    "a long name of a tensor": (
        "weights_given",
        frame({"kind": "slots", "checksums": ["a"], "tensors": [[[LONG, 1]]]}),
    ),
    "a refusal without a reason": ("weights_given", frame({"kind": "refused"})),
    "a shape that is infinite": ("headers", headed(shape=[float("inf")])),
    "a header that nests": ("headers", (6000).to_bytes(LENGTH_BYTES, "little") + b"[" * 6000),
    "a config that nests": ("model_configs", b'{"a":' * 3000),
    "an index that nests": ("indexes", b'{"a":' * 3000),
    "an index of objects": ("indexes", b'{"weight_map": {"a": {}}}'),
    "an index of nothing": ("indexes", b'{"weight_map": {"a": null}}'),
    "an index of a long name": ("indexes", json.dumps({"weight_map": {"a": LONG}}).encode()),
    "an index of no name of a file": ("indexes", b'{"weight_map": {"a": "\\u0000"}}'),
    "a long value": ("configurations", f'[parallel]\ndata_parallel_size = "{LONG}"'.encode()),
    "a long level": ("configurations", f'[model]\ncheckpoint = "/a"\n[log]\nlevel = "{LONG}"'.encode()),
    "bytes that are no text": ("configurations", b'[model]\ncheckpoint = "\xff"'),
    "tables that nest": ("configurations", b"a = " + b"[" * 3000),
    "a path that no file has": (
        "operations",
        b"\x01" + moe_pb2.ReloadRequest(checkpoint="/\x00").SerializeToString(),
    ),
    "an epoch of no owners": ("member_held", held(owners=0)),
}
"""Inputs that once broke the law, by what they are: the target, and the bytes."""


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what: str, folder: Path) -> None:
    name, data = FOUND[what]
    with TARGETS[name].opened(folder) as (_, run):
        TARGETS[name].check(run, data)


ODD_CONFIGS: dict[str, dict[str, Any]] = {
    "a dtype that is a list": {"dtype": ["bfloat16"]},
    "a step of 0": {"decoder_sparse_step": 0},
    "a step that is an object": {"decoder_sparse_step": {}},
    "architectures that are a number": {"architectures": float("-inf")},
    "a model type that is an object": {"model_type": {}},
    "a long count": {"num_experts": LONG},
    "a long activation": {"hidden_act": LONG},
    "a long dtype": {"dtype": LONG},
    "exceptions that are none": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "modules_to_not_convert": True,
    },
}
"""Values of a config.json that once broke the law."""


@pytest.mark.parametrize("what", ODD_CONFIGS)
def test_odd_values_of_a_config_are_named(what: str, folder: Path) -> None:
    config = json.loads((model_in(folder) / "config.json").read_text())
    target = TARGETS["model_configs"]
    with target.opened(folder) as (_, run):
        target.check(run, json.dumps(config | ODD_CONFIGS[what]).encode())


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", ".", "", "a/../../b"])
def test_an_index_names_no_file_elsewhere(file: str, folder: Path) -> None:
    target = TARGETS["indexes"]
    with target.opened(folder) as (_, run), pytest.raises(target.errors, match="names no file beside it"):
        run(json.dumps({"weight_map": {"a": file}}).encode())


def test_the_fuzzer_finds_what_is_there(folder: Path) -> None:
    """A target that breaks the law on one branch in a chain of three: found, and a long text as well."""
    from moeserve.proto.texts import listed, quoted

    def run(data: bytes) -> None:
        if len(data) > 12:
            quoted(data)
            if data[:1] == b"b":
                listed([1])
                raise KeyError(data[0]) if data[1] % 2 else ValueError("x" * 2000)

    def opened(folder: Path) -> Any:
        return _yielded(run)

    target = Target(
        "own", opened, lambda mutations, data, others: mutations.of_bytes(data, others), (ValueError,)
    )
    outcome = fuzz(target, folder, seed=1, inputs=20_000, seconds=20.0)
    kinds = {text.rpartition("Broken: ")[2].split(" ")[0] for _, text in outcome.broken}
    assert kinds == {"KeyError", "ValueError"} and outcome.corpus > 1, outcome


class _yielded:
    def __init__(self, run: Any) -> None:
        self._run = run

    def __enter__(self) -> tuple[list[bytes], Any]:
        return [b"aaaa"], self._run

    def __exit__(self, *ended: object) -> None:
        return


def test_mutations_are_seeded() -> None:
    one, two = Mutations(5), Mutations(5)
    message = moe_pb2.ForwardRequest(layer=1, job_id="a").SerializeToString()
    for _ in range(200):
        assert one.of_bytes(b"some bytes") == two.of_bytes(b"some bytes")
        assert one.of_json(b'{"a": [1, {"b": null}]}') == two.of_json(b'{"a": [1, {"b": null}]}')
        request = moe_pb2.ForwardRequest()
        assert one.of_message(request, message) == two.of_message(request, message)


def test_a_slow_input_breaks_the_law(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzzing.SECONDS", -1.0)
    with pytest.raises(Broken, match="an input took"):
        TARGETS["frames"].check(lambda data: None, b"")
