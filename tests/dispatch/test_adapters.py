"""Adapters to other libraries: the law over stand-ins with the real signatures, and who may serve where."""

import inspect
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from math import inf

import numpy as np
import pytest
import torch
from adapter_ranks import STANDS_FOR, built, refusals, run_over_stand_ins, unreachable
from deepep_rounding import rounded_by_deepep
from dispatcher_cases import RANKS, Case, Outcome, cases_of, run_cases
from parallel import parallel_launch

from moeserve.device.machine import Machine, machine_named, this_machine
from moeserve.dispatch.backends import DISPATCHERS, dispatcher_named
from moeserve.dispatch.backends.deepep_v2 import DeepEPElastic
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.libraries.probe import (
    CHECKS,
    RankLocation,
    nccl_at_run_time,
    rdma_adapters,
    surroundings,
)
from moeserve.dispatch.libraries.row_exchange import Arrived
from moeserve.dispatch.libraries.travel import only_first, parts_arrived, parts_travelling, presented, widened
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.routing import Routing
from moeserve.experts.activation import Activation
from moeserve.experts.batch import ExpertShape
from moeserve.experts.kernel import Problem
from moeserve.quant.format import Scheme
from moeserve.quant.formats import FORMATS

ADAPTERS = tuple(name for name, entry in DISPATCHERS.items() if entry.modules)
"""Dispatchers over packages that need not be installed."""

FEW_WIRES = {"bf16", "fp8_group128", "fp8_group128_ue8m0", "mxfp4"}


def chosen(dispatcher: str) -> list[Case]:
    """A few wires in one step, every step and every placement in bf16."""
    cases = [case for case in cases_of(DISPATCHERS[dispatcher]) if case.dtype == torch.bfloat16]
    wires = [c for c in cases if c.placement == "even" and c.step == "uneven_lanes" and c.wire in FEW_WIRES]
    steps = [c for c in cases if c.wire == "bf16" and (c.placement == "even" or c.step == "uneven_lanes")]
    return list(dict.fromkeys(wires + steps))


LAW = [case for dispatcher in ADAPTERS for case in chosen(dispatcher)]
FAULTS = [
    Case(dispatcher, "even", "bf16", torch.bfloat16, "uneven_lanes", 8, fault)
    for dispatcher, fault in zip(ADAPTERS, cycle(("rolled_weights", "lost_rank")), strict=False)
]


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, list[Outcome]]:
    """Every case's outcome by rank, from one launch of four processes."""
    cases = LAW + FAULTS
    by_rank = parallel_launch(RANKS, run_over_stand_ins, cases, timeout=240)
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("case", LAW, ids=str)
def test_four_ranks_answer_as_one(case: Case, outcomes: dict[Case, list[Outcome]]) -> None:
    seen = outcomes[case]
    assert max(outcome.worst for outcome in seen) <= 1.0
    assert all(outcome.repeats for outcome in seen)
    assert all(outcome.exact for outcome in seen)
    assert sum(outcome.received for outcome in seen) == seen[0].pairs


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_faulty_adapter_breaks_the_law(fault: Case, outcomes: dict[Case, list[Outcome]]) -> None:
    assert max(outcome.worst for outcome in outcomes[fault]) > 1.0


LACKING = [
    ("deepep_ht", {"arch": "sm80"}, "GPU: found sm80, required sm100 or sm103 or sm90; use "),
    ("mori", {"arch": "sm90"}, "GPU: found sm90, required gfx942 or gfx950; "),
    (
        "deepep_ht",
        {"reaches": unreachable},
        "peer memory: found no access to the GPUs of ranks [0], required",
    ),
    (
        "flashinfer",
        {"location": RankLocation("host1", "GPU-1")},
        "peer memory: found ranks [0] on other hosts, ",
    ),
    ("deepep_ll", {"adapters": ()}, "RDMA: found no adapter in "),
    ("nixl_ep", {"module": "nixl_ep"}, "import of nixl_ep: found ModuleNotFoundError: "),
    ("flashinfer", {"module": "flashinfer"}, "import of flashinfer: found ModuleNotFoundError: "),
    ("nccl_ep", {"nccl": (2, 28, 9)}, "NCCL at run time: found 2.28.9, required at least 2.30.4; install "),
    ("deepep_v2", {"nccl": None}, "NCCL at run time: found none, required at least 2.30.4; "),
    ("deepep_v2", {"bare": "deep_ep"}, "package deep_ep: found one without ElasticBuffer, required "),
]
"""Dispatcher, what rank 1 alone lacks, and what is said of it."""


def test_what_one_rank_lacks_makes_all_refuse() -> None:
    lacking = [(dispatcher, fields) for dispatcher, fields, _ in LACKING]
    whole = [(dispatcher, {}) for dispatcher in ("deepep_ht", "deepep_v2", "nccl_ep", "nixl_ep")]
    by_rank = parallel_launch(2, refusals, lacking + whole, timeout=120)
    assert by_rank[0] == by_rank[1][: len(LACKING)] + [""] * len(whole), "all ranks hear the same"
    for said, (dispatcher, _, message) in zip(by_rank[0], LACKING, strict=False):
        first, *others = said.splitlines()
        assert first == f"dispatcher {dispatcher} cannot serve"
        theirs = [line.strip() for line in others]
        there = ["rank 1"] if "peer memory: found ranks" not in message else ["rank 0", "rank 1"]
        assert [line.partition(":")[0] for line in theirs] == there
        assert message in theirs[-1]


def test_what_compiles_at_first_use_has_done_so_when_it_is_built() -> None:
    dispatchers = ["deepep_v2", "nccl_ep", "nccl_ep_ll", "deepep_ll"]
    assert parallel_launch(RANKS, built, dispatchers, timeout=120) == [[(1, 0)] * 3 + [(0, 0)]] * RANKS


class NoCompiler(Exception):
    """Of a library: no RuntimeError."""


class Uncompiled(DeepEPElastic):
    def _send(self, hidden: torch.Tensor, routing: Routing) -> Arrived:
        raise NoCompiler("nvcc is not there")


def test_a_library_that_cannot_compile_is_refused_as_any_other() -> None:
    dispatcher = object.__new__(Uncompiled)
    dispatcher._spec = SPEC
    with pytest.raises(RuntimeError, match="first step failed: NoCompiler: nvcc is not there"):
        dispatcher._warm()


def test_checks_stand_in_the_order_of_their_cost() -> None:
    names = [check.__name__ for check in CHECKS]
    assert names == ["_architecture", "_peers", "_import", "_nccl", "_sizes", "_rdma"]


def problem(**changed: object) -> Problem:
    shape = ExpertShape(7168, 2048, Activation("silu"))
    scheme = Scheme(FORMATS["fp8_block128"], FORMATS["fp8_group128"])
    return replace(Problem(scheme, FORMATS["bf16"], shape, 256, 4, 4, 8, 128), **changed)


@pytest.mark.parametrize(
    ("dispatcher", "changed", "reason"),
    [
        ("deepep_ht", {"lanes": 3, "owners": 3}, "joins 2, 4, 8 ranks, not 3"),
        ("deepep_ht", {"model_format": FORMATS["fp16"]}, "carries hidden states in bf16, not in fp16"),
        ("deepep_ll", {"top_k": 12}, "takes at most 11 experts a token, not 12"),
        ("deepep_ll", {"shape": ExpertShape(9216, 64, Activation("silu"))}, "H=9216 is more than its"),
        ("flashinfer", {"top_k": 23}, "takes at most 22 experts a token, not 23"),
        ("flashinfer", {"lanes": 65, "owners": 65}, "joins at most 64 ranks, not 65"),
        ("nccl_ep", {"sliced": True}, "carries rows to whole experts only"),
    ],
)
def test_a_plan_hears_limits_as_data(dispatcher: str, changed: dict[str, object], reason: str) -> None:
    entry, machine = DISPATCHERS[dispatcher], machine_named("h200", DISPATCHERS[dispatcher].modules)
    assert entry.refuses(problem(), machine) is None
    said = entry.refuses(problem(**changed), machine)
    assert said is not None and said.startswith(reason)


UNEQUAL = {
    "lanes and owners": Members.split(2, 2),
    "reserved": Members.of_ranks(2, max_owners=3),
    "crossed": Members((Member(0, 0, 1), Member(1, 1, 0)), 2, 2),
}


@pytest.mark.parametrize("members", UNEQUAL)
@pytest.mark.parametrize("dispatcher", ADAPTERS)
def test_libraries_refuse_members_that_are_no_ranks_by_name(dispatcher: str, members: str) -> None:
    spec = replace(SPEC, members=UNEQUAL[members])
    with pytest.raises(
        ValueError, match=f"dispatcher {dispatcher} joins ranks that each bring rows and hold"
    ):
        DISPATCHERS[dispatcher].build(spec, None)
    with pytest.raises(ValueError, match=f"{dispatcher} joins ranks with as many slots each; rank 0 holds 3"):
        DISPATCHERS[dispatcher].build(replace(SPEC, held=3), None)


def test_a_package_that_is_missing_is_named() -> None:
    for dispatcher in ADAPTERS:
        row = DISPATCHERS[dispatcher]
        said = row.refuses(problem(), Machine("bare", min(row.archs), 1 << 30))
        assert said == f"needs the package {', '.join(row.modules)}"


@pytest.mark.parametrize(
    ("name", "dispatcher"),
    [
        ("deepep_high_throughput", "deepep_ht"),
        ("deepep_low_latency", "deepep_ll"),
        ("flashinfer_nvlink_one_sided", "flashinfer"),
        ("flashinfer_all2allv", "flashinfer_two_sided"),
        ("mori_low_latency", "mori"),
        ("nixl_ep", "nixl_ep"),
    ],
)
def test_names_of_model_servers_find_their_adapter(name: str, dispatcher: str) -> None:
    assert dispatcher_named(name).name == dispatcher


def test_how_far_a_row_travels() -> None:
    assert [Limits(hidden_step=256).travelling(h) for h in (2880, 3072, 7168)] == [3072, 3072, 7168]
    sizes = DISPATCHERS["deepep_ll"].limits
    assert [sizes.travelling(h) for h in (256, 2880, 7168)] == [2048, 3072, 7168]
    with pytest.raises(ValueError, match="H=9000 is more than the largest row, 8192"):
        sizes.travelling(9000)
    assert Limits(hidden_multiple=8).refuses(4, 8, 100, "bf16") == "H=100 must be a multiple of 8"


SPEC = DispatchSpec(Members.of_ranks(2), 0, 4, 2880, 2, 8, torch.bfloat16, FORMATS["fp8_group128"])


def test_what_is_added_to_a_row_is_taken_off_again() -> None:
    packed = SPEC.wire.quantize(torch.randn(3, 2880, generator=torch.Generator().manual_seed(0)))
    sent = parts_travelling(packed, 3072)
    assert [(tuple(part.shape), part.is_contiguous()) for part in sent] == [
        ((3, 3072), True),
        ((3, 24), True),
    ]
    assert not sent[0][:, 2880:].float().any() and not sent[1][:, 23:].any()
    for got, want in zip(parts_arrived(sent, SPEC), packed.parts, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8))
    assert widened(packed.parts[1], 23).data_ptr() == packed.parts[1].data_ptr()


def test_an_empty_lane_presents_a_row_that_goes_nowhere() -> None:
    none = Routing(torch.empty((0, 2), dtype=torch.int32), torch.empty(0, 2), (0, 3), 1)
    rows, slots, weights = presented(torch.empty((0, 2880), dtype=torch.bfloat16), none)
    assert (rows.shape, slots.tolist(), weights.tolist()) == ((1, 2880), [[-1, -1]], [[0.0, 0.0]])
    one = Routing(torch.tensor([[-1, 3]], dtype=torch.int32), torch.tensor([[float("nan"), 2.0]]), (1, 3), 1)
    assert presented(torch.ones(1, 2880), one)[2].tolist() == [[0.0, 2.0]]


def test_rows_past_a_count_are_nobodys() -> None:
    slots = torch.tensor([[1, 2], [3, -1], [0, 0]])
    assert only_first(torch.tensor([2]), slots).tolist() == [[1, 2], [3, -1], [-1, -1]]
    blocks = only_first(torch.tensor([[1], [0]]), torch.zeros((2, 2, 1), dtype=torch.int64))
    assert blocks.tolist() == [[0], [-1], [-1], [-1]]


def test_this_host_is_looked_at() -> None:
    here = surroundings(SPEC)
    assert here.arch == "cpu" and here.location.host and not here.reaches(here.location.gpu)
    assert here.adapters == rdma_adapters() and here.nccl == nccl_at_run_time()
    assert here.nccl is None or here.nccl >= (2, 0, 0)


def test_deepep_rounds_within_a_code_of_the_formats() -> None:
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    for name in ("fp8_group128", "fp8_group128_ue8m0"):
        codes, scales = rounded_by_deepep(rows, name.endswith("ue8m0"))
        own = FORMATS[name].quantize(rows)
        assert torch.allclose(scales, own.parts[1], rtol=1e-6)
        steps = codes.view(torch.int8).int() - own.parts[0].view(torch.int8).int()
        assert steps.abs().max() <= 1 and (steps != 0).float().mean() < 1e-3


def test_deepep_rounds_by_one_true_quotient() -> None:
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)).bfloat16().float()  # has ties
    codes, scales = rounded_by_deepep(rows, power_of_two=False)
    blocks = rows.view(64, 4, 128).numpy()
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    expected = torch.from_numpy(blocks * (np.float32(448) / largest)).to(torch.float8_e4m3fn).flatten(1)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, torch.from_numpy(largest[..., 0] * np.float32(1 / 448)))


def installed(dispatcher: str) -> bool:
    """Whether the dispatcher's library is on this machine and meant for its GPUs."""
    entry, machine = DISPATCHERS[dispatcher], this_machine()
    return machine.arch in entry.archs and entry.modules <= machine.modules


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dispatcher", ADAPTERS)
def test_two_gpus_answer_as_one(dispatcher: str) -> None:
    if not installed(dispatcher):
        pytest.skip(f"needs {', '.join(DISPATCHERS[dispatcher].modules)}")
    cases = cases_of(DISPATCHERS[dispatcher], "cuda", 2)
    by_case = zip(*parallel_launch(2, run_cases, cases, timeout=200, device="cuda"), strict=True)
    for case, outcomes in zip(cases, by_case, strict=True):
        assert max(outcome.worst for outcome in outcomes) <= 1.0, str(case)
        assert all(outcome.repeats and outcome.exact for outcome in outcomes), str(case)
        assert sum(outcome.received for outcome in outcomes) == outcomes[0].pairs, str(case)


CALLED = {name: (fake, calls) for name, fake in STANDS_FOR.items() if (calls := fake.STANDS_FOR[name])}
"""Modules with their stand-in, and the names of it that adapters call."""


def test_every_adapter_has_a_stand_in() -> None:
    needed = {module for dispatcher in ADAPTERS for module in DISPATCHERS[dispatcher].modules}
    assert needed <= STANDS_FOR.keys()
    assert all(any(f"{name}.".startswith(f"{module}.") for name in CALLED) for module in needed)


@pytest.mark.parametrize("module", CALLED)
def test_stand_ins_take_what_the_library_takes(module: str) -> None:
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"needs {module}")
    fake, names = CALLED[module]
    for name in names:
        taken = []
        for home in (import_module(module), fake):
            found = home
            for part in name.split("."):
                found = getattr(found, part)
            taken.append([(p.name, p.kind) for p in inspect.signature(found).parameters.values()])
        assert taken[0] == taken[1], name


@pytest.mark.parametrize("dispatcher", ADAPTERS)
def test_how_long_a_rank_waits_is_the_plans_or_said(dispatcher: str) -> None:
    entry = DISPATCHERS[dispatcher]
    source = inspect.getsource(import_module(entry.build.__module__))
    assert ("spec.patience" in source) == (entry.limits.waiting == "")


@pytest.mark.parametrize(
    ("waits", "said"), [(None, ""), (100.0, "wait 100 s for a peer, then end"), (inf, "for ever")]
)
def test_a_librarys_own_patience_is_put_in_words(waits: float | None, said: str) -> None:
    assert said in Limits(waits=waits).waiting and bool(said) == bool(Limits(waits=waits).waiting)
