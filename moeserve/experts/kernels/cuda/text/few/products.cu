// The products of one stage of weights and one piece of rows, on the tensor cores.

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

// acc += this warp's 16 of 64 rows of weights x 256 of K, times N rows; `used` gets an arrival when the weights are in
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
