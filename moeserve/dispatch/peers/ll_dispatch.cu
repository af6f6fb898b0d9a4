// The low-latency dispatch; behind ll_shared.cu.

#define WORKERS (THREADS - 32)  // threads; the last warp tells what has been stored
#define AHEAD 32  // rows a block places at once
#define PIECES 4  // of an arrived row, a warp each

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

// One piece of a record's part, BYTES wide in the batch, to all of the row's places. A warp calls it.
template <int BYTES>
DEVICE void deliver(const u8* part, u8* batch, const int* places, int piece) {
  typedef typename WordOf<(BYTES & -BYTES) < 16 ? (BYTES & -BYTES) : 16>::type Word;
  constexpr int COUNT = BYTES / (int)sizeof(Word), STEP = 32 * PIECES, AT_ONCE = 4;
  for (int first = 32 * piece + threadIdx.x % 32; first < COUNT; first += STEP * AT_ONCE) {
    Word words[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * STEP < COUNT) words[i] = ((const Word*)part)[first + i * STEP];
    for (int k = 0; k < TOP_K; ++k) {
      if (places[k] < 0) continue;
      Word* to = (Word*)(batch + (u64)places[k] * BYTES);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (first + i * STEP < COUNT) to[first + i * STEP] = words[i];
    }
  }
}

// grid <= multiprocessors, so that all blocks run at once. `state`: epoch of the last dispatch, blocks that
// have read it.
// How many of a block's rows its workers have stored, as the last warp reads it.
DEVICE u32 rows_stored(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"((u32)__cvta_generic_to_shared(at))
               : "memory");
  return value;
}

DEVICE void set_rows_stored(u32* at, u32 value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(at)), "r"(value)
               : "memory");
}

DEVICE void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) ll_dispatch(
    const u64* memory, u32* state, u32* live, u32* board, u64 patience, int rank, u64 at_greetings,
    u64 at_choices, u64 at_ready, u64 at_records, u64 parity_bytes, int lane_rows, u64 lanes_low,
    u64 lanes_high, int first_slot, int slots_here, int capacity, int sliced, const u8* rows, int row_bytes,
    const int* slots, const float* weights, float factor, u8* part0, u8* part1, u8* part2, int* counts,
    int* places, float* place_weights, u32* ticket) {
  extern __shared__ uint4 dynamic[];
  __shared__ u32 shared_epoch, stored;
  __shared__ u64 peers[RANKS];
  __shared__ u32 holders[TOP_K];
  __shared__ int chosen[TOP_K + 1];
  __shared__ u32 weighed[TOP_K + 1];
  __shared__ int row_places[AHEAD][TOP_K];
  u8* const record = (u8*)dynamic;
  int* const taken = (int*)(record + RECORD_BYTES);  // [slots_here] rows of each slot that come before
  const Lanes lanes{lanes_low, lanes_high};
  const Places here{first_slot, slots_here, capacity, sliced};
  const Watch w = watch(live, board, memory, rank, patience);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, own_rows = lanes.rows(rank);
  const int first_sent = gridDim.x - 1 - blockIdx.x;

  // One row's choices and record into shared memory.
  auto prepare = [&](int t) {
    const int k = thread - 64;
    if (k >= 0 && k < TOP_K) {
      const int slot = slots[(u64)t * TOP_K + k];
      chosen[k] = slot, weighed[k] = __float_as_uint(weights[(u64)t * TOP_K + k]);
      holders[k] = here.holders(slot);
    }
    make_record(rows + (u64)t * row_bytes, record, factor, WORKERS);
  };
  if (thread == 0) stored = 0, shared_epoch = next_epoch(*(volatile u32*)state);
  if (thread == 0) chosen[TOP_K] = -1, weighed[TOP_K] = 0;
  if (thread >= 32 && thread < 32 + RANKS) peers[thread - 32] = memory[thread - 32];
  for (int i = thread; i < slots_here; i += THREADS) taken[i] = 0;
  if (first_sent < own_rows && warp != WARPS - 1) prepare(first_sent);
  const u32 reachable = live_ranks(w);
  __syncthreads();
  const u32 epoch = shared_epoch;
  const u64 half = (epoch % 2) * parity_bytes;
  // The last warp tells: its fence waits for the wire, while the others go on.
  if (warp == WARPS - 1) {
    const u32 rows_here = first_sent < own_rows ? (own_rows - 1 - first_sent) / gridDim.x + 1 : 0;
    for (u32 told = 0; told < rows_here;) {
      u32 now;
      do now = rows_stored(&stored);
      while (now == told);
      now = __shfl_sync(ALL_LANES, now, 0);
      __syncwarp();  // what lane 0 saw stored, the fence of each lane is behind
      __threadfence_system();
      for (; told < now; ++told) {
        const int t = first_sent + told * gridDim.x;
        const u32 holding = here.holders(lane < TOP_K ? slots[(u64)t * TOP_K + lane] : -1);
        const u32 reached = __reduce_or_sync(ALL_LANES, holding) & reachable;
        if (lane < RANKS && (reached >> lane & 1u))
          store_relaxed((u32*)(peers[lane] + half + at_ready) + (u64)rank * lane_rows + t, epoch);
      }
    }
    return;
  }

  // Away: this lane's rows.
  for (int t = first_sent; t < own_rows; t += gridDim.x) {
    if (t != first_sent) {
      prepare(t);
      workers_sync();
    }
    u32 reached = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) reached |= holders[k];
    reached &= reachable;
    const u64 row = (u64)rank * lane_rows + t;
    for (int i = thread; i < RANKS * WORDS; i += WORKERS) {
      const int to = i / WORDS, k = 2 * (i % WORDS);
      const u32 pair = ((u32)chosen[k] & 0xFFFFu) | (u32)chosen[k + 1] << 16;
      if (reachable >> to & 1u)
        store_whole((u8*)peers[to] + half + at_choices + (row * WORDS + i % WORDS) * 16,
                    sealed(pair, weighed[k], weighed[k + 1], epoch));
    }
    for (int i = thread; i < RECORD_BYTES / 16; i += WORKERS) {
      const uint4 word = ((const uint4*)record)[i];
#pragma unroll
      for (int to = 0; to < RANKS; ++to)
        if (reached >> to & 1u) ((uint4*)(peers[to] + half + at_records + row * RECORD_BYTES))[i] = word;
    }
    workers_sync();
    if (thread == 0) set_rows_stored(&stored, (t - first_sent) / (int)gridDim.x + 1);
  }
  if (blockIdx.x == 0 && thread < RANKS && (reachable >> thread & 1u))
    store_relaxed((u32*)(peers[thread] + half + at_greetings) + rank, epoch);
  if (thread == 0) {
    if (blockIdx.x == 0) ticket[0] = epoch;
    if (atomicAdd(state + 1, 1u) == gridDim.x - 1) state[1] = 0, state[0] = epoch;
  }

  // Here: a run of all lanes' rows for each block, in the order of lanes and rows.
  const int all = lanes.all(), run = (all + gridDim.x - 1) / gridDim.x;
  const int begin = min((int)blockIdx.x * run, all), end = min(begin + run, all);
  if (begin == end && (all > 0 || blockIdx.x > 0)) return;
  const u8* mine = (const u8*)peers[rank] + half;
  for (int source = 0, before = 0; source < RANKS; before += lanes.rows(source++)) {
    const int words = min(max(begin - before, 0), lanes.rows(source)) * WORDS;
    const uint4* at = (const uint4*)(mine + at_choices) + (u64)source * lane_rows * WORDS;
    if (words > 0 && !(reachable >> source & 1u)) continue;
    for (int first = thread; first < words; first += 4 * WORKERS) {
      uint4 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (first + i * WORKERS < words) word[i] = load_whole(at + first + i * WORKERS);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i * WORKERS >= words) continue;
        if (!receive(w, at + first + i * WORKERS, source, epoch, word[i])) continue;
        const int low = here.local(word[i].x & 0xFFFFu), high = here.local(word[i].x >> 16);
        if (low >= 0) atomicAdd(taken + low, 1);
        if (high >= 0) atomicAdd(taken + high, 1);
      }
    }
  }
  workers_sync();

  for (int block = begin; block < end; block += AHEAD) {
    const int count = min(end - block, AHEAD);
    for (int i = thread; i < count * WORDS; i += WORKERS) {
      int source, row;
      const int at = i / WORDS, k = 2 * (i % WORDS);
      lanes.find(block + at, source, row);
      uint4 word = make_uint4(EMPTY_PAIR, 0u, 0u, 0u);
      const u64 from = ((u64)source * lane_rows + row) * WORDS + i % WORDS;
      if (reachable >> source & 1u) word = choices(w, (const uint4*)(mine + at_choices) + from, source, epoch);
      const u64 choice = (u64)(block + at) * TOP_K + k;
      row_places[at][k] = here.local(word.x & 0xFFFFu);
      place_weights[choice] = from_bits(word.y);
      if (k + 1 < TOP_K) {
        row_places[at][k + 1] = here.local(word.x >> 16);
        place_weights[choice + 1] = from_bits(word.z);
      }
    }
    workers_sync();
    if (warp == 0) {
      for (int at = 0; at < count; ++at) {
        const int slot = lane < TOP_K ? row_places[at][lane] : -1;
        if (slot >= 0) row_places[at][lane] = slot * capacity + taken[slot]++;
        __syncwarp();
      }
    }
    workers_sync();
    for (int i = thread; i < count * TOP_K; i += WORKERS)
      places[(u64)block * TOP_K + i] = row_places[i / TOP_K][i % TOP_K];
    for (int unit = warp; unit < count * PIECES; unit += WARPS - 1) {
      const int at = unit / PIECES;
      const bool wanted = lane < TOP_K && row_places[at][lane] >= 0;
      if (!__any_sync(ALL_LANES, wanted)) continue;
      int source, row;
      lanes.find(block + at, source, row);
      const u64 from = (u64)source * lane_rows + row;
      const u32* ready = (const u32*)(mine + at_ready) + from;
      if (!await(w, source, epoch, [&] { return load_acquire(ready) == epoch; })) continue;
      const u8* arrived = mine + at_records + from * RECORD_BYTES;
      deliver<PART0_BYTES>(arrived + PART0_AT, part0, row_places[at], unit % PIECES);
#if PARTS > 1
      deliver<PART1_BYTES>(arrived + PART1_AT, part1, row_places[at], unit % PIECES);
#endif
#if PARTS > 2
      deliver<PART2_BYTES>(arrived + PART2_AT, part2, row_places[at], unit % PIECES);
#endif
    }
    workers_sync();
  }
  if (end < all) return;
  for (int i = thread; i < slots_here; i += WORKERS) counts[i] = taken[i];
  if (thread < RANKS && (reachable >> thread & 1u)) {  // a lane without rows has nothing else to wait for
    const u32* greeting = (const u32*)(mine + at_greetings) + thread;
    await(w, thread, epoch, [&] { return load_acquire(greeting) == epoch; });
  }
}
