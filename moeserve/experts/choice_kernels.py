# mypy: ignore-errors
"""What a step does with its rows' choices, in one launch each on a GPU: choosing, merging, counting.

As torch operations they are some forty launches, longer than a small step's experts. These kernels also run
under Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

ROWS = 16  # of a program that merges
IDS = 256  # that a program counts


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
def _best(values, free, index):
    """The least index of the largest of `values` among those `free`."""
    most = tl.max(tl.where(free, values, float("-inf")), 0)
    return tl.min(tl.where(free & (values == most), index, 1 << 30), 0)


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
    free = group >= 0
    for _ in tl.static_range(KEPT):
        free = free & (group != _best(worth, free, group))
    return tl.reshape(tl.where(free[:, None], float("-inf"), grouped), (EP,))


@triton.jit
def choose_rows(
    logits, bias, ids, weights, scaling, highest,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BIASED: tl.constexpr, SCORING: tl.constexpr, WEIGHING: tl.constexpr,
    EPSILON: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Program t: the K experts of row t, and their weights."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, EP)
    there = index < E
    given = tl.load(logits + row * E + index, mask=there, other=float("-inf")).to(tl.float32)
    given = tl.where(given == given, given, float("-inf"))
    scores = _scores(tl.minimum(given, highest), there, SCORING)
    scores = tl.where(scores == scores, scores, float("-inf"))  # of a row without any number
    choice = scores
    if BIASED:
        choice += tl.load(bias + index, mask=there, other=0.0)
    if GROUPS > 1:
        choice = _within_groups(choice, GROUPS, KEPT, EP, BIASED)
    free = there
    place = tl.arange(0, KP)
    chosen = tl.full([KP], 0.0, tl.float32)
    for k in tl.static_range(K):
        expert = _best(choice, free, index)
        free = free & (index != expert)
        chosen = tl.where(place == k, tl.sum(tl.where(index == expert, scores, 0.0), 0), chosen)
        tl.store(ids + row * K + k, expert)
    inside = place < K
    if WEIGHING == "softmax":
        parts = tl.where(inside, tl.exp(chosen - tl.max(tl.where(inside, chosen, float("-inf")), 0)), 0.0)
        chosen = parts / tl.sum(parts, 0)
    elif WEIGHING == "sigmoid":
        chosen = 1.0 / (1.0 + tl.exp(-chosen))
    elif WEIGHING == "renormalize":
        chosen = chosen / (tl.sum(tl.where(inside, chosen, 0.0), 0) + EPSILON)
    else:
        tl.static_assert(WEIGHING == "score", "a weighing without device code")
    chosen = chosen * scaling
    if ROUND:
        chosen = chosen.to(logits.dtype.element_ty).to(tl.float32)
    chosen = tl.where((chosen == chosen) & (chosen > float("-inf")), chosen, 0.0)
    tl.store(weights + row * K + place, tl.minimum(chosen, highest), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def merge_rows(
    experts, weights, valid, merged, summed, rows,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Repeated experts of a row fold into their first place; rows that are not valid choose none."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    place = tl.arange(0, KP)[None, :]
    inside = (row < rows)[:, None] & (place < K)
    real = (tl.load(valid + row, mask=row < rows, other=0) != 0)[:, None]
    own = tl.load(experts + row[:, None] * K + place, mask=inside & real, other=-1)
    total = tl.zeros([BLOCK, KP], tl.float32)
    repeated = place < 0
    for k in tl.static_range(K):
        other = tl.load(experts + row * K + k, mask=row < rows, other=-1)[:, None]
        weight = tl.load(weights + row * K + k, mask=row < rows, other=0.0)[:, None]
        same = (own == other) & (other >= 0)
        total += tl.where(same, tl.broadcast_to(weight, same.shape), 0.0)
        repeated = repeated | (same & (place > k))
    kept = (own >= 0) & (repeated == 0)
    tl.store(merged + row[:, None] * K + place, tl.where(kept, own, -1).to(tl.int32), mask=inside)
    tl.store(summed + row[:, None] * K + place, tl.where(kept, total, 0.0), mask=inside)


@triton.jit(
    do_not_specialize=["count", "most_experts", "most_slots"],
    do_not_specialize_on_alignment=["by_expert", "by_slot"],
)
def count_ids(experts, slots, by_expert, by_slot, count, most_experts, most_slots, BLOCK: tl.constexpr):
    """Adds 1 for every id within its table."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + at, mask=at < count, other=-1)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    one = tl.full([BLOCK], 1, tl.int64)
    tl.atomic_add(by_expert + expert, one, mask=(expert >= 0) & (expert < most_experts), sem="relaxed")
    tl.atomic_add(by_slot + slot, one, mask=(slot >= 0) & (slot < most_slots), sem="relaxed")


def choose(gate, logits, scoring, weighing, epsilon):
    """Ids `[T, K]` int32 and weights `[T, K]` float32 of `logits [T, E]` contiguous, as `Gate.route` says."""
    rows, experts = logits.shape
    ids = torch.empty((rows, gate.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, gate.top_k), dtype=torch.float32, device=logits.device)
    if rows:
        choose_rows[(rows,)](
            logits, logits if gate.bias is None else gate.bias, ids, weights, float(gate.scaling),
            torch.finfo(torch.float32).max, experts, triton.next_power_of_2(experts), gate.top_k,
            triton.next_power_of_2(gate.top_k), gate.groups, gate.topk_groups, gate.bias is not None, scoring,
            weighing, epsilon, gate.logits_dtype_weights, num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
    return ids, weights


def merge(experts, weights, valid):
    """`merge_duplicates` of the rows that are `valid [T]`: `[T, K]` int32 and float32, all contiguous."""
    rows, top = experts.shape
    merged = torch.empty((rows, top), dtype=torch.int32, device=experts.device)
    summed = torch.empty((rows, top), dtype=torch.float32, device=experts.device)
    if rows and top:
        merge_rows[(triton.cdiv(rows, ROWS),)](
            experts, weights, valid, merged, summed, rows, top, triton.next_power_of_2(top), ROWS, num_warps=1
        )
    return merged, summed


def count(experts, slots, by_expert, by_slot):
    """Adds the ids of `experts` and `slots`, `[T, K]` contiguous, to two int64 tables."""
    ids = experts.numel()
    if ids:
        count_ids[(triton.cdiv(ids, IDS),)](
            experts, slots, by_expert, by_slot, ids, by_expert.shape[0], by_slot.shape[0], IDS, num_warps=4
        )
