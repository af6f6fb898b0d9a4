// The rows that a block's workers share: copied into their ring, or for FP8 rounded into it.

// Until all blocks have stored what this phase reads.
DEVICE void wait_for_all(const Task& t, u64 all_there) {
  u32 deadline = 0;
  const auto here = [&] {
    u64 turn;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(turn) : "l"(t.turns) : "memory");
    return turn >= all_there;
  };
  await_blocks(here, deadline, t.bound, t.expired, t.spoiled);
  asm volatile("fence.proxy.async;" ::: "memory");
}

#if FP8
// Eight values to eight E4M3, and what their group of 128, that sixteen lanes have, was divided by.
DEVICE float round_eight(const float (&values)[8], u32 (&codes)[2]) {
  float peak = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) peak = fmaxf(peak, fabsf(values[j]));
#pragma unroll
  for (int d = 1; d < 16; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
  const float scale = fmaxf(peak, 1e-10f) / 448.f;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float* four = values + 4 * j;
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(four[1] / scale), "f"(four[0] / scale));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(four[3] / scale), "f"(four[2] / scale));
    codes[j] = low | (u32)high << 16;
  }
  return scale;
}

// Eight values of a row: of bf16, or of float32.
DEVICE void load_eight(const u16* at, float (&v)[8]) {
  const uint4 four = __ldcg((const uint4*)at);
  const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    v[2 * j] = __uint_as_float(words[j] << 16), v[2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000);
}

DEVICE void load_eight(const float* at, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float4 four = __ldcg((const float4*)at + j);
    v[4 * j] = four.x, v[4 * j + 1] = four.y, v[4 * j + 2] = four.z, v[4 * j + 3] = four.w;
  }
}

// Every fourth piece of the rows `from` [.., width], from piece `first`, to E4M3 in 128-byte swizzle and a scale a
// row. By one warp, two rows at a time; loads of four such pairs are under way at once.
template <class Value>
DEVICE void round_rows(const Value* from, const Cursor& c, int step, int first, int pieces, int width, u32 base,
                       int lane) {
  const int pairs = (c.rows + 1) / 2, upper = lane / 16, left = lane % 16 * 8;
  from += (u64)(c.row0 + upper) * width + left;
  int load = first, load_pair = 0, piece = first, pair = 0;
  while (piece < pieces) {
    float v[4][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = 0;
      const int row = load_pair * 2 + upper, column = load * 128;
      if (load < pieces && row < c.rows && column + left < width)
        load_eight(from + (u64)load_pair * 2 * width + column, v[i]);
      if (++load_pair == pairs) load_pair = 0, load += 4;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (piece >= pieces) break;
      const int p = (step + piece) % PIECES, row = pair * 2 + upper;
      if (pair == 0) barrier_wait(base + EMPTY(p), ((step + piece) / PIECES & 1) ^ 1);
      u32 codes[2];
      const float scale = round_eight(v[i], codes);
      const u32 place = base + PIECES_AT + p * PIECE_BYTES + row * 128 + ((lane % 16 / 2) ^ (row % 8)) * 16;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place + lane % 2 * 8), "r"(codes[0]), "r"(codes[1])
                   : "memory");
      if (lane % 16 == 0)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + ROW_SCALES_AT + (p * ROWS + row) * 4), "f"(scale)
                     : "memory");
      if (++pair == pairs) {
        fence_for_copies();
        __syncwarp();
        if (lane == 0) barrier_arrive(base + FULL(p));
        pair = 0, piece += 4;
      }
    }
  }
}
#endif

// The rows of a block's units, piece by piece; every fourth piece is for `helper`, one of the last four warps.
DEVICE void bring_rows(const Task& t, const TensorMap* (&maps)[2], u32 base, int helper, int lane) {
#if !FP8
  if (lane) return;
#endif
  const int groups = shared_word(base + TOTALS_AT);
  int step = 0;
  u64 all_there;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(all_there) : "r"(base + TARGET_AT));
  for (int phase = 0; phase < 2; ++phase) {
    Cursor c;
    enter(c, t, groups, phase);
    if (phase && c.at < c.end && lane == 0) wait_for_all(t, all_there);
#if FP8
    __syncwarp();
#endif
    const TensorMap* map = maps[phase];
    const int width = side_of(t, phase).k, pieces = pieces_of(t, phase);
    for (; c.at < c.end; c.at += c.units) {
      look(c, t, base);
      if (!c.fresh) continue;
      const int first = (helper - step) & 3, tiles = (c.rows + 7) / 8;
#if FP8
      if (phase ? !c.whole : ROUND) {
        if (phase)
          round_rows((const float*)t.inner, c, step, first, pieces, width, base, lane);
        else
          round_rows((const u16*)t.x_scale, c, step, first, pieces, width, base, lane);
        step += pieces;
        continue;
      }
      const float* scales = (phase ? inner_scales(t) : t.x_scale) + (u64)(c.row0 + min(lane, c.rows - 1)) * pieces;
      float next = __ldcg(scales + min(first, pieces - 1));
#endif
      for (int piece = first; piece < pieces; piece += 4) {
        const int p = (step + piece) % PIECES, k = piece * DEPTH;
        const u32 to = base + PIECES_AT + p * PIECE_BYTES, full = base + FULL(p);
#if FP8
        const float scale = next;
        next = __ldcg(scales + min(piece + 4, pieces - 1));
#endif
        barrier_wait(base + EMPTY(p), ((step + piece) / PIECES & 1) ^ 1);
#if FP8
        if (lane < ROWS)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + ROW_SCALES_AT + (p * ROWS + lane) * 4), "f"(scale)
                       : "memory");
        __syncwarp();
        if (lane) continue;
#endif
        barrier_expect(full, tiles * TILE_BYTES);
        for (int i = 0; i < tiles; ++i) {
          copy_box(to + i * 1024, map, k, c.row0 + i * 8, full);
#if FP4
#pragma unroll
          for (int j = 1; j < 4; ++j) copy_box(to + j * ROWS * 128 + i * 1024, map, k + j * 64, c.row0 + i * 8, full);
#endif
        }
      }
      step += pieces;
    }
  }
}
