// One grouped GEMM for steps of many rows: out[m, n] = sum_k x[m, k] w[slot of m, n, k], w in four-bit codes
// with a scale for every SPAN of K, and x in bf16, or E4M3 codes, also as bf16, with a scale for every 128.
//
// The tensor cores take the weights from registers, where the multiplying warps decode them, so that they are
// the rows of a product and the rows of x its columns: any multiple of GRAIN up to MOST. A block has 128 rows
// of the weights, half of them for each of its two multiplying warp groups; a cluster of blocks shares the rows
// of x, of which each block copies some to all. With FUSED a block holds gate and up rows of 64 columns of the
// inner rows, the two of one column in one thread, and writes them activated, and with SCALED rounded again, from
// float32.
//
// Given by -D: EIGHT (products in E4M3, else in bf16), SCALED (x has scales; always with EIGHT), SPAN (16 or 32; 16
// for bf16), FUSED, BIAS, LIMITED (0 or 1), OUT (0 float32, 1 bfloat16, 2 float16), CLUSTER (blocks; two), MOST (rows
// of x), GRAIN, BOX (rows of x by one copy), X_STAGES and W_STAGES (of the rings); before it stand hopper.cu and a
// `Product<N>` for each N.

#define DEPTH 128  // of a step
#define THREADS 384
#define PRODUCER_REGISTERS 24
#define CONSUMER_REGISTERS 240

#if EIGHT
#define X_STEPS 1  // copies of x in a step, each of 128 bytes a row
#else
#define X_STEPS 2
#endif
#define X_SCALE_BYTES (SCALED * MOST * 4)
#define RATIOS (SCALED && !EIGHT)  // sums stay in the tensor cores, in units of the scale at hand
#define SCALE_BYTES (64 * DEPTH / SPAN)  // of 64 rows of the weights
#define CODE_BYTES (64 * DEPTH / 2)
#define BLOCK_BYTES (CODE_BYTES + SCALE_BYTES)
#define X_COLUMNS (DEPTH / X_STEPS)
#define X_BYTES ((MOST + BOX - 1) / BOX * BOX * 128)
#define W_STEPS 2  // of a stage of codes
#define W_BYTES (W_STEPS * 2 * BLOCK_BYTES)
#define OUT_BYTES 4096  // of a warp group: OUT_ROWS rows of its columns
#define OUT_ROWS (FUSED ? 64 : 32)
#define ROUNDED (SCALED && FUSED)  // the output is E4M3 codes, as x is, with a scale for every 128 columns
#define PEAK_BUFFERS 3  // buffers of peaks, for a tile that is finished, one that others finish, and one to come

#define X_AT 0
#define OUT_AT (X_AT + X_STAGES * X_BYTES)
#define W_AT (OUT_AT + 2 * OUT_BYTES)
#define X_SCALE_AT (W_AT + W_STAGES * W_BYTES)
#define PEAK_AT (X_SCALE_AT + X_STAGES * X_SCALE_BYTES)  // largest magnitudes of rows of x
#define BARRIER_AT (PEAK_AT + SCALED * PEAK_BUFFERS * MOST * 4)

#define X_FULL(s) (BARRIER_AT + 8 * (s))
#define X_EMPTY(s) (X_FULL(X_STAGES) + 8 * (s))
#define W_FULL(s) (X_EMPTY(X_STAGES) + 8 * (s))
#define W_EMPTY(s) (W_FULL(W_STAGES) + 8 * (s))
#define PEAKS (W_EMPTY(W_STAGES))

struct Task {
  const int* tiles;  // groups of rows, then from 4 on of each its slot, first row and number of rows
  const float* x_scale;  // SCALED: [groups, K / 128, MOST], by row of a group
  const u8* codes;       // EIGHT: [e, rows / 64, K / 128, BLOCK_BYTES], scales after the codes
  const u8* scales;      // else [e, rows / 64, K / 256, 2 SCALE_BYTES], and codes likewise
  const float* row_scale;
  const float* bias;
  void* out;
  float* out_scale;  // ROUNDED: as x_scale, of the next GEMM
  int n, k_blocks;
  float limit, alpha, beta;
};

#define OWN (FUSED ? 64 : 128)  // columns of the output, by a block
#define COLUMNS (CLUSTER * OWN)

DEVICE int tiles_across(const Task& t) { return (t.n + COLUMNS - 1) / COLUMNS; }
DEVICE int weight_rows(const Task& t) { return FUSED ? 2 * t.n : t.n; }
DEVICE int weight_blocks(const Task& t) { return (weight_rows(t) + 63) / 64; }
DEVICE int boxes_of(int rows) { return (rows + BOX - 1) / BOX; }

// Where in a ring of SIZE stages one is, and the parity of its barriers there.
template <int SIZE>
struct Turn {
  int stage = 0;
  u32 parity = 0;

  DEVICE void next() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
};

DEVICE void store_shared1(u32 at, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

// ---- the copying warps -------------------------------------------------------------------------------------

// Where a tile's codes begin, in steps of 128 of K from the weights' beginning.
DEVICE u64 first_step(const Task& t, int slot, int block) {
  const int blocks = weight_blocks(t), steps = EIGHT ? t.k_blocks : (t.k_blocks + 1) / 2 * 2;
  return ((u64)slot * blocks + min(block, blocks - 1)) * steps;
}

// Codes and scales of W_STEPS steps; all of it where the weights are padded to that.
DEVICE void copy_weights(u32 to, const Task& t, u64 step, int steps, u32 full) {
#if EIGHT
  copy_bytes(to, t.codes + step * BLOCK_BYTES, steps * BLOCK_BYTES, full);
#else
  copy_bytes(to, t.codes + step * CODE_BYTES, W_STEPS * CODE_BYTES, full);
  copy_bytes(to + W_STEPS * CODE_BYTES, t.scales + step * SCALE_BYTES, W_STEPS * SCALE_BYTES, full);
#endif
}

DEVICE void produce_weights(u32 base, u32 rank, const Task& t) {
  const int across = tiles_across(t), total = t.tiles[0] * across;
  Turn<W_STAGES> ws;
  for (int tile = blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const int slot = t.tiles[4 + tile / across * 4], block = (tile % across * CLUSTER + (int)rank) * (OWN / 64);
    const u64 first = first_step(t, slot, block), second = first_step(t, slot, block + (FUSED ? t.n / 64 : 1));
    for (int kb = 0; kb < t.k_blocks; kb += W_STEPS, ws.next()) {
      const u32 full = base + W_FULL(ws.stage), to = base + W_AT + ws.stage * W_BYTES;
      const int steps = EIGHT ? min(W_STEPS, t.k_blocks - kb) : W_STEPS;
      barrier_wait(base + W_EMPTY(ws.stage), ws.parity ^ 1);
      barrier_expect(full, steps * 2 * BLOCK_BYTES);
      copy_weights(to, t, first + kb, steps, full);
      copy_weights(to + W_BYTES / 2, t, second + kb, steps, full);
    }
  }
}

DEVICE void produce_rows(u32 base, u32 rank, const TensorMap* x, const Task& t) {
  const int across = tiles_across(t), total = t.tiles[0] * across;
  Turn<X_STAGES> xs;
  for (int tile = blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const int4 group = ((const int4*)(t.tiles + 4))[tile / across];
    const int boxes = boxes_of(group.z);
    for (int step = 0; step < t.k_blocks * X_STEPS; ++step, xs.next()) {
      const u32 full = base + X_FULL(xs.stage), to = base + X_AT + xs.stage * X_BYTES;
      barrier_wait(base + X_EMPTY(xs.stage), xs.parity ^ 1);
      barrier_expect(full, boxes * (BOX * 128));
      for (int u = rank; u < boxes; u += CLUSTER)
        copy_box_to((1 << CLUSTER) - 1, to + u * (BOX * 128), x, step * X_COLUMNS, group.y + u * BOX, full);
    }
  }
}

#if EIGHT
DEVICE void produce_scales(u32 base, const Task& t) {
  const int across = tiles_across(t), total = t.tiles[0] * across;
  Turn<X_STAGES> xs;
  for (int tile = blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const float* scale = t.x_scale + (u64)(tile / across) * t.k_blocks * MOST;
    const u32 bytes = (t.tiles[4 + tile / across * 4 + 2] + 3) / 4 * 16;
    for (int kb = 0; kb < t.k_blocks; ++kb, scale += MOST, xs.next()) {
      const u32 full = base + X_FULL(xs.stage);
      barrier_wait(base + X_EMPTY(xs.stage), xs.parity ^ 1);
      barrier_expect(full, bytes);
      copy_bytes(base + X_SCALE_AT + xs.stage * X_SCALE_BYTES, scale, bytes, full);
    }
  }
}
#elif SCALED
// A scale as a unit of sums, none of which is 0: what a row of zeros may have, and nothing else has.
DEVICE float unit_of(float scale) { return scale < 1e-20f ? 1e-20f : scale; }

// With each first half of a step of 128 but a tile's first, what brings sums in units of the scale before to those of
// this one. By one warp.
DEVICE void produce_ratios(u32 base, const Task& t, int lane) {
  const int across = tiles_across(t), total = t.tiles[0] * across;
  Turn<X_STAGES> xs;
  for (int tile = blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const float* scale = t.x_scale + (u64)(tile / across) * t.k_blocks * MOST;
    const int rows = t.tiles[4 + tile / across * 4 + 2];
    for (int step = 0; step < t.k_blocks * X_STEPS; ++step, xs.next()) {
      barrier_wait(base + X_EMPTY(xs.stage), xs.parity ^ 1);
      if (step && step % X_STEPS == 0) {
        const float* own = scale + step / X_STEPS * MOST;
        const u32 to = base + X_SCALE_AT + xs.stage * X_SCALE_BYTES;
#pragma unroll 4
        for (int row = lane; row < rows; row += 32)
          store_shared1(to + row * 4, __fdividef(unit_of(__ldg(own + row - MOST)), unit_of(__ldg(own + row))));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(base + X_FULL(xs.stage));
    }
  }
}
#endif

// ---- the multiplying warps ---------------------------------------------------------------------------------

// A thread's two rows of the weights in a product, eight apart: gate and up of a column, or of one block.
struct Place {
  u32 base, rank;
  int group, warp, lane;  // warp of its group
#if EIGHT
  u32 codes, factors, x_scales;  // where a thread reads codes, their scales and those of x, in the first stages
  u32 empty;                     // X_EMPTY(0) of block `lane`
  int first, shares;             // whether the lane is 0, or below CLUSTER
#endif

  DEVICE int block(int r) const { return FUSED ? r : group; }
  DEVICE int warp_rows(int r) const { return FUSED ? 2 * group + warp / 2 : warp; }  // 16 rows of 64
  DEVICE int upper(int r) const { return FUSED ? warp % 2 : r; }
  DEVICE int own_column() const { return FUSED ? group * 32 + warp * 8 : group * 64 + warp * 16; }
};

DEVICE void release(const Place& p, int stage) {
  if (p.lane < CLUSTER) barrier_arrive_there(place_of(p.base + X_EMPTY(stage), p.lane));
}

template <int LEFT>
DEVICE void products_wait_until() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

DEVICE uint2 load_shared_words(u32 at) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
  return value;
}

DEVICE u32 load_shared_word(u32 at) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

#if !EIGHT

// What a thread needs of a step: of row r, of half h of K the words of columns 2 q and of 2 q + 8.
struct Held {
  uint2 words[2][2];  // [row][column], of which x is half 0
  uint2 scales[2];
};

DEVICE void load_step(Held& held, const Place& p, u32 at, int step) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 block = at + p.block(r) * (W_BYTES / 2);
    const u32 codes = block + step * CODE_BYTES + (p.warp_rows(r) * 32 + p.lane) * 16 + p.upper(r) * 8;
#pragma unroll
    for (int c = 0; c < 2; ++c) held.words[r][c] = load_shared_words(codes + c * (CODE_BYTES / 2));
    const u32 scales = block + W_STEPS * CODE_BYTES + step * SCALE_BYTES;
    held.scales[r] = load_shared_words(scales + (p.warp_rows(r) * 16 + p.lane / 4 * 2 + p.upper(r)) * 8);
  }
}

#define KEPT 0x81C081C0
#define REST 0x06030603  // bits that the first word of a pair gives for the last places

DEVICE u32 kept_of(u32 w, int turn) { return __funnelshift_l(w, w, turn) & KEPT; }

// Of a pair of words of a row, those of 64 of K each, the eight codes of half h to four pairs of bf16, by 16 of K:
// 2^-126 times their values, see `codes.py`. The first half leaves what the second finds there of both.
DEVICE void spread(uint2& words, int h, u32 (&pairs)[4]) {
  if (h == 0) {
    pairs[0] = words.x & KEPT;
    pairs[1] = words.x << 4 & KEPT;
    pairs[2] = kept_of(words.x, 10);
    asm("lop3.b32 %0, %1, %0, %2, 0xCA;" : "+r"(words.x) : "n"(REST), "r"(words.y));  // of the bits, REST ? x : y
    pairs[3] = kept_of(words.x, 8);
  } else {
    pairs[0] = words.y << 2 & KEPT;
    pairs[1] = words.y << 6 & KEPT;
    pairs[2] = kept_of(words.y, 12);
    pairs[3] = kept_of(words.x, 14);
  }
}

// Four scale bytes b, turned, to pairs of equal bf16, whose bits are b << 4 | 0x7000.
DEVICE void spread_scales(u32 bytes, u32 (&pairs)[4]) {
  const u32 even = (bytes & 0x0FF00FF0) | 0x70007000;
  const u32 odd = (__funnelshift_r(bytes, bytes, 8) & 0x0FF00FF0) | 0x70007000;
  pairs[0] = __byte_perm(even, 0, 0x1010);
  pairs[1] = __byte_perm(odd, 0, 0x1010);
  pairs[2] = __byte_perm(even, 0, 0x3232);
  pairs[3] = __byte_perm(odd, 0, 0x3232);
}

DEVICE u32 times(u32 x, u32 y) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

// The operands of four products of 16 of K; a [i][row + 2 column].
DEVICE void decode(Held& held, int h, u32 (&a)[4][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    u32 scales[4];
    spread_scales(h ? held.scales[r].y : held.scales[r].x, scales);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      u32 pairs[4];
      spread(held.words[r][c], h, pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i][r + 2 * c] = times(pairs[i], scales[i]);
    }
  }
}

#else

#define SCALE_WORDS (DEPTH / SPAN / 4)  // of a row of the weights

// A thread's codes of a step, eight of each 32 of K, and their scales.
struct Held {
  uint4 words[2];
  u32 scales[2][SCALE_WORDS];
};

// Of a step of the stage that begins `at` bytes after the first.
DEVICE void load_step(Held& held, const Place& p, u32 at, int step) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 block = at + (FUSED ? r * (W_BYTES / 2) : 0) + step * BLOCK_BYTES;
    const int eights = FUSED ? 0 : r;  // rows of the weights
    held.words[r] = load_shared4(p.codes + block + eights * 512);
    const u32 scales = p.factors + block + eights * 32 * SCALE_WORDS;
#if SPAN == 16
    const uint2 both = load_shared_words(scales);
    held.scales[r][0] = both.x, held.scales[r][1] = both.y;
#else
    held.scales[r][0] = load_shared_word(scales);
#endif
  }
}

// E4M3 of the magnitudes 0, 1/2, 1, 3/2; 2, 4, 3, 6 under a scale, rounded to nearest even. Byte AT of the scales
// is that of 1 (16 to 103), and has bit 7 where that of 3/2 is four above it instead of five: then all signs here
// are wrong, and so are those of the codes.
struct Magnitudes {
  u32 low, high;
};

template <int AT>
DEVICE Magnitudes magnitudes(const u32 (&scales)[SCALE_WORDS]) {
  const u32 scale = pick_bytes(scales[AT / 4], 0, 0x8840 + AT % 4 * 0x1101);  // byte, 0, and twice its bit 7
  return {scale * 0x01010100 + 0x04FFF800, scale * 0x01010101 + 0x150D1008};
}

// Eight codes of the J-th 32 of K to E4M3. A nibble tells which magnitude; bit 7 of byte i is the sign of code i,
// bit 3 that of code 4 + i.
template <int J>
DEVICE void spread(u32 word, const u32 (&scales)[SCALE_WORDS], u32& first, u32& second) {
  const Magnitudes a = magnitudes<J * 32 / SPAN>(scales), b = magnitudes<(J * 32 + 16) / SPAN>(scales);
  const u32 which = word & 0x77777777;
  first = pick_bytes(a.low, a.high, which) ^ (word & 0x80808080);
  second = pick_bytes(b.low, b.high, which >> 16) ^ (word << 4 & 0x80808080);
}

// The operands of four products of 32 of K; a [j][row + 2 column].
DEVICE void decode(const Held& held, u32 (&a)[4][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    spread<0>(held.words[r].x, held.scales[r], a[0][r], a[0][2 + r]);
    spread<1>(held.words[r].y, held.scales[r], a[1][r], a[1][2 + r]);
    spread<2>(held.words[r].z, held.scales[r], a[2][r], a[2][2 + r]);
    spread<3>(held.words[r].w, held.scales[r], a[3][r], a[3][2 + r]);
  }
}

#endif

#if !EIGHT

// One of a tile's steps of 128 of K.
struct Step {
  int at, all;

  DEVICE bool begins_stage() const { return at % W_STEPS == 0; }
  DEVICE bool ends_stage() const { return at % W_STEPS == W_STEPS - 1 || at == all - 1; }
};

// A step's codes, when they are there.
DEVICE void begin_step(Held& held, const Place& p, const Turn<W_STAGES>& ws, const Step& step) {
  if (step.begins_stage()) barrier_wait(p.base + W_FULL(ws.stage), ws.parity);
  load_step(held, p, p.base + W_AT + ws.stage * W_BYTES, step.at % W_STEPS);
}

DEVICE void end_step(const Place& p, const Turn<W_STAGES>& ws, const Step& step) {
  if (!step.ends_stage()) return;
  __syncwarp();
  if (p.lane == 0) barrier_arrive(p.base + W_EMPTY(ws.stage));
}

// Begins the products of 64 of K, on the least N that the rows fit, and waits for those before. All of it is
// in one branch, else the compiler has the tensor cores wait for each other's ends.
template <int N>
DEVICE void add_products(float (&acc)[MOST / 2], const u32 (&a)[4][4], u64 b, int rows) {
  if constexpr (N > GRAIN) {
    if (rows <= N - GRAIN) return add_products<N - GRAIN>(acc, a, b, rows);
  }
  products_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) Product<N>::add(acc, a[i], b + 2 * i, 1);
  products_commit();
  products_wait_until<1>();
}

#if RATIOS
// Brings sums to the units of the scales at hand, when no product is under way.
DEVICE void change_units(float (&acc)[MOST / 2], const Place& p, int stage, int rows) {
  const u32 ratios = p.base + X_SCALE_AT + stage * X_SCALE_BYTES + p.lane % 4 * 8;
  products_wait_until<0>();
#pragma unroll
  for (int i = 0; i < MOST / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int i = 0; i < MOST / 8; ++i) {
    if (8 * i >= rows) break;
    const float2 own = load_shared2(ratios + i * 32);
    acc[4 * i] *= own.x, acc[4 * i + 1] *= own.y;
    acc[4 * i + 2] *= own.x, acc[4 * i + 3] *= own.y;
  }
}

// Sums in units of the last scales to numbers.
DEVICE void leave_units(float (&acc)[MOST / 2], const Place& p, const Task& t, int4 group) {
  const float* last = t.x_scale + ((u64)group.w * t.k_blocks + t.k_blocks - 1) * MOST + p.lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < MOST / 8; ++i) {
    if (8 * i >= group.z) break;
    const float2 both = __ldg((const float2*)(last + 8 * i)), own = make_float2(unit_of(both.x), unit_of(both.y));
    acc[4 * i] *= own.x, acc[4 * i + 1] *= own.y;
    acc[4 * i + 2] *= own.x, acc[4 * i + 3] *= own.y;
  }
}
#endif

// Sums of this warp group's 64 rows of the weights and so many rows of x. While the tensor cores work on 64
// of K the next are decoded.
DEVICE void sum(float (&acc)[MOST / 2], const Place& p, int rows, int k_blocks, Turn<X_STAGES>& xs,
                Turn<W_STAGES>& ws) {
  u32 a[2][4][4];
  int before = 0;
  for (int kb = 0; kb < k_blocks; ++kb) {
    Held held;
    const Step step{kb, k_blocks};
    begin_step(held, p, ws, step);
#pragma unroll
    for (int h = 0; h < 2; ++h, xs.next()) {
      decode(held, h, a[h]);
      if (h == 0) end_step(p, ws, step);
      barrier_wait(p.base + X_FULL(xs.stage), xs.parity);
#if RATIOS
      if (h == 0 && kb > 0) change_units(acc, p, xs.stage, rows);
#endif
      const u64 b = tile_descriptor(p.base + X_AT + xs.stage * X_BYTES);
      add_products<MOST>(acc, a[h], b, rows);
      if (kb + h > 0) release(p, before);
      before = xs.stage;
    }
    if (step.ends_stage()) ws.next();
  }
  products_wait_until<0>();
#pragma unroll
  for (int i = 0; i < MOST / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
  release(p, before);
}

#else

#define AHEAD 4  // pairs of scales of x that are read before they are needed

// A warp group's way through a tile. With two warps to a scheduler a step takes as long as a warp's own
// instructions, which the tensor cores outrun: a warp decodes the next codes while these multiply and reads the
// codes after them while it adds.
template <int N>
struct Way {
  const Place& p;
  const int k_blocks;
  Turn<X_STAGES>& xs;
  Turn<W_STAGES>& ws;
  bool there = false;  // whether the next step's rows were seen
  Held held;           // codes of the next step
  u32 a[2][4][4];      // operands of this step and the next

  // Reads the codes of step `at`, whose parity is I.
  template <int I>
  DEVICE void load(int at) {
    if (at >= k_blocks) return;
    if (I == 0) barrier_wait(p.base + W_FULL(ws.stage), ws.parity);
    load_step(held, p, ws.stage * W_BYTES, I);
  }

  // Decodes what was read of step `at`, if there is one, and gives back a stage that is used up.
  template <int I>
  DEVICE void take(int at) {
    if (at >= k_blocks) return;  // else the compiler decodes before it begins the products
    decode(held, a[I]);
    if (I < W_STEPS - 1 && at < k_blocks - 1) return;
    __syncwarp();
    if (p.first) barrier_arrive(p.base + W_EMPTY(ws.stage));
    ws.next();
  }

  // Whether the rows after those of this stage are there, without waiting.
  DEVICE bool is_next_there() const {
    const bool wraps = xs.stage == X_STAGES - 1;
    return barrier_over(p.base + X_FULL(wraps ? 0 : xs.stage + 1), wraps ? xs.parity ^ 1 : xs.parity);
  }

  // Step `at`, with N rows of x: products, scaled and added.
  template <int I>
  DEVICE void step(float (&acc)[MOST / 2], int at) {
    float part[N / 2];
    if (!there) barrier_wait(p.base + X_FULL(xs.stage), xs.parity);
    const u64 b = tile_descriptor(p.base + X_AT) + (u32)xs.stage * (X_BYTES / 16);
    products_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) Product<N>::add(part, a[I][j], b + 2 * j, j);
    products_commit();
    take<1 - I>(at + 1);
    const u32 scales = p.x_scales + xs.stage * X_SCALE_BYTES;
    float2 scale[AHEAD];
#pragma unroll
    for (int i = 0; i < min(AHEAD, N / 8); ++i) scale[i] = load_shared2(scales + i * 32);
    load<I>(at + 2);
    there = is_next_there();
    products_wait_until<0>();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 own = scale[i % AHEAD];
      acc[4 * i] += part[4 * i] * own.x;
      acc[4 * i + 1] += part[4 * i + 1] * own.y;
      acc[4 * i + 2] += part[4 * i + 2] * own.x;
      acc[4 * i + 3] += part[4 * i + 3] * own.y;
      if (i + AHEAD < N / 8) scale[i % AHEAD] = load_shared2(scales + (i + AHEAD) * 32);
    }
    __syncwarp();
    if (p.shares) barrier_arrive_there(p.empty + 8 * xs.stage);
    xs.next();
  }
};

// All steps of a tile, in a loop of its own for each N: a choice in each step costs branches and copies of sums.
template <int N>
DEVICE void sum_rows(float (&acc)[MOST / 2], const Place& p, int k_blocks, Turn<X_STAGES>& xs, Turn<W_STAGES>& ws) {
  Way<N> way{p, k_blocks, xs, ws};
  way.template load<0>(0);
  way.template take<0>(0);
  way.template load<1>(1);
  for (int kb = 0; kb < k_blocks; kb += 2) {
    way.template step<0>(acc, kb);
    if (kb + 1 < k_blocks) way.template step<1>(acc, kb + 1);
  }
}

// The next N below it. With one of 16 the compiler gives up on running products beside other work, for all.
DEVICE constexpr int below(int n) { return n > 128 ? n - GRAIN : n - 32; }

// Sums of this warp group's 64 rows of the weights and so many rows of x, on the least N that they fit.
template <int N = MOST>
DEVICE void sum(float (&acc)[MOST / 2], const Place& p, int rows, int k_blocks, Turn<X_STAGES>& xs,
                Turn<W_STAGES>& ws) {
  if constexpr (below(N) > 0) {
    if (rows <= below(N)) return sum<below(N)>(acc, p, rows, k_blocks, xs, ws);
  }
  sum_rows<N>(acc, p, k_blocks, xs, ws);
}

#endif

// Scale and bias of a thread's two rows of the weights.
struct Factors {
  float scale[2], bias[2];
};

DEVICE Factors factors_of(const Place& p, const Task& t, int slot, int column) {
  Factors f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(column + r * (FUSED ? t.n : 8), weight_rows(t) - 1);
    const u64 at = (u64)slot * weight_rows(t) + row;
    f.scale[r] = __ldg(t.row_scale + at);
    f.bias[r] = BIAS ? __ldg(t.bias + at) : 0;
  }
  return f;
}

DEVICE float finished(float x, const Factors& f, int r) { return BIAS ? x * f.scale[r] + f.bias[r] : x * f.scale[r]; }

DEVICE void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// Four matrices of 8 x 8 halves, transposed: lane 8 m + i gives the place of column i of matrix m.
DEVICE void store_transposed(u32 at, const u32 (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(w[0]),
               "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// Pieces of 16 bytes of a row of OUT_ROWS x (FUSED ? 32 : 64) columns, where no eight rows share banks.
DEVICE u32 piece_at(int row, int piece) {
  return FUSED ? row * 64 + (piece ^ row / 2 % 4) * 16 : row * 128 + (piece ^ row % 8) * 16;
}

#if OUT

// OUT_ROWS rows of 16 bits that this warp group staged, of x from `first` on, to where they belong.
DEVICE void write_rows(const Place& p, const Task& t, int4 group, int column, int first) {
  const u32 from = p.base + OUT_AT + p.group * OUT_BYTES;
  const int thread = p.warp * 32 + p.lane, pieces = FUSED ? 4 : 8;
  group_sync(p.group);
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int i = pass * 128 + thread, row = first + i / pieces, c = column + i % pieces * 8;
    const uint4 value = load_shared4(from + piece_at(i / pieces, i % pieces));
    if (row < group.z && c < t.n) *(uint4*)((u16*)t.out + (u64)(group.y + row) * t.n + c) = value;
  }
  group_sync(p.group);
}

#endif

#if ROUNDED

DEVICE void raise(u32 there, float value) {
  asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(there), "r"(__float_as_uint(value))
               : "memory");
}

// Lane 4 g + q has values of columns g; it gets the largest of value e, where e has the bits of g turned round.
DEVICE float largest(float (&v)[8], int lane) {
#pragma unroll
  for (int some = 4; some > 0; some /= 2) {
    const bool upper = lane & 4 * some;
#pragma unroll
    for (int k = 0; k < some; ++k) {
      const float other = __shfl_xor_sync(~0u, upper ? v[k] : v[k + some], 4 * some);
      v[k] = fmaxf(upper ? v[k + some] : v[k], other);
    }
  }
  return v[0];
}

// Activates, and tells both blocks the largest magnitudes of their columns, of which there are 128.
DEVICE void activate_tile(float (&acc)[MOST / 2], const Place& p, const Task& t, const Factors& f, u32 peaks,
                          bool inside) {
  const u32 others = place_of(peaks, p.rank ^ 1);
#pragma unroll
  for (int first = 0; first < MOST; first += 32) {
    float sizes[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = first / 2 + k / 2 * 4 + k % 2;
      acc[i] = activate(finished(acc[i], f, 0), finished(acc[i + 2], f, 1), t);
      sizes[k] = fabsf(acc[i]);
    }
    const float size = largest(sizes, p.lane);
    const int row = first + (p.lane >> 4 & 1) * 16 + (p.lane >> 3 & 1) * 8 + p.lane % 4 * 2 + (p.lane >> 2 & 1);
    if (!inside) continue;
    raise(place_of(peaks, p.rank) + row * 4, size);
    raise(others + row * 4, size);
  }
}

DEVICE float scale_of(float peak) { return fmaxf(peak, 1e-10f) * (1.f / 448.f); }

DEVICE void store_shared_half(u32 at, u32 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)value) : "memory");
}

#if EIGHT

// Sixteen rows of x, rounded, to their place: two neighbouring columns of one row from each lane.
DEVICE void stage_codes(const float (&acc)[MOST / 2], const Place& p, u32 to, u32 peaks, int first) {
  const bool odd = p.lane >> 2 & 1;
  u32 codes = 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float2 peak = load_shared2(peaks + (first + 8 * j + p.lane % 4 * 2) * 4);
    const int i = first / 2 + 4 * j;
    codes |= e4m3_pair(__fdividef(acc[i], scale_of(peak.x)), __fdividef(acc[i + 1], scale_of(peak.y))) << 16 * j;
  }
  const u32 other = __shfl_xor_sync(~0u, codes, 4);
  codes = odd ? __byte_perm(codes, other, 0x3715) : __byte_perm(codes, other, 0x6240);
  const u32 at = to + (first % 128 + p.lane % 4 * 2 + odd) * 32 + p.warp * 8 + p.lane / 8 * 2;
  store_shared_half(at, codes);
  store_shared_half(at + 8 * 32, codes >> 16);
}

// Rounds an activated tile, and writes it.
DEVICE void write_codes(const float (&acc)[MOST / 2], const Place& p, const Task& t, u32 peaks, int4 group,
                        int column) {
  const u32 from = p.base + OUT_AT + p.group * OUT_BYTES;
  const int thread = p.warp * 32 + p.lane;
#pragma unroll
  for (int first = 0; first < MOST; first += 128) {
    if (first >= group.z) break;
#pragma unroll
    for (int some = first; some < min(first + 128, MOST); some += 16) stage_codes(acc, p, from, peaks, some);
    group_sync(p.group);
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      const int i = pass * 128 + thread, row = first + i / 2, c = column + i % 2 * 16;
      const uint4 value = load_shared4(from + i * 16);
      if (row < group.z && c < t.n) *(uint4*)((u8*)t.out + (u64)(group.y + row) * t.n + c) = value;
    }
    group_sync(p.group);
  }
}

#else

// Two E4M3 codes as bf16, which has all of them.
DEVICE u32 wide_pair(u32 codes) {
  u32 halves;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
  return half_pair(low, high);
}

// The codes of 32 rows of x from `first` on, as bf16, to their place.
DEVICE void stage_codes(const float (&acc)[MOST / 2], const Place& p, u32 to, u32 peaks, int first) {
  u32 words[4];
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int i = (first / 8 + m) * 4;
    const float2 peak = load_shared2(peaks + (first + 8 * m + p.lane % 4 * 2) * 4);
    const float low = __fdividef(acc[i], scale_of(peak.x)), high = __fdividef(acc[i + 1], scale_of(peak.y));
    words[m] = wide_pair(e4m3_pair(low, high));
  }
  store_transposed(to + piece_at(first % OUT_ROWS + p.lane, p.warp), words);
}

// Rounds an activated tile, and writes it.
DEVICE void write_codes(const float (&acc)[MOST / 2], const Place& p, const Task& t, u32 peaks, int4 group,
                        int column) {
  const u32 to = p.base + OUT_AT + p.group * OUT_BYTES;
#pragma unroll
  for (int first = 0; first < MOST; first += OUT_ROWS) {
    if (first >= group.z) break;
#pragma unroll
    for (int some = first; some < first + OUT_ROWS; some += 32) stage_codes(acc, p, to, peaks, some);
    write_rows(p, t, group, column, first);
  }
}

#endif

// Rounds with the peaks of both blocks, which share 128 columns. Peaks of the next turn are made zero before
// this one's are told to be there: no one writes them until then, and no one reads them any more.
DEVICE void finish_tile(float (&acc)[MOST / 2], const Place& p, const Task& t, const Factors& f, int4 group,
                        int column, int turn) {
  const u32 peaks = p.base + PEAK_AT + turn % PEAK_BUFFERS * (MOST * 4);
  const int thread = p.warp * 32 + p.lane, whole = p.group * 128 + thread;
  if (whole < MOST) store_shared1(p.base + PEAK_AT + (turn + 1) % PEAK_BUFFERS * (MOST * 4) + whole * 4, 0);
  activate_tile(acc, p, t, f, peaks, column < t.n);
  __syncwarp();
  if (p.lane < 2) barrier_release_there(place_of(p.base + PEAKS, p.lane));
  barrier_wait_cluster(p.base + PEAKS, turn & 1);
  if (p.rank == 0 && whole < group.z) {
    const u64 block = (u64)group.w * ((t.n + 127) / 128) + column / 128;
    t.out_scale[block * MOST + whole] = scale_of(load_shared(peaks + whole * 4));
  }
  write_codes(acc, p, t, peaks, group, column);
}

#elif OUT

// The sums of 32 rows of x from `first` on, as they are written: of both rows of the weights, or activated.
DEVICE void stage_rows(const float (&acc)[MOST / 2], const Place& p, const Task& t, const Factors& f, int first) {
  const u32 to = p.base + OUT_AT + p.group * OUT_BYTES;
  const int row = first % OUT_ROWS + p.lane;
  u32 words[2][4] = {};
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int i = (first / 8 + m) * 4;
    if (i >= MOST / 2) continue;
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = finished(acc[i + j], f, j / 2);
#if FUSED
    words[0][m] = half_pair(activate(y[0], y[2], t), activate(y[1], y[3], t));
#else
    words[0][m] = half_pair(y[0], y[1]);
    words[1][m] = half_pair(y[2], y[3]);
#endif
  }
#pragma unroll
  for (int r = 0; r < (FUSED ? 1 : 2); ++r)
    store_transposed(to + piece_at(row, FUSED ? p.warp : 2 * p.warp + r), words[r]);
}

DEVICE void finish_tile(const float (&acc)[MOST / 2], const Place& p, const Task& t, const Factors& f, int4 group,
                        int column, int) {
#pragma unroll
  for (int first = 0; first < MOST; first += OUT_ROWS) {
    if (first >= group.z) break;
#pragma unroll
    for (int some = 0; some < OUT_ROWS; some += 32) stage_rows(acc, p, t, f, first + some);
    write_rows(p, t, group, column, first);
  }
}

#else

DEVICE void finish_tile(const float (&acc)[MOST / 2], const Place& p, const Task& t, const Factors& f, int4 group,
                        int column, int) {
#pragma unroll
  for (int i = 0; i < MOST / 2; ++i) {
    const int row = i / 4 * 8 + p.lane % 4 * 2 + i % 2, c = column + p.warp * 16 + p.lane / 4 + i / 2 % 2 * 8;
    if (row < group.z && c < t.n)
      ((float*)t.out)[(u64)(group.y + row) * t.n + c] = finished(acc[i], f, i / 2 % 2);
  }
}

#endif

DEVICE void consume(const Place& p, const Task& t) {
  const int across = tiles_across(t), total = t.tiles[0] * across;
  Turn<X_STAGES> xs;
  Turn<W_STAGES> ws;
  int turn = 0;
  for (int tile = blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER, ++turn) {
    int4 group = ((const int4*)(t.tiles + 4))[tile / across];
    group.w = tile / across;
    const int column = tile % across * COLUMNS + (int)p.rank * OWN;
    float acc[MOST / 2];
#pragma unroll
    for (int i = 0; i < MOST / 2; ++i) acc[i] = 0;
    sum(acc, p, group.z, t.k_blocks, xs, ws);
#if RATIOS
    leave_units(acc, p, t, group);
#endif
    const Factors f = factors_of(p, t, group.x, column + p.own_column() + p.lane / 4);
    finish_tile(acc, p, t, f, group, column + p.group * (OWN / 2), turn);
  }
}

// Of a thread that multiplies. Its addresses are hidden from the compiler, which would keep one for each load.
DEVICE Place place_in(u32 base, u32 rank, int group, int warp, int lane) {
  Place p{base, rank, group, warp, lane};
#if EIGHT
  const u32 codes = base + W_AT + p.block(0) * (W_BYTES / 2);
  const int eight = p.warp_rows(0) * 2 + p.upper(0);  // rows of the weights
  p.codes = codes + (eight * 32 + lane) * 16;
  p.factors = codes + CODE_BYTES + (eight * 8 + lane / 4) * 4 * SCALE_WORDS;
  p.x_scales = base + X_SCALE_AT + lane % 4 * 8;
  p.empty = place_of(base + X_EMPTY(0), lane % CLUSTER);
  p.first = lane == 0, p.shares = lane < CLUSTER;
  asm volatile("" : "+r"(p.codes), "+r"(p.factors), "+r"(p.x_scales), "+r"(p.empty), "+r"(p.first), "+r"(p.shares));
#endif
  return p;
}

DEVICE void begin(u32 base) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < X_STAGES; ++s) {
      barrier_init(base + X_FULL(s), 1 + SCALED);
      barrier_init(base + X_EMPTY(s), CLUSTER * 8);
    }
    for (int s = 0; s < W_STAGES; ++s) {
      barrier_init(base + W_FULL(s), 1);
      barrier_init(base + W_EMPTY(s), 8);
    }
#if SCALED
    barrier_init(base + PEAKS, 16);
    for (int i = 0; i < PEAK_BUFFERS * MOST; ++i) store_shared1(base + PEAK_AT + i * 4, 0);
#endif
    barrier_init_done();
  }
  cluster_sync();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_codes(const __grid_constant__ TensorMap x, const float* x_scale, const u8* codes, const u8* scales, const float* row_scale,
                const float* bias, void* out, float* out_scale, const int* tiles, int n, int k_blocks, float limit, float alpha,
                float beta) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory), rank = cluster_rank();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const Task t{tiles, x_scale, codes, scales, row_scale, bias, out, out_scale, n, k_blocks, limit, alpha, beta};
  begin(base);
  if (group == 2) {
    give_registers<PRODUCER_REGISTERS>();
    if (elected()) {
      if (warp == 0) produce_weights(base, rank, t);
      if (warp == 1) produce_rows(base, rank, &x, t);
#if EIGHT
      if (warp == 2) produce_scales(base, t);
#endif
    }
    __syncwarp();
#if RATIOS
    if (warp == 2) produce_ratios(base, t, lane);
#endif
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(place_in(base, rank, group, warp, lane), t);
  }
  cluster_sync();
}
