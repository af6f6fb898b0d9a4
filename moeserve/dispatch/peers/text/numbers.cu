// Numbers: 16-bit floats of hidden states, and rounding to the formats of wires.

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

// The values of two E4M3 codes, the low byte's first.
DEVICE void e4m3_values(u16 codes, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  low = half_float((u16)halves), high = half_float((u16)(halves >> 16));
}

// E2M1 code: nearest, ties to even; NaN and what is too large give 6.
DEVICE u32 e2m1_code(float x) {
  float size = fminf(fabsf(x), 6.0f);  // 6 for NaN too
  u32 exponent = max(__float_as_uint(size) >> 23, 127u);
  u32 shift = (exponent + 22u) << 23;  // 2^23 steps: their number stands in the sum's low bits
  u32 steps = __float_as_uint(__fadd_rn(size, from_bits(shift))) - shift;
  return (steps + ((exponent - 127u) << 1)) | (x < 0.0f ? 8u : 0u);
}
