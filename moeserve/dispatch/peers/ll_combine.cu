// The low-latency combine, for larger steps and for small ones; behind ll_shared.cu.

#define VECTORS 4  // 16-byte vectors a lane holds of a partial sum
#if SOURCE == 2
#define VECTOR 4  // columns
#else
#define VECTOR 8
#endif
#define SPAN (32 * VECTOR * VECTORS)  // columns of a partial sum that a warp makes
#define SPANS ((HIDDEN + SPAN - 1) / SPAN)

// The vectors of one lane of a span, one 16-byte word each; past the row's end they are zero.
DEVICE void load_span(const uint4* row, int span, uint4 (&words)[VECTORS]) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = (span * VECTORS + i) * 32 + threadIdx.x % 32;
    words[i] = at * VECTOR < HIDDEN ? row[at] : make_uint4(0u, 0u, 0u, 0u);
  }
}

DEVICE void add_word(float (&sum)[VECTOR], uint4 word, float weight) {
  const u32 four[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if SOURCE == 2
    sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, from_bits(four[i])));
#else
    float low, high;
    widen(four[i], low, high);
    sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight, low));
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight, high));
#endif
  }
}

// Sums as they travel: rounded to SOURCE.
DEVICE void pack_span(const float (&sums)[VECTORS][VECTOR], uint4 (&words)[VECTORS]) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
#if SOURCE == 2
    words[i] = make_uint4(__float_as_uint(sums[i][0]), __float_as_uint(sums[i][1]),
                          __float_as_uint(sums[i][2]), __float_as_uint(sums[i][3]));
#else
    words[i] = make_uint4(narrow(sums[i][0], sums[i][1]), narrow(sums[i][2], sums[i][3]),
                          narrow(sums[i][4], sums[i][5]), narrow(sums[i][6], sums[i][7]));
#endif
}

DEVICE void store_span(uint4* row, int span, const uint4 (&words)[VECTORS]) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = (span * VECTORS + i) * 32 + threadIdx.x % 32;
    if (at * VECTOR < HIDDEN) row[at] = words[i];
  }
}

#define AT_A_TIME 3  // outputs whose loads are under way at once
#define HOME_WARPS (RANKS > 4 ? WARPS / 4 : RANKS > 1 ? WARPS / RANKS : WARPS / 2)  // the others send

// Where the outputs of one row's choices stand, and their weights, one choice a lane.
struct Choice {
  int place;
  float weight;
};

DEVICE Choice choice_of(const int* places, const float* place_weights, int g) {
  const int lane = threadIdx.x % 32;
  Choice found{-1, 0.0f};
  if (lane < TOP_K)
    found.place = places[(u64)g * TOP_K + lane], found.weight = place_weights[(u64)g * TOP_K + lane];
  return found;
}

// Adds up a span of a row's weighted outputs, in order of choice; `meanwhile` runs while the first are on
// their way.
template <class Meanwhile>
DEVICE void gather_span(const uint4* outputs, const Choice& choice, int span,
                        float (&sums)[VECTORS][VECTOR], Meanwhile meanwhile) {
  constexpr int ROW = HIDDEN / VECTOR;  // 16-byte words
  u32 hits = __ballot_sync(ALL_LANES, choice.place >= 0);
  for (bool first = true; hits; first = false) {
    uint4 words[AT_A_TIME][VECTORS];
    float by[AT_A_TIME];
    u32 here = 0;
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const int one = hits ? __ffs(hits) - 1 : 0;
      here |= hits ? 1u << i : 0u;
      hits &= hits - (hits ? 1u : 0u);
      const int from = __shfl_sync(ALL_LANES, choice.place, one);
      by[i] = __shfl_sync(ALL_LANES, choice.weight, one);
      if (here >> i & 1u) load_span(outputs + (u64)from * ROW, span, words[i]);
    }
    if (first) meanwhile();
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i)
      if (here >> i & 1u)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) add_word(sums[v], words[i][v], by[i]);
  }
}

// For larger steps. Some warps send spans of partial sums, which waits for nobody; the others make this rank's
// own sums of its lane's rows, and add up what comes.
extern "C" __global__ void __launch_bounds__(THREADS, 1) ll_combine(
    const u64* memory, u32* live, u32* board, u64 patience, int rank,
    u64 at_returned, u64 at_partials, u64 parity_bytes, int lane_rows, u64 lanes_low, u64 lanes_high,
    int slots_here, int sliced, const uint4* outputs, const int* places, const float* place_weights,
    const u32* ticket, const int* slots, uint4* answer) {
  constexpr int ROW = HIDDEN / VECTOR;  // 16-byte words
  const Lanes lanes{lanes_low, lanes_high};
  const Places here{0, slots_here, 0, sliced};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = lanes.all(), own_rows = lanes.rows(rank);
  int before = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) before += r < rank ? lanes.rows(r) : 0;

  if (warp >= HOME_WARPS) {
    const int step = gridDim.x * (WARPS - HOME_WARPS), end = (all - own_rows) * SPANS;
    auto row_of = [&](int unit) {  // from behind this lane's on, so that ranks do not all store to the same
      const int g = unit / SPANS + before + own_rows;
      return g >= all ? g - all : g;
    };
    int unit = blockIdx.x + gridDim.x * (warp - HOME_WARPS);
    Choice next = unit < end ? choice_of(places, place_weights, row_of(unit)) : Choice{-1, 0.0f};
    const Watch w = watch(live, board, memory, rank, patience);
    const u32 epoch = *ticket, reachable = live_ranks(w);
    const u64 half = (epoch % 2) * parity_bytes;
    u32* told = 0;
    for (; unit < end; unit += step) {
      const Choice choice = next;
      if (unit + step < end) next = choice_of(places, place_weights, row_of(unit + step));
      int source, row;
      lanes.find(row_of(unit), source, row);
      if (!(reachable >> source & 1u) || !__any_sync(ALL_LANES, choice.place >= 0)) continue;
      float sums[VECTORS][VECTOR] = {};
      gather_span(outputs, choice, unit % SPANS, sums, [&] {
        if (told && lane == 0) store_release(told, epoch);  // of the span before, whose stores it waits for
      });
      const u64 at = (u64)rank * lane_rows + row;
      uint4 words[VECTORS];
      pack_span(sums, words);
      store_span((uint4*)(memory[source] + half + at_partials) + at * ROW, unit % SPANS, words);
      __syncwarp();
      told = (u32*)(memory[source] + half + at_returned) + at * SPANS + unit % SPANS;
    }
    if (told && lane == 0) store_release(told, epoch);
    return;
  }

  int unit = blockIdx.x + gridDim.x * warp;
  const int step = gridDim.x * HOME_WARPS, end = own_rows * SPANS;
  Choice next = unit < end ? choice_of(places, place_weights, before + unit / SPANS) : Choice{-1, 0.0f};
  const Watch w = watch(live, board, memory, rank, patience);
  const u32 epoch = *ticket, reachable = live_ranks(w);
  const u64 half = (epoch % 2) * parity_bytes;
  const u8* mine = (const u8*)memory[rank] + half;
  for (; unit < end; unit += step) {
    const int row = unit / SPANS, span = unit % SPANS;
    const Choice choice = next;
    if (unit + step < end) next = choice_of(places, place_weights, before + (unit + step) / SPANS);
    const u32 holders = here.holders(lane < TOP_K ? slots[(u64)row * TOP_K + lane] : -1);
    const u32 needed = __reduce_or_sync(ALL_LANES, holders) & reachable & ~(1u << rank);
    uint4 own[VECTORS];
    {
      float sums[VECTORS][VECTOR] = {};
      gather_span(outputs, choice, span, sums, [] {});
      pack_span(sums, own);
    }
    bool came = false;
    if (lane < RANKS && (needed >> lane & 1u)) {
      const u32* flag = (const u32*)(mine + at_returned) + ((u64)lane * lane_rows + row) * SPANS + span;
      came = await(w, lane, epoch, [&] { return load_acquire(flag) == epoch; });
    }
    const u32 there = __ballot_sync(ALL_LANES, came);
    __syncwarp();
    float sums[VECTORS][VECTOR] = {};
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      uint4 words[VECTORS];
      if (r != rank && !(there >> r & 1u)) continue;
      const uint4* arrived = (const uint4*)(mine + at_partials) + ((u64)r * lane_rows + row) * ROW;
      if (r != rank) load_span(arrived, span, words);
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) add_word(sums[v], r == rank ? own[v] : words[v], 1.0f);
    }
    uint4 words[VECTORS];
    pack_span(sums, words);
    store_span(answer + (u64)row * ROW, span, words);
  }
}

// One word of a row's 12 bytes times its weight onto sums of SUMS columns.
#if SOURCE == 2
#define SUMS 3
#else
#define SUMS 6
#endif

DEVICE void add_three(float (&sums)[SUMS], const u32 (&three)[3], float weight) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#if SOURCE == 2
    sums[i] = __fadd_rn(sums[i], __fmul_rn(weight, from_bits(three[i])));
#else
    float low, high;
    widen(three[i], low, high);
    sums[2 * i] = __fadd_rn(sums[2 * i], __fmul_rn(weight, low));
    sums[2 * i + 1] = __fadd_rn(sums[2 * i + 1], __fmul_rn(weight, high));
#endif
  }
}

DEVICE void round_words(const float (&sums)[SUMS], u32 (&three)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#if SOURCE == 2
    three[i] = __float_as_uint(sums[i]);
#else
    three[i] = narrow(sums[2 * i], sums[2 * i + 1]);
#endif
  }
}

// For small steps: partial sums travel under seals, so that no lane waits for another's fence. A warp makes
// 32 words of a row at a time, 12 bytes each.
extern "C" __global__ void __launch_bounds__(THREADS, 1) ll_combine_small(
    const u64* memory, u32* live, u32* board, u64 patience, int rank, u64 at_sealed, u64 parity_bytes,
    int small_rows, u64 lanes_low, u64 lanes_high, int slots_here, int sliced, const u32* outputs,
    const int* places, const float* place_weights, const u32* ticket, const int* slots, u32* answer) {
  constexpr int ROW = HIDDEN / VECTOR * 4;  // words of 4 bytes
  constexpr int ROW_WORDS = (ROW + 2) / 3, RUNS = (ROW_WORDS + 31) / 32;
  const Lanes lanes{lanes_low, lanes_high};
  const Places here{0, slots_here, 0, sliced};
  const Watch w = watch(live, board, memory, rank, patience);
  const int lane = threadIdx.x % 32, all = lanes.all(), own_rows = lanes.rows(rank);
  const int first = blockIdx.x + gridDim.x * (threadIdx.x / 32), step = gridDim.x * WARPS;
  const u32 epoch = *ticket, reachable = live_ranks(w);
  const u64 half = (epoch % 2) * parity_bytes;
  int turn = own_rows;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) turn += r < rank ? lanes.rows(r) : 0;

  for (int unit = first; unit < all * RUNS; unit += step) {
    int g = unit / RUNS + turn, source, row;
    if (g >= all) g -= all;
    lanes.find(g, source, row);
    const int word = unit % RUNS * 32 + lane;
    const int place = lane < TOP_K ? places[(u64)g * TOP_K + lane] : -1;
    const float weight = place >= 0 ? place_weights[(u64)g * TOP_K + lane] : 0.0f;
    const u32 hits = __ballot_sync(ALL_LANES, place >= 0);
    if (!hits || !(reachable >> source & 1u)) continue;
    u32 found[TOP_K][3];
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {  // all on their way before the first is added
      const int from = __shfl_sync(ALL_LANES, place, k);
#pragma unroll
      for (int i = 0; i < 3; ++i)
        found[k][i] = from >= 0 && 3 * word + i < ROW ? outputs[(u64)from * ROW + 3 * word + i] : 0u;
    }
    float sums[SUMS] = {};
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
      const float by = __shfl_sync(ALL_LANES, weight, k);
      if (hits >> k & 1u) add_three(sums, found[k], by);
    }
    u32 three[3];
    round_words(sums, three);
    const u64 at = ((u64)rank * small_rows + row) * ROW_WORDS + word;
    if (word < ROW_WORDS)
      store_whole((uint4*)(memory[source] + half + at_sealed) + at,
                  sealed(three[0], three[1], three[2], epoch));
  }

  const u8* mine = (const u8*)memory[rank] + half;
  for (int unit = first; unit < own_rows * RUNS; unit += step) {
    const int row = unit / RUNS, word = unit % RUNS * 32 + lane;
    const u32 holders = here.holders(lane < TOP_K ? slots[(u64)row * TOP_K + lane] : -1);
    const u32 needed = __reduce_or_sync(ALL_LANES, holders) & reachable;
    if (word >= ROW_WORDS) continue;
    uint4 words[RANKS];
    const uint4* at = (const uint4*)(mine + at_sealed) + (u64)row * ROW_WORDS + word;
    const u64 next = (u64)small_rows * ROW_WORDS;  // from rank to rank
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (needed >> r & 1u) words[r] = load_whole(at + r * next);
    float sums[SUMS] = {};
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      if (!(needed >> r & 1u) || !receive(w, at + r * next, r, epoch, words[r])) continue;
      const u32 three[3] = {words[r].x, words[r].y, words[r].z};
      add_three(sums, three, 1.0f);
    }
    u32 three[3];
    round_words(sums, three);
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (3 * word + i < ROW) answer[(u64)row * ROW + 3 * word + i] = three[i];
  }
}
