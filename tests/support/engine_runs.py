"""Services for real engines, and the processes in which engines run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_models import (
    FLOAT32,
    Bound,
    EngineModel,
    apart,
    bound_by_experts,
    bound_by_float32,
    prompts,
)
from houses import house_config
from processes import descendants_of, gone

from bench.lib.children import end
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

ROOT = Path(__file__).parent.parent.parent
HERE = ROOT / "tests" / "engines"
RUN_SECONDS = 600
NEW_TOKENS = 24
REQUESTS = 16
FREE_CORES = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM's processes compute by one thread each, wherever there is room: models are tiny, machines are busy."""

Run = Callable[..., dict[str, Any]]
"""Runs an engine once: of a checkpoint, a service's address or None, and more of the job by keywords."""


def environment(address: str | None, **more: str) -> dict[str, str]:
    """The environment of an engine, with its experts behind `address`, or alone."""
    left_out = ("MOESERVE_EXPERTS", "OMP_NUM_THREADS", "PYTHONPATH")
    given = {key: value for key, value in os.environ.items() if key not in left_out}
    chosen = {"MOESERVE_EXPERTS": address} if address else {}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    ours = {"PYTHONPATH": str(ROOT), "VLLM_PLUGINS": "moeserve"}
    return given | ours | FREE_CORES | offline | chosen | more


def house_of(path: Path, ranks: int = 2, **values: Any) -> LocalCluster:
    """A service of `ranks` ranks, whose weights can be reloaded."""
    spare = {"balance__redundant_experts": ranks, "parallel__enable_expert_parallel": True}
    return LocalCluster(house_config(path, parallel__data_parallel_size=ranks, **spare, **values))


def run_engine(
    script: str, folder: Path, model: Path, address: str | None, environ: dict[str, str], **job: Any
) -> dict[str, Any]:
    """Runs an engine once in a process of its own; returns what it wrote, or `failed` and what it said."""
    asked = {
        "model": str(model),
        "prompts": prompts(REQUESTS),
        "sampling": {"max_tokens": NEW_TOKENS, "logprobs": 20},
        "options": {},
        "rounds": [None],
        "address": address,
    } | job
    (folder / "job.json").write_text(json.dumps(asked))
    command = [sys.executable, str(HERE / script), folder / "job.json", folder / "answer.json"]
    ended = subprocess.run(
        command,
        env=environment(address, **environ),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    said = ended.stdout + ended.stderr
    if ended.returncode:
        return {"failed": ended.returncode, "said": said}
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer | {"said": said}


def answered(run: Run, model: Path, address: str | None, **job: Any) -> dict[str, Any]:
    """What an engine wrote, which must not have failed."""
    found = run(model, address, **job)
    assert "failed" not in found, found["said"][-3000:]
    return found


def answered_behind(run: Run, model: Path, **job: Any) -> dict[str, Any]:
    """The same with the engine's experts behind a service of the same checkpoint."""
    with house_of(model) as house:
        return answered(run, model, house.address, **job)


@dataclass(frozen=True)
class Generated:
    """What an engine wrote alone, and behind a service with the weights of `rounds`."""

    alone: dict[str, Any]
    found: dict[str, Any]
    rounds: int
    computed: int  # rows that the service says it computed, once an expert
    steps: int  # that the service says it ran


def generate_as_alone(run: Run, model: EngineModel, options: dict[str, Any]) -> Generated:
    """Runs an engine alone and behind a service. With the same weights it must generate the same, and with
    either damaged checkpoint it must not.
    """
    alone = answered(run, model.path, None, options=options)
    weights = [None, str(model.scaled), str(model.zeroed)]
    with house_of(model.path) as house:
        found = answered(run, model.path, house.address, options=options, rounds=weights)
        with MoeClient(house.address) as client:
            status = client.status()
    right, scaled, zeroed = (apart(answers, alone["rounds"][0]) for answers in found["rounds"])
    bound = FLOAT32 if model.dtype == "float32" else bf16_bound(run, model, options, alone)
    print(
        f"{model.family} {model.dtype}: right {right.most:.2g} ({right.mean:.2g}), "
        f"x 1.05 {scaled.most:.2g} ({scaled.mean:.2g}), zeroed {zeroed.most:.2g} ({zeroed.mean:.2g}); "
        f"bound {bound.most:.2g} ({bound.mean:.2g})"
    )
    assert right.within(bound), right
    assert model.dtype != "float32" or not right.ties, "float32 tokens are equal"
    assert not scaled.within(bound), scaled
    assert not zeroed.within(bound), zeroed
    computed = sum(rank.tokens for rank in status.ranks)
    return Generated(alone, found, len(weights), computed, int(status.steps))


def bf16_bound(run: Run, model: EngineModel, options: dict[str, Any], alone: dict[str, Any]) -> Bound:
    """How far a service's answers in bf16 may be from those of an engine `alone`, by what bf16 does to it.

    vLLM is compared with itself with experts in float32, another engine with itself in float32.
    """
    vllm = "read" in alone  # what only vllm_generate.py writes
    exact = (
        {"exact_experts": True, "options": options} if vllm else {"options": options | {"dtype": "float32"}}
    )
    found = answered(run, model.path, None, **exact)
    told = apart(alone["rounds"][0], found["rounds"][0])
    return bound_by_experts(told) if vllm else bound_by_float32(told)


def strike(pid: int, *, stopped: bool) -> None:
    """Kills a rank, or stops it for good: whoever waits for it must give it up."""
    os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)


def until(done: Callable[[], bool], check: Callable[[], None], seconds: float = 120.0) -> None:
    """Waits until `done()`, and has `check` look for what went wrong meanwhile."""
    deadline = time.monotonic() + seconds
    while not done():
        check()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


START_SECONDS = 600
STOP_SECONDS = 30


class Server:
    """vLLM's OpenAI server on a free port; a context, which ends every process that it started."""

    def __init__(
        self, model: Path, address: str | None, folder: Path, *arguments: str, **environ: str
    ) -> None:
        self.log = folder / "server.log"
        self.port = free_port()
        self.model = str(model)
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "256"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        memory = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *place, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(address, **(memory | environ)),
            )

    @property
    def address(self) -> str:
        """The base of the OpenAI API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def said(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-6000:]

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.3)
        self.__exit__()
        raise RuntimeError(f"vLLM's server did not start:\n{self.said()}")

    def __exit__(self, *ended: object) -> None:
        children = descendants_of(self.process.pid)
        end(self.process, STOP_SECONDS)
        if not gone(children, 10):
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def complete(address: str, model: str, asked: list[list[int]], new: int) -> list[dict[str, Any]]:
    """Completions of all prompts at once, by the `openai` client, as `apart` takes them."""
    import openai

    async def together() -> list[dict[str, Any]]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, ids) for ids in asked)))

    async def one(client: Any, ids: list[int]) -> dict[str, Any]:
        answer = await client.completions.create(
            model=model,
            prompt=ids,
            max_tokens=new,
            temperature=0,
            logprobs=20,
            timeout=RUN_SECONDS,
            extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
        )
        told = answer.choices[0].logprobs
        tokens = [int(token.removeprefix("token_id:")) for token in told.tokens]
        positions = [
            {token.removeprefix("token_id:"): value for token, value in position.items()}
            for position in told.top_logprobs
        ]
        return {"tokens": tokens, "logprobs": positions}

    return asyncio.run(together())


def stream(address: str, model: str, ids: list[int], new: int) -> str:
    """The text of one streamed completion; raises what the `openai` client does for a request that failed."""
    import openai

    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        parts = client.completions.create(
            model=model,
            prompt=ids,
            max_tokens=new,
            temperature=0,
            stream=True,
            timeout=RUN_SECONDS,
            extra_body={"ignore_eos": True},
        )
        pieces = list(parts)
    assert pieces[-1].choices[0].finish_reason == "length", pieces[-1]
    return "".join(piece.choices[0].text for piece in pieces)
