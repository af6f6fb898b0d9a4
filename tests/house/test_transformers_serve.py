"""transformers models, and its OpenAI-compatible server, with experts behind a running house."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import make_checkpoint, make_tokenizer
from lane_calls import Ordinary
from transformers.utils import import_utils

from moeserve.proto.client import MoeClient
from moeserve.proto.integrations import transformers_serve
from moeserve.proto.integrations.transformers import experts_modules, load
from moeserve.proto.integrations.transformers_serve import client_of
from moeserve.runtime.launch.local_cluster import LocalCluster

PROMPT = "four ranks answer as one"
NEW_TOKENS = 16
START_SECONDS = 120

needs_serving = pytest.mark.skipif(
    not import_utils.is_serve_available(), reason="transformers' server is not installed (extra `serving`)"
)


@pytest.fixture(scope="module")
def model_path(checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the house serves, with a tokenizer."""
    path = tmp_path_factory.mktemp("with-tokenizer") / "model"
    shutil.copytree(checkpoint_path, path)
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def whole(model_path: Path) -> Any:
    """The same model alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(model_path)


@pytest.mark.parametrize("lanes", [0, 2])  # a lane has one dtype
def test_a_model_generates_through_the_house_what_it_generates_alone(
    house: LocalCluster, model_path: Path, whole: Any, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By messages, and over device lanes, which take a choice's weights as float32 alone."""
    tokens = torch.randint(3, 259, (3, 40), generator=torch.Generator().manual_seed(5))
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ordinary = Ordinary(monkeypatch)
    with client_of(house.address, lanes, 30.0, None) as client, torch.no_grad():
        model = load(str(model_path), client)
        assert not [p for _, module in experts_modules(model).values() for p in module.parameters()]
        assert (model(tokens).logits - whole(tokens).logits).abs().max() <= 1e-4
        assert torch.equal(model.generate(tokens, **settings), whole.generate(tokens, **settings))
        half = load(str(model_path), client, dtype=torch.bfloat16)
        before = ordinary.calls
        assert half(tokens[:1]).logits.dtype == torch.bfloat16
    if lanes:
        assert (before, ordinary.calls) == (4, 4), "of 120 rows alone, which no lane of this house takes"
    else:
        assert before > 16 and ordinary.calls == before + 2


@pytest.fixture(scope="module")
def server(house: LocalCluster, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running `transformers serve`, whose process holds no experts."""
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    (folder / "hub").mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    place = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu"]
    module = ["-m", "moeserve.proto.integrations.transformers_serve", "--experts", house.address]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *module, str(model_path), *place],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | offline,
        )
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"transformers serve did not start:\n{log.read_text()}")


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@needs_serving
def test_completions_over_http_are_those_of_the_model_alone(
    house: LocalCluster, server: str, model_path: Path, whole: Any
) -> None:
    with MoeClient(house.address, timeout=30) as client:
        before = client.status().jobs
        body = {"model": str(model_path), "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
        found = _post(server, body)["choices"][0]["text"]
        asked = client.status().jobs - before
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = whole.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    expected = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert found == expected
    new = len(tokens) - inputs["input_ids"].shape[1]
    assert asked >= 2 * new  # a job for each of the two layers in each forward pass


@needs_serving
@pytest.mark.parametrize("address", ["127.0.0.1:1", "house"])
def test_a_server_that_cannot_reach_its_experts_says_why(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    house: LocalCluster,
    address: str,
) -> None:
    from transformers.cli.serving import model_manager

    monkeypatch.setattr(model_manager, "ModelManager", model_manager.ModelManager)  # put back afterwards
    make_checkpoint("mixtral", tmp_path)
    make_tokenizer(tmp_path)
    experts = house.address if address == "house" else address
    place = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu"]
    assert (
        transformers_serve.main(["--experts", experts, "--experts-timeout", "5", str(tmp_path), *place]) == 2
    )
    reason = "the model is MixtralForCausalLM, but" if address == "house" else "UNAVAILABLE"
    assert reason in capfd.readouterr().err


def test_without_the_extra_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    assert transformers_serve.main(["--experts", "127.0.0.1:1", "model"]) == 2
    assert "pip install 'moeserve[serving]'" in capfd.readouterr().err
