// Dispatch of the high-throughput carrier, one launch; it follows ht_shared, ht_batch, ht_send and ht_receive.
// Block 0 leads; every other block sends SENDERS channels and receives the same channels of all ranks.

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    ht_dispatch(const u64* memory, u32* live, u32* board, u64* state, int rank, u64 patience, const u8* rows,
                float factor, const int* slots, const float* weights, int tokens, u8* part0, u8* part1,
                u8* part2, int* counts, int* offsets, int* arrived, int* homes, u64* traffic) {
  extern __shared__ __align__(128) u8 stages[];  // SENDERS x DEPTH, then RECEIVERS x RING rows
  __shared__ int table[TABLE];
  __shared__ Placed placed[SENDERS * CHANNEL_ROWS * TOP_K];
  __shared__ u64 barriers[RECEIVERS * RING];
  Watch w = watch(live, board, memory, rank, patience);
  Lane mine{rows, factor, slots, weights, tokens};
  Batch batch{{part0, part1, part2}, counts, offsets, arrived, homes};
  u32 epoch = next_epoch((u32)state[DISPATCH_EPOCH]);
  int warp = threadIdx.x / 32, first = ((int)blockIdx.x - 1) * SENDERS;
  for (int i = threadIdx.x; i < TABLE; i += 32 * WARPS) table[i] = 0;
  if (threadIdx.x < RECEIVERS * RING) barrier_init(barriers + threadIdx.x);
  proxy_fence();
  __syncthreads();
  if (blockIdx.x == 0) {
    lead(w, state, mine, batch, table);
  } else if (warp < SENDERS) {
    send(w, state, mine, first + warp, stages + warp * DEPTH * ROW_STRIDE);
  } else {
    int own = warp - SENDERS;
    u8* ring = stages + (SENDERS * DEPTH + own * RING) * ROW_STRIDE;
    prepare(w, state, mine, first, table, placed);
    receive(w, state, batch, first + own * SHARE, table, ring, barriers + own * RING);
  }
  end_phase(state, DISPATCH_EPOCH, epoch, DISPATCHED_ROWS, traffic);
}
