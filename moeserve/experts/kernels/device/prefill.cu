// One grouped GEMM for steps of many rows: out[m, n] = sum_k x[m, k] w[slot of m, n, k], x and w in E4M3.
//
// A cluster of blocks works on up to three units of 64 rows of one slot: each block reads 128 rows of the weights
// of its own, and some of x, which it copies to all. Of a block's warp groups three multiply, a unit each; of the
// fourth one warp copies. The sums of each 128 of K are scaled and added in float32, and while one group does so
// the others multiply. With FUSED a pair of blocks holds gate and up columns of the same 128 columns of the inner
// rows and writes these activated and rounded.
//
// Given by -D: CLUSTER (blocks, even), FUSED, BIAS, LIMITED (0 or 1), OUT (0 float32, 1 bfloat16, 2 float16).

#define DEPTH 128
#define UNIT 64
#define UNITS 3  // a multiplying warp group each
#define STAGES 4
#define NOTES 8  // more than tiles begin before the first of them is done
#define THREADS 512
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 152
#define CONSUMER_WARPS (4 * UNITS)

#define X_BYTES (UNIT * DEPTH)
#define W_BYTES (128 * DEPTH)

#define X_AT 0
#define W_AT (X_AT + STAGES * UNITS * X_BYTES)
#define X_SCALE_AT (W_AT + STAGES * W_BYTES)
#define NOTE_AT (X_SCALE_AT + STAGES * UNITS * UNIT * 4)  // of a tile: slot, first row, rows, place across
#define PEAK_AT (NOTE_AT + NOTES * 16)                    // largest magnitudes of the other block's rows
#define COLUMNS_AT (PEAK_AT + 2 * UNITS * UNIT * 4)       // of a tile: biases of the weights' 128 rows
#define W_SCALE_AT (COLUMNS_AT + NOTES * 512)
#define BARRIER_AT (W_SCALE_AT + STAGES * 8)

#define FULL(s) (BARRIER_AT + 8 * (s))
#define EMPTY(s) (FULL(STAGES) + 8 * (s))
#define PEAK(w) (EMPTY(STAGES) + 8 * (w))  // w of the multiplying warps, of every second exchange

struct Task {
  const int* tiles;  // groups of rows, then from 4 on of each its slot, first row and number of rows
  const float* w_scale;
  const float* bias;
  void* out;
  float* out_scale;  // as x_scale, of the next GEMM
  int n, k_blocks;
  float limit, alpha, beta;
};

#define OWN (FUSED ? 64 : 128)  // columns of the output, by a block
#define COLUMNS (CLUSTER * OWN)

DEVICE int tiles_across(const Task& t) { return (t.n + COLUMNS - 1) / COLUMNS; }
DEVICE int weight_rows(const Task& t) { return FUSED ? 2 * t.n : t.n; }

// First of the 64 rows of its slot's weights that half h of block `rank` multiplies.
DEVICE int weight_row(const Task& t, int across, u32 rank, int h) {
  return across * COLUMNS + (int)rank * OWN + h * (FUSED ? t.n : UNIT);
}

DEVICE int units_of(int rows) { return (rows + UNIT - 1) / UNIT; }

// ---- the copying warp --------------------------------------------------------------------------------------

// Biases of a tile, where there are any; the bytes that will arrive.
DEVICE u32 copy_columns(u32 to, const Task& t, u64 slot_rows, const int (&row)[2], u32 full) {
  u32 bytes = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int there = min(UNIT, weight_rows(t) - row[h]) * 4;
    if (there <= 0) continue;
#if BIAS
    copy_bytes(to + h * UNIT * 4, t.bias + slot_rows + row[h], there, full);
    bytes += there;
#endif
  }
  return bytes;
}

struct Maps {
  const TensorMap *x, *w;
};

// x_scale [groups, K / 128, 192]: row i of a group, not of x.
DEVICE void produce(u32 base, u32 rank, const Maps& maps, const float* x_scale, const Task& t) {
  const int across = tiles_across(t), total = t.tiles[0] * across, rows = weight_rows(t);
  const int blocks = (rows + 127) / 128;
  int step = 0, count = 0;
  for (int tile = blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER, ++count) {
    const int4 group = ((const int4*)(t.tiles + 4))[tile / across];
    const int units = units_of(group.z);
    const float* row_scale = x_scale + (u64)(tile / across) * t.k_blocks * (UNITS * UNIT);
    int row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) row[h] = weight_row(t, tile % across, rank, h);
    const float* scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      scale[h] = t.w_scale + ((u64)group.x * blocks + min(row[h] / 128, blocks - 1)) * t.k_blocks;
    for (int kb = 0; kb < t.k_blocks; ++kb, ++step) {
      const int s = step % STAGES;
      const float gate = __ldg(scale[0] + kb), up = __ldg(scale[1] + kb);
      barrier_wait(base + EMPTY(s), (step / STAGES & 1) ^ 1);
      const u32 full = base + FULL(s);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        copy_box(base + W_AT + s * W_BYTES + h * (W_BYTES / 2), maps.w, kb * DEPTH, group.x * rows + row[h], full);
      for (int u = rank; u < units; u += CLUSTER) {
        const u32 at = base + X_AT + (s * UNITS + u) * X_BYTES;
        copy_box_to((1 << CLUSTER) - 1, at, maps.x, kb * DEPTH, group.y + u * UNIT, full);
      }
      const u32 scales = base + X_SCALE_AT + s * (UNITS * UNIT * 4);
      copy_bytes(scales, row_scale + kb * (UNITS * UNIT), units * (UNIT * 4), full);
      u32 columns = 0;
      if (kb == 0) {
        const int place = count % NOTES;
        store_shared4(base + NOTE_AT + place * 16, make_uint4(group.x, group.y, group.z, tile));
        columns = copy_columns(base + COLUMNS_AT + place * 512, t, (u64)group.x * rows, row, full);
      }
      store_shared2(base + W_SCALE_AT + s * 8, gate, up);
      barrier_expect(full, W_BYTES + units * (X_BYTES + UNIT * 4) + columns);
    }
  }
}

// ---- the multiplying warps ---------------------------------------------------------------------------------

struct Place {
  u32 base, rank;
  int group, warp, lane;  // warp of its group
};

DEVICE uint4 note_of(const Place& p, int count) { return load_shared4(p.base + NOTE_AT + count % NOTES * 16); }

// Until rows and weights of a step are there.
DEVICE void wait_for(const Place& p, int step) { barrier_wait(p.base + FULL(step % STAGES), step / STAGES & 1); }

DEVICE bool is_there(const Place& p, int step) {
  return barrier_over(p.base + FULL(step % STAGES), step / STAGES & 1);
}

DEVICE void release(const Place& p, int step) {
  if (p.lane < CLUSTER) barrier_arrive_there(place_of(p.base + EMPTY(step % STAGES), p.lane));
}

// Row of the tile, before `half` 8, of this thread.
DEVICE int row_of(const Place& p) { return p.group * UNIT + p.warp * 16 + p.lane / 4; }

// The tile's sums of this warp group's unit.
DEVICE void sum(float (&acc)[64], const Place& p, int rows, int k_blocks, int& step) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0;
  bool over = false;
  for (int kb = 0; kb < k_blocks; ++kb, ++step) {
    const int s = step % STAGES;
    if (!over) wait_for(p, step);
    const u64 b = tile_descriptor(p.base + W_AT + s * W_BYTES);
    float part[64];
    const u64 a = tile_descriptor(p.base + X_AT + (s * UNITS + p.group) * X_BYTES);
    products_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 32; ++k) product(part, a + 2 * k, b + 2 * k, k);
    products_commit();
    const u32 scales = p.base + X_SCALE_AT + (s * UNITS * UNIT + row_of(p)) * 4;
    const float x0 = load_shared(scales), x1 = load_shared(scales + 32);
    const float2 scale = load_shared2(p.base + W_SCALE_AT + s * 8);
    const float f[2][2] = {{x0 * scale.x, x0 * scale.y}, {x1 * scale.x, x1 * scale.y}};
    over = is_there(p, step + 1);
    products_wait(part);
    release(p, step);
    if (row_of(p) - p.lane / 4 < rows) {  // a warp without rows leaves the registers to the tensor cores
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] += part[i] * f[i / 2 % 2][i / 32];
    }
  }
}

// Biases of two neighbouring columns, the first of them `column` of the block's 128.
DEVICE void finish(float& x, float& y, u32 columns, int column) {
#if BIAS
  const float2 bias = load_shared2(columns + column * 4);
  x += bias.x, y += bias.y;
#endif
}

#if FUSED

DEVICE float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

// 64 inner columns of one row, rounded: this lane's 16 values to its 16 neighbouring codes.
DEVICE void store_codes(const float (&y)[64], int half, float factor, u8* at, bool there, int lane) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = 8 * i + 2 * half;
    words[i] = e4m3_pair(y[j] * factor, y[j + 1] * factor) | e4m3_pair(y[j + 4] * factor, y[j + 5] * factor) << 16;
  }
  transpose(words, lane);
  const uint4 codes = make_uint4(__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                                 __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
  if (there) *(uint4*)(at + lane % 4 * 16) = codes;
}

// Activates and rounds; the scale of a row's 128 columns needs the other block's 64, `turn` counts exchanges.
DEVICE void finish_tile(float (&acc)[64], const Place& p, const Task& t, int count, int& turn) {
  const uint4 group = note_of(p, count);
  const u32 columns = p.base + COLUMNS_AT + count % NOTES * 512;
  const int across = tiles_across(t), column = group.w % across * COLUMNS + p.rank * OWN, q = p.lane % 4;
  const bool inside = column < t.n;
  float* scales = t.out_scale + ((u64)(group.w / across) * ((t.n + 127) / 128) + column / 128) * (UNITS * UNIT);
  const u32 peaks = PEAK_AT + (turn & 1) * UNITS * UNIT * 4;
  float peak[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    finish(acc[i], acc[i + 1], columns, i / 4 * 8 + 2 * q);
    finish(acc[i + 32], acc[i + 33], columns, 64 + i / 4 * 8 + 2 * q);
    acc[i] = activate(acc[i], acc[i + 32], t);
    acc[i + 1] = activate(acc[i + 1], acc[i + 33], t);
    float& m = peak[i / 2 % 2];
    m = fmaxf(m, fmaxf(fabsf(acc[i]), fabsf(acc[i + 1])));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    peak[half] = inside ? quad_max(peak[half]) : 0;
    const u32 there = place_of(p.base + peaks + (row_of(p) + 8 * half) * 4, p.rank ^ 1);
    if (q == 0) store_there(there, peak[half]);
  }
  const int barrier = PEAK((turn & 1) * CONSUMER_WARPS + p.group * 4 + p.warp);
  if (q == 0) barrier_release_there(place_of(p.base + barrier, p.rank ^ 1));
  barrier_wait_cluster(p.base + barrier, turn / 2 & 1);
  ++turn;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(p) + 8 * half;
    const bool there = row < (int)group.z;
    const u64 r = group.y + row;
    const float other = load_shared(p.base + peaks + row * 4);
    const float scale = fmaxf(fmaxf(peak[half], other), 1e-10f) / 448.f;
    u8* at = (u8*)t.out + r * t.n + column;
    store_codes(acc, half, 1 / scale, at, there && inside, p.lane);
    if (there && inside && q == 0 && p.rank % 2 == 0) scales[row] = scale;
  }
}

#else

DEVICE void finish_tile(float (&acc)[64], const Place& p, const Task& t, int count, int& turn) {
  const uint4 group = note_of(p, count);
  const u32 columns = p.base + COLUMNS_AT + count % NOTES * 512;
  const int column = group.w % tiles_across(t) * COLUMNS + p.rank * OWN, q = p.lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(p) + 8 * half;
    const bool there = row < (int)group.z;
    const u64 r = (u64)(group.y + row) * t.n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 32 columns
#if OUT
      u32 words[4];
#endif
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = acc[16 * i + 4 * j + 2 * half], y = acc[16 * i + 4 * j + 2 * half + 1];
        const int c = 32 * i + 8 * j + 2 * q;
        finish(x, y, columns, c);
#if OUT
        words[j] = half_pair(x, y);
#else
        if (there && column + c < t.n) *(float2*)((float*)t.out + r + column + c) = make_float2(x, y);
#endif
      }
#if OUT
      transpose(words, p.lane);
      const int c = column + 32 * i + 8 * q;
      if (there && c < t.n) *(uint4*)((u16*)t.out + r + c) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
    }
  }
}

#endif

// A tile that has no rows for this warp group.
DEVICE void sit_out(const Place& p, int k_blocks, int& step) {
  for (int kb = 0; kb < k_blocks; ++kb, ++step) {
    wait_for(p, step);
    release(p, step);
  }
}

DEVICE void consume(const Place& p, const Task& t) {
  const int total = t.tiles[0] * tiles_across(t);
  int step = 0, count = 0, turn = 0;
  for (int tile = blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER, ++count) {
    wait_for(p, step);
    const int rows = note_of(p, count).z;
    if (p.group < units_of(rows)) {
      float acc[64];
      sum(acc, p, rows, t.k_blocks, step);
      finish_tile(acc, p, t, count, turn);
    } else {
      sit_out(p, t.k_blocks, step);
    }
  }
}

DEVICE void begin(u32 base) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(base + FULL(s), 1);
      barrier_init(base + EMPTY(s), CLUSTER * CONSUMER_WARPS);
    }
    for (int w = 0; w < 2 * CONSUMER_WARPS; ++w) barrier_init(base + PEAK(w), 8);
    barrier_init_done();
  }
  cluster_sync();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ TensorMap x, const float* x_scale,
            const __grid_constant__ TensorMap w, const float* w_scale, const float* bias, void* out, float* out_scale,
            const int* tiles, int n, int k_blocks, float limit, float alpha, float beta) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory), rank = cluster_rank();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const Task t{tiles, w_scale, bias, out, out_scale, n, k_blocks, limit, alpha, beta};
  begin(base);
  if (group >= UNITS) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 == CONSUMER_WARPS) {
      if (elected()) {
        prefetch_map(&x);
        produce(base, rank, Maps{&x, &w}, x_scale, t);
      }
      __syncwarp();
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(Place{base, rank, group, warp, lane}, t);
  }
  cluster_sync();
}
