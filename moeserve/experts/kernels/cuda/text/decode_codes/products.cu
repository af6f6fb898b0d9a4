// The products of one stage: codes decoded in registers while the tensor cores multiply those before.

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
