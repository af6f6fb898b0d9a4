// What a block of a step of few rows works on: the list of slots that have rows, and runs of units of work.

DEVICE int shared_word(u32 at) {
  int word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

DEVICE void store_word(u32 at, u32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }

// A run of units in a phase, and the part of it that is at hand.
struct Cursor {
  int phase, begin, at, end;  // units
  bool whole;                 // see `inner_whole`
  int units, log, first;      // at hand: how many, its logarithm, and the first of them in its slot
  bool fresh, last;           // of the tiles that share rows in the ring
  int slot, row0, rows;
};

DEVICE int units_of_slot(const Task& t, int phase) {
  return phase ? (t.down.n + 63) / 64 : t.gate_up.n / 64;
}

// Parts that K is cut into between the workers; within a tile a place in the ring of rows belongs to one of them.
DEVICE int shares_of(const Cursor& c) { return WORKERS >> c.log; }

// FP8: whether inner rows are rounded as they are made, for which a tile of gate and up must be a whole group of 128
// columns: where there are too few tiles for that, each block rounds what it reads.
DEVICE bool inner_whole(const Task& t, int groups) {
  return FP8 && WORKERS == 4 && t.down.k % 128 == 0 && (u32)groups * (t.down.k / 128) >= 5 * gridDim.x;
}

DEVICE float* inner_scales(const Task& t) { return (float*)((u8*)t.inner + (u64)t.rows * t.down.k); }

DEVICE void enter(Cursor& c, const Task& t, int groups, int phase) {
  c.phase = phase;
  c.whole = inner_whole(t, groups);
  const int step = c.whole && !phase ? WORKERS : 1;
  const u32 total = (u32)groups * units_of_slot(t, phase) / step;
  c.at = c.begin = (u64)total * blockIdx.x / gridDim.x * step;
  c.end = (u64)total * (blockIdx.x + 1) / gridDim.x * step;
}

// Of K.
DEVICE int pieces_of(const Task& t, int phase) { return (side_of(t, phase).k + DEPTH - 1) / DEPTH; }

// Whether the ring holds all of K, so that rows stay there for all tiles of their group.
DEVICE bool keeps_rows(const Task& t, int phase) { return pieces_of(t, phase) <= PIECES; }

// Looks up what stands at c.at; there is something.
DEVICE void look(Cursor& c, const Task& t, u32 base) {
  const int across = units_of_slot(t, c.phase), group = c.at / across;
  c.first = c.at - group * across;
  const int left = min(c.end - c.at, across - c.first);
  c.log = WORKERS >= 4 && left >= 4 ? 2 : left >= 2 ? 1 : 0;
  c.units = 1 << c.log;
  const bool kept = keeps_rows(t, c.phase);
  c.fresh = !kept || c.first == 0 || c.at == c.begin;
  c.last = !kept || c.units == left;
  int low = 0, high = shared_word(base + TOTALS_AT + 4);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if ((shared_word(base + LIST_AT + middle * 4) & BEFORE) <= group)
      low = middle;
    else
      high = middle;
  }
  const u32 entry = shared_word(base + LIST_AT + low * 4);
  c.slot = entry >> BEFORE_BITS;
  const int before = entry & BEFORE;
  const int done = (group - before) * ROWS;
  c.row0 = __ldg(t.offsets + c.slot) + done;
  c.rows = min(__ldg(t.counts + c.slot) - done, ROWS);
}

// The list of slots that have rows. By one warp.
DEVICE void list_slots(const Task& t, u32 base, int lane) {
  int groups = 0, active = 0;
  int count[MOST_SLOTS / 32];
#pragma unroll
  for (int i = 0; i < MOST_SLOTS / 32; ++i) {
    const int slot = i * 32 + lane;
    count[i] = slot < t.slots ? __ldg(t.counts + slot) : 0;
  }
#pragma unroll
  for (int i = 0; i < MOST_SLOTS / 32; ++i) {
    if (i * 32 >= t.slots) break;
    const int own = (max(count[i], 0) + ROWS - 1) / ROWS;
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    const u32 there = __ballot_sync(~0u, own > 0);
    const int place = active + __popc(there & ((1u << lane) - 1));
    if (own > 0)
      store_word(base + LIST_AT + place * 4, (u32)(groups + sum - own) | (u32)(i * 32 + lane) << BEFORE_BITS);
    groups += __shfl_sync(~0u, sum, 31);
    active += __popc(there);
  }
  if (lane == 0)
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(base + TOTALS_AT), "r"(groups), "r"(active) : "memory");
}
