// Rows and the E4M3 codes that they are rounded to, with a scale for every 128 columns.
//
// Given by -D: MOST (rows of a group, where scales are in the order of a list of groups), and WIDE: whether codes are
// written as bf16, which has all of them, for products of bf16.

#if WIDE
typedef u16 Code;
#else
typedef u8 Code;
#endif

#define THREADS 256

// Eight neighbouring values, of which 16 lanes hold 128: `pairs` of bf16.
struct Eight {
  float y[8];

  DEVICE explicit Eight(uint4 pairs) {
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
  }

  // What all 128 are divided by.
  DEVICE float scale() const {
    float peak = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(y[i]));
#pragma unroll
    for (int by = 1; by < 16; by *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, by));
    return fmaxf(peak, 1e-10f) * (1.f / 448.f);  // as torch divides by a constant on a GPU
  }

  DEVICE uint2 codes(float scale) const {
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      u16 pair;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y[i + 1] / scale), "f"(y[i] / scale));
      words[i / 4] |= (u32)pair << i % 4 * 8;
    }
    return make_uint2(words[0], words[1]);
  }
};

// Eight codes times their scale, in bf16.
DEVICE uint4 values(uint2 codes, float scale) {
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u16 pair = (i / 2 ? codes.y : codes.x) >> i % 2 * 16;
    u32 halves;
    float low, high;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out[i]) : "f"(high * scale), "f"(low * scale));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Eight codes, as they are written.
DEVICE void store_codes(u8* at, uint2 codes) { *(uint2*)at = codes; }
DEVICE void store_codes(u16* at, uint2 codes) { *(uint4*)at = values(codes, 1); }

// x [R, width] bf16 to codes [R, width] and scale [groups, blocks, MOST]; block (g, b) of the grid takes columns
// 256 b.. of group g, half a warp 128 of a row. A width is a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS)
    round_groups(const __grid_constant__ RoundArguments args) {
  if ((int)blockIdx.x >= args.tiles[0]) return;
  const int4 group = ((const int4*)(args.tiles + 4))[blockIdx.x];
  const int lane = threadIdx.x % 32, block = blockIdx.y * 2 + lane / 16, column = block * 128 + lane % 16 * 8;
  float* own = args.scale + ((u64)blockIdx.x * args.blocks + block) * MOST;
  for (int row = threadIdx.x / 32; row < group.z; row += THREADS / 32) {
    const u64 at = (u64)(group.y + row) * args.width + column;
    const Eight eight(column < args.width ? *(const uint4*)(args.x + at) : make_uint4(0, 0, 0, 0));
    const float factor = eight.scale();
    if (column < args.width) store_codes((Code*)args.codes + at, eight.codes(factor));
    if (block < args.blocks && lane % 16 == 0) own[row] = factor;
  }
}

// codes [rows, width], scale of row r and block k of 128 at r * row_step + k * block_step, to x [rows, width] bf16.
extern "C" __global__ void __launch_bounds__(THREADS)
    widen(const __grid_constant__ WidenArguments args) {
  const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= args.rows) return;
  const u64 at = (u64)row * args.width;
  for (int column = lane * 8; column < args.width; column += 256) {
    const float factor = args.scale[(u64)row * args.row_step + (u64)(column / 128) * args.block_step];
    *(uint4*)(args.x + at + column) = values(*(const uint2*)(args.codes + at + column), factor);
  }
}
