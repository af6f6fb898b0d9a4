// Sums over K: shares of several workers added up, then activated or finished, and stored.

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
