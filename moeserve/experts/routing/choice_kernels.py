# mypy: ignore-errors
"""What a step does with its rows' choices, in one launch each on a GPU: choosing, merging, counting.

As torch operations they are some forty launches, longer than a small step's experts. These kernels also run
under Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from moeserve.experts.routing.methods import RENORMALIZE_EPSILON, ROUTINGS, weigh_sigmoid, weigh_softmax

ROWS = 16  # of a program that merges
IDS = 256  # that a program counts
WEIGHINGS = {weigh_softmax: "softmax", weigh_sigmoid: "sigmoid"}  # as the kernels name them


@triton.jit
def _scores(logits, there, SCORING: tl.constexpr):
    """Scores `[E]` float32 of one row, by a name of `SCORES`; what is not `there` has no part in them."""
    if SCORING == "softmax":
        parts = tl.where(there, tl.exp(logits - tl.max(tl.where(there, logits, float("-inf")), 0)), 0.0)
        return parts / tl.sum(parts, 0)
    if SCORING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logits))
    if SCORING == "sqrtsoftplus":
        grown = tl.exp(tl.minimum(logits, 20.0))
        small = grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0)))  # of log(1 + x), where 1 + x loses x
        return tl.sqrt(tl.where(logits > 20.0, logits, tl.where(grown < 1e-3, small, tl.log(1.0 + grown))))
    return logits


@triton.jit
def _order(values):
    """int32 keys that stand as `values` float32 do; one reduction of a warp is one instruction for them."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 is no less than 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _within_groups(choice, GROUPS: tl.constexpr, KEPT: tl.constexpr, EP: tl.constexpr, TWO: tl.constexpr):
    """`choice [EP]` with -inf outside the KEPT best groups; a group's worth is its best, or its TWO best."""
    WIDTH: tl.constexpr = EP // GROUPS
    grouped = tl.reshape(choice, (GROUPS, WIDTH))
    worth = tl.max(grouped, 1)
    if TWO:
        column = tl.arange(0, WIDTH)[None, :]
        first = tl.min(tl.where(grouped == worth[:, None], column, WIDTH), 1)
        worth += tl.max(tl.where(column == first[:, None], float("-inf"), grouped), 1)
    group = tl.arange(0, GROUPS)
    own, other = worth[:, None], worth[None, :]
    ahead = (other > own) | ((other == own) & (group[None, :] < group[:, None]))
    kept = tl.sum(ahead.to(tl.int32), 1) < KEPT
    return tl.reshape(tl.where(kept[:, None], grouped, float("-inf")), (EP,))


@triton.jit
def chosen(
    given, bias, scaling, highest, dtype: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BIASED: tl.constexpr, SCORING: tl.constexpr, WEIGHING: tl.constexpr,
    EPSILON: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The K experts that a row's logits `given [EP]` float32 choose, int32 `[KP]`, and their weights."""
    index = tl.arange(0, EP)
    there = index < E
    given = tl.where(given == given, given, float("-inf"))
    scores = _scores(tl.minimum(given, highest), there, SCORING)
    scores = tl.where(scores == scores, scores, float("-inf"))  # of a row without any number
    choice = scores
    if BIASED:
        choice += tl.load(bias + index, mask=there, other=0.0)
    if GROUPS > 1:
        choice = _within_groups(choice, GROUPS, KEPT, EP, BIASED)
    LEAST: tl.constexpr = -(1 << 31)  # less than -inf is
    order = tl.where(there, _order(choice), LEAST)
    place = tl.arange(0, KP)
    ids = tl.full([KP], 0, tl.int32)
    for k in tl.static_range(K):
        expert = tl.min(tl.where(order == tl.max(order, 0), index, EP), 0)
        order = tl.where(index == expert, LEAST, order)
        ids = tl.where(place == k, expert, ids)
    inside = place < K
    weights = tl.gather(scores, ids, 0)
    if WEIGHING == "softmax":
        parts = tl.where(inside, tl.exp(weights - tl.max(tl.where(inside, weights, float("-inf")), 0)), 0.0)
        weights = parts / tl.sum(parts, 0)
    elif WEIGHING == "sigmoid":
        weights = 1.0 / (1.0 + tl.exp(-weights))
    elif WEIGHING == "renormalize":
        weights = weights / (tl.sum(tl.where(inside, weights, 0.0), 0) + EPSILON)
    else:
        tl.static_assert(WEIGHING == "score", "a weighing without device code")
    weights = weights * scaling
    if ROUND:
        weights = weights.to(dtype).to(tl.float32)
    weights = tl.where((weights == weights) & (weights > float("-inf")), weights, 0.0)
    return ids, tl.minimum(weights, highest)


@triton.jit
def row_of(logits, row, E: tl.constexpr, EP: tl.constexpr):
    """One row of `logits [T, E]`, float32 `[EP]`."""
    index = tl.arange(0, EP)
    return tl.load(logits + row * E + index, mask=index < E, other=float("-inf")).to(tl.float32)


@triton.jit
def choose_rows(
    logits, bias, scaling, highest, ids, weights,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BIASED: tl.constexpr, SCORING: tl.constexpr, WEIGHING: tl.constexpr,
    EPSILON: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Program t: the K experts of row t, and their weights."""
    row = tl.program_id(0).to(tl.int64)
    found, weight = chosen(
        row_of(logits, row, E, EP), bias, scaling, highest, logits.dtype.element_ty, E, EP, K, KP, GROUPS,
        KEPT, BIASED, SCORING, WEIGHING, EPSILON, ROUND,
    )  # fmt: skip
    place = tl.arange(0, KP)
    tl.store(ids + row * K + place, found, mask=place < K)
    tl.store(weights + row * K + place, weight, mask=place < K)


@triton.jit
def ids_of(experts, valid, row, rows, K: tl.constexpr, KP: tl.constexpr, FOLDS: tl.constexpr):
    """Ids `[BLOCK, KP]` that `row [BLOCK]` choose, -1 for none; FOLDS: and for what an earlier place has."""
    place = tl.arange(0, KP)[None, :]
    there = (row < rows)[:, None]
    real = tl.load(valid + row, mask=row < rows, other=0) != 0
    at = experts + row.to(tl.int64) * K
    own = tl.load(at[:, None] + place, mask=there & (place < K), other=-1)
    own = tl.where(real[:, None], own, -1)  # no load waits for the other
    if FOLDS:
        repeated = place < 0
        for k in tl.static_range(K - 1):
            other = tl.load(at + k, mask=row < rows, other=-1)[:, None]
            repeated = repeated | ((own == other) & (place > k))
        own = tl.where(repeated, -1, own)
    return own


@triton.jit
def merged(experts, weights, valid, row, rows, K: tl.constexpr, KP: tl.constexpr):
    """Ids `[BLOCK, KP]` as of `ids_of`, and the weights of all places of a row that choose the same."""
    place = tl.arange(0, KP)[None, :]
    own = ids_of(experts, valid, row, rows, K, KP, FOLDS=False)
    at = row.to(tl.int64) * K
    total = tl.zeros(own.shape, tl.float32)
    repeated = place < 0
    for k in tl.static_range(K):
        other = tl.load(experts + at + k, mask=row < rows, other=-1)[:, None]
        weight = tl.load(weights + at + k, mask=row < rows, other=0.0)[:, None]
        same = (own == other) & (other >= 0)
        total += tl.where(same, tl.broadcast_to(weight, same.shape), 0.0)
        repeated = repeated | (same & (place > k))
    kept = (own >= 0) & (repeated == 0)
    return tl.where(kept, own, -1), tl.where(kept, total, 0.0)


@triton.jit
def counted(table, ids, there):
    """Adds 1 to the int64 `table` for every id that is `there`."""
    tl.atomic_add(table + ids, tl.full(ids.shape, 1, tl.int64), mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def merge_rows(
    experts, weights, valid, kept, summed, rows,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Repeated experts of a row fold into their first place; rows that are not valid choose none."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, KP)[None, :]
    inside = (row < rows)[:, None] & (place < K)
    ids, total = merged(experts, weights, valid, row, rows, K, KP)
    at = row.to(tl.int64)[:, None] * K + place
    tl.store(kept + at, ids.to(tl.int32), mask=inside)
    tl.store(summed + at, total, mask=inside)


@triton.jit(
    do_not_specialize=["count", "most_experts", "most_slots"],
    do_not_specialize_on_alignment=["by_expert", "by_slot"],
)
def count_ids(experts, slots, by_expert, by_slot, count, most_experts, most_slots, BLOCK: tl.constexpr):
    """Adds 1 for every id within its table."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + at, mask=at < count, other=-1)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    counted(by_expert, expert, (expert >= 0) & (expert < most_experts))
    counted(by_slot, slot, (slot >= 0) & (slot < most_slots))


def constants(gate):
    """What `chosen` is compiled for, from E on."""
    weighing = "renormalize" if gate.renormalize else "score"
    return (
        gate.experts, triton.next_power_of_2(gate.experts), gate.top_k, triton.next_power_of_2(gate.top_k),
        gate.groups, gate.topk_groups, gate.bias is not None, gate.scoring,
        WEIGHINGS.get(ROUTINGS[gate.method].weigh, weighing), RENORMALIZE_EPSILON, gate.logits_dtype_weights,
    )  # fmt: skip


def numbers(gate, logits):
    """What `chosen` is given beside logits: a bias, or what is not read; scaling; the highest float32."""
    return logits if gate.bias is None else gate.bias, float(gate.scaling), torch.finfo(torch.float32).max


def warps(gate):
    """Warps of the program that routes one row."""
    return 1 if gate.experts <= 256 else 4


def choose(gate, logits):
    """Ids `[T, K]` int32 and weights `[T, K]` float32 of `logits [T, E]` contiguous, as `Gate.route` says."""
    shape = (len(logits), gate.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        given = (logits, *numbers(gate, logits), ids, weights)
        choose_rows[(len(logits),)](*given, *constants(gate), num_warps=warps(gate))
    return ids, weights


def merge(experts, weights, valid):
    """`merge_duplicates` of the rows that are `valid [T]`: `[T, K]` int32 and float32, all contiguous."""
    rows, top = experts.shape
    kept = torch.empty((rows, top), dtype=torch.int32, device=experts.device)
    summed = torch.empty((rows, top), dtype=torch.float32, device=experts.device)
    if rows and top:
        merge_rows[(triton.cdiv(rows, ROWS),)](
            experts, weights, valid, kept, summed, rows, top, triton.next_power_of_2(top), ROWS, num_warps=1
        )
    return kept, summed


def count(experts, slots, by_expert, by_slot):
    """Adds the ids of `experts` and `slots`, `[T, K]` contiguous, to two int64 tables."""
    ids = experts.numel()
    if ids:
        count_ids[(triton.cdiv(ids, IDS),)](
            experts, slots, by_expert, by_slot, ids, by_expert.shape[0], by_slot.shape[0], IDS, num_warps=4
        )
