// Four-bit codes in the order of `codes.py`, decoded in registers; behind `hopper.cu`.

// (a & mask) | c
DEVICE u32 and_or(u32 a, u32 mask, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
  return d;
}

// Two bf16 codes times one of the scales in the halves of `scales`.
DEVICE u32 times_low(u32 codes, u32 scales) {
  u32 product;
  asm("{\n.reg .b16 l, h;\n.reg .b32 p;\nmov.b32 {l, h}, %2;\nmov.b32 p, {l, l};\nmul.rn.bf16x2 %0, %1, p;\n}"
      : "=r"(product)
      : "r"(codes), "r"(scales));
  return product;
}

DEVICE u32 times_high(u32 codes, u32 scales) {
  u32 product;
  asm("{\n.reg .b16 l, h;\n.reg .b32 p;\nmov.b32 {l, h}, %2;\nmov.b32 p, {h, h};\nmul.rn.bf16x2 %0, %1, p;\n}"
      : "=r"(product)
      : "r"(codes), "r"(scales));
  return product;
}

#define KEPT 0x81C081C0
#define REST 0x06030603  // bits that the first word of a pair gives for the last places

DEVICE u32 kept_of(u32 w, int turn) { return __funnelshift_l(w, w, turn) & KEPT; }

// Of a pair of words of a row, those of 64 of K each, the four pairs of half h, 16 of K apart, times their scales: see
// `codes.py`. `even` has the scales of the first and the third, `odd` those of the others. The first half leaves what
// the second finds there of both.
DEVICE void decode(u32& w0, u32 w1, u32 even, u32 odd, int h, u32 (&out)[4]) {
  if (h == 0) {
    out[0] = times_low(w0 & KEPT, even);
    out[1] = times_low(w0 << 4 & KEPT, odd);
    out[2] = times_high(kept_of(w0, 10), even);
    asm("lop3.b32 %0, %1, %0, %2, 0xCA;" : "+r"(w0) : "n"(REST), "r"(w1));  // of the bits, REST ? w0 : w1
    out[3] = times_high(kept_of(w0, 8), odd);
  } else {
    out[0] = times_low(w1 << 2 & KEPT, even);
    out[1] = times_low(w1 << 6 & KEPT, odd);
    out[2] = times_high(kept_of(w1, 12), even);
    out[3] = times_high(kept_of(w0, 14), odd);
  }
}
