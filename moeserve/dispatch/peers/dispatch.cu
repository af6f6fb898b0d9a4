// Dispatch; behind step.cu. Given by -D: RAGGED, whether segments follow one another in the batch.
//
// The last `senders` blocks send rows, and the others tell choices and place what arrives: in a block that
// does both, loads would wait behind stores to peers.

#define THREADS 512
#define WARPS (THREADS / 32)
#define AHEAD (4096 / TOP_K)  // rows a block places at once
#define AT_ONCE 4  // sheets a warp has under way
#define RECORD_SHEETS SHEETS_OF(RECORD_BYTES)
#define TOTAL_WORDS(SLOTS) (((SLOTS) + 5) / 6)  // six counts in a sealed word

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

struct Sections {  // of every rank's memory
  u64 greetings, totals, choices, records;
};

struct Lane {  // what this rank brings
  const u8* rows;
  int row_bytes;
  const int* slots;      // [rows, TOP_K]
  const float* weights;  // [rows, TOP_K]
  float factor;
};

struct Batch {
  u8* parts[3];
  int *counts, *offsets;  // [slots], [slots + 1]
  int* places;            // [rows of all lanes, TOP_K]
  float* weights;
};

// ---- out ---------------------------------------------------------------------------------------------------

// The record in shared memory to all ranks of `reached`, by `warps` warps of which this is `warp`.
DEVICE void send_record(const Step& step, const u8* record, u64 records, u64 row, u32 reached, int rank,
                        int warp, int warps) {
  const int lane = threadIdx.x % 32;
  for (int sheet = warp; sheet < RECORD_SHEETS; sheet += warps) {
    const int at = SHEET_WORDS * sheet + lane, last = last_lane<RECORD_BYTES>(sheet);
    uint4 word = make_uint4(0u, 0u, 0u, 0u);
    if (lane < SHEET_WORDS && at < WORDS_OF(RECORD_BYTES)) word = ((const uint4*)record)[at];
    word = tagged(word, step.epoch, last);
#pragma unroll
    for (int turn = 1; turn <= RANKS; ++turn) {
      const int to = (rank + turn) % RANKS;
      if (reached >> to & 1u)
        store_sheet((uint4*)(step.memory[to] + records) + (row * RECORD_SHEETS + sheet) * SHEET, word, last);
    }
  }
}

// Adds the first `entries` slots of a lane to the table, by the block.
DEVICE void count_slots(const int* slots, int entries, int size, int* table) {
  auto add = [&](int slot) {
    if ((u32)slot < (u32)size) atomicAdd(table + slot, 1);
  };
  const int wide = (u64)slots % 16 == 0 ? entries / 4 : 0;
  for (int first = threadIdx.x; first < wide; first += 8 * THREADS) {
    int4 found[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      found[i] =
          first + i * THREADS < wide ? ((const int4*)slots)[first + i * THREADS] : make_int4(-1, -1, -1, -1);
#pragma unroll
    for (int i = 0; i < 8; ++i) add(found[i].x), add(found[i].y), add(found[i].z), add(found[i].w);
  }
  for (int i = 4 * wide + threadIdx.x; i < entries; i += THREADS) add(slots[i]);
}

// Tells all ranks the choices of rows first .. last - 1: slots, how many of the lane's rows go to each
// before, weights. Who has the lane's last row tells the totals too. The block calls it.
DEVICE void tell_choices(const Step& step, const Sections& at, const Places& here, const Lane& mine, int rank,
                         u64 lane_start, int first, int last, int own_rows, int* table,
                         int (*positions)[TOP_K]) {
  const int thread = threadIdx.x;
  const int size = here.sliced ? here.slots : RANKS * here.slots;
  for (int i = thread; i < size; i += THREADS) table[i] = 0;
  __syncthreads();
  count_slots(mine.slots, first * TOP_K, size, table);
  __syncthreads();
  for (int begin = first; begin < last; begin += AHEAD) {
    const int count = min(last - begin, AHEAD);
    if (thread < 32)
      for (int row = 0; row < count; ++row) {
        const int slot = thread < TOP_K ? mine.slots[(u64)(begin + row) * TOP_K + thread] : -1;
        if ((u32)slot < (u32)size) positions[row][thread] = table[slot]++;
        __syncwarp();
      }
    __syncthreads();
    for (int i = thread; i < count * CHOICE_WORDS * 2; i += THREADS) {
      const int row = i / (CHOICE_WORDS * 2), word = i % (CHOICE_WORDS * 2);
      u32 three[3];
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        const int k = word % CHOICE_WORDS * 3 + j;
        const u64 choice = (u64)(begin + row) * TOP_K + k;
        three[j] = NOWHERE;
        if (k >= TOP_K) continue;
        if (word >= CHOICE_WORDS)
          three[j] = __float_as_uint(mine.weights[choice]);
        else if ((u32)mine.slots[choice] < (u32)size)
          three[j] = mine.slots[choice] | positions[row][k] << 16;
      }
      const u64 to_word = (lane_start + begin + row) * (CHOICE_WORDS * 2) + word;
#pragma unroll
      for (int to = 0; to < RANKS; ++to)
        if (step.reachable >> to & 1u)
          store_whole((uint4*)(step.memory[to] + at.choices) + to_word,
                      sealed(three[0], three[1], three[2], step.epoch));
    }
    __syncthreads();
  }
  if (last != own_rows) return;
  const int words = TOTAL_WORDS(here.slots);
  for (int i = thread; i < RANKS * words; i += THREADS) {
    const int to = i / words, slot = i % words * 6;
    u32 six[6];
#pragma unroll
    for (int j = 0; j < 6; ++j)
      six[j] = slot + j < here.slots ? table[(here.sliced ? 0 : to * here.slots) + slot + j] : 0;
    if (step.reachable >> to & 1u)
      store_whole((uint4*)(step.memory[to] + at.totals) + rank * words + i % words,
                  sealed(six[0] | six[1] << 16, six[2] | six[3] << 16, six[4] | six[5] << 16, step.epoch));
  }
}

// ---- here --------------------------------------------------------------------------------------------------

// Where each slot's segment begins: into `starts` [slots], that has its rows. A warp calls it; the last block
// tells the batch.
DEVICE void lay_out(int* starts, const Places& here, const Batch& batch, int row_align, bool tells) {
  const int lane = threadIdx.x % 32;
  int end = 0;
  for (int first = 0; first < here.slots; first += 32) {
    const int slot = first + lane, rows = slot < here.slots ? starts[slot] : 0;
#if RAGGED
    const int room = (rows + row_align - 1) / row_align * row_align;
#else
    const int room = here.capacity;
#endif
    int upto = room;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(ALL_LANES, upto, step);
      if (lane >= step) upto += left;
    }
    if (slot < here.slots) starts[slot] = end + upto - room;
    if (tells && slot < here.slots) batch.counts[slot] = rows, batch.offsets[slot + 1] = end + upto;
    end += __shfl_sync(ALL_LANES, upto, 31);
  }
  if (tells && lane == 0) batch.offsets[0] = 0;
}

// Where each lane's rows of each slot begin in the slot's segment: `bases` [RANKS, slots]; behind them where
// segments begin, [slots]. The block calls it.
DEVICE void find_bases(const Step& step, const Watch& w, const Lanes& lanes, const Places& here, u64 totals,
                       int* bases, const Batch& batch, int row_align, bool tells) {
  const int words = TOTAL_WORDS(here.slots), slots = here.slots;
  int* starts = bases + RANKS * slots;
  for (int i = threadIdx.x; i < RANKS * words; i += THREADS) {
    const int source = i / words, slot = i % words * 6;
    uint4 word = make_uint4(0u, 0u, 0u, 0u);
    if (lanes.rows(source) && (step.reachable >> source & 1u))
      word = received(w, (const uint4*)(step.memory[w.rank] + totals) + i, source, step.epoch, word);
    const u32 three[3] = {word.x, word.y, word.z};
#pragma unroll
    for (int j = 0; j < 6; ++j)
      if (slot + j < slots) bases[source * slots + slot + j] = three[j / 2] >> 16 * (j % 2) & 0xFFFFu;
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < slots; slot += THREADS) {
    int sum = 0;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      const int rows = bases[r * slots + slot];
      bases[r * slots + slot] = sum, sum += rows;
    }
    starts[slot] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) lay_out(starts, here, batch, row_align, tells);
  __syncthreads();
}

// Places of the choices of rows block .. block + count - 1 of all lanes', and their weights.
DEVICE void place_rows(const Step& step, const Watch& w, const Lanes& lanes, const Places& here, u64 choices,
                       int lane_rows, int block, int count, const int* bases, int (*row_places)[TOP_K],
                       const Batch& batch) {
  const uint4* words = (const uint4*)(step.memory[w.rank] + choices);
  const uint4 none = make_uint4(NOWHERE, NOWHERE, NOWHERE, 0u);
  for (int i = threadIdx.x; i < count * CHOICE_WORDS; i += THREADS) {
    int source, row;
    const int at = i / CHOICE_WORDS, k = i % CHOICE_WORDS * 3;
    lanes.find(block + at, source, row);
    const uint4* from = words + ((u64)source * lane_rows + row) * (CHOICE_WORDS * 2) + i % CHOICE_WORDS;
    const bool open = step.reachable >> source & 1u;
    uint4 chosen = open ? load_whole(from) : none, weighed = open ? load_whole(from + CHOICE_WORDS) : none;
    if (open && !(receive(w, from, source, step.epoch, chosen) &&
                  receive(w, from + CHOICE_WORDS, source, step.epoch, weighed)))
      chosen = none;
    const u32 pairs[3] = {chosen.x, chosen.y, chosen.z}, weights[3] = {weighed.x, weighed.y, weighed.z};
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      if (k + j >= TOP_K) continue;
      const int slot = here.local(pairs[j] & 0xFFFFu);
      int place = -1;
      if (slot >= 0)
        place = bases[RANKS * here.slots + slot] + bases[source * here.slots + slot] + (int)(pairs[j] >> 16);
      const u64 choice = (u64)(block + at) * TOP_K + k + j;
      row_places[at][k + j] = batch.places[choice] = place;
      batch.weights[choice] = from_bits(weights[j]);
    }
  }
}

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

// A row's sheets first, first + step, .. to its places, as they arrive; a warp calls it.
DEVICE void deliver(const Step& step, const Watch& w, const uint4* arrived, int source, int first, int stride,
                    const int* places, const Batch& batch) {
  const int lane = threadIdx.x % 32;
  for (int sheet = first; sheet < RECORD_SHEETS; sheet += stride * AT_ONCE) {
    uint4 words[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int s = sheet + i * stride;
      if (s < RECORD_SHEETS) words[i] = load_sheet(arrived + s * SHEET, last_lane<RECORD_BYTES>(s));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int s = sheet + i * stride, last = last_lane<RECORD_BYTES>(s);
      if (s >= RECORD_SHEETS) continue;
      if (!receive_sheet(w, arrived + s * SHEET, source, step.epoch, last, words[i])) return;
      words[i] = untagged(words[i], last);
    }
    for (int k = 0; k < TOP_K; ++k) {
      if (places[k] < 0) continue;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int byte = 16 * (SHEET_WORDS * (sheet + i * stride) + lane);
        if (lane < SHEET_WORDS && byte < RECORD_BYTES) put_word(batch, places[k], byte, words[i]);
      }
    }
  }
}

// The rows of this lane that a sending block has: each of its groups of warps makes and stores a row at a
// time. Rows go in the order in which they are taken up there, `stretch` rows of all lanes' a warp: the first
// of each stretch, then the second.
DEVICE void send_rows(const Step& step, const Places& here, const Lane& mine, const Lanes& lanes, int rank,
                      u64 records, u64 lane_start, int stretch, int groups, int block, int senders, u8* record,
                      u64* sent) {
  const int lane = threadIdx.x % 32, warps = WARPS / groups, group = threadIdx.x / 32 / warps;
  const int warp = threadIdx.x / 32 % warps, own_rows = lanes.rows(rank);
  int before = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) before += r < rank ? lanes.rows(r) : 0;
  const int first = before / stretch, stretches = (before + own_rows - 1) / stretch - first + 1;
  u32 copies = 0;
  record += group * RECORD_BYTES;
  auto sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(32 * warps) : "memory"); };
  for (int turn = block * groups + group; turn < stretches * stretch; turn += senders * groups) {
    const int t = (first + turn % stretches) * stretch + turn / stretches - before;
    if (t < 0 || t >= own_rows) continue;
    const int slot = lane < TOP_K ? mine.slots[(u64)t * TOP_K + lane] : -1;
    make_record(mine.rows + (u64)t * mine.row_bytes, record, mine.factor, threadIdx.x % (32 * warps),
                32 * warps);
    const u32 reached = __reduce_or_sync(ALL_LANES, here.holders(slot)) & step.reachable;
    sync();
    send_record(step, record, records, lane_start + t, reached, rank, warp, warps);
    copies += __popc(reached & ~(1u << rank));
    sync();
  }
  if (warp == 0 && lane == 0 && copies) atomicAdd(sent, (u64)copies);
}

// grid <= multiprocessors, so that all blocks run at once. `state`: epoch of the last dispatch, blocks that
// have read it. `sent`: copies that dispatches sent to other ranks, and sums that combines did; the host
// reads them as `told`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) peer_dispatch(
    const u64* memory, u32* state, u32* live, u32* board, u64 patience, int rank, u64 at_greetings,
    u64 at_totals, u64 at_choices, u64 at_records, u64 parity_bytes, int lane_rows, u64 lanes_low,
    u64 lanes_high, int first_slot, int slots_here, int capacity, int row_align, int sliced, int senders,
    int groups, const u8* rows, int row_bytes, const int* slots, const float* weights, float factor,
    u8* part0, u8* part1, u8* part2, int* counts, int* offsets, int* places, float* place_weights, u32* ticket,
    u64* sent, u64* told) {
  extern __shared__ uint4 dynamic[];  // a record for each group, or [RANKS + 1, slots_here] int
  __shared__ Step step;
  __shared__ int row_places[AHEAD][TOP_K];
  const Lanes lanes{lanes_low, lanes_high};
  const Places here{first_slot, slots_here, capacity, sliced};
  const Sections at{at_greetings, at_totals, at_choices, at_records};
  const Lane mine{rows, row_bytes, slots, weights, factor};
  const Batch batch{{part0, part1, part2}, counts, offsets, places, place_weights};
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, block = blockIdx.x;
  const int own_rows = lanes.rows(rank), all = lanes.all(), readers = gridDim.x - senders;
  const u64 lane_start = (u64)rank * lane_rows;
  const Watch w = watch(live, board, memory, rank, patience);
  if (warp == 0) open_step(step, memory, live, next_epoch(*(volatile u32*)state), parity_bytes);
  __syncthreads();
  if (thread == 0 && atomicAdd(state + 1, 1u) == gridDim.x - 1) state[1] = 0, state[0] = step.epoch;

  // Each reading block has a run of all lanes' rows, and with many rows each of its warps a stretch.
  const int fair = (all + readers - 1) / readers, stretch = max(1, (fair + WARPS - 1) / WARPS);
  const int run = fair > WARPS ? stretch * WARPS : max(fair, 1);
  if (block >= readers) {
    if (own_rows)
      send_rows(step, here, mine, lanes, rank, at_records, lane_start, stretch, groups, block - readers,
                senders, (u8*)dynamic, sent);
    return;
  }
  if (block == 0) {
    if (thread == 0) *ticket = step.epoch;
    if (thread < 2) *(volatile u64*)(told + thread) = sent[thread];
    if (thread < RANKS && (step.reachable >> thread & 1u))
      store_relaxed((u32*)(step.memory[thread] + at_greetings) + rank, step.epoch);
  }
  int* const bases = (int*)dynamic;
  const int share = (own_rows + readers - 1) / readers, first = min(block * share, own_rows);
  const int last = min(first + share, own_rows);
  if (first < last)
    tell_choices(step, at, here, mine, rank, lane_start, first, last, own_rows, bases, row_places);
  __syncthreads();

  const int begin = min(block * run, all), end = min(begin + run, all);
  if (begin == end && (all > 0 || block > 0)) return;
  find_bases(step, w, lanes, here, at_totals, bases, batch, row_align, end == all);
  for (int from = begin; from < end; from += AHEAD) {
    const int count = min(end - from, AHEAD);
    place_rows(step, w, lanes, here, at_choices, lane_rows, from, count, bases, row_places, batch);
    __syncthreads();
    // With few rows some warps share one; with many, each has a stretch.
    const int team = max(1, WARPS / count), teams = WARPS / team, length = (count + teams - 1) / teams;
    const int mine_from = warp / team * length, upto = min(mine_from + length, count);
    for (int i = mine_from; i < upto; ++i) {
      if (!__any_sync(ALL_LANES, lane < TOP_K && row_places[i][lane] >= 0)) continue;
      int source, row;
      lanes.find(from + i, source, row);
      const u64 sheet = ((u64)source * lane_rows + row) * RECORD_SHEETS;
      deliver(step, w, (const uint4*)(step.memory[rank] + at_records) + sheet * SHEET, source, warp % team,
              team, row_places[i], batch);
    }
    __syncthreads();
  }
  if (end < all || thread >= RANKS || !(step.reachable >> thread & 1u)) return;
  const u32* greeting = (const u32*)(step.memory[rank] + at_greetings) + thread;
  await(w, thread, step.epoch, [&] { return load_acquire(greeting) == step.epoch; });  // of empty lanes too
}
