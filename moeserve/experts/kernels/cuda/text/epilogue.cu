// What becomes of a grouped GEMM's sums: activated, rounded, turned round. A GEMM's own source follows in one text.
//
// Given by -D: LIMITED (0 or 1), OUT (2 float16, else bfloat16 where the output has 16 bits).

// Of gate and up; `Task` has the limit, alpha and beta.
template <class Task>
DEVICE float activate(float gate, float up, const Task& t) {
#if LIMITED
  gate = gate > t.limit ? t.limit : gate;
  up = up > t.limit ? t.limit : up < -t.limit ? -t.limit : up;
#endif
  return __fdividef(gate, 1 + __expf(-t.alpha * gate)) * (up + t.beta);
}

// Two E4M3 codes, saturated, the low byte first.
DEVICE u32 e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two values of OUT, the low half first.
DEVICE u32 half_pair(float low, float high) {
  u32 pair;
#if OUT == 2
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

// After it, word i of lane q of a quad is what word q of lane i was.
DEVICE void transpose(u32 (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  u32 a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  if (odd) {
    w[0] = a, w[2] = b;
  } else {
    w[1] = a, w[3] = b;
  }
  a = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
  if (upper) {
    w[0] = a, w[1] = b;
  } else {
    w[2] = a, w[3] = b;
  }
}
