// Four-bit codes of a stage, read from shared memory and decoded to operands of products.

// A thread's two rows of the weights in a product, eight apart: gate and up of a column, or of one block.
struct Place {
  u32 base, rank;
  int group, warp, lane;  // warp of its group
#if EIGHT
  u32 codes, factors, x_scales;  // where a thread reads codes, their scales and those of x, in the first stages
  u32 empty;                     // X_EMPTY(0) of block `lane`
  int first, shares;             // whether the lane is 0, or below CLUSTER
#endif

  DEVICE int block(int r) const { return FUSED ? r : group; }
  DEVICE int warp_rows(int r) const { return FUSED ? 2 * group + warp / 2 : warp; }  // 16 rows of 64
  DEVICE int upper(int r) const { return FUSED ? warp % 2 : r; }
  DEVICE int own_column() const { return FUSED ? group * 32 + warp * 8 : group * 64 + warp * 16; }
};

DEVICE void release(const Place& p, int stage) {
  if (p.lane < CLUSTER) barrier_arrive_there(place_of(p.base + X_EMPTY(stage), p.lane));
}

template <int LEFT>
DEVICE void products_wait_until() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

DEVICE uint2 load_shared_words(u32 at) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
  return value;
}

DEVICE u32 load_shared_word(u32 at) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

#if !EIGHT

// What a thread needs of a step: of row r, of half h of K the words of columns 2 q and of 2 q + 8.
struct Held {
  uint2 words[2][2];  // [row][column], of which x is half 0
  uint2 scales[2];
};

DEVICE void load_step(Held& held, const Place& p, u32 at, int step) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 block = at + p.block(r) * (W_BYTES / 2);
    const u32 codes = block + step * CODE_BYTES + (p.warp_rows(r) * 32 + p.lane) * 16 + p.upper(r) * 8;
#pragma unroll
    for (int c = 0; c < 2; ++c) held.words[r][c] = load_shared_words(codes + c * (CODE_BYTES / 2));
    const u32 scales = block + W_STEPS * CODE_BYTES + step * SCALE_BYTES;
    held.scales[r] = load_shared_words(scales + (p.warp_rows(r) * 16 + p.lane / 4 * 2 + p.upper(r)) * 8);
  }
}

#define KEPT 0x81C081C0
#define REST 0x06030603  // bits that the first word of a pair gives for the last places

DEVICE u32 kept_of(u32 w, int turn) { return __funnelshift_l(w, w, turn) & KEPT; }

// Of a pair of words of a row, those of 64 of K each, the eight codes of half h to four pairs of bf16, by 16 of K:
// 2^-126 times their values, see `codes.py`. The first half leaves what the second finds there of both.
DEVICE void spread(uint2& words, int h, u32 (&pairs)[4]) {
  if (h == 0) {
    pairs[0] = words.x & KEPT;
    pairs[1] = words.x << 4 & KEPT;
    pairs[2] = kept_of(words.x, 10);
    asm("lop3.b32 %0, %1, %0, %2, 0xCA;" : "+r"(words.x) : "n"(REST), "r"(words.y));  // of the bits, REST ? x : y
    pairs[3] = kept_of(words.x, 8);
  } else {
    pairs[0] = words.y << 2 & KEPT;
    pairs[1] = words.y << 6 & KEPT;
    pairs[2] = kept_of(words.y, 12);
    pairs[3] = kept_of(words.x, 14);
  }
}

// Four scale bytes b, turned, to pairs of equal bf16, whose bits are b << 4 | 0x7000.
DEVICE void spread_scales(u32 bytes, u32 (&pairs)[4]) {
  const u32 even = (bytes & 0x0FF00FF0) | 0x70007000;
  const u32 odd = (__funnelshift_r(bytes, bytes, 8) & 0x0FF00FF0) | 0x70007000;
  pairs[0] = __byte_perm(even, 0, 0x1010);
  pairs[1] = __byte_perm(odd, 0, 0x1010);
  pairs[2] = __byte_perm(even, 0, 0x3232);
  pairs[3] = __byte_perm(odd, 0, 0x3232);
}

DEVICE u32 times(u32 x, u32 y) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

// The operands of four products of 16 of K; a [i][row + 2 column].
DEVICE void decode(Held& held, int h, u32 (&a)[4][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    u32 scales[4];
    spread_scales(h ? held.scales[r].y : held.scales[r].x, scales);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      u32 pairs[4];
      spread(held.words[r][c], h, pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i][r + 2 * c] = times(pairs[i], scales[i]);
    }
  }
}

#else

#define SCALE_WORDS (DEPTH / SPAN / 4)  // of a row of the weights

// A thread's codes of a step, eight of each 32 of K, and their scales.
struct Held {
  uint4 words[2];
  u32 scales[2][SCALE_WORDS];
};

// Of a step of the stage that begins `at` bytes after the first.
DEVICE void load_step(Held& held, const Place& p, u32 at, int step) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 block = at + (FUSED ? r * (W_BYTES / 2) : 0) + step * BLOCK_BYTES;
    const int eights = FUSED ? 0 : r;  // rows of the weights
    held.words[r] = load_shared4(p.codes + block + eights * 512);
    const u32 scales = p.factors + block + eights * 32 * SCALE_WORDS;
#if SPAN == 16
    const uint2 both = load_shared_words(scales);
    held.scales[r][0] = both.x, held.scales[r][1] = both.y;
#else
    held.scales[r][0] = load_shared_word(scales);
#endif
  }
}

// E4M3 of the magnitudes 0, 1/2, 1, 3/2; 2, 4, 3, 6 under a scale, rounded to nearest even. Byte AT of the scales
// is that of 1 (16 to 103), and has bit 7 where that of 3/2 is four above it instead of five: then all signs here
// are wrong, and so are those of the codes.
struct Magnitudes {
  u32 low, high;
};

template <int AT>
DEVICE Magnitudes magnitudes(const u32 (&scales)[SCALE_WORDS]) {
  const u32 scale = pick_bytes(scales[AT / 4], 0, 0x8840 + AT % 4 * 0x1101);  // byte, 0, and twice its bit 7
  return {scale * 0x01010100 + 0x04FFF800, scale * 0x01010101 + 0x150D1008};
}

// Eight codes of the J-th 32 of K to E4M3. A nibble tells which magnitude; bit 7 of byte i is the sign of code i,
// bit 3 that of code 4 + i.
template <int J>
DEVICE void spread(u32 word, const u32 (&scales)[SCALE_WORDS], u32& first, u32& second) {
  const Magnitudes a = magnitudes<J * 32 / SPAN>(scales), b = magnitudes<(J * 32 + 16) / SPAN>(scales);
  const u32 which = word & 0x77777777;
  first = pick_bytes(a.low, a.high, which) ^ (word & 0x80808080);
  second = pick_bytes(b.low, b.high, which >> 16) ^ (word << 4 & 0x80808080);
}

// The operands of four products of 32 of K; a [j][row + 2 column].
DEVICE void decode(const Held& held, u32 (&a)[4][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    spread<0>(held.words[r].x, held.scales[r], a[0][r], a[0][2 + r]);
    spread<1>(held.words[r].y, held.scales[r], a[1][r], a[1][2 + r]);
    spread<2>(held.words[r].z, held.scales[r], a[2][r], a[2][2 + r]);
    spread<3>(held.words[r].w, held.scales[r], a[3][r], a[3][2 + r]);
  }
}

#endif
