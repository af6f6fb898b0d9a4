// What a dispatch and a combine share. Each is one kernel, in which nothing waits for a whole grid.
// Given by -D beside what memory.cu takes: TOP_K.
//
// Choices travel to all owners, a row to each owner that needs it, and a partial sum back to the row's lane. A reader sees
// by the bytes themselves that they have arrived, without a fence or a flag: choices and weights are checked words, rows
// and sums are packets. Both hold the sequence number. layout.py says why none is overwritten before it is read.

#define WEIGHT_WORDS ((TOP_K + 2) / 3)  // of a row
#define NOWHERE 0xFFFFu
#define WHOLE_WARP 0xFFFFFFFFu

#define LANE_WORDS ((LANES + 3) / 4)

// Rows of each lane, 16 bits a lane.
struct Lanes {
  u64 words[LANE_WORDS];
  DEVICE explicit Lanes(const u64* given) {
#pragma unroll
    for (int i = 0; i < LANE_WORDS; ++i) words[i] = given[i];
  }
  DEVICE int rows(int lane) const {
    u64 word = words[0];
#pragma unroll
    for (int i = 1; i < LANE_WORDS; ++i) word = lane >= 4 * i ? words[i] : word;
    return (int)(word >> 16 * (lane % 4)) & 0xFFFF;
  }
  // Rows of all lanes before `lane`.
  DEVICE int before(int lane) const {
    int sum = 0;
#pragma unroll
    for (int l = 0; l < LANES; ++l) sum += l < lane ? rows(l) : 0;
    return sum;
  }
  DEVICE int all() const {
    int sum = 0;
#pragma unroll
    for (int l = 0; l < LANES; ++l) sum += rows(l);
    return sum;
  }
  // Whose row `g` of all lanes' rows one after the other is, and which of that lane's rows.
  DEVICE void find(int g, int& source, int& row) const {
    source = 0, row = g;
#pragma unroll
    for (int l = 0; l < LANES - 1; ++l)
      if (source == l && row >= rows(l)) row -= rows(l), ++source;
  }
};

// This member's slots, and how slots are numbered: `stride` numbers for each owner's place.
struct Places {
  int first, slots, stride, capacity, sliced;
  DEVICE int local(u32 slot) const {
    int at = (int)slot - first;
    return at >= 0 && at < slots ? at : -1;
  }
  // Owners that hold a slot, one bit each.
  DEVICE u32 holders(int slot) const {
    if (slot < 0) return 0u;
    if (sliced) return (1u << OWNERS) - 1u;
    int owner = slot / stride;
    return owner < OWNERS ? 1u << owner : 0u;
  }
};

#define TABLE (LANES > OWNERS ? LANES : OWNERS)

// What a block knows of its step, in shared memory. One warp loads it for all, since words that every warp of a GPU
// loads come late.
struct Step {
  u64 memory[TABLE];  // where this kernel stores: of owners or of lanes, from the sequence number's half on
  u64 here;           // where it reads what they stored
  u32 sequence, lanes, owners;  // lanes and owners that take part and are live, one bit each
  u32 behind;         // the number that all owners must have left behind before this lane stores anything
  bool waits;         // whether some may not have yet; layout.py says why
};

// What the loading warp has loaded, a place in each thread. The warp has other work until it opens the step.
struct Opening {
  int count;
  u64 at;
  u32 lane, owner;

  DEVICE Opening(const u64* table, int count, const u32* live, bool loads) : count(count), at(0), lane(0), owner(0) {
    const int warp_thread = threadIdx.x % 32;
    if (!loads) return;
    if (warp_thread < count) at = *(volatile const u64*)(table + warp_thread);
    if (warp_thread < LANES) lane = *(volatile const u32*)(live + warp_thread);
    if (warp_thread < OWNERS) owner = *(volatile const u32*)(live + LANES + warp_thread);
  }
  DEVICE void open(Step& step, u32 sequence, u32 absent, const u8* here, u64 parity_bytes) const {
    const int warp_thread = threadIdx.x % 32;
    const u64 half = sequence % 2 * parity_bytes;
    const u32 lanes = __ballot_sync(WHOLE_WARP, lane != 0), owners = __ballot_sync(WHOLE_WARP, owner != 0);
    if (warp_thread < count) step.memory[warp_thread] = at + half;
    if (warp_thread != 0) return;
    step.sequence = sequence, step.lanes = lanes & ~absent, step.owners = owners, step.here = (u64)here + half;
  }
};

// Waits for the checked word of lane `source` that stands `at`, of which `word` was loaded; false when it will not come.
DEVICE bool receive(const Watch& w, const uint4* at, int source, u32 sequence, uint4& word) {
  return belongs(word, sequence) ||
         await(w, source, sequence, [&] { return belongs(word = load_whole(at), sequence); });
}

// The checked word of lane `source` that stands `at`; `empty` when it will not come.
DEVICE uint4 received(const Watch& w, const uint4* at, int source, u32 sequence, uint4 empty) {
  uint4 word = load_whole(at);
  return receive(w, at, source, sequence, word) ? word : empty;
}
