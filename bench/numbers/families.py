"""Every model family of the installed transformers that has experts, served by two ranks: docs/families.md.

    python -m bench.numbers.families                   # all families, and writes the page
    python -m bench.numbers.families --only jamba zaya # some of them
    python -m bench.numbers.families --resume          # those that no earlier run of this version has done

A family is a `model_type` whose config counts experts; transformers is walked, and no family is left out. Of
each a tiny seeded model is saved as transformers writes it for the hub. `moeserve inspect` and `plan` read
it, two ranks serve it from CPU in float32 with expert parallelism, and the transformers plug-in loads the
model without its experts' weights and asks them. It must generate the greedy tokens of the model alone, its
logits for all of them must be within 1e-4, and every layer with experts must have been asked. To show that
the check would notice, a column tells by how much logits move when every other number between an expert's
GEMMs is 1.05 times itself, which no norm behind the experts hides: more than the bound.
Exit status 1 where a family that is not refused fails, or fewer than 95 % are served.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import torch
import transformers
from houses import house_config
from in_process import InProcess
from tiny_families import TinyFamily, answers, families, greedy
from torch import Tensor

from moeserve.checkpoints.families import REFUSED
from moeserve.cli import main as moeserve
from moeserve.experts.routing.families import BY_MODEL
from moeserve.proto.client import MoeClient
from moeserve.proto.integrations.transformers import attach, experts_modules, load
from moeserve.runtime.launch.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
PAGE, DONE = ROOT / "docs" / "families.md", ROOT / ".cache" / "families.jsonl"
LOGIT_BOUND, DAMAGE, SHARE = 1e-4, 1.05, 0.95
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 9, 8
TWO_RANKS = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}

PLAN_FLAGS = ("--data-parallel-size", "2", "--enable-expert-parallel")

HEAD = (
    "family",
    "`inspect`",
    "plan",
    "tokens",
    "logits",
    "layers: calls",
    "client sends",
    "damaged",
    "if not, why",
)


@dataclass(frozen=True)
class Row:
    """One family: what was seen, or why not."""

    family: str
    inspected: str = "-"
    plan: str = "-"
    tokens: tuple[int, int] = (0, 0)  # equal, of all
    difference: float = float("nan")  # largest, of logits
    calls: str = "-"
    routed: str = "-"
    damaged: float = float("nan")
    why: str = ""

    @property
    def served(self) -> bool:
        """Whether tokens and logits are those of the model alone, and damage would have been seen."""
        equal, total = self.tokens
        close = self.difference <= LOGIT_BOUND < self.damaged
        return not self.why and close and 0 < total == equal

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        if self.why:
            return (f"`{self.family}`", *("-" for _ in HEAD[2:]), self.why)
        equal, total = self.tokens
        seen = (
            f"{equal} of {total}",
            f"{self.difference:.0e}",
            self.calls,
            self.routed,
            f"{self.damaged:.0e}",
        )
        return (f"`{self.family}`", self.inspected, self.plan, *seen, "" if self.served else "FAILED")


class Counted:
    """A client that counts its calls by layer."""

    def __init__(self, client: MoeClient) -> None:
        self._client, self.calls = client, Counter[int]()

    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Any:
        """One layer's experts, mixed."""
        self.calls[layer] += 1
        return self._client.forward(layer, hidden, experts, weights)

    def model(self) -> Any:
        """The description of the model that is served."""
        return self._client.model()


def command(*words: str) -> dict[str, Any]:
    """What `moeserve ... --json` prints. Raises RuntimeError with what it says on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = moeserve([*words, "--json"])
    if status:
        raise RuntimeError(f"moeserve {words[0]}: {err.getvalue().strip()}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def row_of(family: TinyFamily) -> Row:
    """Serves one family and compares."""
    if family.model_type in REFUSED:
        return Row(family.model_type, why=REFUSED[family.model_type])
    prompts = torch.randint(4, 250, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(3))
    with tempfile.TemporaryDirectory() as folder:
        alone = family.model()
        alone.save_pretrained(folder)
        tokens = greedy(alone, prompts, NEW_TOKENS)
        wanted = answers(alone, tokens)
        layers = sorted(experts_modules(alone))
        inspected = command("inspect", folder)
        planned = command("plan", "--checkpoint", folder, *PLAN_FLAGS)
        config = house_config(Path(folder), model__dtype="fp32", server__metrics_port=-1, **TWO_RANKS)
        with LocalCluster(config) as house, MoeClient(house.address, timeout=60) as client:
            counted = Counted(client)
            remote = load(folder, counted, cls=type(alone), dtype=torch.float32)
            generated = greedy(remote, prompts, NEW_TOKENS)
            given = answers(remote, tokens)
        attach(alone, InProcess(folder, halves=DAMAGE))
        damaged = float((answers(alone, tokens) - wanted).abs().max())
    return Row(
        family.model_type,
        _experts(inspected),
        _kernels(planned),
        (int((generated == tokens)[:, PROMPT_TOKENS:].sum()), PROMPTS * NEW_TOKENS),
        float((given - wanted).abs().max()),
        _calls(counted.calls, layers),
        "ids" if family.model_type in BY_MODEL else "ids or logits",
        damaged,
    )


def _experts(inspected: dict[str, Any]) -> str:
    """What `inspect` tells of the experts."""
    one = inspected["layers"][0]
    biased = " + bias" * one["bias"]
    return f"{len(inspected['layers'])} layers, {one['activation']}{biased}"


def _kernels(planned: dict[str, Any]) -> str:
    """The kernels that `plan` chooses."""
    return " ".join(sorted({plan["kernel"]["name"] for plan in planned["plans"]}))


def _calls(calls: Counter[int], layers: Sequence[int]) -> str:
    """How often each layer was asked. Raises RuntimeError for a layer that was not, or is not the model's."""
    if sorted(calls) != list(layers):
        raise RuntimeError(f"layers {sorted(calls)} were asked, and {list(layers)} have experts")
    counts = sorted(set(calls.values()))
    return f"{len(calls)}: {'-'.join(map(str, counts))}"


def tried(family: TinyFamily) -> Row:
    """The row of one family; what went wrong is its reason."""
    try:
        return row_of(family)
    except Exception as error:  # whatever a model's own code or the service says
        told = next(iter(str(error).splitlines()), "")
        return Row(family.model_type, why=f"FAILED: {type(error).__name__}: {told[:300]}")


TEXT = (
    "Made by `python -m bench.numbers.families`, whose text says what is compared. A family is a model type",
    "whose config counts experts; one of several parts (`glm4v_moe`, `kimi_k25`) is served as its text",
    "part, and `kimi_k2` is `deepseek_v3` under another name.",
    "",
    "- `logits`: the largest difference to the model alone, at most 1e-4. `damaged`: the same when experts",
    "  are off by 1.05 in every other number between their GEMMs.",
    "- `tokens`: what the loaded model generates, equal to the model alone. `layers: calls`: layers with",
    "  experts, and how often each was asked: once a token, and once for all.",
    "- `client sends`: where it is ids (and weights) alone, `moeserve inspect` says why logits do not tell",
    "  the choice. The plug-in always sends the choice of the model's own router.",
    "",
)


def page(rows: Sequence[Row]) -> str:
    """The text of docs/families.md."""
    served = sum(row.served for row in rows)
    packages = f"transformers {transformers.__version__}, torch {torch.__version__}"
    counted = f"{served} of {len(rows)} families ({100 * served / len(rows):.0f} %)"
    lines = [
        "# Model families",
        "",
        f"{counted} that have experts in {packages} are served: tiny seeded models, two CPU ranks, float32.",
        *TEXT,
        "| " + " | ".join(HEAD) + " |",
        "| " + " | ".join("---" for _ in HEAD) + " |",
        *("| " + " | ".join(row.cells) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="these families; writes no page")
    parser.add_argument("--resume", action="store_true", help=f"keep the rows of {DONE.relative_to(ROOT)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    start, rows = time.perf_counter(), kept() if options.resume else {}
    DONE.parent.mkdir(exist_ok=True)
    wanted = [name for name in sorted(families()) if not options.only or name in options.only]
    with DONE.open("a" if options.resume else "w", encoding="utf-8") as file:
        for name in wanted:
            if name not in rows:
                rows[name] = tried(families()[name])
                file.write(json.dumps(asdict(rows[name])) + "\n")
                file.flush()
            print(" | ".join(rows[name].cells), flush=True)
    shown = [rows[name] for name in wanted]
    served = sum(row.served for row in shown)
    failed = [row.family for row in shown if not row.served and row.family not in REFUSED]
    print(f"{served} of {len(shown)} served, {failed} failed; {time.perf_counter() - start:.0f} s")
    if not options.only:
        PAGE.write_text(page(shown), encoding="utf-8")
    return 0 if not failed and served >= SHARE * len(shown) else 1


def kept() -> dict[str, Row]:
    """The rows of an earlier run that were no failure."""
    lines = DONE.read_text(encoding="utf-8").splitlines() if DONE.exists() else []
    rows = (Row(**json.loads(line) | {"tokens": tuple(json.loads(line)["tokens"])}) for line in lines)
    return {row.family: row for row in rows if row.served or row.family in REFUSED}


if __name__ == "__main__":
    sys.exit(main())
