// The warps that copy weights and rows into the ring, and wait for the inner rows of a slot.

DEVICE u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE void copy_stream(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :
      : "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Of a tile's blocks of 64 rows, number b: gate's come before up's in the first phase.
DEVICE int block_at(const Side& side, int phase, int column, int b) {
  if (phase) return column * BLOCKS + b;
  return column * (BLOCKS / 2) + b % (BLOCKS / 2) + b / (BLOCKS / 2) * (blocks_of(side) / 2);
}

// Until all of the slot's inner rows are there.
DEVICE void wait_for_inner(const Task& t, const Group& g, u32& deadline) {
  const u32 parts = g.in_slot * pairs_of(t.gate_up) * CLUSTER * WARPS;
  const auto here = [&] {
    u32 made;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(made) : "l"(t.made + 1 + g.slot) : "memory");
    return made >= parts;
  };
  await_blocks(here, deadline, t.bound, t.expired, t.spoiled);
}

// By one thread of each of four warps, since one takes too long to ask for all that a stage needs. Each brings one of
// the tile's blocks, its codes and its scales, and by turns a box of those rows that this block of the cluster copies.
DEVICE void produce(const Task& t, const TensorMap* x, const TensorMap* inner, u32 base, int helper) {
  const u64 policy = streaming_policy();
  const int rank = cluster_rank();
  Walk walk(t, shared_word(base + TOTALS_AT));
  int stage = 0, phase, pair;
  u32 parity = 1, deadline = 0;
  while (walk.next(phase, pair)) {
    const Side side = side_of(t, phase);
    const TensorMap* rows = phase ? inner : x;
    const int pairs = pairs_of(side), column = pair % pairs * CLUSTER + rank, pieces = pieces_of(side);
    const Group g = group_at(t, base, pair / pairs);
    const int eights = (g.rows + 7) / 8, block = min(block_at(side, phase, column, helper), blocks_of(side) - 1);
    const u64 first = ((u64)g.slot * blocks_of(side) + block) * pieces;
    const u8* codes = side.codes + first * CODE_BYTES;
    const u8* scales = side.scales + first * SCALE_BYTES;
    const u32 bytes = CODE_BYTES + SCALE_BYTES + (helper ? 0 : eights * 8 * DEPTH * 2);
    for (int piece = 0; piece < pieces; ++piece, codes += CODE_BYTES, scales += SCALE_BYTES) {
      const u32 to = base + stage * STAGE_BYTES, full = base + FULL(stage);
      barrier_wait(base + EMPTY(stage), parity);
      if (helper == 0) {
        store_shared4(base + TILE_AT + stage * 32, make_uint4(phase, column, g.slot, g.row0));
        store_word(base + TILE_AT + stage * 32 + 16, g.rows);
      }
      barrier_expect(full, bytes);
      copy_stream(to + CODES_AT + helper * CODE_BYTES, codes, CODE_BYTES, full, policy);
      copy_stream(to + SCALES_AT + helper * SCALE_BYTES, scales, SCALE_BYTES, full, policy);
      if (phase && piece == 0) {
        wait_for_inner(t, g, deadline);
        asm volatile("fence.proxy.async;" ::: "memory");
      }
#pragma unroll 1
      for (int c = helper; c < eights * (DEPTH / 64 / CLUSTER); c += HELPERS) {
        const int n = c / (DEPTH / 64 / CLUSTER), q = c % (DEPTH / 64 / CLUSTER) * CLUSTER + rank;  // 64 columns
        copy_box_to((1 << CLUSTER) - 1, to + q * ROWS * 128 + n * 1024, rows, piece * DEPTH + q * 64,
                    g.row0 + n * 8, full);
      }
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  barrier_wait(base + EMPTY(stage), parity);
  if (helper == 0) store_word(base + TILE_AT + stage * 32 + 16, 0);  // no rows: the end
  barrier_arrive(base + FULL(stage));
}
