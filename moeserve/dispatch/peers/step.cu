// What a dispatch and a combine share, one kernel each, in which nothing waits for a whole grid.
// Given by -D beside what common.cu takes: TOP_K.
//
// Choices travel to all ranks, a row to each rank that needs it, a partial sum home. All of it tells by
// itself that it is here, without fence or flag: choices in words of 12 bytes under a check, rows and sums in
// packets.
// Seals and tags hold the sequence number, and no sequence number's words are written over before they are read: see layout.py.

#define WEIGHT_WORDS ((TOP_K + 2) / 3)  // of a row
#define NOWHERE 0xFFFFu
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

// What a block knows of its step, in shared memory: one warp asks for all, since words that every warp of a
// GPU asks for come late.
struct Step {
  u64 memory[RANKS];  // of all ranks, from the sequence number's half on
  u32 sequence, reachable;
};

// What the asking warp has been told, a rank a lane; it has other work until it opens the step.
struct Opening {
  u64 at;
  u32 live, last;

  DEVICE Opening(const u64* memory, const u32* live_ranks, const u32* last_sequence, bool asks)
      : at(0), live(0), last(0) {
    const int lane = threadIdx.x % 32;
    if (!asks) return;
    last = *(volatile const u32*)last_sequence;
    if (lane >= RANKS) return;
    at = *(volatile const u64*)(memory + lane), live = *(volatile const u32*)(live_ranks + lane);
  }
  DEVICE void open(Step& step, u32 sequence, u64 parity_bytes) const {
    const int lane = threadIdx.x % 32;
    const u32 reachable = __ballot_sync(ALL_LANES, live != 0);
    if (lane < RANKS) step.memory[lane] = at + sequence % 2 * parity_bytes;
    if (lane == 0) step.sequence = sequence, step.reachable = reachable;
  }
};

// A checked word, when it is there; false when its source will not come.
DEVICE bool receive(const Watch& w, const uint4* at, int source, u32 sequence, uint4& word) {
  return belongs(word, sequence) ||
         await(w, source, sequence, [&] { return belongs(word = load_whole(at), sequence); });
}

// A checked word; empty when its source will not come.
DEVICE uint4 received(const Watch& w, const uint4* at, int source, u32 sequence, uint4 empty) {
  uint4 word = load_whole(at);
  return receive(w, at, source, sequence, word) ? word : empty;
}

// ---- packets: rows whose lines tell by themselves that they are here ---------------------------------------

// A packet is what one store of a warp carries: 31 words of 16 bytes, and in each of its four lines of 128
// bytes the sequence number. A line arrives whole, so its sequence number tells that it is here (NCCL's LL128 rests on the same).
// The last packet of a row has no more lines than it needs.
#define PACKET 32  // words of 16 bytes it takes
#define PACKET_WORDS 31
#define WORDS_OF(BYTES) ((BYTES) / 16)
#define PACKETS_OF(BYTES) ((WORDS_OF(BYTES) + PACKET_WORDS - 1) / PACKET_WORDS)

// The last lane of packet `packet` of a row of BYTES: what other lines' tags displaced stands there.
template <int BYTES>
DEVICE int last_lane(int packet) {
  constexpr int LEFT = WORDS_OF(BYTES) - (PACKETS_OF(BYTES) - 1) * PACKET_WORDS;  // words of the last packet
  return packet == PACKETS_OF(BYTES) - 1 ? LEFT / 8 * 8 + 7 : PACKET_WORDS;
}

// The words of lanes 0 .. last - 1 as a packet; a warp makes it.
DEVICE uint4 tagged(uint4 word, u32 sequence, int last) {
  const int lane = threadIdx.x % 32;
  const u32 x = __shfl_sync(ALL_LANES, word.w, 7), y = __shfl_sync(ALL_LANES, word.w, 15);
  const u32 z = __shfl_sync(ALL_LANES, word.w, 23);
  if (lane == last) word = make_uint4(x, y, z, sequence);
  if (lane % 8 == 7) word.w = sequence;
  return word;
}

DEVICE uint4 untagged(uint4 word, int last) {
  const int lane = threadIdx.x % 32;
  const u32 x = __shfl_sync(ALL_LANES, word.x, last), y = __shfl_sync(ALL_LANES, word.y, last);
  const u32 z = __shfl_sync(ALL_LANES, word.z, last);
  if (lane % 8 == 7) word.w = lane == 7 ? x : lane == 15 ? y : z;
  return word;
}

DEVICE void store_packet(uint4* at, uint4 word, int last) {
  if ((int)(threadIdx.x % 32) <= last) store_whole(at + threadIdx.x % 32, word);
}

DEVICE uint4 load_packet(const uint4* at, int last) {
  return (int)(threadIdx.x % 32) <= last ? load_whole(at + threadIdx.x % 32) : make_uint4(0u, 0u, 0u, 0u);
}

// Whether all lines of a packet are here; a warp asks.
DEVICE bool is_whole(uint4 word, u32 sequence, int last) {
  const int lane = threadIdx.x % 32;
  return __all_sync(ALL_LANES, lane % 8 != 7 || lane > last || word.w == sequence);
}

// Which of the `missing` packets to ask for again: all, once some came, else the first, since those who wait
// together ask for more than the memory gives.
DEVICE u32 to_ask(u32 missing, u32 last) {
  return missing == last ? missing & ~(missing - 1u) : missing;
}
