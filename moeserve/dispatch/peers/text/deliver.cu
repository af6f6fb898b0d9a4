// Records that arrive, brought to their places in the batch.

// The widest word that a part's bytes are whole words of.
template <int BYTES>
struct WordOf { typedef u8 type; };
template <>
struct WordOf<2> { typedef u16 type; };
template <>
struct WordOf<4> { typedef u32 type; };
template <>
struct WordOf<8> { typedef uint2 type; };
template <>
struct WordOf<16> { typedef uint4 type; };

// What of a part stands in a record's word, BYTES a row in the batch, to its place; `at` is the word's first
// byte in the part.
template <int BYTES>
DEVICE void put(u8* batch, int place, int at, uint4 word) {
  constexpr int WIDE = (BYTES & -BYTES) < 16 ? (BYTES & -BYTES) : 16;
  typedef typename WordOf<WIDE>::type Word;
  u8* to = batch + (u64)place * BYTES + at;
  union {
    uint4 whole;
    Word pieces[16 / WIDE];
  } found;
  found.whole = word;
#pragma unroll
  for (int i = 0; i < 16 / WIDE; ++i)
    if (at + i * WIDE < BYTES) ((Word*)to)[i] = found.pieces[i];
}

DEVICE void put_word(const Batch& batch, int place, int byte, uint4 word) {
#if PARTS > 2
  if (byte >= PART2_AT) {
    put<PART2_BYTES>(batch.parts[2], place, byte - PART2_AT, word);
    return;
  }
#endif
#if PARTS > 1
  if (byte >= PART1_AT) {
    put<PART1_BYTES>(batch.parts[1], place, byte - PART1_AT, word);
    return;
  }
#endif
  put<PART0_BYTES>(batch.parts[0], place, byte, word);
}

// Brings a team's packets of row `g` of all lanes' rows to the row's places, as they arrive. Each thread has one of the
// places. A warp calls it.
DEVICE void deliver(const Exchange& x, int g, int place, Team team) {
  int source, row;
  x.lanes.find(g, source, row);
  const uint4* arrived = x.arrived(x.at.records) + x.room(source, row) * RECORD_PACKETS * PACKET;
  const int warp_thread = threadIdx.x % 32;
  const u32 hits = __ballot_sync(WHOLE_WARP, place >= 0);
  for (int first = hits ? team.warp : RECORD_PACKETS; first < RECORD_PACKETS; first += team.warps * AT_ONCE) {
    uint4 words[AT_ONCE];
    auto packet = [&](int i) { return first + i * team.warps; };
    auto at = [&](int i) { return arrived + packet(i) * PACKET; };
    auto last = [&](int i) { return last_thread<RECORD_BYTES>(packet(i)); };
    u32 missing = 0, lately = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (packet(i) < RECORD_PACKETS) missing |= 1u << i, words[i] = load_packet(at(i), last(i));
    for (u32 polls = 1;; ++polls) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if ((missing >> i & 1u) && is_whole(words[i], x.step.sequence, last(i))) missing &= ~(1u << i);
      if (!missing) break;
      const u32 asked = to_ask(missing, lately);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (asked >> i & 1u) words[i] = load_packet(at(i), last(i));
      lately = missing;
      if (polls % 64 == 0 && __any_sync(WHOLE_WARP, warp_thread == 0 && is_gone(x.w, source, x.step.sequence))) return;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (packet(i) < RECORD_PACKETS) words[i] = untagged(words[i], last(i));
#pragma unroll 1
    for (u32 left = hits; left; left &= left - 1) {
      const int to = __shfl_sync(WHOLE_WARP, place, __ffs(left) - 1);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int byte = 16 * (PACKET_WORDS * packet(i) + warp_thread);
        if (warp_thread < PACKET_WORDS && byte < RECORD_BYTES) put_word(x.batch, to, byte, words[i]);
      }
    }
  }
}

// Brings the span's rows to their places, each by a team: with few rows a team has one, with many it has a stretch.
// `places` holds the place of one choice in each thread if these are `few`; else they stand in the tables.
DEVICE void deliver_rows(const Exchange& x, DispatchSpan span, const Tables& t, bool few, int places) {
  const int warp_thread = threadIdx.x % 32, warp = threadIdx.x / 32, warps = max(LEAST_TEAM, WARPS / span.count);
  const int teams = WARPS / warps, length = (span.count + teams - 1) / teams;
  const int upto = min((warp / warps + 1) * length, span.count);
#pragma unroll 1
  for (int i = warp / warps * length; i < upto; ++i) {
    int place = few ? __shfl_sync(WHOLE_WARP, places, (i * TOP_K + warp_thread) % 32) : -1;
    if (!few && warp_thread < TOP_K) place = t.choices[i][warp_thread];
    deliver(x, span.from + i, warp_thread < TOP_K ? place : -1, Team{warp % warps, warps});
  }
}
