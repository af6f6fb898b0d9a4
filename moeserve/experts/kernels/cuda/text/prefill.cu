// One grouped GEMM for steps of many rows: out[m, n] = sum_k x[m, k] w[slot of m, n, k], x and w in E4M3, w in panels
// (see `panels.py`).
//
// A cluster of blocks works on up to two units of 64 rows of one slot: each block reads 256 rows of the weights
// of its own, and some of x, which it copies to all. Of a block's warp groups two multiply, a unit each by all
// weights, or half of the weights each where there is one unit; of the third one warp copies. The sums of each 128
// of K are scaled and added in float32, half of the weights after the other, so that one group does so while the
// other multiplies. With FUSED a block holds gate and up columns of the same 128 columns of the inner rows and
// writes these activated and rounded.
//
// Given by -D: CLUSTER (blocks), FUSED, BIAS, LIMITED (0 or 1), OUT (0 float32, 1 bfloat16, 2 float16).

#define DEPTH 128
#define UNIT 64
#define UNITS 2  // a multiplying warp group each
#define STAGES 4
#define NOTES 8  // more than tiles begin before the first of them is done
#define THREADS 384
#define PRODUCER_REGISTERS 72
#define CONSUMER_REGISTERS 216
#define CONSUMER_WARPS (4 * UNITS)

#define X_BYTES (UNIT * DEPTH)
#define W_BYTES (256 * DEPTH)

#define X_AT 0
#define W_AT (X_AT + STAGES * UNITS * X_BYTES)
#define X_SCALE_AT (W_AT + STAGES * W_BYTES)
#define NOTE_AT (X_SCALE_AT + STAGES * UNITS * UNIT * 4)  // of a tile: group, first row, rows, place across
#define PEAK_AT (NOTE_AT + NOTES * 16)                    // largest magnitudes of half a row, of every second exchange
#define COLUMNS_AT (PEAK_AT + 2 * 2 * UNIT * 4)           // of a tile: biases of the weights' 256 rows
#define W_SCALE_AT (COLUMNS_AT + NOTES * 1024)
#define NEXT_AT (W_SCALE_AT + STAGES * 16)  // numbers of tiles, from the cluster's first block
#define BARRIER_AT (NEXT_AT + NOTES * 4)

#define FULL(s) (BARRIER_AT + 8 * (s))
#define EMPTY(s) (FULL(STAGES) + 8 * (s))
#define NEXT(i) (EMPTY(STAGES) + 8 * (i))

// What the kernel takes; `prefill.py` declares it.
typedef PrefillArguments Task;

#define OWN (FUSED ? 128 : 256)  // columns of the output, by a block
#define COLUMNS (CLUSTER * OWN)

DEVICE int tiles_across(const Task& t) { return (t.n + COLUMNS - 1) / COLUMNS; }
DEVICE int weight_rows(const Task& t) { return FUSED ? 2 * t.n : t.n; }

// First of the 64 rows of its slot's weights that are quarter q of block `rank`; with FUSED a half is gate and up.
DEVICE int weight_row(const Task& t, int across, u32 rank, int q) {
  return across * COLUMNS + (int)rank * OWN + (FUSED ? q / 2 * UNIT + q % 2 * t.n : q * UNIT);
}

// The panel that quarter q of block `rank` starts with: panels of a slot's gate, then of its up.
DEVICE int panel_of(const Task& t, int slot, int across, u32 rank, int q) {
  const int column = across * COLUMNS + (int)rank * OWN + (FUSED ? q / 2 : q) * UNIT, panels = (t.n + UNIT - 1) / UNIT;
  return ((FUSED ? 2 * slot + q % 2 : slot) * panels + column / UNIT) * t.k_blocks;
}

DEVICE int units_of(int rows) { return (rows + UNIT - 1) / UNIT; }

// ---- the copying warp --------------------------------------------------------------------------------------

// Biases of a tile, where there are any; the bytes that will arrive.
DEVICE u32 copy_columns(u32 to, const Task& t, u64 slot_rows, const int (&row)[4], u32 full) {
  u32 bytes = 0;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int there = min(UNIT, weight_rows(t) - row[q]) * 4;
    if (there <= 0) continue;
#if BIAS
    copy_bytes(to + q * UNIT * 4, t.bias + slot_rows + row[q], there, full);
    bytes += there;
#endif
  }
  return bytes;
}


DEVICE void copy_weights(u32 base, u32 s, const Task& t, int panel, int q) {
  copy_box(base + W_AT + s * W_BYTES + q * (W_BYTES / 4), &t.w, 0, panel * UNIT, base + FULL(s));
}

struct Work {
  int4 group;
  int number, across;  // of the group, of the tile in the group's row of tiles
};

// Tiles that multiply by the same weights follow each other, so that these are read while they are in the cache.
DEVICE Work work_of(const Task& t, int tile, int across) {
  const int4* groups = (const int4*)(t.tiles + 4);
  Work work;
  const int any = tile / across, packed = groups[any].w, first = any - (packed & 0xFFFF), own = packed >> 16;
  const int place = tile - first * across;
  work.number = first + place % own, work.across = place / own;
  work.group = groups[work.number];
  return work;
}

// x_scale [groups, K / 128, 128]: row i of a group, not of x.
DEVICE void produce(u32 base, u32 rank, const Task& t) {
  const int across = tiles_across(t), total = min(t.tiles[0] * across, t.last), rows = weight_rows(t);
  const int blocks = (rows + 127) / 128;
  u32 step = 0, count = 0, begun = 0;
  int tile = t.first + blockIdx.x / CLUSTER;
#if !FUSED
  // the weights are there, and so is the list, which the launch before waited for
  if (tile < total) {
    const Work work = work_of(t, tile, across);
    for (begun = 0; begun < min(STAGES, t.k_blocks); ++begun)
      for (int q = 0; q < 4; ++q)
        copy_weights(base, begun, t, panel_of(t, work.group.x, work.across, rank, q) + begun, q);
  }
  grid_wait();
#endif
  while (tile < total) {
    const Work work = work_of(t, tile, across);
    const int4 group = work.group;
    int following = 0;
    if (rank == 0) following = gridDim.x / CLUSTER + atomicAdd(t.tiles + (FUSED ? 1 : 2), 1);
    const int units = units_of(group.z);
    const float* row_scale = t.x_scale + (u64)work.number * t.k_blocks * (UNITS * UNIT);
    const float* slot_scale = t.w_scale + (u64)group.x * blocks * t.k_blocks;
    int row[4], scale[4], panel[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      panel[q] = panel_of(t, group.x, work.across, rank, q);
      row[q] = weight_row(t, work.across, rank, q);
      scale[q] = min(row[q] / 128, blocks - 1) * t.k_blocks;
    }
    for (int kb = 0; kb < t.k_blocks; ++kb, ++step) {
      const u32 s = step % STAGES;
      float f[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) f[q] = __ldg(slot_scale + scale[q] + kb);
      barrier_wait(base + EMPTY(s), (step / STAGES & 1) ^ 1);
      const u32 full = base + FULL(s);
      if (step >= begun)
#pragma unroll
        for (int q = 0; q < 4; ++q) copy_weights(base, s, t, panel[q] + kb, q);
      for (int u = rank; u < units; u += CLUSTER) {
        const u32 at = base + X_AT + (s * UNITS + u) * X_BYTES;
        copy_box_to((1 << CLUSTER) - 1, at, &t.x, kb * DEPTH, group.y + u * UNIT, full);
      }
      const u32 scales = base + X_SCALE_AT + s * (UNITS * UNIT * 4);
      copy_bytes(scales, row_scale + kb * (UNITS * UNIT), units * (UNIT * 4), full);
      u32 columns = 0;
      if (kb == 0) {
        const u32 place = count % NOTES;
        store_shared4(base + NOTE_AT + place * 16, make_uint4(work.number, group.y, group.z, work.across));
        columns = copy_columns(base + COLUMNS_AT + place * 1024, t, (u64)group.x * rows, row, full);
      }
      store_shared2(base + W_SCALE_AT + s * 16, f[0], f[1]);
      store_shared2(base + W_SCALE_AT + s * 16 + 8, f[2], f[3]);
      barrier_expect(full, W_BYTES + units * (X_BYTES + UNIT * 4) + columns);
    }
    const u32 i = count % NOTES;
    tile = value_of_first(following, rank, CLUSTER, base + NEXT_AT + i * 4, base + NEXT(i), count / NOTES & 1);
    ++count;
  }
  const u32 s = step % STAGES;
  barrier_wait(base + EMPTY(s), (step / STAGES & 1) ^ 1);
  store_shared4(base + NOTE_AT + count % NOTES * 16, make_uint4(0, 0, 0, 0));
  barrier_expect(base + FULL(s), 0);
}

// ---- the multiplying warps ---------------------------------------------------------------------------------

DEVICE void store_shared(u32 at, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory"); }

// All threads of both multiplying warp groups; what they wrote to shared memory before is there after.
DEVICE void groups_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

struct Place {
  u32 base, rank;
  int group, warp, lane;  // warp of its group
  int unit, half;         // of the tile: the rows, and the first of the weights, of this group
};

DEVICE uint4 note_of(const Place& p, u32 count) { return load_shared4(p.base + NOTE_AT + count % NOTES * 16); }

// Until rows and weights of a step are there.
DEVICE void wait_for(const Place& p, u32 step) { barrier_wait(p.base + FULL(step % STAGES), step / STAGES & 1); }

DEVICE bool is_there(const Place& p, u32 step) {
  return barrier_over(p.base + FULL(step % STAGES), step / STAGES & 1);
}

DEVICE void release(const Place& p, u32 step) {
  if (p.lane < CLUSTER) barrier_arrive_there(place_of(p.base + EMPTY(step % STAGES), p.lane));
}

// Row of the tile, before 8 more, of this thread.
DEVICE int row_of(const Place& p) { return p.unit * UNIT + p.warp * 16 + p.lane / 4; }

// As `tile_descriptor`, of `more` times 16 bytes further.
DEVICE u64 descriptor(u32 shared, u32 more) {
  u64 made;
  asm("mov.b64 %0, {%1, %2};" : "=l"(made) : "r"((shared >> 4 | 1 << 16) + more), "r"(1024 >> 4 | 1 << 30));
  return made;
}

// The tile's sums of this warp group's unit and its halves of the weights.
template <int HALVES>
DEVICE void sum(float (&acc)[64 * HALVES], const Place& p, int k_blocks, u32& step) {
#pragma unroll
  for (int i = 0; i < 64 * HALVES; ++i) acc[i] = 0;
  bool over = false;
  for (int kb = 0; kb < k_blocks; ++kb, ++step) {
    const u32 s = step % STAGES;
    if (!over) wait_for(p, step);
    const u32 a = p.base + X_AT + (s * UNITS + p.unit) * X_BYTES, b = p.base + W_AT + s * W_BYTES;
    float x0, x1;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      float part[64];
      const u32 half = HALVES == 1 ? p.half : h;
      products_fence();
#pragma unroll
      for (int k = 0; k < DEPTH / 32; ++k)
        product(part, descriptor(a, 2 * k), descriptor(b + half * (W_BYTES / 2), 2 * k), k);
      products_commit();
      if (h == 0) {
        const u32 scales = p.base + X_SCALE_AT + (s * UNITS * UNIT + row_of(p)) * 4;
        x0 = load_shared(scales), x1 = load_shared(scales + 32);
      }
      const float2 scale = load_shared2(p.base + W_SCALE_AT + s * 16 + half * 8);
      const float f[2][2] = {{x0 * scale.x, x0 * scale.y}, {x1 * scale.x, x1 * scale.y}};
      if (h == HALVES - 1) over = is_there(p, step + 1);
      products_wait(part);
      if (h == HALVES - 1) release(p, step);
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[64 * h + i] += part[i] * f[i / 2 % 2][i / 32];
    }
  }
}

// Biases of two neighbouring columns, the first of them `column` of the block's 256.
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
template <int N>
DEVICE void store_codes(const float (&y)[N], int first, float factor, u8* at, bool there, int lane) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = first + 8 * i;
    words[i] = e4m3_pair(y[j] * factor, y[j + 1] * factor) | e4m3_pair(y[j + 4] * factor, y[j + 5] * factor) << 16;
  }
  transpose(words, lane);
  const uint4 codes = make_uint4(__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                                 __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
  if (there) *(uint4*)(at + lane % 4 * 16) = codes;
}

// The largest of a row's magnitudes, of which the other warp group has those of the other half.
DEVICE void exchange(float (&peak)[2], const Place& p, u32& turn) {
  const u32 at = p.base + PEAK_AT + ((turn++ & 1) * 2 * UNIT + row_of(p)) * 4;
  if (p.lane % 4 == 0) {
    store_shared(at + p.half * UNIT * 4, peak[0]);
    store_shared(at + p.half * UNIT * 4 + 32, peak[1]);
  }
  groups_meet();
  const u32 other = at + (p.half ^ 1) * UNIT * 4;
  peak[0] = fmaxf(peak[0], load_shared(other)), peak[1] = fmaxf(peak[1], load_shared(other + 32));
}

// Activates and rounds 64 columns a half; a scale is of 128.
template <int HALVES>
DEVICE void finish_tile(float (&acc)[64 * HALVES], const Place& p, const Task& t, u32 count, u32& turn) {
  const uint4 group = note_of(p, count);
  const u32 columns = p.base + COLUMNS_AT + count % NOTES * 1024;
  const int column = group.w * COLUMNS + p.rank * OWN, q = p.lane % 4;
  float* scales = t.out_scale + ((u64)group.x * ((t.n + 127) / 128) + column / 128) * (UNITS * UNIT);
  float peak[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    const bool inside = column + (p.half + h) * UNIT < t.n;
#pragma unroll
    for (int i = 64 * h; i < 64 * h + 32; i += 2) {
      const int c = (p.half + h) * 128 + i % 64 / 4 * 8 + 2 * q;
      finish(acc[i], acc[i + 1], columns, c);
      finish(acc[i + 32], acc[i + 33], columns, c + 64);
      acc[i] = activate(acc[i], acc[i + 32], t);
      acc[i + 1] = activate(acc[i + 1], acc[i + 33], t);
      float& m = peak[i / 2 % 2];
      if (inside) m = fmaxf(m, fmaxf(fabsf(acc[i]), fabsf(acc[i + 1])));
    }
  }
  peak[0] = quad_max(peak[0]), peak[1] = quad_max(peak[1]);
  if (HALVES == 1) exchange(peak, p, turn);
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    const int row = row_of(p) + 8 * eight;
    const bool there = row < (int)group.z;
    const float scale = fmaxf(peak[eight], 1e-10f) / 448.f;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int c = column + (p.half + h) * UNIT;
      u8* at = (u8*)t.out + (u64)(group.y + row) * t.n + c;
      store_codes(acc, 64 * h + 2 * eight, 1 / scale, at, there && c < t.n, p.lane);
    }
    if (there && column < t.n && q == 0 && p.half == 0) scales[row] = scale;
  }
}

#else

template <int HALVES>
DEVICE void finish_tile(float (&acc)[64 * HALVES], const Place& p, const Task& t, u32 count, u32& turn) {
  const uint4 group = note_of(p, count);
  void* const out = t.out;
  const int n = t.n, first = p.half * 128, column = group.w * COLUMNS + p.rank * OWN + first, q = p.lane % 4;
  const u32 columns = p.base + COLUMNS_AT + count % NOTES * 1024 + first * 4;
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    const int row = row_of(p) + 8 * eight;
    const bool there = row < (int)group.z;
    const u64 r = (u64)(group.y + row) * n;
#pragma unroll
    for (int i = 0; i < 4 * HALVES; ++i) {  // 32 columns
#if OUT
      u32 words[4];
#endif
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = acc[16 * i + 4 * j + 2 * eight], y = acc[16 * i + 4 * j + 2 * eight + 1];
        const int c = 32 * i + 8 * j + 2 * q;
        finish(x, y, columns, c);
#if OUT
        words[j] = half_pair(x, y);
#else
        if (there && column + c < n) *(float2*)((float*)out + r + column + c) = make_float2(x, y);
#endif
      }
#if OUT
      transpose(words, p.lane);
      const int c = column + 32 * i + 8 * q;
      if (there && c < n) *(uint4*)((u16*)out + r + c) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
    }
  }
}

#endif

template <int HALVES>
DEVICE void tile(const Place& p, const Task& t, u32 count, u32& step, u32& turn) {
  float acc[64 * HALVES];
  sum<HALVES>(acc, p, t.k_blocks, step);
  finish_tile<HALVES>(acc, p, t, count, turn);
}

DEVICE void consume(Place& p, const Task& t) {
  u32 step = 0, turn = 0;
  for (u32 count = 0;; ++count) {
    wait_for(p, step);
    const int rows = note_of(p, count).z;
    if (!rows) break;
    const bool one = rows <= UNIT;
    p.unit = one ? 0 : p.group, p.half = one ? p.group : 0;
    if (one)
      tile<1>(p, t, count, step, turn);
    else
      tile<2>(p, t, count, step, turn);
  }
}

DEVICE void begin(u32 base) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(base + FULL(s), 1);
      barrier_init(base + EMPTY(s), CLUSTER * CONSUMER_WARPS);
    }
    for (int i = 0; i < NOTES; ++i) barrier_init(base + NEXT(i), 1);
    barrier_init_done();
  }
  cluster_sync();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ PrefillArguments args) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = (u32)__cvta_generic_to_shared(memory), rank = cluster_rank();
  const int number = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // known as the warp's own
  begin(base);
#if FUSED
  grid_wait();
  grid_release();
#endif
  if (number >= CONSUMER_WARPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (number == CONSUMER_WARPS) {
      if (elected()) {
        prefetch_map(&args.x);
        produce(base, rank, args);
      }
      __syncwarp();
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    Place p{base, rank, number / 4, number % 4, lane};
    consume(p, args);
  }
  cluster_sync();
}
