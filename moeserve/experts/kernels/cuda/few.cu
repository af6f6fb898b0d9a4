// A whole step of few rows a slot in one launch: gate and up, the activation, a barrier of the grid, down.
// Weights are the wide side of the matrix instruction and stream through a ring that each worker, a warp group,
// has of its own; rows stand in a ring that the workers of a block share. `hopper.cu` and `codes.cu` precede it.
//
// Work is counted in units of 64 rows of weights by all of K, for one group of at most ROWS rows of a slot. A
// block owns a run of units, and works on up to WORKERS of one group at once. Its workers share them, and K: worker
// w has unit w % units, and of the pieces of K, DEPTH long, those that are w / units modulo WORKERS / units. A unit
// of gate and up is 32 rows of each, so that their sums meet in one thread.
//
// Given: KIND (0 four-bit, 1 FP8, 2 bf16), ROWS (8, 16, 24, 32), WORKERS (2, 4), STAGES of a worker's ring, PIECES
// of rows (a multiple of WORKERS), BIAS, LIMITED, OUT (0 float32, 1 bf16, 2 f16), and for FP8 ROUND: rows come in
// bf16 and are rounded here.
//
// Nothing in the loop over K reads global memory: behind the streams of all blocks a load would wait for microseconds.
// FP8's scales of weights therefore come with their stage. Rows of the second phase stay in their ring while all of K
// has room there, and are brought, or rounded, once for all units of a group.

#define FP4 (KIND == 0)
#define FP8 (KIND == 1)
#define BF16 (KIND == 2)

#define TILES (ROWS / 8)

#if FP4
#define DEPTH 256
#define CODE_BYTES 8192
#define SCALE_BYTES 1024
#define STAGE_BYTES (CODE_BYTES + SCALE_BYTES)
#define ROW_BYTES 512
#else
#define DEPTH (FP8 ? 128 : 64)
#define STAGE_BYTES 8192
#define ROW_BYTES 128
#endif
#define TILE_BYTES (8 * ROW_BYTES)
#define PIECE_BYTES (ROWS * ROW_BYTES)
#define RING_BYTES (STAGES * STAGE_BYTES)

#define MOST_SLOTS 512
// A slot that has rows, in the list of them: groups before it, then its number.
#define BEFORE_BITS 23
#define BEFORE ((1 << BEFORE_BITS) - 1)
#define PIECES_AT 0
#define RINGS_AT (PIECES * PIECE_BYTES)
#define SUMS_AT (RINGS_AT + WORKERS * RING_BYTES)
#define SUM_BYTES (64 * ROWS * 4)
#define ROW_SCALES_AT (SUMS_AT + WORKERS / 2 * SUM_BYTES)
#define SCALES_AT (ROW_SCALES_AT + (FP8 ? PIECES * ROWS * 4 : 0))
#define LIST_AT (SCALES_AT + (FP8 ? WORKERS * STAGES * 8 : 0))
#define BARRIERS_AT (LIST_AT + MOST_SLOTS * 4)
#define READY(w, s) (BARRIERS_AT + ((w) * STAGES + (s)) * 8)
#define USED(w, s) (BARRIERS_AT + ((WORKERS + (w)) * STAGES + (s)) * 8)
#define FULL(p) (BARRIERS_AT + (2 * WORKERS * STAGES + (p)) * 8)
#define EMPTY(p) (BARRIERS_AT + (2 * WORKERS * STAGES + PIECES + (p)) * 8)
#define TOTALS_AT (BARRIERS_AT + (2 * WORKERS * STAGES + 2 * PIECES) * 8)
#define TARGET_AT (TOTALS_AT + 8)

// The last warp group brings rows and gives registers away. What a block is given when it starts must do: a warp
// that asks for more than is left waits for good.
#define THREADS (WORKERS * 128 + 128)
#if WORKERS == 2
#define START_REGISTERS 168
#define WORKER_REGISTERS 224
#define HELPER_REGISTERS 56
#else
#define START_REGISTERS 96
#define WORKER_REGISTERS (FP8 ? 104 : 112)
#define HELPER_REGISTERS (FP8 ? 64 : 32)
#endif
static_assert(WORKERS * WORKER_REGISTERS + HELPER_REGISTERS <= (WORKERS + 1) * START_REGISTERS, "too many registers");

// One side's weights, but for its codes.
struct Side {
  const float* scale;  // four-bit: one a row, [e, n]; FP8: [e, n / 128, k / 128]
  const float* bias;   // [e, n]
  int n, k;
};

struct Task {
  const TensorMap* gate_up_codes;  // four-bit: as below, in rows of 2048 bytes; else panels by eights
#if FP4
  const TensorMap* gate_up_scales;  // as below, in rows of 512 bytes
  const u8* down_codes;             // [e, blocks of 64 rows, pieces of 256, 8192]
  const u8* down_scales;            // [e, blocks, pieces, 1024]
#else
  const TensorMap* down_codes;  // panels
#endif
  Side gate_up, down;
  const int* counts;
  const int* offsets;
  const float* x_scale;  // FP8: [R, H / 128], or bf16 rows [R, H] if these are rounded here
  int slots;
  u16* inner;  // [R, I] bf16; FP8: float32, or E4M3 codes [R, I] and then their scales [R, I / 128]
  int rows;    // R
  void* out;   // [R, H]
  u64* turns;  // of blocks, never reset
  float limit, alpha, beta;
};

DEVICE Side side_of(const Task& t, int phase) { return phase ? t.down : t.gate_up; }

// ---- what a block works on ---------------------------------------------------------------------------------

DEVICE int shared_word(u32 at) {
  int word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

DEVICE void store_word(u32 at, u32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }

// A run of units in a phase, and the part of it that is at hand.
struct Cursor {
  int phase, begin, at, end;  // units
  bool whole;                 // see `inner_whole`
  int units, log, first;      // at hand: how many, its logarithm, and the first of them in its slot
  bool fresh, last;           // of the tiles that share rows in the ring
  int slot, row0, rows;
};

DEVICE int units_of_slot(const Task& t, int phase) {
  return phase ? (t.down.n + 63) / 64 : t.gate_up.n / 64;
}

// Parts that K is cut into between the workers; within a tile a place in the ring of rows belongs to one of them.
DEVICE int shares_of(const Cursor& c) { return WORKERS >> c.log; }

// FP8: whether inner rows are rounded as they are made, for which a tile of gate and up must be a whole group of 128
// columns: where there are too few tiles for that, each block rounds what it reads.
DEVICE bool inner_whole(const Task& t, int groups) {
  return FP8 && WORKERS == 4 && t.down.k % 128 == 0 && (u32)groups * (t.down.k / 128) >= 5 * gridDim.x;
}

DEVICE float* inner_scales(const Task& t) { return (float*)((u8*)t.inner + (u64)t.rows * t.down.k); }

DEVICE void enter(Cursor& c, const Task& t, int groups, int phase) {
  c.phase = phase;
  c.whole = inner_whole(t, groups);
  const int step = c.whole && !phase ? WORKERS : 1;
  const u32 total = (u32)groups * units_of_slot(t, phase) / step;
  c.at = c.begin = (u64)total * blockIdx.x / gridDim.x * step;
  c.end = (u64)total * (blockIdx.x + 1) / gridDim.x * step;
}

// Of K.
DEVICE int pieces_of(const Task& t, int phase) { return (side_of(t, phase).k + DEPTH - 1) / DEPTH; }

// Whether the ring holds all of K, so that rows stay there for all tiles of their group.
DEVICE bool keeps_rows(const Task& t, int phase) { return pieces_of(t, phase) <= PIECES; }

// Looks up what stands at c.at; there is something.
DEVICE void look(Cursor& c, const Task& t, u32 base) {
  const int across = units_of_slot(t, c.phase), group = c.at / across;
  c.first = c.at - group * across;
  const int left = min(c.end - c.at, across - c.first);
  c.log = WORKERS >= 4 && left >= 4 ? 2 : left >= 2 ? 1 : 0;
  c.units = 1 << c.log;
  const bool kept = keeps_rows(t, c.phase);
  c.fresh = !kept || c.first == 0 || c.at == c.begin;
  c.last = !kept || c.units == left;
  int low = 0, high = shared_word(base + TOTALS_AT + 4);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if ((shared_word(base + LIST_AT + middle * 4) & BEFORE) <= group)
      low = middle;
    else
      high = middle;
  }
  const u32 entry = shared_word(base + LIST_AT + low * 4);
  c.slot = entry >> BEFORE_BITS;
  const int before = entry & BEFORE;
  const int done = (group - before) * ROWS;
  c.row0 = __ldg(t.offsets + c.slot) + done;
  c.rows = min(__ldg(t.counts + c.slot) - done, ROWS);
}

// The list of slots that have rows. By one warp.
DEVICE void list_slots(const Task& t, u32 base, int lane) {
  int groups = 0, active = 0;
  int count[MOST_SLOTS / 32];
#pragma unroll
  for (int i = 0; i < MOST_SLOTS / 32; ++i) {
    const int slot = i * 32 + lane;
    count[i] = slot < t.slots ? __ldg(t.counts + slot) : 0;
  }
#pragma unroll
  for (int i = 0; i < MOST_SLOTS / 32; ++i) {
    if (i * 32 >= t.slots) break;
    const int own = (max(count[i], 0) + ROWS - 1) / ROWS;
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    const u32 there = __ballot_sync(~0u, own > 0);
    const int place = active + __popc(there & ((1u << lane) - 1));
    if (own > 0)
      store_word(base + LIST_AT + place * 4, (u32)(groups + sum - own) | (u32)(i * 32 + lane) << BEFORE_BITS);
    groups += __shfl_sync(~0u, sum, 31);
    active += __popc(there);
  }
  if (lane == 0)
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(base + TOTALS_AT), "r"(groups), "r"(active) : "memory");
}

// ---- copies ------------------------------------------------------------------------------------------------

DEVICE u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// What a copy reads: bytes; columns of 64 rows; or half a panel of gate and its half of up by turns, eight rows of
// each, from the eight `group` of both.
struct Bytes {
  const void* from;
  u32 bytes;
};

struct Box {
  const TensorMap* map;
  int column, row;
};

struct Eights {
  const TensorMap* map;
  int group, panel;
};

DEVICE void copy_stream(u32 to, const Bytes& c, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :
      : "r"(to), "l"(c.from), "r"(c.bytes), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_stream(u32 to, const Box& c, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(to),
      "l"((u64)c.map), "r"(c.column), "r"(c.row), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_stream(u32 to, const Eights& c, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%2, %2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"((u64)c.map), "r"(0), "r"(c.group), "r"(c.panel), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_word(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// A warp of a worker.
struct Worker {
  u32 base;
  int worker, warp, lane;  // warp of the worker
  u64 policy;
  int step, pieces, turn;  // stages used; pieces of rows before this tile; see `store_whole`
};

// A worker's own stream of weights: what it asks for next. Its warps all know, and ask by turns.
struct Stream {
  Cursor c;
  int unit;
  int piece, pieces, shares;  // of K: the next one, all of them, and how far the next but one is
  int step;                   // stages asked for
  bool over;
#if FP8
  const float* scales[2];  // of the 128 x 128 that hold the next stage's halves
#endif
};

// Finds the next tile that has something for this worker.
DEVICE void settle(Stream& s, const Task& t, const Worker& w) {
  for (;;) {
    if (s.c.at >= s.c.end) {
      if (s.c.phase) {
        s.over = true;
        return;
      }
      enter(s.c, t, shared_word(w.base + TOTALS_AT), 1);
      continue;
    }
    look(s.c, t, w.base);
    s.shares = shares_of(s.c);
    s.piece = w.worker >> s.c.log;
    s.pieces = pieces_of(t, s.c.phase);
    if (s.piece < s.pieces) {
      const int unit = s.unit = s.c.first + (w.worker & s.c.units - 1);
#if FP8
      const Side side = side_of(t, s.c.phase);
      const int columns = (side.k + 127) / 128, rows = (side.n + 127) / 128;
      const int first = s.c.phase ? unit / 2 : unit / 4, second = s.c.phase ? first : (side.n / 2 + unit * 32) / 128;
      const float* of_slot = side.scale + (u64)s.c.slot * rows * columns + s.piece;
      s.scales[0] = of_slot + first * columns, s.scales[1] = of_slot + second * columns;
#endif
      return;
    }
    s.c.at += s.c.units;
  }
}

// Copies the next stage. By one thread.
DEVICE void copy_stage(const Stream& s, const Task& t, const Worker& w) {
  const int stage = s.step % STAGES;
  const u32 to = w.base + RINGS_AT + w.worker * RING_BYTES + stage * STAGE_BYTES;
  const u32 ready = w.base + READY(w.worker, stage);
  barrier_wait(w.base + USED(w.worker, stage), (s.step / STAGES & 1) ^ 1);
  barrier_expect(ready, STAGE_BYTES);
#if FP4
  const Side side = side_of(t, s.c.phase);
  const int packed = (side.k + DEPTH - 1) / DEPTH, first = s.c.slot * ((side.n + 63) / 64);
  if (s.c.phase) {
    const u64 at = (u64)(first + s.unit) * packed + s.piece;
    copy_stream(to, Bytes{t.down_codes + at * CODE_BYTES, CODE_BYTES}, ready, w.policy);
    copy_stream(to + CODE_BYTES, Bytes{t.down_scales + at * SCALE_BYTES, SCALE_BYTES}, ready, w.policy);
    return;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int half = s.unit + j * (side.n / 64), at = (first + half / 2) * packed + s.piece;
    copy_stream(to + j * 4096, Box{t.gate_up_codes, half % 2 * 256, at * 4}, ready, w.policy);
    copy_stream(to + CODE_BYTES + j * 512, Box{t.gate_up_scales, half % 2 * 64, at * 2}, ready, w.policy);
  }
#else
#if FP8
  const u32 scales = w.base + SCALES_AT + (w.worker * STAGES + stage) * 8;
  copy_word(scales, s.scales[0]);
  copy_word(scales + 4, s.scales[1]);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ready) : "memory");
#endif
  const int own = s.c.phase ? (t.down.n + 63) / 64 : (t.gate_up.n / 2 + 63) / 64 * 2;  // panels of a slot, by K
  const int first = s.c.slot * own + (s.c.phase ? s.unit : s.unit / 2);
  const int panel = first * pieces_of(t, s.c.phase) + s.piece;
  if (s.c.phase)
    copy_stream(to, Box{t.down_codes, 0, panel * 64}, ready, w.policy);
  else
    copy_stream(to, Eights{t.gate_up_codes, s.unit % 2 * 4, panel}, ready, w.policy);
#endif
}

// Asks for the next stage, if there is one.
DEVICE void ask(Stream& s, const Task& t, const Worker& w) {
  if (s.over) return;
  if ((s.step & 3) == w.warp) {
    if (w.lane == 0) copy_stage(s, t, w);
    __syncwarp();
  }
#if FP8
  s.scales[0] += s.shares, s.scales[1] += s.shares;
#endif
  ++s.step;
  s.piece += s.shares;
  if (s.piece >= s.pieces) {
    s.c.at += s.c.units;
    settle(s, t, w);
  }
}

// Until all blocks have stored what this phase reads.
DEVICE void wait_for_all(const Task& t, u64 all_there) {
  u64 turn;
  for (;;) {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(turn) : "l"(t.turns) : "memory");
    if (turn >= all_there) break;
    __nanosleep(50);
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}

#if FP8
// Eight values to eight E4M3, and what their group of 128, that sixteen lanes have, was divided by.
DEVICE float round_eight(const float (&values)[8], u32 (&codes)[2]) {
  float peak = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) peak = fmaxf(peak, fabsf(values[j]));
#pragma unroll
  for (int d = 1; d < 16; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
  const float scale = fmaxf(peak, 1e-10f) / 448.f;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float* four = values + 4 * j;
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(four[1] / scale), "f"(four[0] / scale));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(four[3] / scale), "f"(four[2] / scale));
    codes[j] = low | (u32)high << 16;
  }
  return scale;
}

// Eight values of a row: of bf16, or of float32.
DEVICE void load_eight(const u16* at, float (&v)[8]) {
  const uint4 four = __ldcg((const uint4*)at);
  const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    v[2 * j] = __uint_as_float(words[j] << 16), v[2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000);
}

DEVICE void load_eight(const float* at, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float4 four = __ldcg((const float4*)at + j);
    v[4 * j] = four.x, v[4 * j + 1] = four.y, v[4 * j + 2] = four.z, v[4 * j + 3] = four.w;
  }
}

// Every fourth piece of the rows `from` [.., width], from piece `first`, to E4M3 in 128-byte swizzle and a scale a
// row. By one warp, two rows at a time; loads of four such pairs are under way at once.
template <class Value>
DEVICE void round_rows(const Value* from, const Cursor& c, int step, int first, int pieces, int width, u32 base,
                       int lane) {
  const int pairs = (c.rows + 1) / 2, upper = lane / 16, left = lane % 16 * 8;
  from += (u64)(c.row0 + upper) * width + left;
  int load = first, load_pair = 0, piece = first, pair = 0;
  while (piece < pieces) {
    float v[4][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = 0;
      const int row = load_pair * 2 + upper, column = load * 128;
      if (load < pieces && row < c.rows && column + left < width)
        load_eight(from + (u64)load_pair * 2 * width + column, v[i]);
      if (++load_pair == pairs) load_pair = 0, load += 4;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (piece >= pieces) break;
      const int p = (step + piece) % PIECES, row = pair * 2 + upper;
      if (pair == 0) barrier_wait(base + EMPTY(p), ((step + piece) / PIECES & 1) ^ 1);
      u32 codes[2];
      const float scale = round_eight(v[i], codes);
      const u32 place = base + PIECES_AT + p * PIECE_BYTES + row * 128 + ((lane % 16 / 2) ^ (row % 8)) * 16;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place + lane % 2 * 8), "r"(codes[0]), "r"(codes[1])
                   : "memory");
      if (lane % 16 == 0)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + ROW_SCALES_AT + (p * ROWS + row) * 4), "f"(scale)
                     : "memory");
      if (++pair == pairs) {
        fence_for_copies();
        __syncwarp();
        if (lane == 0) barrier_arrive(base + FULL(p));
        pair = 0, piece += 4;
      }
    }
  }
}
#endif

// The rows of a block's units, piece by piece; every fourth piece is for `helper`, one of the last four warps.
DEVICE void bring_rows(const Task& t, const TensorMap* (&maps)[2], u32 base, int helper, int lane) {
#if !FP8
  if (lane) return;
#endif
  const int groups = shared_word(base + TOTALS_AT);
  int step = 0;
  u64 all_there;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(all_there) : "r"(base + TARGET_AT));
  for (int phase = 0; phase < 2; ++phase) {
    Cursor c;
    enter(c, t, groups, phase);
    if (phase && c.at < c.end && lane == 0) wait_for_all(t, all_there);
#if FP8
    __syncwarp();
#endif
    const TensorMap* map = maps[phase];
    const int width = side_of(t, phase).k, pieces = pieces_of(t, phase);
    for (; c.at < c.end; c.at += c.units) {
      look(c, t, base);
      if (!c.fresh) continue;
      const int first = (helper - step) & 3, tiles = (c.rows + 7) / 8;
#if FP8
      if (phase ? !c.whole : ROUND) {
        if (phase)
          round_rows((const float*)t.inner, c, step, first, pieces, width, base, lane);
        else
          round_rows((const u16*)t.x_scale, c, step, first, pieces, width, base, lane);
        step += pieces;
        continue;
      }
      const float* scales = (phase ? inner_scales(t) : t.x_scale) + (u64)(c.row0 + min(lane, c.rows - 1)) * pieces;
      float next = __ldcg(scales + min(first, pieces - 1));
#endif
      for (int piece = first; piece < pieces; piece += 4) {
        const int p = (step + piece) % PIECES, k = piece * DEPTH;
        const u32 to = base + PIECES_AT + p * PIECE_BYTES, full = base + FULL(p);
#if FP8
        const float scale = next;
        next = __ldcg(scales + min(piece + 4, pieces - 1));
#endif
        barrier_wait(base + EMPTY(p), ((step + piece) / PIECES & 1) ^ 1);
#if FP8
        if (lane < ROWS)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + ROW_SCALES_AT + (p * ROWS + lane) * 4), "f"(scale)
                       : "memory");
        __syncwarp();
        if (lane) continue;
#endif
        barrier_expect(full, tiles * TILE_BYTES);
        for (int i = 0; i < tiles; ++i) {
          copy_box(to + i * 1024, map, k, c.row0 + i * 8, full);
#if FP4
#pragma unroll
          for (int j = 1; j < 4; ++j) copy_box(to + j * ROWS * 128 + i * 1024, map, k + j * 64, c.row0 + i * 8, full);
#endif
        }
      }
      step += pieces;
    }
  }
}

// ---- products ----------------------------------------------------------------------------------------------

#if FP4
// `decode` by a pair of scale bytes for each of `even` and `odd`.
DEVICE void decode_scaled(u32& w0, u32 w1, u32 scales, int h, u32 (&out)[4]) {
  const u32 even = and_or(scales, 0x0FF00FF0, 0x70007000);
  const u32 odd = and_or(__funnelshift_r(scales, scales, 8), 0x0FF00FF0, 0x70007000);
  decode(w0, w1, even, odd, h, out);
}

DEVICE uint2 load_shared_pair(u32 at) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
  return value;
}

// Where a thread's two rows of a stage are: codes and scales, 8 bytes of both. A row of gate and one of up, which
// stand one after the other, in the first phase; rows 8 apart in the second. Codes of 8 more columns are `half` bytes
// on, of 128 more `2 half`, scales of these `half / 4`.
struct Held {
  u32 codes[2], scales[2], half;
};

DEVICE Held held_at(int phase, int warp, int lane) {
  Held held;
  held.half = phase ? 2048 : 1024;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int chunk = phase ? warp : warp / 2, row3 = phase ? r : warp & 1, side = phase ? 0 : r;
    held.codes[r] = side * 4096 + chunk * 512 + lane * 16 + row3 * 8;
    held.scales[r] = CODE_BYTES + side * 512 + chunk * 128 + lane / 4 * 16 + row3 * 8;
  }
  return held;
}

DEVICE void load_matrices(u32 at, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

DEVICE void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// acc += this warp's 16 of 64 rows of weights x 256 of K, times N rows; `used` is told when the weights are in
// registers. wgmma would take operands from registers too, but is slow with so few columns.
template <int N>
DEVICE void multiply_stage(float (&acc)[N / 2], const Held& held, u32 weights, u32 rows, u32 used, int lane) {
  uint2 codes[2][2][2], scales[2][2];  // 128 of K; row, half
#pragma unroll
  for (int s = 0; s < 2; ++s)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      codes[s][r][0] = load_shared_pair(weights + held.codes[r] + s * 2 * held.half);
      codes[s][r][1] = load_shared_pair(weights + held.codes[r] + (s * 2 + 1) * held.half);
      scales[s][r] = load_shared_pair(weights + held.scales[r] + s * held.half / 4);
    }
  const u32 row = rows + lane % 8 * 128;
#pragma unroll
  for (int g = 0; g < 4; ++g) {  // 64 of K
    const int s = g / 2, h = g % 2;
    u32 b[N / 8][2][4];
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        load_matrices(row + g * ROWS * 128 + n * 1024 + ((j * 4 + lane / 8) ^ lane % 8) * 16, b[n][j]);
    u32 w[4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        decode_scaled(codes[s][r][half].x, codes[s][r][half].y, h ? scales[s][r].y : scales[s][r].x, h,
                      w[half * 2 + r]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 chunk[4] = {w[0][i], w[1][i], w[2][i], w[3][i]};
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
        multiply(acc + n * 4, chunk, b[n][i / 2][i % 2 * 2], b[n][i / 2][i % 2 * 2 + 1]);
    }
    if (g == 0) {
      __syncwarp();
      if (lane == 0) barrier_arrive(used);
    }
  }
}

#else

#define SUMS_OF_8 "%0, %1, %2, %3"
#define SUMS_OF_16 SUMS_OF_8 ", %4, %5, %6, %7"
#define SUMS_OF_24 SUMS_OF_16 ", %8, %9, %10, %11"
#define SUMS_OF_32 SUMS_OF_24 ", %12, %13, %14, %15"
#define HELD_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HELD_OF_8 HELD_4(0)
#define HELD_OF_16 HELD_OF_8, HELD_4(4)
#define HELD_OF_24 HELD_OF_16, HELD_4(8)
#define HELD_OF_32 HELD_OF_24, HELD_4(12)

#if FP8
#define FEW_TYPES "k32.f32.e4m3.e4m3 {"
#define FEW_ORDERS ", p, 1, 1;\n}"
#else
#define FEW_TYPES "k16.f32.bf16.bf16 {"
#define FEW_ORDERS ", p, 1, 1, 0, 0;\n}"
#endif
#define FEW_PRODUCT(n, a, x, m) \
  if constexpr (N == n) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #m ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n FEW_TYPES \
                 SUMS_OF_##n "}, %" #a ", %" #x FEW_ORDERS : HELD_OF_##n : "l"(w), "l"(rows), "r"(more));

// d [64 x N] (+)= w [64 x 32 bytes] rows [N x 32 bytes]^T; `more` 0 starts a new sum.
template <int N>
DEVICE void few_product(float (&d)[N / 2], u64 w, u64 rows, int more) {
  FEW_PRODUCT(8, 4, 5, 6)
  FEW_PRODUCT(16, 8, 9, 10)
  FEW_PRODUCT(24, 12, 13, 14)
  FEW_PRODUCT(32, 16, 17, 18)
}

// Until all products are there; the sums are named so that nothing reads them earlier.
template <int N>
DEVICE void few_products_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d (+)= 64 rows of weights x 128 bytes of K, times N rows.
template <int N>
DEVICE void multiply_stage(float (&d)[N / 2], u32 weights, u32 rows, int more) {
  const u64 w = tile_descriptor(weights), x = tile_descriptor(rows);
  products_fence();
#pragma unroll
  for (int j = 0; j < 4; ++j) few_product<N>(d, w + j * 2, x + j * 2, more || j);
  products_commit();
  few_products_wait(d);
}
#endif

// ---- sums --------------------------------------------------------------------------------------------------

DEVICE void all_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS * 128) : "memory"); }

// Adds the shares of K of each unit into its first worker's sums.
template <int N>
DEVICE void gather(float (&acc)[N / 2], const Cursor& c, u32 base, int worker) {
  const int share = worker >> c.log, unit = worker & c.units - 1;
  for (int half = shares_of(c) / 2; half; half /= 2) {
    all_workers();
    const u32 at = base + SUMS_AT + threadIdx.x % 128 * 16;
    if (share >= half && share < 2 * half) {
      const u32 own = at + (((share - half) << c.log) + unit) * SUM_BYTES;
#pragma unroll
      for (int i = 0; i < N / 8; ++i)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(own + i * 2048), "f"(acc[i * 4]),
                     "f"(acc[i * 4 + 1]), "f"(acc[i * 4 + 2]), "f"(acc[i * 4 + 3])
                     : "memory");
    }
    all_workers();
    if (share < half) {
      const u32 other = at + ((share << c.log) + unit) * SUM_BYTES;
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        const uint4 v = load_shared4(other + i * 2048);
        acc[i * 4] += __uint_as_float(v.x), acc[i * 4 + 1] += __uint_as_float(v.y);
        acc[i * 4 + 2] += __uint_as_float(v.z), acc[i * 4 + 3] += __uint_as_float(v.w);
      }
    }
  }
}

// Of this thread's two rows of weights: which they are, what their sums are multiplied by, and what is added.
struct Terms {
  int row[2];
  float scale[2], bias[2];
};

DEVICE Terms load_terms(const Cursor& c, const Side& side, int unit, int warp, int lane) {
  Terms terms;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = c.phase ? unit * 64 + warp * 16 + r * 8 : unit * 32 + warp * 8 + r * (side.n / 2);
    terms.row[r] = row + lane / 4;
    const u64 at = (u64)c.slot * side.n + min(terms.row[r], side.n - 1);
    terms.scale[r] = FP4 ? __ldg(side.scale + at) : 1;
    terms.bias[r] = BIAS ? __ldg(side.bias + at) : 0;
  }
  return terms;
}

// Two lanes with neighbouring columns, of rows 2 (lane % 4) and the next: the even column's lane stores both columns
// of the first row, the other one those of the second.
template <int BF>
DEVICE void store_pair(u16* out, float2 v, const Cursor& c, int row, int column, int width) {
  const bool odd = threadIdx.x & 4;
  const float other = __shfl_xor_sync(~0u, odd ? v.x : v.y, 4);
  const float low = odd ? other : v.x, high = odd ? v.y : other;
  u32 pair;
  if (BF)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  row += odd;
  if (row < c.rows && column < width) *(u32*)(out + (u64)(c.row0 + row) * width + (column & ~1)) = pair;
}

#if FP8
// Activates, rounds to E4M3 with one scale for the tile's 128 columns, and stores. Peaks of rows stand where shares of
// K would be summed, at the tile's turn of three; a turn is zeroed two tiles ahead, when nobody can be there.
template <int N>
DEVICE void store_whole(float (&acc)[N / 2], const Cursor& c, const Task& t, const Worker& w, const Terms& terms) {
  const u32 peaks = w.base + SUMS_AT + w.turn * ROWS * 4, later = w.base + SUMS_AT + (w.turn + 2) % 3 * ROWS * 4;
  const int width = t.down.k, token = w.lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    float& v = acc[i / 2 * 4 + i % 2];
    v = activate(v + terms.bias[0], acc[i / 2 * 4 + 2 + i % 2] + terms.bias[1], t);
    float peak = fabsf(v);
#pragma unroll
    for (int d = 4; d < 32; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
    if (w.lane < 4)
      asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(peaks + (i / 2 * 8 + token + i % 2) * 4),
                   "r"(__float_as_uint(peak))
                   : "memory");
  }
  all_workers();
  if (threadIdx.x < ROWS) store_word(later + threadIdx.x * 4, 0);
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    const float2 peak = load_shared2(peaks + (n * 8 + token) * 4);
    const float x = fmaxf(peak.x, 1e-10f) / 448.f, y = fmaxf(peak.y, 1e-10f) / 448.f;
    const float first = acc[n * 4] / x, second = acc[n * 4 + 1] / y;
    const bool odd = w.lane & 4;  // as in `store_pair`
    const float other = __shfl_xor_sync(~0u, odd ? first : second, 4);
    const float low = odd ? other : first, high = odd ? second : other;
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    const int row = n * 8 + token + odd;
    if (row >= c.rows) continue;
    *(u16*)((u8*)t.inner + (u64)(c.row0 + row) * width + (terms.row[0] & ~1)) = pair;
    const u64 group = (u64)(c.row0 + row) * (width / 128) + terms.row[0] / 128;
    if (w.lane < 8 && threadIdx.x < 32) inner_scales(t)[group] = odd ? y : x;
  }
}
#endif

template <int N>
DEVICE void store(const float (&acc)[N / 2], const Terms& terms, const Cursor& c, const Task& t, int lane) {
  if (c.phase == 0) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      float v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        v[j] = activate(acc[n * 4 + j] * terms.scale[0] + terms.bias[0],
                        acc[n * 4 + 2 + j] * terms.scale[1] + terms.bias[1], t);
      const int row = n * 8 + lane % 4 * 2, width = t.gate_up.n / 2;
#if FP8
      float* at = (float*)t.inner + (u64)(c.row0 + row) * width + terms.row[0];
      if (row < c.rows) *at = v[0];
      if (row + 1 < c.rows) at[width] = v[1];
#else
      store_pair<1>(t.inner, make_float2(v[0], v[1]), c, row, terms.row[0], width);
#endif
    }
    return;
  }
  const int width = t.down.n;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float first = acc[n * 4 + r * 2] * terms.scale[r] + terms.bias[r];
      const float second = acc[n * 4 + r * 2 + 1] * terms.scale[r] + terms.bias[r];
      const int row = n * 8 + lane % 4 * 2;
#if OUT
      store_pair<OUT == 1>((u16*)t.out, make_float2(first, second), c, row, terms.row[r], width);
#else
      float* at = (float*)t.out + (u64)(c.row0 + row) * width + terms.row[r];
      if (row < c.rows && terms.row[r] < width) *at = first;
      if (row + 1 < c.rows && terms.row[r] < width) at[width] = second;
#endif
    }
}

// ---- a worker's work ---------------------------------------------------------------------------------------

template <int N>
DEVICE void do_tile(Worker& w, Stream& s, const Cursor& c, const Task& t) {
  float acc[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = 0;
  const Side side = side_of(t, c.phase);
  const int pieces = pieces_of(t, c.phase), shares = shares_of(c), share = w.worker >> c.log;
  const bool kept = keeps_rows(t, c.phase);
  const int unit = c.first + (w.worker & c.units - 1);
#if FP4
  const Held held = held_at(c.phase, w.warp, w.lane);
#endif
  for (int k = share; k < pieces; k += shares, ++w.step) {
    const int stage = w.step % STAGES, piece = w.pieces + k, p = piece % PIECES;
    const u32 weights = w.base + RINGS_AT + w.worker * RING_BYTES + stage * STAGE_BYTES;
    const u32 rows = w.base + PIECES_AT + p * PIECE_BYTES, used = w.base + USED(w.worker, stage);
    barrier_wait(w.base + READY(w.worker, stage), w.step / STAGES & 1);
    barrier_wait(w.base + FULL(p), piece / PIECES & 1);
#if FP4
    multiply_stage<N>(acc, held, weights, rows, used, w.lane);
#elif FP8
    const float2 scales = load_shared2(w.base + SCALES_AT + (w.worker * STAGES + stage) * 8);
    float part[N / 2];
    multiply_stage<N>(part, weights, rows, 0);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 x = load_shared2(w.base + ROW_SCALES_AT + (p * ROWS + n * 8 + w.lane % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        acc[n * 4 + i] += part[n * 4 + i] * ((i % 2 ? x.y : x.x) * (i < 2 ? scales.x : scales.y));
    }
#else
    multiply_stage<N>(acc, weights, rows, 1);
#endif
    __syncwarp();
    if (w.lane == 0) {
#if !FP4
      barrier_arrive(used);
#endif
      if (!kept)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(w.base + EMPTY(p)), "r"(WORKERS >> c.log)
                     : "memory");
    }
    if (w.step) ask(s, t, w);
  }
  if (kept && c.last)
    for (int k = w.lane; k < pieces; k += 32) barrier_arrive(w.base + EMPTY((w.pieces + k) % PIECES));
  if (c.last) w.pieces += pieces;
  Terms terms;
  if (share == 0) terms = load_terms(c, side, unit, w.warp, w.lane);
  gather<N>(acc, c, w.base, w.worker);
#if FP8
  if (c.whole && !c.phase) {
    store_whole<N>(acc, c, t, w, terms);
    w.turn = (w.turn + 1) % 3;
    return;
  }
#endif
  if (share == 0) store<N>(acc, terms, c, t, w.lane);
}

DEVICE void work(Worker& w, const Task& t) {
  const int groups = shared_word(w.base + TOTALS_AT);
  Stream s;
  s.step = 0, s.over = false;
  enter(s.c, t, groups, 0);
  settle(s, t, w);
  for (int i = 0; i < STAGES; ++i) ask(s, t, w);
  for (int phase = 0; phase < 2; ++phase) {
    Cursor c;
    enter(c, t, groups, phase);
    for (; c.at < c.end; c.at += c.units) {
      look(c, t, w.base);
      if (ROWS == 8 || c.rows <= 8)
        do_tile<8>(w, s, c, t);
#if ROWS > 8
      else if (ROWS == 16 || c.rows <= 16)
        do_tile<16>(w, s, c, t);
#endif
#if ROWS > 16
      else if (ROWS == 24 || c.rows <= 24)
        do_tile<24>(w, s, c, t);
#endif
#if ROWS > 24
      else
        do_tile<32>(w, s, c, t);
#endif
    }
    if (phase == 0) {
      __threadfence();
      asm volatile("fence.proxy.async;" ::: "memory");
      all_workers();
      if (threadIdx.x == 0)
        asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(t.turns), "l"((u64)1) : "memory");
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    few(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap inner,
#if FP4
        const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap gate_up_scales, const u8* down,
        const u8* down_scales,
#else
        const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap down,
#endif
        const float* gate_up_scale, const float* gate_up_bias, const float* down_scale, const float* down_bias,
        const float* x_scale, const int* counts, const int* offsets, u16* inner_rows, void* out, u64* turns, int rows,
        int slots, int hidden, int inner_size, float limit, float alpha, float beta) {
  const Task t{&gate_up,
#if FP4
               &gate_up_scales, down, down_scales,
#else
               &down,
#endif
               Side{gate_up_scale, gate_up_bias, 2 * inner_size, hidden},
               Side{down_scale, down_bias, hidden, inner_size},
               counts, offsets, x_scale, slots, inner_rows, rows, out, turns, limit, alpha, beta};
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == WORKERS * 128 + 32) {
    prefetch_map(&gate_up);
    prefetch_map(&x);
    prefetch_map(&inner);
#if FP4
    prefetch_map(&gate_up_scales);
#else
    prefetch_map(&down);
#endif
  }
  if (threadIdx.x == WORKERS * 128) {
    for (int i = 0; i < WORKERS * STAGES; ++i) {
      barrier_init(base + READY(0, i), FP8 ? 2 : 1);  // the copy, and FP8's scales
      barrier_init(base + USED(0, i), 4);
    }
    for (int p = 0; p < PIECES; ++p) {
      barrier_init(base + FULL(p), 1);
      barrier_init(base + EMPTY(p), 4 * WORKERS);
    }
    barrier_init_done();
    u64 turn;  // of an earlier launch, or of this one: all blocks come once
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(turn) : "l"(t.turns) : "memory");
    const u64 all_there = (turn / gridDim.x + 1) * gridDim.x;
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(base + TARGET_AT), "l"(all_there) : "memory");
  } else if (warp == 0) {
    list_slots(t, base, lane);
    for (int i = lane; i < 3 * ROWS; i += 32) store_word(base + SUMS_AT + i * 4, 0);
  }
  __syncthreads();
  if (warp >= WORKERS * 4) {
    give_registers<HELPER_REGISTERS>();
    const TensorMap* maps[2] = {&x, &inner};
    bring_rows(t, maps, base, warp - WORKERS * 4, lane);
  } else {
    take_registers<WORKER_REGISTERS>();
    Worker w{base, warp / 4, warp % 4, lane, streaming_policy(), 0, 0, 0};
    work(w, t);
  }
}
