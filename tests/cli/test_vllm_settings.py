"""vLLM's settings as moeserve's: every switch and name comes to keys that exist, or to a reason."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quantized import PRODUCERS, write

from moeserve.checkpoints.load_as import KEPT
from moeserve.cli import main
from moeserve.cli.vllm.backends import (
    AUTO_MEMBER,
    MEMBERS,
    MOE_BACKENDS,
    MoeBackend,
    VllmFamily,
    VllmMember,
    family_of,
)
from moeserve.cli.vllm.reading import merged, read, toml
from moeserve.cli.vllm.switches import ANY, BACKEND_NAMES, SWITCHES, Switch
from moeserve.dispatch.backends import ELSEWHERE, dispatcher_named
from moeserve.experts.kernels import PINS
from moeserve.quant.format import Scheme
from moeserve.quant.formats import FORMATS, format_named
from moeserve.quant.schemes import SCHEMES, scheme_named
from moeserve.runtime.config import Config, from_mapping
from moeserve.runtime.sections import ConfigError

ONE_OF_EACH = {
    family: scheme
    for scheme in SCHEMES.values()
    if scheme.weights not in KEPT and (family := family_of(scheme)) is not None
}
"""A scheme of each family that a file may hold."""

NEW = Scheme(replace(format_named("int8_channel"), name="nf4"), format_named("bf16"))
"""A scheme of a number format that vLLM has no family for, as somebody may add one to the tables."""


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests set their own."""
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


def values(switch: Switch) -> list[str]:
    """What a switch may be set to."""
    if switch.name == "VLLM_ALL2ALL_BACKEND":
        return list(BACKEND_NAMES)
    return ["512"] if ANY in switch.answers else list(switch.answers)


SETTINGS = [(name, value) for name, switch in SWITCHES.items() for value in values(switch)]


def test_schemes_fall_into_every_family() -> None:
    assert ONE_OF_EACH.keys() == set(VllmFamily)


@pytest.mark.parametrize("member", MEMBERS.values(), ids=lambda m: f"{m.family.value} {m.name}")
def test_a_member_is_a_kernel_that_computes_its_family_or_a_reason(member: VllmMember) -> None:
    assert member.kernel or member.note.startswith(("not built: ", "no kernel: "))
    if member.kernel:
        schemes = {scheme for entry in PINS[member.kernel] for scheme in entry.schemes}
        assert member.family in {family_of(scheme) for scheme in schemes}


@pytest.mark.parametrize("entry", MOE_BACKENDS.values(), ids=lambda entry: entry.name)
def test_a_name_asks_for_members_that_there_are_or_says_why_not(entry: MoeBackend) -> None:
    assert entry.members or entry.note.startswith("not built: ")
    for family, names in entry.members.items():
        assert names
        assert all(name == AUTO_MEMBER or (family, name) in MEMBERS for name in names)


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids="=".join)
def test_every_setting_gives_keys_that_exist_or_a_reason(name: str, value: str) -> None:
    for stored in (None, *ONE_OF_EACH.values()):
        (found,) = read({name: value}, "", stored)
        assert found.keys or found.why
        config = Config().with_values({"model.checkpoint": "x"} | dict(found.keys)).checked()
        assert config.plan.kernel in {"auto", *PINS}
        assert from_mapping(Config, tomllib.loads(toml(found.keys))) == Config().with_values(found.keys)


@pytest.mark.parametrize("entry", MOE_BACKENDS.values(), ids=lambda entry: entry.name)
def test_every_name_gives_a_kernel_or_a_reason(entry: MoeBackend) -> None:
    for family, stored in ONE_OF_EACH.items():
        (found,) = read({}, entry.name, stored)
        assert found.keys or found.why
        if "plan.kernel" in found.keys:
            assert found.keys["plan.kernel"] in {"auto", *PINS}
        elif family in entry.members:
            assert found.why.startswith(("not built: ", "no kernel: "))


class TestANewNumberFormat:
    """A format that vLLM knows nothing of is an answer to every setting, and no error."""

    @pytest.fixture(autouse=True)
    def added(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The format and a scheme of it stand in the tables."""
        monkeypatch.setitem(FORMATS, NEW.weights.name, NEW.weights)
        monkeypatch.setitem(SCHEMES, str(NEW), NEW)

    def test_has_no_family(self) -> None:
        assert family_of(scheme_named(str(NEW))) is None

    @pytest.mark.parametrize(("name", "value"), SETTINGS, ids="=".join)
    def test_has_keys_or_a_reason_for_every_setting(self, name: str, value: str) -> None:
        (found,) = read({name: value}, "", NEW)
        assert found.keys or found.why
        if SWITCHES[name].families != set(VllmFamily):
            assert (found.keys, found.why) == ({}, "it says nothing about nf4 experts")

    def test_keeps_the_settings_of_experts_of_any_kind(self) -> None:
        assert merged(read({"VLLM_MOE_DP_CHUNK_SIZE": "128"}, "auto", NEW)) == {
            "step.lane_rows": 128,
            "plan.kernel": "auto",
        }

    @pytest.mark.parametrize("backend", MOE_BACKENDS.values(), ids=lambda backend: backend.name)
    def test_has_a_reason_for_every_name(self, backend: MoeBackend) -> None:
        (found,) = read({}, backend.name, NEW)
        if backend.members.keys() == set(VllmFamily):
            assert found.keys == {"plan.kernel": "auto"}
        elif backend.members:
            assert (found.keys, found.why) == ({}, "vLLM does not take it for nf4 experts")
        else:
            assert found.why == backend.note


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_dispatchers_of_that_name_are_known(name: str) -> None:
    try:
        dispatcher_named(name)
    except ValueError as error:
        assert any(reason in str(error) for reason in ELSEWHERE.values())


@pytest.mark.parametrize(
    ("environ", "stored", "keys"),
    [
        ({"VLLM_MOE_DP_CHUNK_SIZE": "128"}, None, {"step.lane_rows": 128}),
        ({"VLLM_FUSED_MOE_CHUNK_SIZE": "4096"}, "bf16", {"step.max_step_tokens": 4096}),
        ({"VLLM_ALL2ALL_BACKEND": "naive"}, None, {"plan.all2all_backend": "naive"}),
        ({"VLLM_ALL2ALL_BACKEND": "pplx"}, None, {}),
        ({"VLLM_MXFP4_USE_MARLIN": "true"}, "mxfp4 x bf16", {"plan.kernel": "cuda_fp4"}),
        ({"VLLM_MXFP4_USE_MARLIN": "0"}, "mxfp4 x bf16", {}),
        ({"VLLM_MXFP4_USE_MARLIN": "1"}, "bf16", {}),
        (
            {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
            "nvfp4 x nvfp4_static",
            {"plan.kernel": "cuda_fp4", "model.load_as": "nvfp4 x bf16"},
        ),
        (
            {"VLLM_MARLIN_INPUT_DTYPE": "int8"},
            "int4_group128 x bf16",
            {"model.load_as": "int4_group128 x int8_token"},
        ),
        ({"VLLM_MARLIN_INPUT_DTYPE": "int8"}, "int4_asym_group128 x bf16", {}),
        ({"VLLM_MARLIN_INPUT_DTYPE": "fp8"}, "mxfp4 x fp8_token", {}),
        ({"VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "1"}, "mxfp8", {"model.load_as": "bf16"}),
        ({"VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "1"}, None, {}),
        ({"VLLM_MOE_DP_CHUNK_SIZE": ""}, None, {}),
        # vLLM insists on a kernel only where both of a pair are on, one of them by its default
        ({"VLLM_ROCM_USE_AITER": "1"}, "bf16", {"plan.kernel": "aiter"}),
        ({"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "0"}, "bf16", {}),
        ({"VLLM_ROCM_USE_AITER_MOE": "1"}, "bf16", {}),
        ({"VLLM_USE_DEEP_GEMM": "1"}, "fp8_block128 x fp8_group128", {"plan.kernel": "deep_gemm"}),
        ({"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "0"}, "fp8_block128 x fp8_group128", {}),
        ({"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "1"}, "fp8_block128 x fp8_group128", {}),
        # and this one says which kernel the others mean
        ({"VLLM_FLASHINFER_MOE_BACKEND": "throughput"}, "bf16", {}),
        (
            {"VLLM_USE_FLASHINFER_MOE_FP16": "1", "VLLM_FLASHINFER_MOE_BACKEND": "throughput"},
            "bf16",
            {"plan.kernel": "flashinfer_cutlass"},
        ),
        ({"PATH": "moe", "VLLM_LOGGING_LEVEL": "DEBUG"}, None, {}),
    ],
)
def test_settings_come_to_these_keys(
    environ: dict[str, str], stored: str | None, keys: dict[str, Any]
) -> None:
    assert merged(read(environ, "", stored and scheme_named(stored))) == keys


@pytest.mark.parametrize(
    ("environ", "backend", "message"),
    [
        ({"VLLM_MOE_DP_CHUNK_SIZE": "many"}, "", "VLLM_MOE_DP_CHUNK_SIZE=many must be a number of tokens"),
        ({"VLLM_MOE_DP_CHUNK_SIZE": "0"}, "", "must be a number of tokens, 1 or more"),
        ({"VLLM_USE_DEEP_GEMM": "maybe"}, "", "VLLM_USE_DEEP_GEMM='maybe' is no value of it; known: 1, 0"),
        ({"VLLM_FLASHINFER_MOE_BACKEND": "x"}, "", "known: throughput, latency, masked_gemm"),
        ({}, "marlim", "unknown moe_backend 'marlim'; known: auto, triton"),
    ],
)
def test_values_that_vllm_does_not_take_are_named(
    environ: dict[str, str], backend: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(environ, backend, None)


def test_two_settings_may_not_want_different_values() -> None:
    findings = read({"VLLM_MXFP4_USE_MARLIN": "1"}, "emulation", scheme_named("mxfp4 x bf16"))
    with pytest.raises(
        ConfigError, match=r'VLLM_MXFP4_USE_MARLIN=1 means plan\.kernel = "cuda_fp4", and --moe'
    ):
        merged(findings)
    assert merged(read({"VLLM_MXFP4_USE_MARLIN": "1"}, "auto", scheme_named("mxfp4 x bf16"))) == {
        "plan.kernel": "cuda_fp4"
    }


def test_without_a_checkpoint_keys_and_unknown_switches_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_MOE_DP_CHUNK_SIZE", "128")
    monkeypatch.setenv("VLLM_MOE_USE_MAGIC", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert main(["plan", "--from-vllm-env", "--moe-backend", "marlin"]) == 0
    shown = capsys.readouterr().out
    assert "VLLM_MOE_DP_CHUNK_SIZE=128\n  step.lane_rows = 128: " in shown
    assert "VLLM_MOE_USE_MAGIC=1\n  no key: unknown here" in shown
    assert (
        "--moe-backend marlin\n  no key: by what the checkpoint stores, FP8, MXFP8: `plan.kernel = " in shown
    )
    assert "LOGGING" not in shown
    assert shown.endswith("# the same for moeserve\n[step]\nlane_rows = 128\n")


def test_nothing_set_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from-vllm-env"]) == 0
    assert "says nothing about experts" in capsys.readouterr().out


def test_with_a_checkpoint_the_plan_is_made_under_these_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, PRODUCERS["ct NVFP4"])
    monkeypatch.setenv("VLLM_TEST_FORCE_FP8_MARLIN", "1")
    words = ["plan", "--from-vllm-env", "--checkpoint", str(tmp_path), "--machine", "h200"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vllm"]["keys"] == {"plan.kernel": "cuda_fp4", "model.load_as": "nvfp4 x bf16"}
    (plan,) = found["plans"]
    assert (plan["kernel"]["name"], plan["scheme"]) == ("cuda_fp4", "nvfp4 x bf16")
    assert main([*words, "--kernel", "torch_reference"]) == 0  # a flag of ours has the last word
    shown = capsys.readouterr().out
    assert 'kernel = "cuda_fp4"' in shown and "  kernel   torch_reference" in shown
    assert "load_as  nvfp4 x bf16: nvfp4 x nvfp4_static -> nvfp4 x bf16" in shown


def test_a_key_that_cannot_serve_there_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, PRODUCERS["ct NVFP4"])
    words = ["plan", "--from-vllm-env", "--moe-backend", "marlin", "--checkpoint", str(tmp_path)]
    assert main([*words, "--machine", "mi300x"]) == 2
    said = capsys.readouterr()
    assert 'kernel = "cuda_fp4"' in said.out
    assert "cuda_fp4_few: runs on sm90, not on gfx942" in said.err


def test_vllms_flag_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--checkpoint", "x", "--moe-backend", "marlin"]) == 2
    assert "--moe-backend is vLLM's name: add --from-vllm-env" in capsys.readouterr().err
