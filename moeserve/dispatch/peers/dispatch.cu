// Dispatch; behind step.cu. Given by -D: RAGGED, whether segments follow one another in the batch.
//
// Some blocks read, some tell choices, some send rows: in a block that stores to peers, loads would wait
// behind the stores.

#define THREADS 512
#define WARPS (THREADS / 32)
#define WARPS_LOG2 4
#define LEAST_TEAM 2  // warps that place a row together
#define AHEAD (4096 / TOP_K)  // rows a block places at once
#define AT_ONCE 8  // packets a warp has under way
#define RECORD_PACKETS PACKETS_OF(RECORD_BYTES)
#define COUNT_WORDS(SLOTS) (((SLOTS) + 5) / 6)       // of counts, six in a checked word
#define SLOT_WORDS(ROWS) (((ROWS) * TOP_K + 5) / 6)  // of a lane's choices, six in a checked word

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
  u64 begun, choices, weights, records;
  u64 lane_words;  // of choices that a lane has room for
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
  int row_align;
};

// One dispatch as a block of it knows it.
struct Exchange {
  const Step& step;
  const Watch& w;
  Lanes lanes;
  Places here;
  Sections at;
  Lane mine;
  Batch batch;
  uint4* shared_counts;  // [readers, COUNT_WORDS] of this GPU
  int lane_rows;

  // A row of rank `source` among all that a rank's memory has room for.
  DEVICE u64 room(int source, int row) const { return (u64)source * lane_rows + row; }
  DEVICE bool reaches(int rank) const { return step.reachable >> rank & 1u; }
  DEVICE int own_rows() const { return lanes.rows(w.rank); }
  DEVICE const uint4* arrived(u64 section) const { return (const uint4*)(step.memory[w.rank] + section); }
};

// ---- out --------------------------------------------------------------------------------------------------

// The record of row `t` of this lane, in shared memory, to all ranks of `reached`.
DEVICE void send_record(const Exchange& x, const u8* record, int t, u32 reached, Team team) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int packet = team.warp; packet < RECORD_PACKETS; packet += team.warps) {
    const int at = PACKET_WORDS * packet + lane, last = last_lane<RECORD_BYTES>(packet);
    uint4 word = make_uint4(0u, 0u, 0u, 0u);
    if (lane < PACKET_WORDS && at < WORDS_OF(RECORD_BYTES)) word = ((const uint4*)record)[at];
    word = tagged(word, x.step.sequence, last);
    const u64 to_word = (x.room(x.w.rank, t) * RECORD_PACKETS + packet) * PACKET;
#pragma unroll
    for (int turn = 1; turn <= RANKS; ++turn) {
      const int to = (x.w.rank + turn) % RANKS;
      if (reached >> to & 1u) store_packet((uint4*)(x.step.memory[to] + x.at.records) + to_word, word, last);
    }
  }
}

// Tells all ranks what this lane's rows choose, and then by which weights: block `block` of `choice_senders`. Opens
// the step once it has asked for the first.
template <class Open>
DEVICE void send_choices(const Exchange& x, int block, int choice_senders, Open open) {
  const int rows = x.own_rows(), words = SLOT_WORDS(rows), begin = (words + 31) / 32 * 32;
  const int end = begin + rows * WEIGHT_WORDS, size = x.here.sliced ? x.here.slots : RANKS * x.here.slots;
  u32 three[3];
  auto fetch = [&](int i) {
#pragma unroll
    for (int j = 0; j < 3; ++j) three[j] = i < begin ? NOWHERE * 0x10001u : 0u;
    if (i < words) {
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        const int slot = 6 * i + j < rows * TOP_K ? x.mine.slots[6 * i + j] : -1;
        if ((u32)slot < (u32)size) three[j / 2] ^= (u32)(slot ^ NOWHERE) << 16 * (j % 2);
      }
    } else if (i >= begin && i < end) {
      const int row = (i - begin) / WEIGHT_WORDS, k = (i - begin) % WEIGHT_WORDS * 3;
#pragma unroll
      for (int j = 0; j < 3; ++j)
        if (k + j < TOP_K) three[j] = __float_as_uint(x.mine.weights[(u64)row * TOP_K + k + j]);
    }
  };
  int i = (threadIdx.x / 32 * choice_senders + block) * 32 + threadIdx.x % 32;
  fetch(i);
  open();
  const u64 choices = x.at.choices + x.w.rank * x.at.lane_words * 16;
  const u64 weights = x.at.weights + x.room(x.w.rank, 0) * WEIGHT_WORDS * 16;
  for (; i < end; i += choice_senders * THREADS) {
    const uint4 word = checked(three[0], three[1], three[2], x.step.sequence);
    const u64 to_word = i < begin ? choices + 16 * (u64)i : weights + 16 * (u64)(i - begin);
#pragma unroll
    for (int to = 0; to < RANKS; ++to)
      if (x.reaches(to) && (i < words || i >= begin)) store_whole((u8*)x.step.memory[to] + to_word, word);
    if (i + choice_senders * THREADS < end) fetch(i + choice_senders * THREADS);
  }
}

// ---- here -------------------------------------------------------------------------------------------------

// Rows from .. from + count - 1 of all lanes', one lane's after the other's.
struct DispatchSpan {
  int from, count;
};

// What a block counts and keeps of all lanes' choices, in shared memory.
struct Tables {
  int *before, *others;   // [slots]: rows of each slot that stand before the block's, and all other ones
  int (*choices)[TOP_K];  // of the rows that it places at once: slots here, -1 for none; then places
};

// The word, of those that tell all lanes' choices, in which row `g` of all lanes' begins.
DEVICE int word_of(const Lanes& lanes, int g) {
  int source, row, before = 0;
  lanes.find(g, source, row);
#pragma unroll
  for (int r = 0; r < RANKS; ++r) before += r < source ? SLOT_WORDS(lanes.rows(r)) : 0;
  return before + row * TOP_K / 6;
}

// Reads the choices of the rows of `scope`: counts them, if it `counts`, by whether they stand before `kept`,
// and keeps those of `kept`. The block calls it.
DEVICE void read_choices(const Exchange& x, DispatchSpan scope, DispatchSpan kept, bool counts, const Tables& t) {
  const int upto = scope.from + scope.count;
  int words = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) words += SLOT_WORDS(x.lanes.rows(r));
  if (upto < x.lanes.all()) words = word_of(x.lanes, upto) + 1;
  const int low = (scope.from - kept.from) * TOP_K, high = counts ? (upto - kept.from) * TOP_K : low;
#pragma unroll 1
  for (int i = word_of(x.lanes, scope.from) + threadIdx.x; i < words; i += THREADS) {
    int source = 0, word = i, before = 0;
#pragma unroll
    for (int r = 0; r < RANKS - 1; ++r)
      if (source == r && word >= SLOT_WORDS(x.lanes.rows(r)))
        word -= SLOT_WORDS(x.lanes.rows(r)), before += x.lanes.rows(r), ++source;
    const int first = (before - kept.from) * TOP_K + 6 * word;
    const int end = min(kept.count, before - kept.from + x.lanes.rows(source)) * TOP_K;
    const uint4* at = x.arrived(x.at.choices) + source * x.at.lane_words + word;
    uint4 found = make_uint4(~0u, ~0u, ~0u, 0u);  // of no slot
    if (x.reaches(source)) found = received(x.w, at, source, x.step.sequence, found);
    const u32 three[3] = {found.x, found.y, found.z};
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const int slot = x.here.local(three[j / 2] >> 16 * (j % 2) & 0xFFFFu), c = first + j;
      if (slot >= 0 && c >= low && c < high) atomicAdd((c < 0 ? t.before : t.others) + slot, 1);
      if (c >= 0 && c < end) (&t.choices[0][0])[c] = slot;
    }
  }
}

// Of the block's counts, in `others`, and those of all reading blocks: what stands before the block's rows,
// and the others. The block calls it.
DEVICE void share_counts(const Exchange& x, const Tables& t, int block, int readers) {
  const int slots = x.here.slots, words = COUNT_WORDS(slots);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < words; i += THREADS) {
    u32 three[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int slot = 6 * i + 2 * j;
      three[j] = slot < slots ? t.others[slot] : 0;
      if (slot + 1 < slots) three[j] |= t.others[slot + 1] << 16;
    }
    store_whole(x.shared_counts + block * words + i, checked(three[0], three[1], three[2], x.step.sequence));
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < slots; i += THREADS) t.others[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < readers * words; i += THREADS) {
    const uint4* at = x.shared_counts + i;
    uint4 word = load_whole(at);
    while (!belongs(word, x.step.sequence)) word = load_whole(at);  // they wait for nobody but other ranks
    const u32 three[3] = {word.x, word.y, word.z};
    int* table = i / words < block ? t.before : t.others;
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const int rows = three[j / 2] >> 16 * (j % 2) & 0xFFFFu;
      if (rows) atomicAdd(table + i % words * 6 + j, rows);
    }
  }
}

// Where segments begin: added to `before`, or told to the batch by a block without rows. A warp calls it.
DEVICE void lay_out(const Exchange& x, const Tables& t, bool tells) {
  const int lane = threadIdx.x % 32;
  int end = 0;
#pragma unroll 1
  for (int first = 0; first < x.here.slots; first += 32) {
    const int slot = first + lane;
    const bool mine = slot < x.here.slots;
    const int before = mine ? t.before[slot] : 0, rows = before + (mine ? t.others[slot] : 0);
#if RAGGED
    const int room = (rows + x.batch.row_align - 1) / x.batch.row_align * x.batch.row_align;
    int upto = room;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(ALL_LANES, upto, step);
      if (lane >= step) upto += left;
    }
#else
    const int room = x.here.capacity, upto = room * (lane + 1);
#endif
    if (mine && tells)
      x.batch.counts[slot] = rows, x.batch.offsets[slot + 1] = end + upto;
    else if (mine)
      t.before[slot] = before + end + upto - room;
    end += __shfl_sync(ALL_LANES, upto, 31);
  }
  if (tells && lane == 0) x.batch.offsets[0] = 0;
  __syncwarp();
}

// Choices that a warp places at once: those of whole rows.
#define PLACED_AT_ONCE (32 / TOP_K * TOP_K)

// The place of this lane's choice, of those of `span` from the `first` on; -1 for none. A warp calls it.
DEVICE int place_of(const Exchange& x, DispatchSpan span, int first, const Tables& t, bool counts) {
  const int lane = threadIdx.x % 32;
  const bool mine = lane < PLACED_AT_ONCE && first + lane < span.count * TOP_K;
  const int slot = mine ? (&t.choices[0][0])[first + lane] : -1;
  const u32 same = __match_any_sync(ALL_LANES, slot);
  int place = -1;
  if (slot >= 0) place = t.before[slot] + __popc(same & ((1u << lane) - 1u));
  __syncwarp();
  if (counts && slot >= 0 && same >> lane == 1u) t.before[slot] = place + 1;
  __syncwarp();
#if !RAGGED
  if (slot >= 0) place += slot * x.here.capacity;
#endif
  return place;
}

// The slots of the span's choices become places, in the rows' order. A warp calls it.
DEVICE void place_rows(const Exchange& x, DispatchSpan span, const Tables& t) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < span.count * TOP_K; first += PLACED_AT_ONCE) {
    const int place = place_of(x, span, first, t, true);
    if (lane < PLACED_AT_ONCE && first + lane < span.count * TOP_K)
      (&t.choices[0][0])[first + lane] = x.batch.places[(u64)span.from * TOP_K + first + lane] = place;
  }
}

// The weights of the span's choices, by the block's threads from `first` on.
DEVICE void keep_weights(const Exchange& x, DispatchSpan span, int first) {
#pragma unroll 1
  for (int i = (int)threadIdx.x - first; i < span.count * WEIGHT_WORDS; i += THREADS - first) {
    int source, row;
    const int at = span.from + i / WEIGHT_WORDS, k = i % WEIGHT_WORDS * 3;
    x.lanes.find(at, source, row);
    const uint4* word = x.arrived(x.at.weights) + x.room(source, row) * WEIGHT_WORDS + i % WEIGHT_WORDS;
    if (!x.reaches(source)) continue;
    uint4 found = load_whole(word);
    if (!receive(x.w, word, source, x.step.sequence, found)) continue;
    const u32 three[3] = {found.x, found.y, found.z};
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (k + j < TOP_K) x.batch.weights[(u64)at * TOP_K + k + j] = from_bits(three[j]);
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

// A team's packets of row `g` of all lanes' to the row's places, one a lane, as they arrive. A warp calls it.
DEVICE void deliver(const Exchange& x, int g, int place, Team team) {
  int source, row;
  x.lanes.find(g, source, row);
  const uint4* arrived = x.arrived(x.at.records) + x.room(source, row) * RECORD_PACKETS * PACKET;
  const int lane = threadIdx.x % 32;
  const u32 hits = __ballot_sync(ALL_LANES, place >= 0);
  for (int first = hits ? team.warp : RECORD_PACKETS; first < RECORD_PACKETS; first += team.warps * AT_ONCE) {
    uint4 words[AT_ONCE];
    auto packet = [&](int i) { return first + i * team.warps; };
    auto at = [&](int i) { return arrived + packet(i) * PACKET; };
    auto last = [&](int i) { return last_lane<RECORD_BYTES>(packet(i)); };
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
      if (polls % 64 == 0 && __any_sync(ALL_LANES, lane == 0 && is_gone(x.w, source, x.step.sequence))) return;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (packet(i) < RECORD_PACKETS) words[i] = untagged(words[i], last(i));
#pragma unroll 1
    for (u32 left = hits; left; left &= left - 1) {
      const int to = __shfl_sync(ALL_LANES, place, __ffs(left) - 1);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int byte = 16 * (PACKET_WORDS * packet(i) + lane);
        if (lane < PACKET_WORDS && byte < RECORD_BYTES) put_word(x.batch, to, byte, words[i]);
      }
    }
  }
}

// ---- blocks -----------------------------------------------------------------------------------------------

// How the step's work is divided among blocks: the first read, then some tell choices, the others send.
struct Division {
  int choice_senders, senders, groups_log2;  // a sending block has 1 << groups_log2 rows under way
  int run, stretch;  // rows of a reading block; of each of its teams, where there are many
  int shares;        // whether reading blocks count a run each and share what they counted
};

// What sending block `block` sends: each of its teams makes and stores a row at a time. Rows go in the
// order in which they are taken up there: the first of each stretch, then the second. Opens the step once the
// first are asked for. Returns how many copies a team sent to other ranks.
template <class Open>
DEVICE u32 send_rows(const Exchange& x, const Division& d, int block, u8* records, Open open) {
  const int lane = threadIdx.x % 32, warps = WARPS >> d.groups_log2, own_rows = x.own_rows();
  const Team team{(int)threadIdx.x / 32 & warps - 1, warps};
  const int group = threadIdx.x / 32 >> WARPS_LOG2 - d.groups_log2;
  int before = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) before += r < x.w.rank ? x.lanes.rows(r) : 0;
  int first = before, stretches = own_rows;
  if (d.stretch > 1) first = before / d.stretch, stretches = (before + own_rows - 1) / d.stretch - first + 1;
  int turn = (block << d.groups_log2) + group, row = -1, slot = -1;
  Piece piece;
  auto ask_next = [&] {  // row: -1 behind the last
    row = -1;
#pragma unroll 1
    for (; row < 0 && turn < stretches * d.stretch; turn += d.senders << d.groups_log2) {
      row = d.stretch > 1 ? (first + turn % stretches) * d.stretch + turn / stretches - before : turn;
      if (row >= own_rows) row = -1;
    }
    if (row < 0) return;
    piece.load(x.mine.rows + (u64)row * x.mine.row_bytes, team.thread());
    slot = lane < TOP_K ? x.mine.slots[(u64)row * TOP_K + lane] : -1;
  };
  ask_next();
  open();
  u8* const record = records + group * RECORD_BYTES;
  auto sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(32 * warps) : "memory"); };
  u32 copies = 0;
#pragma unroll 1
  while (row >= 0) {
    const int t = row;
    const u32 reached = __reduce_or_sync(ALL_LANES, x.here.holders(slot)) & x.step.reachable;
    make_record(piece, x.mine.rows + (u64)t * x.mine.row_bytes, record, x.mine.factor, team);
    sync();
    ask_next();
    send_record(x, record, t, reached, team);
    copies += __popc(reached & ~(1u << x.w.rank));
    sync();
  }
  return team.thread() == 0 ? copies : 0;
}

// The choices of a reading block's rows, from its first `span` on: counted among all lanes' choices, or among
// the block's, whose counts it then shares; kept of `span`. The block calls it, and synchronises.
DEVICE void count_choices(const Exchange& x, const Division& d, int block, DispatchSpan span, const Tables& t) {
  const int all = x.lanes.all(), readers = gridDim.x - d.senders - d.choice_senders;
  const DispatchSpan scope = d.shares ? DispatchSpan{span.from, min(d.run, all - span.from)} : DispatchSpan{0, all};
  read_choices(x, scope, span, true, t);
  if (d.shares) share_counts(x, t, block, readers);
}

// The span's rows to their places, each by a team: with few rows a team has one, with many a stretch.
// `places`: of all choices, one a lane, if these are `few`; else they stand in the tables.
DEVICE void deliver_rows(const Exchange& x, DispatchSpan span, const Tables& t, bool few, int places) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = max(LEAST_TEAM, WARPS / span.count);
  const int teams = WARPS / warps, length = (span.count + teams - 1) / teams;
  const int upto = min((warp / warps + 1) * length, span.count);
#pragma unroll 1
  for (int i = warp / warps * length; i < upto; ++i) {
    int place = few ? __shfl_sync(ALL_LANES, places, (i * TOP_K + lane) % 32) : -1;
    if (!few && lane < TOP_K) place = t.choices[i][lane];
    deliver(x, span.from + i, lane < TOP_K ? place : -1, Team{warp % warps, warps});
  }
}

// What reading block `block` does: places its run of all lanes' rows; the last one has none, and tells the
// batch. Opens the step before it reads.
template <class Open>
DEVICE void read_rows(const Exchange& x, const Division& d, int block, int* tables, Open open) {
  __shared__ int choices[AHEAD][TOP_K];
  const Tables t{tables, tables + x.here.slots, choices};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = x.lanes.all();
  const int begin = min(block * d.run, all), end = min(begin + d.run, all);
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * x.here.slots; i += THREADS) tables[i] = 0;
  open();
#pragma unroll 1
  for (DispatchSpan span{begin, 0}; span.from < end || begin == end; span.from += AHEAD) {
    span.count = min(end - span.from, AHEAD);
    if (span.from == begin)
      count_choices(x, d, block, span, t);
    else
      read_choices(x, span, span, false, t);
    __syncthreads();
    if (warp == 0 && (begin == end || RAGGED && span.from == begin)) lay_out(x, t, begin == end);
    if (begin == end) return;
    const bool few = span.count * TOP_K <= PLACED_AT_ONCE;
    int places = -1;
    if (few) {
      if (RAGGED) __syncthreads();
      places = place_of(x, span, 0, t, false);
      if (warp == 0 && lane < span.count * TOP_K) x.batch.places[(u64)span.from * TOP_K + lane] = places;
      if (warp == WARPS - 1) keep_weights(x, span, 32 * warp);
    } else {
      if (warp == 0)
        place_rows(x, span, t);
      else
        keep_weights(x, span, 32);
      __syncthreads();
    }
    deliver_rows(x, span, t, few, places);
    __syncthreads();
  }
}

// grid <= multiprocessors, so that all blocks run at once. `state`: sequence number of the last dispatch, blocks that
// have read it. `sent`: copies that dispatches sent to other ranks, and sums that combines did; the host
// reads them as `told`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) peer_dispatch(
    const u64* memory, u32* state, u32* live, u32* host_flags, u64 patience, int rank, u64 at_begun,
    u64 at_choices, u64 at_weights, u64 at_records, u64 parity_bytes, int lane_rows, u64 lanes_low,
    u64 lanes_high, int first_slot, int slots_here, int capacity, int row_align, int sliced, int choice_senders,
    int senders, int groups_log2, int run, int stretch, int shares, const u8* rows, int row_bytes,
    const int* slots, const float* weights, float factor, u8* part0, u8* part1, u8* part2, int* counts,
    int* offsets, int* places, float* place_weights, u32* ticket, u64* sent, u64* told,
    uint4* shared_counts) {
  extern __shared__ uint4 dynamic[];  // a record for each team, or [2, slots_here] int
  __shared__ Step step;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Opening opening(memory, live, state, warp == 0);
  const Watch w{live, host_flags, memory, rank, patience, 0};
  const Exchange x{step,
                   w,
                   {lanes_low, lanes_high},
                   {first_slot, slots_here, capacity, sliced},
                   {at_begun, at_choices, at_weights, at_records, (u64)SLOT_WORDS(lane_rows)},
                   {rows, row_bytes, slots, weights, factor},
                   {{part0, part1, part2}, counts, offsets, places, place_weights, row_align},
                   shared_counts,
                   lane_rows};
  const Division d{choice_senders, senders, groups_log2, run, stretch, shares};
  auto open = [&] {
    if (warp == 0) opening.open(step, next_sequence(opening.last), parity_bytes);
    if (threadIdx.x == 0) atomicAdd(state + 1, 1u);
    __syncthreads();
  };
  const int block = blockIdx.x, readers = gridDim.x - senders - choice_senders;
  if (block < readers) {
    read_rows(x, d, block, (int*)dynamic, open);
    return;
  }
  if (block >= readers + choice_senders) {
    const u32 copies = send_rows(x, d, block - readers - choice_senders, (u8*)dynamic, open);
    if (copies) atomicAdd(sent, (u64)copies);
    return;
  }
  send_choices(x, block - readers, choice_senders, open);
  if (block > readers) return;
  if (warp == 0 && lane < RANKS && x.reaches(lane)) {  // also those whose lanes are empty
    store_relaxed((u32*)(step.memory[lane] + at_begun) + rank, step.sequence);
    const u32* greeting = (const u32*)x.arrived(x.at.begun) + lane;
    await(w, lane, step.sequence, [&] { return load_acquire(greeting) == step.sequence; });
  }
  if (warp == 1 && lane < 2) *(volatile u64*)(told + lane) = sent[lane];
  if (warp == 2 && lane == 0) {
    *ticket = step.sequence;
    while (load_relaxed(state + 1) < gridDim.x) {}  // until all blocks have read the last sequence number
    state[1] = 0, state[0] = step.sequence;
  }
}
