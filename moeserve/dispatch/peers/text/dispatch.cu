// The kernel of a dispatch, and what a block of it does that reads.

// What reading block `block` does: places its run of all lanes' rows; the last one has none, and tells the
// batch. Opens the step before it reads.
template <class Open>
DEVICE void read_rows(const Exchange& x, const Division& d, int block, int* tables, Open open) {
  __shared__ int choices[AHEAD][TOP_K];
  const Tables t{tables, tables + x.here.slots, choices};
  const int warp = threadIdx.x / 32, warp_thread = threadIdx.x % 32, all = x.lanes.all();
  const int begin = min(block * d.run, all), end = min(begin + d.run, all);
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * x.here.slots; i += THREADS) tables[i] = 0;
  open();
#pragma unroll 1
  for (DispatchSpan span{begin, 0}; span.from < end || begin == end; span.from += AHEAD) {
    span.count = min(end - span.from, AHEAD);
    if (span.from == begin)
      count_choices(x, d, block, span, t);
    else
      read_choices(x, span, span, false, t);
    __syncthreads();
    if (warp == 0 && (begin == end || RAGGED && span.from == begin)) lay_out(x, t, begin == end);
    if (begin == end) return;
    const bool few = span.count * TOP_K <= PLACED_AT_ONCE;
    int places = -1;
    if (few) {
      if (RAGGED) __syncthreads();
      places = place_of(x, span, 0, t, false);
      if (warp == 0 && warp_thread < span.count * TOP_K) x.batch.places[(u64)span.from * TOP_K + warp_thread] = places;
      if (warp == WARPS - 1) keep_weights(x, span, 32 * warp);
    } else {
      if (warp == 0)
        place_rows(x, span, t);
      else
        keep_weights(x, span, 32);
      __syncthreads();
    }
    deliver_rows(x, span, t, few, places);
    __syncthreads();
  }
}

// grid <= multiprocessors, so that all blocks run at once. `state`: sequence number of the last dispatch, blocks that
// have read it. `sent`: copies that dispatches sent to other ranks, and sums that combines did; the host
// reads them as `told`.
extern "C" __global__ void __launch_bounds__(THREADS, 1) peer_dispatch(
    const u64* memory, u32* state, u32* live, u32* host_flags, u64 patience, int rank, u64 at_begun,
    u64 at_choices, u64 at_weights, u64 at_records, u64 parity_bytes, int lane_rows, u64 lanes_low,
    u64 lanes_high, int first_slot, int slots_here, int capacity, int row_align, int sliced, int choice_senders,
    int senders, int groups_log2, int run, int stretch, int shares, const u8* rows, int row_bytes,
    const int* slots, const float* weights, float factor, u8* part0, u8* part1, u8* part2, int* counts,
    int* offsets, int* places, float* place_weights, u32* ticket, u64* sent, u64* told,
    uint4* shared_counts) {
  extern __shared__ uint4 dynamic[];  // a record for each team, or [2, slots_here] int
  __shared__ Step step;
  const int warp = threadIdx.x / 32, warp_thread = threadIdx.x % 32;
  const Opening opening(memory, live, state, warp == 0);
  const Watch w{live, host_flags, memory, rank, patience, 0};
  const Exchange x{step,
                   w,
                   {lanes_low, lanes_high},
                   {first_slot, slots_here, capacity, sliced},
                   {at_begun, at_choices, at_weights, at_records, (u64)SLOT_WORDS(lane_rows)},
                   {rows, row_bytes, slots, weights, factor},
                   {{part0, part1, part2}, counts, offsets, places, place_weights, row_align},
                   shared_counts,
                   lane_rows};
  const Division d{choice_senders, senders, groups_log2, run, stretch, shares};
  auto open = [&] {
    if (warp == 0) opening.open(step, next_sequence(opening.last), parity_bytes);
    if (threadIdx.x == 0) atomicAdd(state + 1, 1u);
    __syncthreads();
  };
  const int block = blockIdx.x, readers = gridDim.x - senders - choice_senders;
  if (block < readers) {
    read_rows(x, d, block, (int*)dynamic, open);
    return;
  }
  if (block >= readers + choice_senders) {
    const u32 copies = send_rows(x, d, block - readers - choice_senders, (u8*)dynamic, open);
    if (copies) atomicAdd(sent, (u64)copies);
    return;
  }
  send_choices(x, block - readers, choice_senders, open);
  if (block > readers) return;
  if (warp == 0 && warp_thread < RANKS && x.reaches(warp_thread)) {  // also those whose lanes are empty
    store_relaxed((u32*)(step.memory[warp_thread] + at_begun) + rank, step.sequence);
    const u32* greeting = (const u32*)x.arrived(x.at.begun) + warp_thread;
    await(w, warp_thread, step.sequence, [&] { return load_acquire(greeting) == step.sequence; });
  }
  if (warp == 1 && warp_thread < 2) *(volatile u64*)(told + warp_thread) = sent[warp_thread];
  if (warp == 2 && warp_thread == 0) {
    *ticket = step.sequence;
    while (load_relaxed(state + 1) < gridDim.x) {}  // until all blocks have read the last sequence number
    state[1] = 0, state[0] = step.sequence;
  }
}
