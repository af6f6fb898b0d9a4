// A step of some rows a slot on four-bit weights in one launch: gate and up, the activation, down. `hopper.cu`,
// `epilogue.cu` and `codes.cu` precede it.
//
// Reading the weights takes the time, if decoding them does not: tensor cores take them from registers, where the
// multiplying warps decode them, as the wide side of the product. A tile is 256 rows of weights by all of K, for one
// group of at most ROWS rows of a slot. Both blocks of a cluster work on neighbouring tiles of one group, and each
// copies half of its rows to both. Of a tile's four warp groups two share the same weights, and K: each has half of a
// stage. Every warp group multiplies two blocks of 64 rows; in the first GEMM these are gate and up of the same
// columns, so that they meet in one thread.
//
// Tiles of the second GEMM follow those of the first without a barrier: they wait until their slot's inner rows are
// there, which were made long before unless there are few slots.
//
// Given: ROWS (8, 16, 24, 32), STAGES, BIAS, LIMITED, OUT (0 float32, 1 bf16, 2 f16).

#define WARPS 16     // that multiply
#define HELPERS 4    // warps that copy
#define THREADS (WARPS * 32 + HELPERS * 32)
#define WORKER_REGISTERS 112
#define HELPER_REGISTERS 32
#define CLUSTER 2
#define BLOCKS 4     // of 64 rows of weights in a tile
#define DEPTH 256    // of a stage; the weights are packed in pieces of that
#define CODE_BYTES 8192   // of 64 rows of weights by DEPTH
#define SCALE_BYTES 1024
#define MOST_SLOTS 512

#define CODES_AT (ROWS * DEPTH * 2)
#define SCALES_AT (CODES_AT + BLOCKS * CODE_BYTES)
#define STAGE_BYTES (SCALES_AT + BLOCKS * SCALE_BYTES)
#define SUMS_AT (STAGES * STAGE_BYTES)
#define SUM_BYTES (WARPS * 32 * ROWS * 2)
#define LIST_AT (SUMS_AT + SUM_BYTES)
#define TILE_AT (LIST_AT + MOST_SLOTS * 4)
#define BARRIERS_AT (TILE_AT + STAGES * 32)
#define FULL(s) (BARRIERS_AT + (s) * 8)
#define EMPTY(s) (BARRIERS_AT + (STAGES + (s)) * 8)
#define TOTALS_AT (BARRIERS_AT + STAGES * 16)

// One side's weights.
struct Side {
  const u8* codes;     // [e, blocks of 64 rows, pieces of 256, CODE_BYTES]
  const u8* scales;    // [e, blocks, pieces, SCALE_BYTES]
  const float* scale;  // [e, n]
  const float* bias;   // [e, n]
  int n, k;
};

// What the kernel takes, `decode_codes.py` declares it, by side.
struct Task {
  Side gate_up, down;
  const int* counts;
  const int* offsets;
  int slots;
  u16* inner;
  void* out;
  u32* made;
  u64 bound;
  u32 *expired, *spoiled;
  float limit, alpha, beta;

  DEVICE explicit Task(const DecodeArguments& args)
      : gate_up{args.gate_up,      args.gate_up_scales, args.gate_up_scale,
                args.gate_up_bias, 2 * args.inner_size, args.hidden},
        down{args.down, args.down_scales, args.down_scale, args.down_bias, args.hidden, args.inner_size},
        counts(args.counts),
        offsets(args.offsets),
        slots(args.slots),
        inner(args.inner_rows),
        out(args.out),
        made(args.made),
        bound(args.bound),
        expired(args.expired),
        spoiled(args.spoiled),
        limit(args.limit),
        alpha(args.alpha),
        beta(args.beta) {}
};

DEVICE Side side_of(const Task& t, int phase) { return phase ? t.down : t.gate_up; }
DEVICE int pieces_of(const Side& side) { return (side.k + DEPTH - 1) / DEPTH; }
DEVICE int blocks_of(const Side& side) { return (side.n + 63) / 64; }

// Pairs of tiles, one for each block of a cluster, that a group makes.
DEVICE int pairs_of(const Side& side) { return (blocks_of(side) + CLUSTER * BLOCKS - 1) / (CLUSTER * BLOCKS); }

DEVICE u32 shared_word(u32 at) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}

DEVICE void store_word(u32 at, u32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }

// Lane 0's word, which the compiler then knows to be one for the whole warp.
DEVICE int same(u32 word) { return __shfl_sync(~0u, (int)word, 0); }
