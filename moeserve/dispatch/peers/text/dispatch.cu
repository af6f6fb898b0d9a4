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

// What a GPU keeps from one dispatch to the next.
struct State {
  u32 next;    // the sequence number of the next step that a graph replays, unless the host sets another
  u32 opened;  // blocks of the dispatch under way that have read the state
  u32 last;    // the last step in which this lane brought rows
  u32 absent;  // lanes, one bit each, that the next replay does not name
};

DEVICE State load_state(const u32* at) {
  State found;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.next), "=r"(found.opened), "=r"(found.last), "=r"(found.absent)
               : "l"(at));
  return found;
}

// Waits until every owner has begun another step than the one before which this lane must not store; layout.py says why.
// Owners that do not come are stored to no more. The block calls it, and synchronises. It is called at all only after
// steps without this lane, so that it stands aside from the text that every step runs.
__device__ __noinline__ void wait_until_read(const DispatchArguments& args, Step& step) {
  if (threadIdx.x < 32) {
    const int owner = threadIdx.x;
    const Watch w = watch(args);
    w.deadline = nanoseconds() + args.patience / 2;  // less than the others wait for what this lane holds back
    const u32* begun = args.header + BEGUN + owner;
    bool read = true;
    if (owner < OWNERS && step.owners >> owner & 1u && owner != args.owner)
      read = await(w, LANES + owner, step.sequence, [&] { return load_acquire(begun) != step.behind; });
    const u32 lost = __ballot_sync(WHOLE_WARP, !read);
    if (owner == 0) step.owners &= ~lost;
  }
  __syncthreads();
}

// The grid has no more blocks than there are multiprocessors for it, so that all run at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    peer_dispatch(const __grid_constant__ DispatchArguments args) {
  extern __shared__ uint4 dynamic[];  // a record for each team, or [2, slots_here] int
  __shared__ Step step;
  const int warp = threadIdx.x / 32, warp_thread = threadIdx.x % 32;
  const Opening opening(args.arrivals, OWNERS, args.live, warp == 0);
  State was{};
  if (warp == 0) was = load_state(args.state);
  const Watch w = watch(args);
  const Exchange x{
      step,
      w,
      Lanes(&args.rows_0),
      {args.first_slot, args.slots_here, args.stride, args.capacity, args.sliced},
      {args.at_choices, args.at_weights, args.at_records, (u64)SLOT_WORDS(args.lane_rows)},
      {args.lane, args.rows, args.row_bytes, args.slots, args.weights, args.factor},
      {{args.part0, args.part1, args.part2}, args.counts, args.offsets, args.places, args.place_weights, args.row_align},
      HAS_OWNER ? 1u << args.owner : 0u,
      args.shared_counts,
      args.lane_rows};
  const Division d{args.choice_senders, args.senders, args.groups_log2, args.run, args.stretch, args.shares};
  u32* const state = args.state;
  auto open = [&] {
    if (warp == 0) {
      const u32 sequence = args.number ? args.number : was.next;
      opening.open(step, sequence, args.number ? 0u : was.absent, args.arrivals_here, args.parity_bytes);
      if (warp_thread == 0) step.behind = was.last, step.waits = was.last == 0 || (was.last ^ sequence) % 2 == 0;
    }
    if (threadIdx.x == 0) atomicAdd(state + 1, 1u);
    __syncthreads();
  };
  const int block = blockIdx.x, readers = gridDim.x - d.senders - d.choice_senders;
  if (HAS_OWNER && block < readers) {
    read_rows(x, d, block, (int*)dynamic, open);
    return;
  }
  if (HAS_LANE && block >= readers + d.choice_senders) {
    auto open_to_send = [&] {
      open();
      if (step.waits) wait_until_read(args, step);
    };
    const u32 copies = send_rows(x, d, block - readers - d.choice_senders, (u8*)dynamic, open_to_send);
    if (copies) atomicAdd(args.sent, (u64)copies);
    return;
  }
  const bool keeps = block == readers;  // the words that this member has one of
  const bool tells = HAS_OWNER && keeps && warp == WARPS - 1 && warp_thread < LANES;
  u64 header = 0;  // of a lane's member
  u32 live = 0;
  if (tells) header = *(volatile const u64*)(args.headers + warp_thread), live = *(volatile const u32*)(args.live + warp_thread);
  auto open_and_tell = [&] {
    open();
    if (tells && live && warp_thread != args.lane)  // lanes that are absent are told too
      store_relaxed((u32*)header + BEGUN + args.owner, step.sequence);
    if (HAS_LANE && step.waits && x.own_rows()) wait_until_read(args, step);
  };
  if (HAS_LANE)
    send_choices(x, block - readers, d.choice_senders, open_and_tell);
  else
    open_and_tell();
  if (!keeps) return;
  if (HAS_LANE && warp == 0 && warp_thread < OWNERS && x.own_rows() && x.reaches(warp_thread) && warp_thread != args.owner) {
    const u32* begun = args.header + BEGUN + warp_thread;
    await(w, LANES + warp_thread, step.sequence, [&] {
      const u32 found = load_acquire(begun);
      return found != 0 && (int)(found - step.sequence) >= 0;
    });
  }
  if (warp == 1 && warp_thread < 2) *(volatile u64*)(args.host_sent + warp_thread) = args.sent[warp_thread];
  if (warp == 2 && warp_thread == 0) {
    *args.sequence = step.sequence;
    await_blocks(w, step.sequence, [&] { return load_relaxed(state + 1) >= gridDim.x; });  // all have read the state
    state[1] = 0, state[0] = next_sequence(step.sequence);
    if (x.own_rows()) state[2] = step.sequence;
  }
}
