// A whole step of few rows a slot in one launch: gate and up, the activation, a barrier of the grid, down.
// Weights are the wide side of the matrix instruction and stream through a ring that each worker, a warp group,
// has of its own; rows stand in a ring that the workers of a block share. `hopper.cu` and `codes.cu` precede it.
//
// Work is counted in units of 64 rows of weights by all of K, for one group of at most ROWS rows of a slot. A
// block owns a run of units, and works on up to WORKERS of one group at once. Its workers share them, and K: worker
// w has unit w % units, and of the pieces of K, DEPTH long, those that are w / units modulo WORKERS / units. A unit
// of gate and up is 32 rows of each, so that their sums meet in one thread.
//
// Given: KIND (0 four-bit, 1 FP8, 2 bf16), ROWS (8, 16, 24, 32), WORKERS (2, 4), STAGES of a worker's ring, PIECES
// of rows (a multiple of WORKERS), BIAS, LIMITED, OUT (0 float32, 1 bf16, 2 f16), and for FP8 ROUND: rows come in
// bf16 and are rounded here.
//
// Nothing in the loop over K reads global memory: behind the streams of all blocks a load would wait for microseconds.
// FP8's scales of weights therefore come with their stage. Rows of the second phase stay in their ring while all of K
// has room there, and are brought, or rounded, once for all units of a group.

#define FP4 (KIND == 0)
#define FP8 (KIND == 1)
#define BF16 (KIND == 2)

#define TILES (ROWS / 8)

#if FP4
#define DEPTH 256
#define CODE_BYTES 8192
#define SCALE_BYTES 1024
#define STAGE_BYTES (CODE_BYTES + SCALE_BYTES)
#define ROW_BYTES 512
#else
#define DEPTH (FP8 ? 128 : 64)
#define STAGE_BYTES 8192
#define ROW_BYTES 128
#endif
#define TILE_BYTES (8 * ROW_BYTES)
#define PIECE_BYTES (ROWS * ROW_BYTES)
#define RING_BYTES (STAGES * STAGE_BYTES)

#define MOST_SLOTS 512
// A slot that has rows, in the list of them: groups before it, then its number.
#define BEFORE_BITS 23
#define BEFORE ((1 << BEFORE_BITS) - 1)
#define PIECES_AT 0
#define RINGS_AT (PIECES * PIECE_BYTES)
#define SUMS_AT (RINGS_AT + WORKERS * RING_BYTES)
#define SUM_BYTES (64 * ROWS * 4)
#define ROW_SCALES_AT (SUMS_AT + WORKERS / 2 * SUM_BYTES)
#define SCALES_AT (ROW_SCALES_AT + (FP8 ? PIECES * ROWS * 4 : 0))
#define LIST_AT (SCALES_AT + (FP8 ? WORKERS * STAGES * 8 : 0))
#define BARRIERS_AT (LIST_AT + MOST_SLOTS * 4)
#define READY(w, s) (BARRIERS_AT + ((w) * STAGES + (s)) * 8)
#define USED(w, s) (BARRIERS_AT + ((WORKERS + (w)) * STAGES + (s)) * 8)
#define FULL(p) (BARRIERS_AT + (2 * WORKERS * STAGES + (p)) * 8)
#define EMPTY(p) (BARRIERS_AT + (2 * WORKERS * STAGES + PIECES + (p)) * 8)
#define TOTALS_AT (BARRIERS_AT + (2 * WORKERS * STAGES + 2 * PIECES) * 8)
#define TARGET_AT (TOTALS_AT + 8)

// The last warp group brings rows and gives registers away. What a block is given when it starts must do: a warp
// that asks for more than is left waits for good.
#define THREADS (WORKERS * 128 + 128)
#if WORKERS == 2
#define START_REGISTERS 168
#define WORKER_REGISTERS 224
#define HELPER_REGISTERS 56
#else
#define START_REGISTERS 96
#define WORKER_REGISTERS (FP8 ? 104 : 112)
#define HELPER_REGISTERS (FP8 ? 64 : 32)
#endif
static_assert(WORKERS * WORKER_REGISTERS + HELPER_REGISTERS <= (WORKERS + 1) * START_REGISTERS, "too many registers");

// One side's weights, but for its codes.
struct Side {
  const float* scale;  // four-bit: one a row, [e, n]; FP8: [e, n / 128, k / 128]
  const float* bias;   // [e, n]
  int n, k;
};

// What the kernel takes, `few.py` declares it, by side. Read from the arguments themselves it costs registers.
struct Task {
  const TensorMap* gate_up_codes;
#if FP4
  const TensorMap* gate_up_scales;
  const u8* down_codes;
  const u8* down_scales;
#else
  const TensorMap* down_codes;
#endif
  Side gate_up, down;
  const int* counts;
  const int* offsets;
  const float* x_scale;
  int slots;
  u16* inner;
  int rows;
  void* out;
  u64* turns;
  u64 bound;
  u32 *expired, *spoiled;
  float limit, alpha, beta;

  DEVICE explicit Task(const FewArguments& args)
      : gate_up_codes(&args.gate_up),
#if FP4
        gate_up_scales(&args.gate_up_scales),
        down_codes(args.down),
        down_scales(args.down_scales),
#else
        down_codes(&args.down),
#endif
        gate_up{args.gate_up_scale, args.gate_up_bias, 2 * args.inner_size, args.hidden},
        down{args.down_scale, args.down_bias, args.hidden, args.inner_size},
        counts(args.counts),
        offsets(args.offsets),
        x_scale((const float*)args.x_scale),
        slots(args.slots),
        inner((u16*)args.inner_rows),
        rows(args.rows),
        out(args.out),
        turns(args.turns),
        bound(args.bound),
        expired(args.expired),
        spoiled(args.spoiled),
        limit(args.limit),
        alpha(args.alpha),
        beta(args.beta) {}
};

DEVICE Side side_of(const Task& t, int phase) { return phase ? t.down : t.gate_up; }
