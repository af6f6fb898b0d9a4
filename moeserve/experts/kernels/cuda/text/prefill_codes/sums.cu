// The sums over K of a warp group's 64 rows of weights and the rows of a group.

#if !EIGHT

// One of a tile's steps of 128 of K.
struct Step {
  int at, all;

  DEVICE bool begins_stage() const { return at % W_STEPS == 0; }
  DEVICE bool ends_stage() const { return at % W_STEPS == W_STEPS - 1 || at == all - 1; }
};

// A step's codes, when they are there.
DEVICE void begin_step(Held& held, const Place& p, const Turn<W_STAGES>& ws, const Step& step) {
  if (step.begins_stage()) barrier_wait(p.base + W_FULL(ws.stage), ws.parity);
  load_step(held, p, p.base + W_AT + ws.stage * W_BYTES, step.at % W_STEPS);
}

DEVICE void end_step(const Place& p, const Turn<W_STAGES>& ws, const Step& step) {
  if (!step.ends_stage()) return;
  __syncwarp();
  if (p.lane == 0) barrier_arrive(p.base + W_EMPTY(ws.stage));
}

// Begins the products of 64 of K, on the least N that the rows fit, and waits for those before. All of it is
// in one branch, else the compiler has the tensor cores wait for each other's ends.
template <int N>
DEVICE void add_products(float (&acc)[MOST / 2], const u32 (&a)[4][4], u64 b, int rows) {
  if constexpr (N > GRAIN) {
    if (rows <= N - GRAIN) return add_products<N - GRAIN>(acc, a, b, rows);
  }
  products_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) Product<N>::add(acc, a[i], b + 2 * i, 1);
  products_commit();
  products_wait_until<1>();
}

#if RATIOS
// Brings sums to the units of the scales at hand, when no product is under way.
DEVICE void change_units(float (&acc)[MOST / 2], const Place& p, int stage, int rows) {
  const u32 ratios = p.base + X_SCALE_AT + stage * X_SCALE_BYTES + p.lane % 4 * 8;
  products_wait_until<0>();
#pragma unroll
  for (int i = 0; i < MOST / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int i = 0; i < MOST / 8; ++i) {
    if (8 * i >= rows) break;
    const float2 own = load_shared2(ratios + i * 32);
    acc[4 * i] *= own.x, acc[4 * i + 1] *= own.y;
    acc[4 * i + 2] *= own.x, acc[4 * i + 3] *= own.y;
  }
}

// Sums in units of the last scales to numbers.
DEVICE void leave_units(float (&acc)[MOST / 2], const Place& p, const Task& t, int4 group) {
  const float* last = t.x_scale + ((u64)group.w * t.k_blocks + t.k_blocks - 1) * MOST + p.lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < MOST / 8; ++i) {
    if (8 * i >= group.z) break;
    const float2 both = __ldg((const float2*)(last + 8 * i)), own = make_float2(unit_of(both.x), unit_of(both.y));
    acc[4 * i] *= own.x, acc[4 * i + 1] *= own.y;
    acc[4 * i + 2] *= own.x, acc[4 * i + 3] *= own.y;
  }
}
#endif

// Sums of this warp group's 64 rows of the weights and so many rows of x. While the tensor cores work on 64
// of K the next are decoded.
DEVICE void sum(float (&acc)[MOST / 2], const Place& p, int rows, int k_blocks, Turn<X_STAGES>& xs,
                Turn<W_STAGES>& ws) {
  u32 a[2][4][4];
  int before = 0;
  for (int kb = 0; kb < k_blocks; ++kb) {
    Held held;
    const Step step{kb, k_blocks};
    begin_step(held, p, ws, step);
#pragma unroll
    for (int h = 0; h < 2; ++h, xs.next()) {
      decode(held, h, a[h]);
      if (h == 0) end_step(p, ws, step);
      barrier_wait(p.base + X_FULL(xs.stage), xs.parity);
#if RATIOS
      if (h == 0 && kb > 0) change_units(acc, p, xs.stage, rows);
#endif
      const u64 b = tile_descriptor(p.base + X_AT + xs.stage * X_BYTES);
      add_products<MOST>(acc, a[h], b, rows);
      if (kb + h > 0) release(p, before);
      before = xs.stage;
    }
    if (step.ends_stage()) ws.next();
  }
  products_wait_until<0>();
#pragma unroll
  for (int i = 0; i < MOST / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
  release(p, before);
}

#else

#define AHEAD 4  // pairs of scales of x that are read before they are needed

// A warp group's way through a tile. With two warps to a scheduler a step takes as long as a warp's own
// instructions, which the tensor cores outrun: a warp decodes the next codes while these multiply and reads the
// codes after them while it adds.
template <int N>
struct Way {
  const Place& p;
  const int k_blocks;
  Turn<X_STAGES>& xs;
  Turn<W_STAGES>& ws;
  bool there = false;  // whether the next step's rows were seen
  Held held;           // codes of the next step
  u32 a[2][4][4];      // operands of this step and the next

  // Reads the codes of step `at`, whose parity is I.
  template <int I>
  DEVICE void load(int at) {
    if (at >= k_blocks) return;
    if (I == 0) barrier_wait(p.base + W_FULL(ws.stage), ws.parity);
    load_step(held, p, ws.stage * W_BYTES, I);
  }

  // Decodes what was read of step `at`, if there is one, and gives back a stage that is used up.
  template <int I>
  DEVICE void take(int at) {
    if (at >= k_blocks) return;  // else the compiler decodes before it begins the products
    decode(held, a[I]);
    if (I < W_STEPS - 1 && at < k_blocks - 1) return;
    __syncwarp();
    if (p.first) barrier_arrive(p.base + W_EMPTY(ws.stage));
    ws.next();
  }

  // Whether the rows after those of this stage are there, without waiting.
  DEVICE bool is_next_there() const {
    const bool wraps = xs.stage == X_STAGES - 1;
    return barrier_over(p.base + X_FULL(wraps ? 0 : xs.stage + 1), wraps ? xs.parity ^ 1 : xs.parity);
  }

  // Step `at`, with N rows of x: products, scaled and added.
  template <int I>
  DEVICE void step(float (&acc)[MOST / 2], int at) {
    float part[N / 2];
    if (!there) barrier_wait(p.base + X_FULL(xs.stage), xs.parity);
    const u64 b = tile_descriptor(p.base + X_AT) + (u32)xs.stage * (X_BYTES / 16);
    products_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) Product<N>::add(part, a[I][j], b + 2 * j, j);
    products_commit();
    take<1 - I>(at + 1);
    const u32 scales = p.x_scales + xs.stage * X_SCALE_BYTES;
    float2 scale[AHEAD];
#pragma unroll
    for (int i = 0; i < min(AHEAD, N / 8); ++i) scale[i] = load_shared2(scales + i * 32);
    load<I>(at + 2);
    there = is_next_there();
    products_wait_until<0>();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 own = scale[i % AHEAD];
      acc[4 * i] += part[4 * i] * own.x;
      acc[4 * i + 1] += part[4 * i + 1] * own.y;
      acc[4 * i + 2] += part[4 * i + 2] * own.x;
      acc[4 * i + 3] += part[4 * i + 3] * own.y;
      if (i + AHEAD < N / 8) scale[i % AHEAD] = load_shared2(scales + (i + AHEAD) * 32);
    }
    __syncwarp();
    if (p.shares) barrier_arrive_there(p.empty + 8 * xs.stage);
    xs.next();
  }
};

// All steps of a tile, in a loop of its own for each N: a choice in each step costs branches and copies of sums.
template <int N>
DEVICE void sum_rows(float (&acc)[MOST / 2], const Place& p, int k_blocks, Turn<X_STAGES>& xs, Turn<W_STAGES>& ws) {
  Way<N> way{p, k_blocks, xs, ws};
  way.template load<0>(0);
  way.template take<0>(0);
  way.template load<1>(1);
  for (int kb = 0; kb < k_blocks; kb += 2) {
    way.template step<0>(acc, kb);
    if (kb + 1 < k_blocks) way.template step<1>(acc, kb + 1);
  }
}

// The next N below it. With one of 16 the compiler gives up on running products beside other work, for all.
DEVICE constexpr int below(int n) { return n > 128 ? n - GRAIN : n - 32; }

// Sums of this warp group's 64 rows of the weights and so many rows of x, on the least N that they fit.
template <int N = MOST>
DEVICE void sum(float (&acc)[MOST / 2], const Place& p, int rows, int k_blocks, Turn<X_STAGES>& xs,
                Turn<W_STAGES>& ws) {
  if constexpr (below(N) > 0) {
    if (rows <= below(N)) return sum<below(N)>(acc, p, rows, k_blocks, xs, ws);
  }
  sum_rows<N>(acc, p, k_blocks, xs, ws);
}

#endif
