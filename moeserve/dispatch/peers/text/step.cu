// What a dispatch and a combine share. Each is one kernel, in which nothing waits for a whole grid.
// Given by -D beside what memory.cu takes: TOP_K.
//
// Choices travel to all ranks, a row to each rank that needs it, and a partial sum back to the row's rank. A reader sees
// by the bytes themselves that they have arrived, without a fence or a flag: choices and weights are checked words, rows
// and sums are packets. Both hold the sequence number. layout.py says why none is overwritten before it is read.

#define WEIGHT_WORDS ((TOP_K + 2) / 3)  // of a row
#define NOWHERE 0xFFFFu
#define WHOLE_WARP 0xFFFFFFFFu

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
  // Whose row `g` of all lanes' rows one after the other is, and which of that lane's rows.
  DEVICE void find(int g, int& source, int& row) const {
    source = 0, row = g;
#pragma unroll
    for (int r = 0; r < RANKS - 1; ++r)
      if (source == r && row >= rows(r)) row -= rows(r), ++source;
  }
};

// This rank's slots.
struct Places {
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

// What a block knows of its step, in shared memory. One warp loads it for all, since words that every warp of a GPU
// loads come late.
struct Step {
  u64 memory[RANKS];  // of all ranks, from the sequence number's half on
  u32 sequence, reachable;
};

// What the loading warp has loaded, a rank in each thread. The warp has other work until it opens the step.
struct Opening {
  u64 at;
  u32 live, last;

  DEVICE Opening(const u64* memory, const u32* live_ranks, const u32* last_sequence, bool loads)
      : at(0), live(0), last(0) {
    const int warp_thread = threadIdx.x % 32;
    if (!loads) return;
    last = *(volatile const u32*)last_sequence;
    if (warp_thread >= RANKS) return;
    at = *(volatile const u64*)(memory + warp_thread), live = *(volatile const u32*)(live_ranks + warp_thread);
  }
  DEVICE void open(Step& step, u32 sequence, u64 parity_bytes) const {
    const int warp_thread = threadIdx.x % 32;
    const u32 reachable = __ballot_sync(WHOLE_WARP, live != 0);
    if (warp_thread < RANKS) step.memory[warp_thread] = at + sequence % 2 * parity_bytes;
    if (warp_thread == 0) step.sequence = sequence, step.reachable = reachable;
  }
};

// Waits for the checked word that stands `at`, of which `word` was loaded; false when its source will not come.
DEVICE bool receive(const Watch& w, const uint4* at, int source, u32 sequence, uint4& word) {
  return belongs(word, sequence) ||
         await(w, source, sequence, [&] { return belongs(word = load_whole(at), sequence); });
}

// The checked word that stands `at`; `empty` when its source will not come.
DEVICE uint4 received(const Watch& w, const uint4* at, int source, u32 sequence, uint4 empty) {
  uint4 word = load_whole(at);
  return receive(w, at, source, sequence, word) ? word : empty;
}
