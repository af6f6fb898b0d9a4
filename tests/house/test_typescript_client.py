"""The TypeScript client against a service of ranks: the bits of the Python client, without a deadline."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from houses import Alone
from torch import Tensor

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

CLIENT = Path(__file__).parents[2] / "clients" / "typescript"
PROGRAM = CLIENT / "dist" / "ask.js"
SECONDS = 120
ROWS = 48

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not PROGRAM.is_file() or not (CLIENT / "node_modules").is_dir(),
        reason="clients/typescript is not built: make typescript",
    ),
]

CODES = {torch.float32: "DTYPE_FP32", torch.bfloat16: "DTYPE_BF16", torch.int32: "DTYPE_INT32"}


def stored(folder: Path, name: str, tensor: Tensor) -> dict[str, object]:
    """Writes a tensor's bytes; returns what the program reads of it."""
    file = folder / f"{name}.bin"
    file.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "file": str(file)}


def asked(address: str, call: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program once."""
    words = ["node", str(PROGRAM), address, str(call)]
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_its_rows_have_the_bits_of_the_python_client(
    tmp_path: Path, house: LocalCluster, alone: Alone, dtype: torch.dtype
) -> None:
    layer = alone.checkpoint.layers[0]
    hidden, ids, weights = alone.batch(ROWS, seed=7)
    hidden, ids = hidden.to(dtype), ids.int()
    ids[3] = -1
    call = {
        "layer": layer,
        "hidden": stored(tmp_path, "hidden", hidden),
        "ids": stored(tmp_path, "ids", ids),
        "weights": stored(tmp_path, "weights", weights),
        "answer": str(tmp_path / "answer.bin"),
    }
    (tmp_path / "call.json").write_text(json.dumps(call))
    done = asked(house.address, tmp_path / "call.json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {
        "dtype": CODES[dtype],
        "shape": list(hidden.shape),
        "layers": len(alone.checkpoint.layers),
    }
    with MoeClient(house.address, timeout=60) as client:
        ours = client.forward(layer, hidden, ids, weights)
    assert isinstance(ours, Tensor) and ours.any()
    assert (tmp_path / "answer.bin").read_bytes() == ours.view(torch.uint8).numpy().tobytes()


def test_what_the_service_refuses_is_told(tmp_path: Path, house: LocalCluster, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(2, seed=1)
    tensors = {"hidden": hidden, "ids": ids.int(), "weights": weights}
    call = {name: stored(tmp_path, name, tensor) for name, tensor in tensors.items()}
    whole = {**call, "layer": 99, "answer": str(tmp_path / "answer.bin")}
    (tmp_path / "call.json").write_text(json.dumps(whole))
    done = asked(house.address, tmp_path / "call.json")
    assert done.returncode == 1
    assert "99" in done.stderr and not (tmp_path / "answer.bin").exists()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "localhost:", "host:http", "host:70000", "::1", "::1:50051", "http://127.0.0.1:1"],
)
def test_an_address_without_a_port_is_refused_at_once(tmp_path: Path, address: str) -> None:
    """gRPC would go to port 443, and say that nobody answers."""
    (tmp_path / "call.json").write_text("{}")
    done = asked(address, tmp_path / "call.json")
    assert done.returncode == 1
    assert done.stderr == f'"{address}" must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051\n'


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "[::1]:50051", "ipv4:1.1.1.1:1", "ipv6:[::1]:1", "unix:/a", "dns:///a", "dns:a:1"],
)
def test_other_addresses_are_taken(address: str) -> None:
    script = f"require({json.dumps(str(PROGRAM.with_name('client.js')))})"
    script = f"new ({script}.MoeClient)({json.dumps(address)}).close()"
    done = subprocess.run(
        ["node", "-e", script], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
