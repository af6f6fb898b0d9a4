// What every kernel over peer memory shares; a dispatcher's own source follows it in one text.
//
// Given by -D: RANKS, HIDDEN (columns), SOURCE (0 bfloat16, 1 float16, 2 float32: hidden states and answers),
// WIRE (the WIRE_* below), TRUE_DIVISION (0 where this torch divides by a constant as a product),
// RECORD_BYTES, PARTS, and of each part i: PART<i>_AT, PART<i>_BYTES in a record.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

#define WIRE_RECORDS 0  // rows come as records: hidden states as they are, or packed before
#define WIRE_FP8_GROUP128 1
#define WIRE_MXFP8 2
#define WIRE_NVFP4 3  // with a constant outer scale

// ---- memory that other GPUs write or read ----------------------------------------------------------------

DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

DEVICE void store_release(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

DEVICE u32 load_acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

DEVICE void store_relaxed(u32* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

DEVICE u32 load_relaxed(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// 16 bytes in one piece: what is read is what one store wrote. The assembler reads only the components that
// are used, and then one by one; a checked word needs them all.
DEVICE void store_whole(void* at, uint4 value) {
  asm volatile(
      "{\n.reg .b128 word;\n.reg .b64 low, high;\n"
      "mov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\nmov.b128 word, {low, high};\n"
      "st.relaxed.sys.global.b128 [%0], word;\n}" ::"l"(at),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

DEVICE uint4 load_whole(const void* at) {
  uint4 value;
  asm volatile(
      "{\n.reg .b128 word;\n.reg .b64 low, high;\n"
      "ld.relaxed.sys.global.b128 word, [%4];\n"
      "mov.b128 {low, high}, word;\nmov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(at)
      : "memory");
  return value;
}

// 12 bytes under a check that tells which sequence number they belong to.
DEVICE uint4 checked(u32 x, u32 y, u32 z, u32 sequence) { return make_uint4(x, y, z, sequence ^ x ^ y ^ z); }

DEVICE bool belongs(uint4 word, u32 sequence) { return (word.x ^ word.y ^ word.z ^ word.w) == sequence; }

// ---- sequence numbers, live ranks, and who is late ------------------------------------------------------------------

// Sequence numbers count 1 .. 2^32 - 2 and start over; 0 is memory that nobody wrote. Parity alternates over the turn.
DEVICE u32 next_sequence(u32 sequence) { return sequence == 0xFFFFFFFEu ? 1u : sequence + 1u; }

// The first GIVEN_UP_BYTES of every rank's memory: word r is set once rank r has given this rank up.
#define GIVEN_UP_BYTES 256

struct Watch {
  u32* live;   // [RANKS + 1] of this GPU: 0 is never waited for nor stored to; last, when the host was asked
  u32* host_flags;  // [RANKS + 1] of the host: the sequence number in which a rank was late; last, whether all is over
  const u64* memory;  // [RANKS] addresses of all ranks' peer memory, as mapped here
  int rank;
  u64 patience;          // nanoseconds
  mutable u64 deadline;  // nanoseconds(); 0 before anybody was asked for
};

DEVICE bool is_live(const Watch& w, int rank) { return *(volatile u32*)(w.live + rank) != 0; }

// From here on `source` is neither waited for nor stored to; the host and `source` itself can read it.
DEVICE void give_up(const Watch& w, int source, u32 sequence) {
  *(volatile u32*)(w.live + source) = 0;
  store_relaxed(w.host_flags + source, sequence);
  store_relaxed((u32*)w.memory[source] + w.rank, sequence);
}

// Whether the host has ended all of it: then nobody is live any more, and nobody late. One thread in a tick
// of 2^17 ns asks, since the word lies behind a bus that many waiting threads would hold up.
DEVICE bool is_over(const Watch& w) {
  u32 tick = (u32)(nanoseconds() >> 17), *asked = w.live + RANKS;
  if (*(volatile u32*)asked == tick || atomicExch(asked, tick) == tick) return false;
  bool over = load_relaxed(w.host_flags + RANKS) != 0;
  if (over)
    for (int rank = 0; rank < RANKS; ++rank) *(volatile u32*)(w.live + rank) = 0;
  return over;
}

// Whether `source` will not come: it is not live, has given this rank up, its time is over, or all is.
DEVICE bool is_gone(const Watch& w, int source, u32 sequence) {
  if (!is_live(w, source)) return true;
  if (is_over(w)) return true;
  if (w.deadline == 0) w.deadline = nanoseconds() + w.patience;
  bool late = nanoseconds() > w.deadline || load_relaxed((const u32*)w.memory[w.rank] + source) != 0;
  if (late) give_up(w, source, sequence);
  return late;
}

// Waits until `here()`; false when `source` will not come.
template <class Here>
DEVICE bool await(const Watch& w, int source, u32 sequence, Here here) {
  for (u32 polls = 1;; ++polls) {
    if (here()) return true;
    if (polls % 64 == 0 && is_gone(w, source, sequence)) return false;
  }
}

// ---- numbers ----------------------------------------------------------------------------------------------

DEVICE float from_bits(u32 bits) { return __uint_as_float(bits); }

DEVICE float half_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two 16-bit values of SOURCE as float32, the low half first.
DEVICE void widen(u32 pair, float& low, float& high) {
#if SOURCE == 1
  low = half_float((u16)pair), high = half_float((u16)(pair >> 16));
#else
  low = from_bits(pair << 16), high = from_bits(pair & 0xFFFF0000u);
#endif
}

// Rounded to nearest even in SOURCE's 16 bits.
DEVICE u32 narrow(float low, float high) {
  u32 pair;
#if SOURCE == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

DEVICE float larger(float a, float b) {  // NaN where one is
  float value;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}

// a / constant as torch does it on this device.
DEVICE float over_constant(float a, float constant) {
#if TRUE_DIVISION
  return __fdiv_rn(a, constant);
#else
  return a * __fdiv_rn(1.0f, constant);
#endif
}

// Two E4M3 codes, saturated, the low byte first.
DEVICE u32 e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE float e4m3_value(u32 code) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)code));
  return half_float((u16)halves);
}

// E2M1 code: nearest, ties to even; NaN and what is too large give 6.
DEVICE u32 e2m1_code(float x) {
  float size = fminf(fabsf(x), 6.0f);  // 6 for NaN too
  u32 exponent = max(__float_as_uint(size) >> 23, 127u);
  u32 shift = (exponent + 22u) << 23;  // 2^23 steps: their number stands in the sum's low bits
  u32 steps = __float_as_uint(__fadd_rn(size, from_bits(shift))) - shift;
  return (steps + ((exponent - 127u) << 1)) | (x < 0.0f ? 8u : 0u);
}

// Some of a block's warps, with a row in common: which of them this is.
struct Team {
  int warp, warps;
  DEVICE int thread() const { return 32 * warp + threadIdx.x % 32; }
  DEVICE int threads() const { return 32 * warps; }
};

// ---- one row to its record in the wire format -------------------------------------------------------------

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

// Eight lanes share a group; lanes past the row's end bring zeros.
DEVICE void encode_columns(float (&x)[16], int unit, bool valid, u8* record, float) {
  float amax = largest_of(x);
#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, lane));
  float scale = over_constant(amax < 1e-10f ? 1e-10f : amax, 448.0f), reciprocal = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = over_scale(x[i], scale, reciprocal);
  if (!valid) return;
  *(uint4*)(record + 16 * unit) = e4m3_codes(x);
  if (unit % 8 == 0) *(float*)(record + PART1_AT + unit / 2) = scale;
}
#elif WIRE == WIRE_MXFP8
// Two lanes share a block; the smallest power of two that saturates nothing.
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
// A lane is a block; `factor` is the reciprocal of the constant outer scale.
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
