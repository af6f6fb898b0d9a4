"""Every family of the installed transformers that has experts is served as its model computes, or says why.

What is walked is transformers, not a list: a release with a new family fails here until that is read or
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from in_process import InProcess
from tiny_families import CHOOSES, answers, families

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.families import FAMILIES, REFUSED
from moeserve.experts.routing.families import BY_MODEL
from moeserve.experts.routing.families import FAMILIES as GATES
from moeserve.proto.integrations.transformers import attach, experts_modules, load

BOUND = 1e-4
DAMAGE = 1.05
SCALE_FREE = {"beam", "diffusion_gemma_text", "flex_olmo", "muse_spark_text"}
"""Families that norm what their experts answer, so that one factor for all of it changes nothing."""
TOKENS = torch.randint(4, 250, (2, 9), generator=torch.Generator().manual_seed(3))
SERVED = sorted(set(families()) - set(REFUSED))


def test_every_family_is_served_or_listed_with_the_reason() -> None:
    known = set(FAMILIES) | set(REFUSED)
    assert set(families()) <= known, "read these, or say in REFUSED why not"
    assert len(families()) >= 70
    assert set(REFUSED) <= set(families())
    assert set(FAMILIES) - set(families()) == {"kimi_k2"}  # transformers reads Kimi-K2 as DeepSeek-V3
    assert len(SERVED) >= 0.95 * len(families())


def test_the_page_of_families_has_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    rows = {cells[1].strip("` "): cells for line in page.splitlines() if len(cells := line.split("|")) > 3}
    assert set(rows) - {"family", "---"} == set(families()), "make families"
    assert "FAILED" not in page
    assert {name for name in families() if rows[name][4].strip() == "16 of 16"} == set(SERVED)


def test_every_family_has_a_router_or_the_reason_why_not() -> None:
    assert set(SERVED) <= set(GATES) | set(BY_MODEL)
    assert not set(GATES) & set(BY_MODEL)


def assert_biases_are_read(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Every layer's gate can be made, and its correction bias, where it has one, is the model's own."""
    held = model.state_dict()
    for layer in checkpoint.layers:
        gate = checkpoint.gate(layer)
        assert (gate.bias is not None) == (gate.biased and gate.takes_logits)
        if gate.bias is None:
            continue
        biases = {name: held[name] for name in held if f".{layer}." in name and CHOOSES.search(name)}
        text = {name: bias for name, bias in biases.items() if "text_moe" in name}  # beside one of vision's
        (bias,) = (text or biases).values()
        assert bias.abs().min() > 0, "it would not be told from none"
        assert torch.equal(gate.bias.float(), bias.reshape(-1)[: gate.experts].float())


@pytest.mark.parametrize("family", SERVED)
def test_a_family_answers_as_its_model_alone(tmp_path: Path, family: str) -> None:
    model = families()[family].model()
    alone = answers(model, TOKENS)
    wanted = sorted(experts_modules(model))
    for form, original in (("hub", True), ("own", False)):
        model.save_pretrained(tmp_path / form, save_original_format=original)
        assert list(Checkpoint(tmp_path / form).layers) == wanted
        assert_biases_are_read(Checkpoint(tmp_path / form), model)
    services = {form: InProcess(tmp_path / form) for form in ("hub", "own")}
    for layer in wanted:
        hub, own = (services[form]._weights(layer) for form in ("hub", "own"))
        assert all(torch.equal(left, right) for left, right in zip(hub, own, strict=True))
    loaded = load(str(tmp_path / "hub"), services["hub"], cls=type(model), dtype=torch.float32)
    torch.testing.assert_close(answers(loaded, TOKENS), alone, rtol=0, atol=BOUND)
    assert sorted(services["hub"].calls) == wanted
    services["hub"].calls.clear()
    attach(model, services["hub"])
    served = answers(model, TOKENS)
    assert sorted(services["hub"].calls) == wanted
    torch.testing.assert_close(served, alone, rtol=0, atol=BOUND)
    assert torch.equal(served.argmax(-1), alone.argmax(-1))
    attach(model, InProcess(tmp_path / "hub", halves=DAMAGE))
    assert (answers(model, TOKENS) - alone).abs().max() > BOUND, "its experts do not matter"
    attach(model, InProcess(tmp_path / "hub", scale=DAMAGE))
    assert ((answers(model, TOKENS) - alone).abs().max() > BOUND) != (family in SCALE_FREE)
