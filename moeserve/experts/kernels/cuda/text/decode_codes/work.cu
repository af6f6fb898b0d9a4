// What there is to do: the list of slots that have rows, groups of rows, and a cluster's pairs of tiles.

#define BEFORE_BITS 23
#define BEFORE ((1 << BEFORE_BITS) - 1)

// The list of slots that have rows: groups before it, then its number. By one warp.
DEVICE void list_slots(const Task& t, u32 base, int lane) {
  int groups = 0, active = 0;
  for (int first = 0; first < t.slots; first += 32) {
    const int slot = first + lane, count = slot < t.slots ? __ldg(t.counts + slot) : 0;
    const int own = (max(count, 0) + ROWS - 1) / ROWS;
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    const u32 there = __ballot_sync(~0u, own > 0);
    const int place = active + __popc(there & ((1u << lane) - 1));
    if (own > 0) store_word(base + LIST_AT + place * 4, (u32)(groups + sum - own) | (u32)slot << BEFORE_BITS);
    groups += __shfl_sync(~0u, sum, 31);
    active += __popc(there);
  }
  if (lane == 0) store_word(base + TOTALS_AT, groups), store_word(base + TOTALS_AT + 4, active);
}

// Rows of a slot, and where they are.
struct Group {
  int slot, row0, rows, in_slot;  // groups of the slot
};

DEVICE Group group_at(const Task& t, u32 base, int group) {
  int low = 0, high = shared_word(base + TOTALS_AT + 4);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if ((shared_word(base + LIST_AT + middle * 4) & BEFORE) <= group)
      low = middle;
    else
      high = middle;
  }
  const u32 entry = shared_word(base + LIST_AT + low * 4);
  const int slot = entry >> BEFORE_BITS, done = (group - (int)(entry & BEFORE)) * ROWS;
  const int count = __ldg(t.counts + slot);
  return Group{slot, __ldg(t.offsets + slot) + done, min(count - done, ROWS), (count + ROWS - 1) / ROWS};
}

// This cluster's pairs of tiles, one after the other: first those of gate and up by turns, then those of down. Clusters
// that had one pair fewer of the first get as many more of the second as take the same time.
struct Walk {
  int clusters, own, first, second;  // pairs in all, by phase
  int heavy, extra;                  // clusters that have one pair more of the first; pairs of the second for it
  int step;

  DEVICE Walk(const Task& t, int groups) {
    clusters = gridDim.x / CLUSTER, own = blockIdx.x / CLUSTER, step = 0;
    first = groups * pairs_of(t.gate_up), second = groups * pairs_of(t.down);
    heavy = first % clusters;
    extra = heavy ? pieces_of(t.gate_up) / pieces_of(t.down) : 0;
  }

  // Phase and pair of the next; false if there is none.
  DEVICE bool next(int& phase, int& pair) {
    const int before = first / clusters + (own < heavy), light = clusters - heavy, i = step++;
    phase = i >= before;
    if (!phase) {
      pair = own + i * clusters;
      return true;
    }
    const int more = own >= heavy ? extra : 0, j = i - before;
    pair = j < more ? own - heavy + j * light
                    : extra * light + (own - heavy + clusters) % clusters + (j - more) * clusters;
    return pair < second;
  }
};
