// The kernel of a dispatch, and what a block of it does that reads.

// What reading block `block` does: it places its run of all lanes' rows. The last reading block has none, and writes the
// batch's counts and offsets. Opens the step before it reads.
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

// The grid has no more blocks than the GPU has multiprocessors, so that all run at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    peer_dispatch(const __grid_constant__ DispatchArguments args) {
  extern __shared__ uint4 dynamic[];  // a record for each team, or [2, slots_here] int
  __shared__ Step step;
  const int warp = threadIdx.x / 32, warp_thread = threadIdx.x % 32;
  const Opening opening(args.memory, args.live, args.state, warp == 0);
  const Watch w{args.live, args.host_flags, args.memory, args.rank, args.patience, 0};
  const Exchange x{
      step,
      w,
      {args.lanes_low, args.lanes_high},
      {args.first_slot, args.slots_here, args.capacity, args.sliced},
      {args.at_begun, args.at_choices, args.at_weights, args.at_records, (u64)SLOT_WORDS(args.lane_rows)},
      {args.rows, args.row_bytes, args.slots, args.weights, args.factor},
      {{args.part0, args.part1, args.part2}, args.counts, args.offsets, args.places, args.place_weights, args.row_align},
      args.shared_counts,
      args.lane_rows};
  const Division d{args.choice_senders, args.senders, args.groups_log2, args.run, args.stretch, args.shares};
  u32* const state = args.state;
  auto open = [&] {
    if (warp == 0) opening.open(step, next_sequence(opening.last), args.parity_bytes);
    if (threadIdx.x == 0) atomicAdd(state + 1, 1u);
    __syncthreads();
  };
  const int block = blockIdx.x, readers = gridDim.x - d.senders - d.choice_senders;
  if (block < readers) {
    read_rows(x, d, block, (int*)dynamic, open);
    return;
  }
  if (block >= readers + d.choice_senders) {
    const u32 copies = send_rows(x, d, block - readers - d.choice_senders, (u8*)dynamic, open);
    if (copies) atomicAdd(args.sent, (u64)copies);
    return;
  }
  send_choices(x, block - readers, d.choice_senders, open);
  if (block > readers) return;
  if (warp == 0 && warp_thread < RANKS && x.reaches(warp_thread)) {  // also those whose lanes are empty
    store_relaxed((u32*)(step.memory[warp_thread] + x.at.begun) + w.rank, step.sequence);
    const u32* begun = (const u32*)x.arrived(x.at.begun) + warp_thread;
    await(w, warp_thread, step.sequence, [&] { return load_acquire(begun) == step.sequence; });
  }
  if (warp == 1 && warp_thread < 2) *(volatile u64*)(args.host_sent + warp_thread) = args.sent[warp_thread];
  if (warp == 2 && warp_thread == 0) {
    *args.sequence = step.sequence;
    while (load_relaxed(state + 1) < gridDim.x) {}  // until all blocks have read the last sequence number
    state[1] = 0, state[0] = step.sequence;
  }
}
