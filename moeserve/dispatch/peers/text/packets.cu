// Packets: how rows travel, so that a reader sees by their own bytes that they have arrived.

// A packet is what one store of a warp carries: 31 words of 16 bytes, and the sequence number at the end of each of its
// four lines of 128 bytes. A line arrives whole, so a reader that finds the sequence number has the line (NCCL's LL128
// rests on the same). The last packet of a row has no more lines than it needs.
#define PACKET 32  // words of 16 bytes it takes
#define PACKET_WORDS 31
#define WORDS_OF(BYTES) ((BYTES) / 16)
#define PACKETS_OF(BYTES) ((WORDS_OF(BYTES) + PACKET_WORDS - 1) / PACKET_WORDS)

// The last thread that has a word of packet `packet` of a row of BYTES. That word holds what the sequence numbers of
// the other lines displaced.
template <int BYTES>
DEVICE int last_thread(int packet) {
  constexpr int LEFT = WORDS_OF(BYTES) - (PACKETS_OF(BYTES) - 1) * PACKET_WORDS;  // words of the last packet
  return packet == PACKETS_OF(BYTES) - 1 ? LEFT / 8 * 8 + 7 : PACKET_WORDS;
}

// The words of threads 0 .. last - 1 as a packet. A warp calls it.
DEVICE uint4 tagged(uint4 word, u32 sequence, int last) {
  const int warp_thread = threadIdx.x % 32;
  const u32 x = __shfl_sync(WHOLE_WARP, word.w, 7), y = __shfl_sync(WHOLE_WARP, word.w, 15);
  const u32 z = __shfl_sync(WHOLE_WARP, word.w, 23);
  if (warp_thread == last) word = make_uint4(x, y, z, sequence);
  if (warp_thread % 8 == 7) word.w = sequence;
  return word;
}

// The words of a packet without its sequence numbers. A warp calls it.
DEVICE uint4 untagged(uint4 word, int last) {
  const int warp_thread = threadIdx.x % 32;
  const u32 x = __shfl_sync(WHOLE_WARP, word.x, last), y = __shfl_sync(WHOLE_WARP, word.y, last);
  const u32 z = __shfl_sync(WHOLE_WARP, word.z, last);
  if (warp_thread % 8 == 7) word.w = warp_thread == 7 ? x : warp_thread == 15 ? y : z;
  return word;
}

DEVICE void store_packet(uint4* at, uint4 word, int last) {
  if ((int)(threadIdx.x % 32) <= last) store_whole(at + threadIdx.x % 32, word);
}

DEVICE uint4 load_packet(const uint4* at, int last) {
  return (int)(threadIdx.x % 32) <= last ? load_whole(at + threadIdx.x % 32) : make_uint4(0u, 0u, 0u, 0u);
}

// Whether all lines of a packet have arrived. A warp calls it.
DEVICE bool is_whole(uint4 word, u32 sequence, int last) {
  const int warp_thread = threadIdx.x % 32;
  return __all_sync(WHOLE_WARP, warp_thread % 8 != 7 || warp_thread > last || word.w == sequence);
}

// Which of the `missing` packets to load again: all of them once some have arrived, else the first. Loads of all that
// wait would be more than the memory serves.
DEVICE u32 to_ask(u32 missing, u32 last) {
  return missing == last ? missing & ~(missing - 1u) : missing;
}
