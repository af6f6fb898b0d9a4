// A step of some rows a slot on four-bit weights in one launch: gate and up, the activation, down. `hopper.cu`,
// `epilogue.cu` and `codes.cu` precede it.
//
// Reading the weights takes the time, if decoding them does not: tensor cores take them from registers, where the
// multiplying warps decode them, as the wide side of the product. A tile is 256 rows of weights by all of K, for one
// group of at most ROWS rows of a slot. Both blocks of a cluster work on neighbouring tiles of one group, and each
// copies half of its rows to both. Of a tile's four warp groups two share the same weights, and K: each has half of a
// stage. Every warp group multiplies two blocks of 64 rows; in the first GEMM these are gate and up of the same
// columns, so that they meet in one thread.
//
// Tiles of the second GEMM follow those of the first without a barrier: they wait until their slot's inner rows are
// there, which were made long before unless there are few slots.
//
// Given: ROWS (8, 16, 24, 32), STAGES, BIAS, LIMITED, OUT (0 float32, 1 bf16, 2 f16).

#define WARPS 16     // that multiply
#define HELPERS 4    // warps that copy
#define THREADS (WARPS * 32 + HELPERS * 32)
#define WORKER_REGISTERS 112
#define HELPER_REGISTERS 32
#define CLUSTER 2
#define BLOCKS 4     // of 64 rows of weights in a tile
#define DEPTH 256    // of a stage; the weights are packed in pieces of that
#define CODE_BYTES 8192   // of 64 rows of weights by DEPTH
#define SCALE_BYTES 1024
#define MOST_SLOTS 512

#define CODES_AT (ROWS * DEPTH * 2)
#define SCALES_AT (CODES_AT + BLOCKS * CODE_BYTES)
#define STAGE_BYTES (SCALES_AT + BLOCKS * SCALE_BYTES)
#define SUMS_AT (STAGES * STAGE_BYTES)
#define SUM_BYTES (WARPS * 32 * ROWS * 2)
#define LIST_AT (SUMS_AT + SUM_BYTES)
#define TILE_AT (LIST_AT + MOST_SLOTS * 4)
#define BARRIERS_AT (TILE_AT + STAGES * 32)
#define FULL(s) (BARRIERS_AT + (s) * 8)
#define EMPTY(s) (BARRIERS_AT + (STAGES + (s)) * 8)
#define TOTALS_AT (BARRIERS_AT + STAGES * 16)

// One side's weights.
struct Side {
  const u8* codes;     // [e, blocks of 64 rows, pieces of 256, CODE_BYTES]
  const u8* scales;    // [e, blocks, pieces, SCALE_BYTES]
  const float* scale;  // [e, n]
  const float* bias;   // [e, n]
  int n, k;
};

struct Task {
  Side gate_up, down;
  const int* counts;
  const int* offsets;
  int slots;
  u16* inner;  // [R, I] bf16
  void* out;   // [R, H]
  u32* made;   // blocks that are through, then by slot its parts of inner rows that are there; zero between launches
  float limit, alpha, beta;
};

DEVICE Side side_of(const Task& t, int phase) { return phase ? t.down : t.gate_up; }
DEVICE int pieces_of(const Side& side) { return (side.k + DEPTH - 1) / DEPTH; }
DEVICE int blocks_of(const Side& side) { return (side.n + 63) / 64; }

// Pairs of tiles, one for each block of a cluster, that a group makes.
DEVICE int pairs_of(const Side& side) { return (blocks_of(side) + CLUSTER * BLOCKS - 1) / (CLUSTER * BLOCKS); }

DEVICE u32 shared_word(u32 at) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

DEVICE void store_word(u32 at, u32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }

// Lane 0's word, which the compiler then knows to be one for the whole warp.
DEVICE int same(u32 word) { return __shfl_sync(~0u, (int)word, 0); }

// ---- what there is to do -----------------------------------------------------------------------------------

#define BEFORE_BITS 23
#define BEFORE ((1 << BEFORE_BITS) - 1)

// The list of slots that have rows: groups before it, then its number. By one warp.
DEVICE void list_slots(const Task& t, u32 base, int lane) {
  int groups = 0, active = 0;
  for (int first = 0; first < t.slots; first += 32) {
    const int slot = first + lane, count = slot < t.slots ? __ldg(t.counts + slot) : 0;
    const int own = (max(count, 0) + ROWS - 1) / ROWS;
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    const u32 there = __ballot_sync(~0u, own > 0);
    const int place = active + __popc(there & ((1u << lane) - 1));
    if (own > 0) store_word(base + LIST_AT + place * 4, (u32)(groups + sum - own) | (u32)slot << BEFORE_BITS);
    groups += __shfl_sync(~0u, sum, 31);
    active += __popc(there);
  }
  if (lane == 0) store_word(base + TOTALS_AT, groups), store_word(base + TOTALS_AT + 4, active);
}

// Rows of a slot, and where they are.
struct Group {
  int slot, row0, rows, in_slot;  // groups of the slot
};

DEVICE Group group_at(const Task& t, u32 base, int group) {
  int low = 0, high = shared_word(base + TOTALS_AT + 4);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if ((shared_word(base + LIST_AT + middle * 4) & BEFORE) <= group)
      low = middle;
    else
      high = middle;
  }
  const u32 entry = shared_word(base + LIST_AT + low * 4);
  const int slot = entry >> BEFORE_BITS, done = (group - (int)(entry & BEFORE)) * ROWS;
  const int count = __ldg(t.counts + slot);
  return Group{slot, __ldg(t.offsets + slot) + done, min(count - done, ROWS), (count + ROWS - 1) / ROWS};
}

// This cluster's pairs of tiles, one after the other: first those of gate and up by turns, then those of down. Clusters
// that had one pair fewer of the first get as many more of the second as take the same time.
struct Walk {
  int clusters, own, first, second;  // pairs in all, by phase
  int heavy, extra;                  // clusters that have one pair more of the first; pairs of the second for it
  int step;

  DEVICE Walk(const Task& t, int groups) {
    clusters = gridDim.x / CLUSTER, own = blockIdx.x / CLUSTER, step = 0;
    first = groups * pairs_of(t.gate_up), second = groups * pairs_of(t.down);
    heavy = first % clusters;
    extra = heavy ? pieces_of(t.gate_up) / pieces_of(t.down) : 0;
  }

  // Phase and pair of the next; false if there is none.
  DEVICE bool next(int& phase, int& pair) {
    const int before = first / clusters + (own < heavy), light = clusters - heavy, i = step++;
    phase = i >= before;
    if (!phase) {
      pair = own + i * clusters;
      return true;
    }
    const int more = own >= heavy ? extra : 0, j = i - before;
    pair = j < more ? own - heavy + j * light
                    : extra * light + (own - heavy + clusters) % clusters + (j - more) * clusters;
    return pair < second;
  }
};

// ---- copies ------------------------------------------------------------------------------------------------

DEVICE u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE void copy_stream(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :
      : "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Of a tile's blocks of 64 rows, number b: gate's come before up's in the first phase.
DEVICE int block_at(const Side& side, int phase, int column, int b) {
  if (phase) return column * BLOCKS + b;
  return column * (BLOCKS / 2) + b % (BLOCKS / 2) + b / (BLOCKS / 2) * (blocks_of(side) / 2);
}

// Until all of the slot's inner rows are there.
DEVICE void wait_for_inner(const Task& t, const Group& g) {
  const u32 parts = g.in_slot * pairs_of(t.gate_up) * CLUSTER * WARPS;
  u32 made;
  for (;;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(made) : "l"(t.made + 1 + g.slot) : "memory");
    if (made >= parts) return;
    __nanosleep(50);
  }
}

// By one thread of each of four warps, since one takes too long to ask for all that a stage needs. Each brings one of
// the tile's blocks, its codes and its scales, and by turns a box of those rows that this block of the cluster copies.
DEVICE void produce(const Task& t, const TensorMap* x, const TensorMap* inner, u32 base, int helper) {
  const u64 policy = streaming_policy();
  const int rank = cluster_rank();
  Walk walk(t, shared_word(base + TOTALS_AT));
  int stage = 0, phase, pair;
  u32 parity = 1;
  while (walk.next(phase, pair)) {
    const Side side = side_of(t, phase);
    const TensorMap* rows = phase ? inner : x;
    const int pairs = pairs_of(side), column = pair % pairs * CLUSTER + rank, pieces = pieces_of(side);
    const Group g = group_at(t, base, pair / pairs);
    const int eights = (g.rows + 7) / 8, block = min(block_at(side, phase, column, helper), blocks_of(side) - 1);
    const u64 first = ((u64)g.slot * blocks_of(side) + block) * pieces;
    const u8* codes = side.codes + first * CODE_BYTES;
    const u8* scales = side.scales + first * SCALE_BYTES;
    const u32 bytes = CODE_BYTES + SCALE_BYTES + (helper ? 0 : eights * 8 * DEPTH * 2);
    for (int piece = 0; piece < pieces; ++piece, codes += CODE_BYTES, scales += SCALE_BYTES) {
      const u32 to = base + stage * STAGE_BYTES, full = base + FULL(stage);
      barrier_wait(base + EMPTY(stage), parity);
      if (helper == 0) {
        store_shared4(base + TILE_AT + stage * 32, make_uint4(phase, column, g.slot, g.row0));
        store_word(base + TILE_AT + stage * 32 + 16, g.rows);
      }
      barrier_expect(full, bytes);
      copy_stream(to + CODES_AT + helper * CODE_BYTES, codes, CODE_BYTES, full, policy);
      copy_stream(to + SCALES_AT + helper * SCALE_BYTES, scales, SCALE_BYTES, full, policy);
      if (phase && piece == 0) {
        wait_for_inner(t, g);
        asm volatile("fence.proxy.async;" ::: "memory");
      }
#pragma unroll 1
      for (int c = helper; c < eights * (DEPTH / 64 / CLUSTER); c += HELPERS) {
        const int n = c / (DEPTH / 64 / CLUSTER), q = c % (DEPTH / 64 / CLUSTER) * CLUSTER + rank;  // 64 columns
        copy_box_to((1 << CLUSTER) - 1, to + q * ROWS * 128 + n * 1024, rows, piece * DEPTH + q * 64,
                    g.row0 + n * 8, full);
      }
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  barrier_wait(base + EMPTY(stage), parity);
  if (helper == 0) store_word(base + TILE_AT + stage * 32 + 16, 0);  // no rows: the end
  barrier_arrive(base + FULL(stage));
}

// ---- products ----------------------------------------------------------------------------------------------

#define SUMS_OF_8 "%0, %1, %2, %3"
#define SUMS_OF_16 SUMS_OF_8 ", %4, %5, %6, %7"
#define SUMS_OF_24 SUMS_OF_16 ", %8, %9, %10, %11"
#define SUMS_OF_32 SUMS_OF_24 ", %12, %13, %14, %15"
#define HELD_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HELD_OF_8 HELD_4(0)
#define HELD_OF_16 HELD_OF_8, HELD_4(4)
#define HELD_OF_24 HELD_OF_16, HELD_4(8)
#define HELD_OF_32 HELD_OF_24, HELD_4(12)
#define CODES_PRODUCT(n, a0, a1, a2, a3, x) \
  if constexpr (N == n) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" SUMS_OF_##n "}, {%" #a0 ", %" #a1 ", %" \
                 #a2 ", %" #a3 "}, %" #x ", 1, 1, 1, 0;" : HELD_OF_##n \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));

// d [64 x N] += a [64 x 16] rows [N x 16]^T of bf16.
template <int N>
DEVICE void codes_product(float (&d)[N / 2], const u32 (&a)[4], u64 rows) {
  CODES_PRODUCT(8, 4, 5, 6, 7, 8)
  CODES_PRODUCT(16, 8, 9, 10, 11, 12)
  CODES_PRODUCT(24, 12, 13, 14, 15, 16)
  CODES_PRODUCT(32, 16, 17, 18, 19, 20)
}

// A warp of those that multiply.
struct Worker {
  u32 base;
  int share, chunk, lane;  // half of a stage; which of 8 times 16 rows of gate, and of up
  u32 codes, scales;       // where this lane's are in a stage
  u32 rows;                // where this share's rows are in the first stage
  int stage;
  u32 parity;
};

// One of four turns of a stage: the products of 64 rows of weights, block M of two, with 64 of K, half H. While the
// tensor cores work on them the next are decoded.
template <int N, int M, int H>
DEVICE void turn(float (&acc)[2][N / 2], u32 (&a)[4][4], uint4 (&codes)[2], const uint4& scales, u32 rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 four = H ? (r ? scales.w : scales.y) : (r ? scales.z : scales.x);
    const u32 even = and_or(four, 0x0FF00FF0, 0x70007000);
    const u32 odd = and_or(__funnelshift_r(four, four, 8), 0x0FF00FF0, 0x70007000);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      u32 pairs[4];
      decode(r ? codes[c].z : codes[c].x, r ? codes[c].w : codes[c].y, even, odd, H, pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i][c * 2 + r] = pairs[i];
    }
  }
  const u64 x = tile_descriptor(rows + H * ROWS * 128);
  products_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) codes_product<N>(acc[M], a[i], x + 2 * i);
  products_commit();
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(M && H ? 0 : 1) : "memory");
}

// acc += 2 x 64 rows of weights x this share of the stage's K, times N rows.
template <int N>
DEVICE void multiply_stage(float (&acc)[2][N / 2], const Worker& w) {
  const u32 at = w.base + w.stage * STAGE_BYTES, rows = same(w.rows + w.stage * STAGE_BYTES);
  uint4 codes[2][2], scales[2];
  u32 a[2][4][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const u32 own = at + w.codes + m * (BLOCKS / 2) * CODE_BYTES;
    codes[m][0] = load_shared4(own), codes[m][1] = load_shared4(own + 2048);
    scales[m] = load_shared4(at + w.scales + m * (BLOCKS / 2) * SCALE_BYTES);
  }
  turn<N, 0, 0>(acc, a[0], codes[0], scales[0], rows);
  turn<N, 0, 1>(acc, a[1], codes[0], scales[0], rows);
  turn<N, 1, 0>(acc, a[0], codes[1], scales[1], rows);
  turn<N, 1, 1>(acc, a[1], codes[1], scales[1], rows);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(acc[m][i])::"memory");
}

// ---- sums --------------------------------------------------------------------------------------------------

struct Tile {
  int phase, column, slot, row0, rows;
};

// Of this thread's two rows of weights after `gather`, one of each block: which they are, what their sums are
// multiplied by, and what is added.
struct Terms {
  int row[2];
  float scale[2], bias[2];
};

DEVICE Terms load_terms(const Side& side, const Tile& tile, const Worker& w) {
  Terms terms;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int block = block_at(side, tile.phase, tile.column, m * (BLOCKS / 2) + w.chunk / 4);
    terms.row[m] = block * 64 + w.chunk % 4 * 16 + w.share * 8 + w.lane / 4;
    const u64 at = (u64)tile.slot * side.n + min(terms.row[m], side.n - 1);
    terms.scale[m] = __ldg(side.scale + at);
    terms.bias[m] = BIAS ? __ldg(side.bias + at) : 0;
  }
  return terms;
}

// Adds the two shares of K: each gives the other the sums of one of a thread's two rows, and keeps `sums` of its own.
template <int N>
DEVICE void gather(const float (&acc)[2][N / 2], float (&sums)[2][N / 4], const Worker& w) {
  const u32 at = w.base + SUMS_AT + (w.chunk * 32 + w.lane) * 16, half = SUM_BYTES / 2;
  const bool upper = w.share;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    const float* gate = acc[0] + n * 4;
    const float* up = acc[1] + n * 4;
    store_shared4(at + (upper ? 0 : half) + n * (WARPS * 256),
                  make_uint4(__float_as_uint(upper ? gate[0] : gate[2]), __float_as_uint(upper ? gate[1] : gate[3]),
                             __float_as_uint(upper ? up[0] : up[2]), __float_as_uint(upper ? up[1] : up[3])));
  }
  asm volatile("bar.sync %0, 64;" ::"r"(w.chunk + 1) : "memory");
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    const uint4 v = load_shared4(at + (upper ? half : 0) + n * (WARPS * 256));
    sums[0][n * 2] = (upper ? acc[0][n * 4 + 2] : acc[0][n * 4]) + __uint_as_float(v.x);
    sums[0][n * 2 + 1] = (upper ? acc[0][n * 4 + 3] : acc[0][n * 4 + 1]) + __uint_as_float(v.y);
    sums[1][n * 2] = (upper ? acc[1][n * 4 + 2] : acc[1][n * 4]) + __uint_as_float(v.z);
    sums[1][n * 2 + 1] = (upper ? acc[1][n * 4 + 3] : acc[1][n * 4 + 1]) + __uint_as_float(v.w);
  }
  asm volatile("bar.sync %0, 64;" ::"r"(w.chunk + 1) : "memory");  // the place is free
}

// Two lanes with neighbouring columns, of rows 2 (lane % 4) and the next: the even column's lane stores both columns
// of the first row, the other one those of the second.
template <int BF>
DEVICE void store_pair(u16* out, float2 v, const Tile& tile, int row, int column, int width) {
  const bool odd = threadIdx.x & 4;
  const float other = __shfl_xor_sync(~0u, odd ? v.x : v.y, 4);
  const float low = odd ? other : v.x, high = odd ? v.y : other;
  u32 pair;
  if (BF)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  row += odd;
  if (row < tile.rows && column < width) *(u32*)(out + (u64)(tile.row0 + row) * width + (column & ~1)) = pair;
}

template <int N>
DEVICE void store(const float (&sums)[2][N / 4], const Terms& terms, const Tile& tile, const Task& t, int lane) {
  if (tile.phase == 0) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      float v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        v[j] = activate(sums[0][n * 2 + j] * terms.scale[0] + terms.bias[0],
                        sums[1][n * 2 + j] * terms.scale[1] + terms.bias[1], t);
      store_pair<1>(t.inner, make_float2(v[0], v[1]), tile, n * 8 + lane % 4 * 2, terms.row[0], t.down.k);
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();  // so that lane 0 releases what all lanes stored
    if (lane == 0)
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(t.made + 1 + tile.slot) : "memory");
    return;
  }
  const int width = t.down.n;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float first = sums[m][n * 2] * terms.scale[m] + terms.bias[m];
      const float second = sums[m][n * 2 + 1] * terms.scale[m] + terms.bias[m];
      const int row = n * 8 + lane % 4 * 2;
#if OUT
      store_pair<OUT == 1>((u16*)t.out, make_float2(first, second), tile, row, terms.row[m], width);
#else
      float* at = (float*)t.out + (u64)(tile.row0 + row) * width + terms.row[m];
      if (row < tile.rows && terms.row[m] < width) *at = first;
      if (row + 1 < tile.rows && terms.row[m] < width) at[width] = second;
#endif
    }
}

// ---- a worker's work ---------------------------------------------------------------------------------------

template <int N>
DEVICE void do_tile(Worker& w, const Tile& tile, const Task& t) {
  const Side side = side_of(t, tile.phase);
  const int pieces = pieces_of(side);
  const Terms terms = load_terms(side, tile, w);
  float acc[2][N / 2], sums[2][N / 4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[m][i] = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    if (piece) barrier_wait(w.base + FULL(w.stage), w.parity);
    multiply_stage<N>(acc, w);
    if (w.lane < CLUSTER) barrier_arrive_there(place_of(w.base + EMPTY(w.stage), w.lane));
    if (++w.stage == STAGES) w.stage = 0, w.parity ^= 1;
  }
  gather<N>(acc, sums, w);
  store<N>(sums, terms, tile, t, w.lane);
}

DEVICE void work(Worker& w, const Task& t) {
  for (;;) {
    barrier_wait(w.base + FULL(w.stage), w.parity);
    const u32 at = w.base + TILE_AT + w.stage * 32;
    const uint4 first = load_shared4(at);
    const Tile tile{same(first.x), same(first.y), same(first.z), same(first.w), same(shared_word(at + 16))};
    if (tile.rows == 0) return;
    if (ROWS == 8 || tile.rows <= 8)
      do_tile<8>(w, tile, t);
#if ROWS > 8
    else if (ROWS == 16 || tile.rows <= 16)
      do_tile<16>(w, tile, t);
#endif
#if ROWS > 16
    else if (ROWS == 24 || tile.rows <= 24)
      do_tile<24>(w, tile, t);
#endif
#if ROWS > 24
    else
      do_tile<32>(w, tile, t);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_codes(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap inner, const u8* gate_up,
                 const u8* gate_up_scales, const u8* down, const u8* down_scales, const float* gate_up_scale,
                 const float* gate_up_bias, const float* down_scale, const float* down_bias, const int* counts,
                 const int* offsets, u16* inner_rows, void* out, u32* made, int slots, int hidden, int inner_size,
                 float limit, float alpha, float beta) {
  const Task t{Side{gate_up, gate_up_scales, gate_up_scale, gate_up_bias, 2 * inner_size, hidden},
               Side{down, down_scales, down_scale, down_bias, hidden, inner_size},
               counts, offsets, slots, inner_rows, out, made, limit, alpha, beta};
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == WARPS * 32) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(base + FULL(s), HELPERS);
      barrier_init(base + EMPTY(s), WARPS * CLUSTER);
    }
    barrier_init_done();
  } else if (warp == 0) {
    list_slots(t, base, lane);
  }
  __syncthreads();
  cluster_sync();
  if (warp >= WARPS) {
    give_registers<HELPER_REGISTERS>();
    const int helper = same(warp) - WARPS;
    if (elected()) produce(t, &x, &inner, base, helper);
    __syncwarp();
  } else {
    take_registers<WORKER_REGISTERS>();
    const int share = same(warp / (WARPS / 2)), chunk = warp % (WARPS / 2);
    Worker w{base, share, chunk, lane};
    w.codes = CODES_AT + chunk / 4 * CODE_BYTES + share * (CODE_BYTES / 2) + chunk % 4 * 512 + lane * 16;
    w.scales = SCALES_AT + chunk / 4 * SCALE_BYTES + share * (SCALE_BYTES / 2) + chunk % 4 * 128 + lane / 4 * 16;
    w.rows = base + share * 2 * ROWS * 128;
    w.stage = 0, w.parity = 0;
    work(w, t);
  }
  __syncthreads();
  cluster_sync();  // nobody copies here any more, or tells this block's barriers
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(t.made, 1) == gridDim.x - 1) {
      for (int slot = 0; slot < t.slots; ++slot) t.made[1 + slot] = 0;
      t.made[0] = 0;
    }
  }
}
