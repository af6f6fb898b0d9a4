// What becomes of a tile's sums: scaled, activated, rounded, and written.

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

// Activates, and raises the peaks of both blocks to the largest magnitudes of their columns, which are 128.
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
// the barrier of this one's: no one writes them until then, and no one reads them any more.
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
