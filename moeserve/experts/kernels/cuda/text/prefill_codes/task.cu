// One grouped GEMM for steps of many rows: out[m, n] = sum_k x[m, k] w[slot of m, n, k], w in four-bit codes
// with a scale for every SPAN of K, and x in bf16, or E4M3 codes, also as bf16, with a scale for every 128.
//
// The tensor cores take the weights from registers, where the multiplying warps decode them, so that they are
// the rows of a product and the rows of x its columns: any multiple of GRAIN up to MOST. A block has 128 rows
// of the weights, half of them for each of its two multiplying warp groups; a cluster of blocks shares the rows
// of x, of which each block copies some to all. With FUSED a block holds gate and up rows of 64 columns of the
// inner rows, the two of one column in one thread, and writes them activated, and with SCALED rounded again, from
// float32.
//
// Given by -D: EIGHT (products in E4M3, else in bf16), SCALED (x has scales; always with EIGHT), SPAN (16 or 32; 16
// for bf16), FUSED, BIAS, LIMITED (0 or 1), OUT (0 float32, 1 bfloat16, 2 float16), CLUSTER (blocks; two), MOST (rows
// of x), GRAIN, BOX (rows of x by one copy), X_STAGES and W_STAGES (of the rings); before it stand hopper.cu and a
// `Product<N>` for each N.

#define DEPTH 128  // of a step
#define THREADS 384
#define PRODUCER_REGISTERS 24
#define CONSUMER_REGISTERS 240

#if EIGHT
#define X_STEPS 1  // copies of x in a step, each of 128 bytes a row
#else
#define X_STEPS 2
#endif
#define X_SCALE_BYTES (SCALED * MOST * 4)
#define RATIOS (SCALED && !EIGHT)  // sums stay in the tensor cores, in units of the scale at hand
#define SCALE_BYTES (64 * DEPTH / SPAN)  // of 64 rows of the weights
#define CODE_BYTES (64 * DEPTH / 2)
#define BLOCK_BYTES (CODE_BYTES + SCALE_BYTES)
#define X_COLUMNS (DEPTH / X_STEPS)
#define X_BYTES ((MOST + BOX - 1) / BOX * BOX * 128)
#define W_STEPS 2  // of a stage of codes
#define W_BYTES (W_STEPS * 2 * BLOCK_BYTES)
#define OUT_BYTES 4096  // of a warp group: OUT_ROWS rows of its columns
#define OUT_ROWS (FUSED ? 64 : 32)
#define ROUNDED (SCALED && FUSED)  // the output is E4M3 codes, as x is, with a scale for every 128 columns
#define PEAK_BUFFERS 3  // buffers of peaks, for a tile that is finished, one that others finish, and one to come

#define X_AT 0
#define OUT_AT (X_AT + X_STAGES * X_BYTES)
#define W_AT (OUT_AT + 2 * OUT_BYTES)
#define X_SCALE_AT (W_AT + W_STAGES * W_BYTES)
#define PEAK_AT (X_SCALE_AT + X_STAGES * X_SCALE_BYTES)  // largest magnitudes of rows of x
#define BARRIER_AT (PEAK_AT + SCALED * PEAK_BUFFERS * MOST * 4)

#define X_FULL(s) (BARRIER_AT + 8 * (s))
#define X_EMPTY(s) (X_FULL(X_STAGES) + 8 * (s))
#define W_FULL(s) (X_EMPTY(X_STAGES) + 8 * (s))
#define W_EMPTY(s) (W_FULL(W_STAGES) + 8 * (s))
#define PEAKS (W_EMPTY(W_STAGES))

// What the kernel takes, `prefill_codes.py` declares it, but for the map of x. Read from the arguments themselves the
// activation's numbers cost registers.
struct Task {
  const int* tiles;
  const float* x_scale;
  const u8* codes;
  const u8* scales;
  const float* row_scale;
  const float* bias;
  void* out;
  float* out_scale;
  int n, k_blocks, first, last;
  float limit, alpha, beta;

  DEVICE explicit Task(const CodesArguments& args)
      : tiles(args.tiles),
        x_scale(args.x_scale),
        codes(args.codes),
        scales(args.scales),
        row_scale(args.row_scale),
        bias(args.bias),
        out(args.out),
        out_scale(args.out_scale),
        n(args.n),
        k_blocks(args.k_blocks),
        first(args.first),
        last(args.last),
        limit(args.limit),
        alpha(args.alpha),
        beta(args.beta) {}
};

#define OWN (FUSED ? 64 : 128)  // columns of the output, by a block
#define COLUMNS (CLUSTER * OWN)

DEVICE int tiles_across(const Task& t) { return (t.n + COLUMNS - 1) / COLUMNS; }
DEVICE int weight_rows(const Task& t) { return FUSED ? 2 * t.n : t.n; }
DEVICE int weight_blocks(const Task& t) { return (weight_rows(t) + 63) / 64; }
DEVICE int boxes_of(int rows) { return (rows + BOX - 1) / BOX; }

// Where in a ring of SIZE stages one is, and the parity of its barriers there.
template <int SIZE>
struct Turn {
  int stage = 0;
  u32 parity = 0;

  DEVICE void next() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
};

DEVICE void store_shared1(u32 at, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}
