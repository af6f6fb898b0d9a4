// Low latency: a dispatch is one kernel, a combine is one kernel, and nothing in them waits for a whole grid.
// Given by -D beside what common.cu takes: TOP_K.
//
// Choices travel to all ranks, a row to each rank that needs it, a partial sum home. What is small travels in
// words of 12 bytes under a seal, which costs a third more bytes but no fence and no flag: choices always,
// partial sums in small steps. The rest goes as it is, and its flag behind it. Seals and flags hold the
// epoch, and no epoch's words are written over before they are read: see ll_layout.py.

#define THREADS 512
#define WARPS (THREADS / 32)
#define WORDS ((TOP_K + 1) / 2)  // of a row's choices
#define EMPTY_PAIR 0xFFFFFFFFu
#define ALL_LANES 0xFFFFFFFFu

// Rows of each lane, 16 bits a rank.
struct Lanes {
  u64 low, high;
  DEVICE int rows(int rank) const { return (int)((rank < 4 ? low : high) >> 16 * (rank % 4)) & 0xFFFF; }
  DEVICE int all() const {
    int sum = 0;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) sum += rows(r);
    return sum;
  }
  // Row `g` of all lanes' rows one after the other: whose it is, and which of its rows.
  DEVICE void find(int g, int& source, int& row) const {
    source = 0, row = g;
#pragma unroll
    for (int r = 0; r < RANKS - 1; ++r)
      if (source == r && row >= rows(r)) row -= rows(r), ++source;
  }
};

struct Places {  // of this rank's slots
  int first, slots, capacity, sliced;
  DEVICE int local(u32 slot) const {
    int at = (int)slot - first;
    return at >= 0 && at < slots ? at : -1;
  }
  // Ranks that hold a slot, one bit each.
  DEVICE u32 holders(int slot) const {
    if (slot < 0) return 0u;
    if (sliced) return (1u << RANKS) - 1u;
    int rank = slot / slots;
    return rank < RANKS ? 1u << rank : 0u;
  }
};

DEVICE u32 live_ranks(const Watch& w) {
  u32 mask = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) mask |= is_live(w, r) ? 1u << r : 0u;
  return mask;
}

// A sealed word, when it is there; false when its source will not come.
DEVICE bool receive(const Watch& w, const uint4* at, int source, u32 epoch, uint4& word) {
  return belongs(word, epoch) ||
         await(w, source, epoch, [&] { return belongs(word = load_whole(at), epoch); });
}

// One word of choices; none when its source will not come.
DEVICE uint4 choices(const Watch& w, const uint4* at, int source, u32 epoch) {
  uint4 word = load_whole(at);
  return receive(w, at, source, epoch, word) ? word : make_uint4(EMPTY_PAIR, 0u, 0u, 0u);
}
