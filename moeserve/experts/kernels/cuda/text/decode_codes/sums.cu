// Sums over K: two shares added up, then activated or finished, and stored.

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
