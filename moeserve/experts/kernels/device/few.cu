// A whole step of few rows a slot in one launch: gate and up, the activation, a barrier of the grid, down.
// Weights are the wide side of the matrix instruction and stream through a ring that each worker, a warp group,
// has of its own; rows stand in a ring that the workers of a block share. `hopper.cu` precedes it.
//
// Work is counted in units of 64 rows of weights by all of K, for one group of at most ROWS rows of a slot. A
// block owns a run of units, and works on up to WORKERS of one group at once. Its workers share them, and K: worker
// w has unit w % units, and of the pieces of K, DEPTH long, those that are w / units modulo WORKERS / units. A unit
// of gate and up is 32 rows of each, so that their sums meet in one thread.
//
// Given: KIND (0 four-bit, 1 FP8, 2 bf16), ROWS (8, 16, 24, 32), WORKERS (2, 4), STAGES of a worker's ring, PIECES
// of rows (a multiple of WORKERS), BIAS, LIMITED, OUT (0 float32, 1 bf16, 2 f16), and for FP8 ROUND: rows come in
// bf16 and are rounded here.

#define FP4 (KIND == 0)
#define FP8 (KIND == 1)
#define BF16 (KIND == 2)

#define TILES (ROWS / 8)

#if FP4
#define DEPTH 128
#define CODE_BYTES 4096
#define SCALE_BYTES 512
#define STAGE_BYTES (CODE_BYTES + SCALE_BYTES)
#define ROW_BYTES 256
#define WeightMap u8
#else
#define DEPTH (FP8 ? 128 : 64)
#define STAGE_BYTES 8192
#define ROW_BYTES 128
#define WeightMap TensorMap
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
#define LIST_AT (ROW_SCALES_AT + (FP8 ? PIECES * ROWS * 4 : 0))
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

// One side's weights.
struct Side {
  const WeightMap* codes;  // four-bit: [e, blocks of 64 rows, pieces of 128, 4096]; else [e n, k]
  const u8* scales;        // four-bit: [e, blocks, pieces, 512]
  const float* scale;      // four-bit: one a row, [e, n]; FP8: [e, n / 128, k / 128]
  const float* bias;       // [e, n]
  int n, k;
};

struct Task {
  Side gate_up, down;
  const int* counts;
  const int* offsets;
  const float* x_scale;  // FP8: [R, H / 128], or bf16 rows [R, H] if these are rounded here
  int slots;
  u16* inner;  // [R, I] bf16; or E4M3 codes [R, I], then their scales [R, I / 128], in the same memory
  int rows;    // R
  void* out;   // [R, H]
  u64* turns;  // of blocks, never reset; then by turn's parity and slot its units of gate and up that are done
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
  int phase, at, end;  // units
  bool whole;          // see `inner_whole`
  int units, log, first;  // at hand: how many, its logarithm, and the first of them in its slot
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
  c.at = (u64)total * blockIdx.x / gridDim.x * step;
  c.end = (u64)total * (blockIdx.x + 1) / gridDim.x * step;
}

// Looks up what stands at c.at; there is something.
DEVICE void look(Cursor& c, const Task& t, u32 base) {
  const int across = units_of_slot(t, c.phase), group = c.at / across;
  c.first = c.at - group * across;
  const int left = min(c.end - c.at, across - c.first);
  c.log = WORKERS >= 4 && left >= 4 ? 2 : left >= 2 ? 1 : 0;
  c.units = 1 << c.log;
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

// What a copy reads: bytes; columns of 64 rows; or columns of gate rows and up rows by turns, eight of each, from
// the eight `group` of both.
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
  int column, group, slot;
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
      "%3, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"((u64)c.map), "r"(c.column), "r"(0), "r"(c.group), "r"(c.slot), "r"(barrier), "l"(policy)
      : "memory");
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
  int piece, pieces, shares;  // of K: the next one, all of them, and how far the next but one is
  int step;                   // stages asked for
  bool over;
#if FP4
  const u8* from;  // this lane's part of the next stage
  int stride;
#else
  int unit;
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
    const Side side = side_of(t, s.c.phase);
    s.shares = shares_of(s.c);
    s.piece = w.worker >> s.c.log;
    s.pieces = (side.k + DEPTH - 1) / DEPTH;
    if (s.piece < s.pieces) {
      const int unit = s.c.first + (w.worker & s.c.units - 1);
#if FP4
      const int packed = (side.k + 255) / 256 * 2, blocks = (side.n + 63) / 64;
      // of blocks of 64 rows: lanes 0-3 have the quarters of the codes, 4 and 5 the halves of the scales
      const int half = s.c.phase ? unit * 2 + (w.lane & 1) : (w.lane & 1 ? side.n / 64 : 0) + unit;
      const u64 at = ((u64)s.c.slot * blocks + half / 2) * packed + s.piece;
      s.from = w.lane < 4 ? side.codes + at * CODE_BYTES + (w.lane >> 1) * 2048 + (half & 1) * 1024
                        : side.scales + at * SCALE_BYTES + (half & 1) * 256;
      s.stride = s.shares * (w.lane < 4 ? CODE_BYTES : SCALE_BYTES);
#else
      s.unit = unit;
#endif
      return;
    }
    s.c.at += s.c.units;
  }
}

DEVICE void copy_stage(const Stream& s, const Task& t, const Worker& w) {
  const int stage = s.step % STAGES, lane = w.lane;
  const u32 to = w.base + RINGS_AT + w.worker * RING_BYTES + stage * STAGE_BYTES;
  const u32 ready = w.base + READY(w.worker, stage);
  if (lane == 0) {
    barrier_wait(w.base + USED(w.worker, stage), (s.step / STAGES & 1) ^ 1);
    barrier_expect(ready, STAGE_BYTES);
#if !FP4
    const int k = s.piece * DEPTH;
    if (s.c.phase)
      copy_stream(to, Box{t.down.codes, k, s.c.slot * t.down.n + s.unit * 64}, ready, w.policy);
    else
      copy_stream(to, Eights{t.gate_up.codes, k, s.unit * 4, s.c.slot}, ready, w.policy);
#endif
  }
  __syncwarp();
#if FP4
  if (s.c.phase) {
    if (lane == 0)
      copy_stream(to, Bytes{s.from, CODE_BYTES}, ready, w.policy);
    else if (lane == 4)
      copy_stream(to + CODE_BYTES, Bytes{s.from, SCALE_BYTES}, ready, w.policy);
  } else if (lane < 4) {
    copy_stream(to + lane * 1024, Bytes{s.from, 1024}, ready, w.policy);
  } else if (lane < 6) {
    copy_stream(to + CODE_BYTES + (lane - 4) * 256, Bytes{s.from, 256}, ready, w.policy);
  }
#endif
}

// Asks for the next stage, if there is one.
DEVICE void ask(Stream& s, const Task& t, const Worker& w) {
  if (s.over) return;
  if ((s.step & 3) == w.warp) copy_stage(s, t, w);
#if FP4
  s.from += s.stride;
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
// Eight bf16 to eight E4M3, and what their group of 128, that sixteen lanes have, was divided by.
DEVICE float round_eight(const uint4& v, u32 (&codes)[2]) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  float values[8], peak = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    values[2 * j] = __uint_as_float(words[j] << 16), values[2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000);
    peak = fmaxf(peak, fmaxf(fabsf(values[2 * j]), fabsf(values[2 * j + 1])));
  }
#pragma unroll
  for (int d = 1; d < 16; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
  const float scale = fmaxf(peak, 1e-10f) / 448.f, factor = 1 / scale;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float* four = values + 4 * j;
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(four[1] * factor), "f"(four[0] * factor));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(four[3] * factor), "f"(four[2] * factor));
    codes[j] = low | (u32)high << 16;
  }
  return scale;
}

// Rows of bf16 `from` [.., width] to a piece of E4M3 in 128-byte swizzle, and a scale a row. By one warp.
DEVICE void round_piece(const u16* from, const Cursor& c, int k, int width, u32 to, u32 scales, int lane) {
  const int column = k + lane % 16 * 8;
  const u16* at = from + (u64)c.row0 * width + column;
  for (int first = lane / 16; first < c.rows + lane / 16; first += 8) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 2 * i;
      v[i] = make_uint4(0, 0, 0, 0);
      if (row < c.rows && column < width) v[i] = __ldcg((const uint4*)(at + (u64)row * width));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 2 * i;
      u32 codes[2];
      const float scale = round_eight(v[i], codes);
      const u32 place = to + row * 128 + ((lane % 16 / 2) ^ (row % 8)) * 16 + lane % 2 * 8;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place), "r"(codes[0]), "r"(codes[1]) : "memory");
      if (lane % 16 == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + row * 4), "f"(scale) : "memory");
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
    const int width = side_of(t, phase).k, pieces = (width + DEPTH - 1) / DEPTH;
    for (; c.at < c.end; c.at += c.units, step += pieces) {
      look(c, t, base);
      const int tiles = (c.rows + 7) / 8;
      for (int piece = (helper - step) & 3; piece < pieces; piece += 4) {
        const int p = (step + piece) % PIECES, k = piece * DEPTH;
        const u32 to = base + PIECES_AT + p * PIECE_BYTES, full = base + FULL(p);
        const u32 free = ((step + piece) / PIECES & 1) ^ 1;
#if FP8
        const u32 scales = base + ROW_SCALES_AT + p * ROWS * 4;
        if (phase ? !c.whole : ROUND) {
          barrier_wait(base + EMPTY(p), free);
          round_piece(phase ? t.inner : (const u16*)t.x_scale, c, k, width, to, scales, lane);
          fence_for_copies();
          __syncwarp();
          if (lane == 0) barrier_arrive(full);
          continue;
        }
        float scale = 0;
        const float* from = phase ? inner_scales(t) : t.x_scale;
        if (lane < c.rows) scale = __ldcg(from + (u64)(c.row0 + lane) * pieces + piece);
        barrier_wait(base + EMPTY(p), free);
        if (lane < ROWS) asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + lane * 4), "f"(scale) : "memory");
        __syncwarp();
        if (lane) continue;
#else
        barrier_wait(base + EMPTY(p), free);
#endif
        barrier_expect(full, tiles * TILE_BYTES);
        for (int i = 0; i < tiles; ++i) {
          copy_box(to + i * 1024, map, k, c.row0 + i * 8, full);
          if (FP4) copy_box(to + ROWS * 128 + i * 1024, map, k + 64, c.row0 + i * 8, full);
        }
      }
    }
  }
}

// ---- products ----------------------------------------------------------------------------------------------

#if FP4
// (a & mask) | c
DEVICE u32 and_or(u32 a, u32 mask, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
  return d;
}

// Two bf16 codes times one of the scales in the halves of `scales`.
DEVICE u32 times_low(u32 codes, u32 scales) {
  u32 product;
  asm("{\n.reg .b16 l, h;\n.reg .b32 p;\nmov.b32 {l, h}, %2;\nmov.b32 p, {l, l};\nmul.rn.bf16x2 %0, %1, p;\n}"
      : "=r"(product)
      : "r"(codes), "r"(scales));
  return product;
}

DEVICE u32 times_high(u32 codes, u32 scales) {
  u32 product;
  asm("{\n.reg .b16 l, h;\n.reg .b32 p;\nmov.b32 {l, h}, %2;\nmov.b32 p, {h, h};\nmul.rn.bf16x2 %0, %1, p;\n}"
      : "=r"(product)
      : "r"(codes), "r"(scales));
  return product;
}

// Four pairs of a row, 16 of K apart, from a word of codes (see `four_bit.py`) and the word of their scales.
DEVICE void decode(u32 w, u32 scales, u32 (&out)[4]) {
  const u32 even = and_or(scales << 4, 0x0FF00FF0, 0x70007000), odd = and_or(scales >> 4, 0x0FF00FF0, 0x70007000);
  out[0] = times_low(w & 0x81C081C0, even);
  out[1] = times_low(w << 3 & 0x81C081C0, odd);
  out[2] = times_high(w << 6 & 0x81C081C0, even);
  out[3] = times_high(and_or(w >> 4, 0x00C000C0, and_or(w >> 5, 0x01000100, w << 1 & 0x80008000)), odd);
}

DEVICE uint2 load_shared_pair(u32 at) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
  return value;
}

// Where a thread's two rows of a stage are: codes (then scales, 1/4 as far apart), 8 bytes of both. A row of gate
// and one of up in the first phase, rows 8 apart in the second.
struct Held {
  u32 codes[2], scales[2];
};

DEVICE Held held_at(int phase, int warp, int lane) {
  Held held;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int chunk = phase ? warp : r * 2 + warp / 2, row3 = phase ? r : warp & 1;
    held.codes[r] = chunk * 512 + lane * 16 + row3 * 8;
    held.scales[r] = CODE_BYTES + chunk * 128 + lane / 4 * 16 + row3 * 8;
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

// acc += this warp's 16 of 64 rows of weights x 128 of K, times N rows; `used` is told when the weights are in
// registers. wgmma would take operands from registers too, but is slow with so few columns.
template <int N>
DEVICE void multiply_stage(float (&acc)[N / 2], const Held& held, u32 weights, u32 rows, u32 used, int lane) {
  uint2 codes[2][2], scales[2];  // row, half
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    codes[r][0] = load_shared_pair(weights + held.codes[r]);
    codes[r][1] = load_shared_pair(weights + 2048 + held.codes[r]);
    scales[r] = load_shared_pair(weights + held.scales[r]);
  }
  const u32 row = rows + lane % 8 * 128;
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // 64 of K
    u32 b[N / 8][2][4];
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        load_matrices(row + h * ROWS * 128 + n * 1024 + ((j * 4 + lane / 8) ^ lane % 8) * 16, b[n][j]);
    u32 w[4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        decode(h ? codes[r][half].y : codes[r][half].x, h ? scales[r].y : scales[r].x, w[half * 2 + r]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 chunk[4] = {w[0][i], w[1][i], w[2][i], w[3][i]};
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
        multiply(acc + n * 4, chunk, b[n][i / 2][i % 2 * 2], b[n][i / 2][i % 2 * 2 + 1]);
    }
    if (h == 0) {
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

#if FP8
// The scales of the blocks of 128 x 128 that hold the two halves of a unit.
DEVICE float2 block_scales(const Side& side, const Cursor& c, int unit, int piece) {
  const int columns = (side.k + 127) / 128, rows = (side.n + 127) / 128;
  const int first = c.phase ? unit / 2 : unit / 4, second = c.phase ? first : (side.n / 2 + unit * 32) / 128;
  const float* at = side.scale + (u64)c.slot * rows * columns + min(piece, columns - 1);
  return make_float2(__ldg(at + first * columns), __ldg(at + second * columns));
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
      store_pair<1>(t.inner, make_float2(v[0], v[1]), c, n * 8 + lane % 4 * 2, terms.row[0], t.gate_up.n / 2);
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
  const int pieces = (side.k + DEPTH - 1) / DEPTH, shares = shares_of(c), share = w.worker >> c.log;
  const int unit = c.first + (w.worker & c.units - 1);
#if FP4
  const Held held = held_at(c.phase, w.warp, w.lane);
#endif
#if FP8
  float2 scales = block_scales(side, c, unit, share);
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
    const float2 next = block_scales(side, c, unit, k + shares);
    float part[N / 2];
    multiply_stage<N>(part, weights, rows, 0);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 x = load_shared2(w.base + ROW_SCALES_AT + (p * ROWS + n * 8 + w.lane % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        acc[n * 4 + i] += part[n * 4 + i] * ((i % 2 ? x.y : x.x) * (i < 2 ? scales.x : scales.y));
    }
    scales = next;
#else
    multiply_stage<N>(acc, weights, rows, 1);
#endif
    __syncwarp();
    if (w.lane == 0) {
#if !FP4
      barrier_arrive(used);
#endif
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(w.base + EMPTY(p)), "r"(WORKERS >> c.log)
                   : "memory");
    }
    if (w.step) ask(s, t, w);
  }
  w.pieces += pieces;
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
        const u8* gate_up, const u8* gate_up_scales, const u8* down, const u8* down_scales,
#else
        const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap down,
#endif
        const float* gate_up_scale, const float* gate_up_bias, const float* down_scale, const float* down_bias,
        const float* x_scale, const int* counts, const int* offsets, u16* inner_rows, void* out, u64* turns, int rows,
        int slots, int hidden, int inner_size, float limit, float alpha, float beta) {
#if FP4
  const Task t{Side{gate_up, gate_up_scales, gate_up_scale, gate_up_bias, 2 * inner_size, hidden},
               Side{down, down_scales, down_scale, down_bias, hidden, inner_size},
#else
  const Task t{Side{&gate_up, nullptr, gate_up_scale, gate_up_bias, 2 * inner_size, hidden},
               Side{&down, nullptr, down_scale, down_bias, hidden, inner_size},
#endif
               counts, offsets, x_scale, slots, inner_rows, rows, out, turns, limit, alpha, beta};
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == WORKERS * 128) {
    for (int i = 0; i < WORKERS * STAGES; ++i) {
      barrier_init(base + READY(0, i), 1);
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
