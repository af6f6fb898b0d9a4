// One grouped GEMM for steps of bf16 rows: out[m, n] = sum_k x[m, k] w[slot of m, n, k], w in panels (see `panels.py`).
//
// A cluster of blocks works on up to 256 rows of one slot. The weights are the side of 64 of a matrix
// instruction and the rows its wide side, in steps of 16, so that few products are of rows that are not
// there. Each block reads 128 rows of the weights of its own, and some of x, which it copies to all. Of a
// block's warp groups two multiply, each 64 rows of the weights; one warp of the third copies. With FUSED
// eight gate rows and their eight up rows follow each other, so that a thread has both of a pair.
//
// Given by -D: CLUSTER (blocks), FUSED, BIAS, LIMITED (0 or 1), OUT (0 float32, 1 bfloat16, 2 float16), and
// MOST_ROWS of a group, 256, or 32: less room for rows of x is more for weights that are on their way.

#define DEPTH 64  // of bf16: a row of a tile is 128 bytes
#ifndef MOST_ROWS
#define MOST_ROWS 256
#endif
#if MOST_ROWS == 256
#define STAGES 4
#define BOX 64  // rows of x by one copy
#else
#define STAGES 10
#define BOX 16
#endif
#define SUMS (MOST_ROWS / 2)
#define NOTES 16  // more than tiles begin before the first of them is done
#define THREADS 384
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232

#define X_BYTES (MOST_ROWS * 128)
#define W_BYTES (128 * 128)

#define X_AT 0
#define W_AT (X_AT + STAGES * X_BYTES)
#define NOTE_AT (W_AT + STAGES * W_BYTES)  // of a tile: slot, first row, rows, place across
#define NEXT_AT (NOTE_AT + NOTES * 16)  // numbers of tiles, from the cluster's first block
#define BARRIER_AT (NEXT_AT + NOTES * 4)

#define FULL(s) (BARRIER_AT + 8 * (s))
#define EMPTY(s) (FULL(STAGES) + 8 * (s))
#define NEXT(i) (EMPTY(STAGES) + 8 * (i))

#define OWN (FUSED ? 64 : 128)  // columns of the output, by a block
#define COLUMNS (CLUSTER * OWN)

// What the kernel takes; `prefill_wide.py` declares it.
typedef WidePrefillArguments Task;

DEVICE int tiles_across(const Task& t) { return (t.n + COLUMNS - 1) / COLUMNS; }

// First column of the output of block `rank`.
DEVICE int first_column(int across, u32 rank) { return across * COLUMNS + (int)rank * OWN; }

// ---- the copying warp --------------------------------------------------------------------------------------

// The block's 128 rows of 64 weights: with FUSED by eights, gate rows at even places and up rows at odd ones.
DEVICE void copy_weights(u32 base, int s, const Task& t, int slot, int column, int kb) {
  const u32 full = base + FULL(s), to = base + W_AT + s * W_BYTES;
  const int panels = (t.n + 63) / 64, panel = ((FUSED ? 2 : 1) * slot * panels + column / 64) * t.k_blocks + kb;
#if FUSED
  copy_eights(to, &t.w, panel, full);
#else
  copy_box(to, &t.w, 0, panel * 64, full);
  copy_box(to + W_BYTES / 2, &t.w, 0, (panel + t.k_blocks) * 64, full);
#endif
}

DEVICE void produce(u32 base, u32 rank, const Task& t) {
  const int across = tiles_across(t), total = min(t.tiles[0] * across, t.last);
  u32 step = 0, count = 0, begun = 0;
#if !FUSED
  // the weights are there, and so is the list, which the launch before waited for
  if (const int tile = t.first + blockIdx.x / CLUSTER; tile < total) {
    const int slot = t.tiles[4 + tile / across * 4], column = first_column(tile % across, rank);
    for (begun = 0; begun < min(STAGES, t.k_blocks); ++begun) copy_weights(base, begun, t, slot, column, begun);
  }
  grid_wait();
#endif
  for (int tile = t.first + blockIdx.x / CLUSTER; tile < total; ++count) {
    int following = 0;
    if (rank == 0) following = gridDim.x / CLUSTER + atomicAdd(t.tiles + (FUSED ? 1 : 2), 1);
    const int4 group = ((const int4*)(t.tiles + 4))[tile / across];
    const int boxes = (group.z + BOX - 1) / BOX, column = first_column(tile % across, rank);
    for (int kb = 0; kb < t.k_blocks; ++kb, ++step) {
      const u32 s = step % STAGES;
      barrier_wait(base + EMPTY(s), (step / STAGES & 1) ^ 1);
      if (step >= begun) copy_weights(base, s, t, group.x, column, kb);
      for (int u = rank; u < boxes; u += CLUSTER) {
        const u32 at = base + X_AT + s * X_BYTES + u * (BOX * 128);
        copy_box_to((1 << CLUSTER) - 1, at, &t.x, kb * DEPTH, group.y + u * BOX, base + FULL(s));
      }
      if (kb == 0)
        store_shared4(base + NOTE_AT + count % NOTES * 16, make_uint4(group.x, group.y, group.z, tile % across));
      barrier_expect(base + FULL(s), W_BYTES + boxes * (BOX * 128));
    }
    const u32 i = count % NOTES;
    tile = value_of_first(following, rank, CLUSTER, base + NEXT_AT + i * 4, base + NEXT(i), count / NOTES & 1);
  }
  const u32 s = step % STAGES;
  barrier_wait(base + EMPTY(s), (step / STAGES & 1) ^ 1);
  store_shared4(base + NOTE_AT + count % NOTES * 16, make_uint4(0, 0, 0, 0));
  barrier_expect(base + FULL(s), 0);
}

// ---- the multiplying warps ---------------------------------------------------------------------------------

struct Place {
  u32 base, rank;
  int group, warp, lane;  // warp of its group
};

struct Note {
  int slot, first, rows, across;
};

DEVICE Note note_of(const Place& p, u32 count) {
  const uint4 note = load_shared4(p.base + NOTE_AT + count % NOTES * 16);
  return Note{(int)note.x, (int)note.y, (int)note.z, (int)note.w};
}

// Until rows and weights of a step are there.
DEVICE void wait_for(const Place& p, u32 step) { barrier_wait(p.base + FULL(step % STAGES), step / STAGES & 1); }

DEVICE void release(const Place& p, u32 step) {
  if (p.lane < CLUSTER) barrier_arrive_there(place_of(p.base + EMPTY(step % STAGES), p.lane));
}

// The sums of this warp group's 64 rows of the weights and N rows of x; a step's products run while the
// next one's are begun.
template <int N>
DEVICE void sum(float (&acc)[SUMS], const Place& p, int k_blocks, u32 step) {
  for (int kb = 0; kb < k_blocks; ++kb, ++step) {
    wait_for(p, step);
    const u64 w = tile_descriptor(p.base + W_AT + step % STAGES * W_BYTES + p.group * (W_BYTES / 2));
    const u64 x = tile_descriptor(p.base + X_AT + step % STAGES * X_BYTES);
    products_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) product_wide<N>(acc, w + 2 * k, x + 2 * k);
    products_commit();
    products_wait_for_older();
    if (kb) release(p, step - 1);
  }
  products_wait(acc);
  release(p, step - 1);
}

#define SUM(n) \
  case n: return sum<16 * n>(acc, p, k_blocks, step);

DEVICE void sum_rows(float (&acc)[SUMS], const Place& p, int rows, int k_blocks, u32 step) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) acc[i] = 0;
  switch ((rows + 15) / 16) {
    SUM(1)
#if MOST_ROWS == 256
    SUM(2) SUM(3) SUM(4) SUM(5) SUM(6) SUM(7) SUM(8) SUM(9) SUM(10) SUM(11) SUM(12) SUM(13) SUM(14) SUM(15)
#endif
    default: return sum<MOST_ROWS>(acc, p, k_blocks, step);
  }
}

// What is added to the sums of row `row` of the weights.
DEVICE float bias_of(const Task& t, int slot, int row) {
#if BIAS
  const int rows = FUSED ? 2 * t.n : t.n;
  return __ldg(t.bias + (u64)slot * rows + min(row, rows - 1));
#else
  return 0;
#endif
}

// Two neighbouring rows of x, and after the transposition two neighbouring columns.
DEVICE u32 column_pair(float low, float high) { return transposed(half_pair(low, high)); }

DEVICE void store_eight(const Task& t, const Note& note, int row, int column, const u32 (&w)[4]) {
  if (row < note.rows && column < t.n)
    *(uint4*)((u16*)t.out + (u64)(note.first + row) * t.n + column) = make_uint4(w[0], w[1], w[2], w[3]);
}

#if FUSED

// acc[4 j + b] is gate and acc[4 j + 2 + b] up of column lane / 4 of the warp's eight, row 8 j + 2 (lane % 4) + b.
DEVICE void finish_tile(float (&acc)[SUMS], const Place& p, const Task& t, const Note& note) {
  const int column = first_column(note.across, p.rank) + (p.group * 4 + p.warp) * 8, own = column + p.lane / 4;
  const float gate = bias_of(t, note.slot, own), up = bias_of(t, note.slot, t.n + own);
#pragma unroll
  for (int j = 0; j < MOST_ROWS / 8; j += 4) {
    if (8 * j >= note.rows) continue;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float y[2];
#pragma unroll
      for (int b = 0; b < 2; ++b)
        y[b] = activate(acc[4 * (j + i) + b] + gate, acc[4 * (j + i) + 2 + b] + up, t);
      words[i] = column_pair(y[0], y[1]);
    }
    transpose(words, p.lane);
    store_eight(t, note, 8 * (j + p.lane % 4) + p.lane / 4, column, words);
  }
}

#else

// acc[4 j + 2 h + b] is of column 8 h + lane / 4 of the warp's 16 and row 8 j + 2 (lane % 4) + b.
DEVICE void finish_tile(float (&acc)[SUMS], const Place& p, const Task& t, const Note& note) {
  const int column = first_column(note.across, p.rank) + (p.group * 4 + p.warp) * 16, q = p.lane % 4;
  const int own = column + p.lane / 4;
  const float bias[2] = {bias_of(t, note.slot, own), bias_of(t, note.slot, own + 8)};
#pragma unroll
  for (int j = 0; j < MOST_ROWS / 8; j += 2) {
    if (8 * j >= note.rows) continue;
#if OUT
    u32 words[4];
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (j + i / 2) + 2 * (i % 2);
      const float low = acc[at] + bias[i % 2], high = acc[at + 1] + bias[i % 2];
#if OUT
      words[i] = column_pair(low, high);
#else
      const int row = 8 * (j + i / 2) + 2 * q, c = own + i % 2 * 8;
      float* to = (float*)t.out + (u64)(note.first + row) * t.n + c;
      if (row < note.rows && c < t.n) to[0] = low;
      if (row + 1 < note.rows && c < t.n) to[t.n] = high;
#endif
    }
#if OUT
    transpose(words, p.lane);
    store_eight(t, note, 8 * (j + q / 2) + p.lane / 4, column + q % 2 * 8, words);
#endif
  }
}

#endif

DEVICE void consume(const Place& p, const Task& t) {
  for (u32 step = 0, count = 0;; ++count, step += t.k_blocks) {
    float acc[SUMS];
    wait_for(p, step);
    const Note note = note_of(p, count);
    if (!note.rows) break;
    sum_rows(acc, p, note.rows, t.k_blocks, step);
    finish_tile(acc, p, t, note);
  }
}

DEVICE void begin(u32 base) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(base + FULL(s), 1);
      barrier_init(base + EMPTY(s), CLUSTER * 8);
    }
    for (int i = 0; i < NOTES; ++i) barrier_init(base + NEXT(i), 1);
    barrier_init_done();
  }
  cluster_sync();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_wide(const __grid_constant__ WidePrefillArguments args) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory), rank = cluster_rank();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  begin(base);
#if FUSED
  grid_wait();
  grid_release();
#endif
  if (group >= 2) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 == 8) {
      if (elected()) {
        prefetch_map(&args.x);
        prefetch_map(&args.w);
        produce(base, rank, args);
      }
      __syncwarp();
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(Place{base, rank, group, warp, lane}, args);
  }
  cluster_sync();
}
