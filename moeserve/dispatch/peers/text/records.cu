// One row as its record in the wire format.

// Some of a block's warps, with a row in common: which of them this is.
struct Team {
  int warp, warps;
  DEVICE int thread() const { return 32 * warp + threadIdx.x % 32; }
  DEVICE int threads() const { return 32 * warps; }
};

#if SOURCE == 2
typedef float Element;
#else
typedef u16 Element;
#endif

// What a thread takes of a row at a time, as it stands in global memory (16-byte aligned): 16 columns, or one
// word of a row that comes as a record.
#if WIRE == WIRE_RECORDS
#define PIECES (RECORD_BYTES / 16)
#define PIECE_WORDS 1
#else
#define PIECES (HIDDEN / 16)
#define PIECE_WORDS ((int)sizeof(Element))
#endif

struct Piece {
  uint4 words[PIECE_WORDS];

  DEVICE void load(const u8* row, int at) {
#pragma unroll
    for (int i = 0; i < PIECE_WORDS; ++i)
      words[i] = at < PIECES ? ((const uint4*)row)[at * PIECE_WORDS + i] : make_uint4(0u, 0u, 0u, 0u);
  }
};

#if WIRE != WIRE_RECORDS
DEVICE void widen_piece(const Piece& piece, float (&x)[16]) {
#if SOURCE == 2
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[4 * i] = from_bits(piece.words[i].x), x[4 * i + 1] = from_bits(piece.words[i].y);
    x[4 * i + 2] = from_bits(piece.words[i].z), x[4 * i + 3] = from_bits(piece.words[i].w);
  }
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 word = piece.words[i];
    widen(word.x, x[8 * i], x[8 * i + 1]), widen(word.y, x[8 * i + 2], x[8 * i + 3]);
    widen(word.z, x[8 * i + 4], x[8 * i + 5]), widen(word.w, x[8 * i + 6], x[8 * i + 7]);
  }
#endif
}
#endif

DEVICE float largest_of(const float (&x)[16]) {
  float amax = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 16; ++i) amax = larger(amax, fabsf(x[i]));
  return amax;
}

DEVICE uint4 e4m3_codes(const float (&x)[16]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = e4m3_pair(x[4 * i], x[4 * i + 1]) | e4m3_pair(x[4 * i + 2], x[4 * i + 3]) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

#if WIRE == WIRE_FP8_GROUP128
// x / scale to the last bit, zero's sign too: one step of correction by the quotient's exact remainder, which
// all of a group share the reciprocal for. Of an infinite scale it makes what division makes: 0 or NaN.
DEVICE float over_scale(float x, float scale, float reciprocal) {
  float quotient = __fmul_rn(x, reciprocal);
  float rest = __fmaf_rn(-quotient, fminf(scale, 3.402823466e38f), x);
  return copysignf(__fmaf_rn(rest, reciprocal, quotient), quotient);
}

// Eight threads share a group; threads past the row's end bring zeros.
DEVICE void encode_columns(float (&x)[16], int unit, bool valid, u8* record, float) {
  float amax = largest_of(x);
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
    amax = larger(amax, __shfl_xor_sync(~0u, amax, distance));
  float scale = over_constant(amax < 1e-10f ? 1e-10f : amax, 448.0f), reciprocal = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = over_scale(x[i], scale, reciprocal);
  if (!valid) return;
  *(uint4*)(record + 16 * unit) = e4m3_codes(x);
  if (unit % 8 == 0) *(float*)(record + PART1_AT + unit / 2) = scale;
}
#elif WIRE == WIRE_MXFP8
// Two threads share a block, whose scale is the smallest power of two that saturates nothing.
DEVICE void encode_columns(float (&x)[16], int unit, bool valid, u8* record, float) {
  float amax = largest_of(x);
  amax = larger(amax, __shfl_xor_sync(~0u, amax, 1));
  u32 ratio = __float_as_uint(over_constant(amax, 448.0f));
  int byte = ratio <= 0x400000u ? 0 : (int)(ratio + 0x7FFFFFu) >> 23;
  byte = min(max(byte, 0), 254);
  float power = from_bits(byte == 254 ? 0x400000u : (u32)(254 - byte) << 23);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = __fmul_rn(x[i], power);
  if (!valid) return;
  *(uint4*)(record + 16 * unit) = e4m3_codes(x);
  if (unit % 2 == 0) record[PART1_AT + unit / 2] = amax != amax ? 255 : (u8)byte;
}
#elif WIRE == WIRE_NVFP4
// A thread has a block; `factor` is the reciprocal of the constant outer scale.
DEVICE void encode_columns(float (&x)[16], int unit, bool valid, u8* record, float factor) {
  u32 code = e4m3_pair(over_constant(__fmul_rn(factor, largest_of(x)), 6.0f), 0.0f) & 0xFFu;
  float value = e4m3_value(code);
  float multiplier = value == 0.0f ? 0.0f : __fdiv_rn(factor, value);
  u32 words[2] = {0u, 0u};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 8] |= e2m1_code(__fmul_rn(x[i], multiplier)) << (4 * (i % 8));
  if (!valid) return;
  *(uint2*)(record + 8 * unit) = make_uint2(words[0], words[1]);
  record[PART1_AT + unit] = (u8)code;
}
#endif

// One row as its record: `record` RECORD_BYTES in shared memory, 16-byte aligned. A team calls it, each
// thread with its first piece of the row; who reads the record synchronises them first. `row` is HIDDEN
// elements, or with WIRE_RECORDS the record itself. `factor` matters to WIRE_NVFP4 alone.
DEVICE void make_record(Piece piece, const u8* row, u8* record, float factor, Team team) {
#pragma unroll 1
  for (int at = team.thread(); at - (int)threadIdx.x % 32 < PIECES; at += team.threads()) {
    const Piece now = piece;  // the next is under way meanwhile
    piece.load(row, at + team.threads());
#if WIRE == WIRE_RECORDS
    if (at < PIECES) ((uint4*)record)[at] = now.words[0];
#else
    float x[16];
    widen_piece(now, x);
    encode_columns(x, at, at < PIECES, record, factor);
#endif
  }
}
