// The kernel: what a multiplying warp does with its tiles, and how a block begins and ends.

template <int N>
DEVICE void do_tile(Worker& w, const Tile& tile, const Task& t) {
  const Side side = side_of(t, tile.phase);
  const int pieces = pieces_of(side);
  const Terms terms = load_terms(side, tile, w);
  float acc[2][N / 2], sums[2][N / 4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[m][i] = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    if (piece) barrier_wait(w.base + FULL(w.stage), w.parity);
    multiply_stage<N>(acc, w);
    if (w.lane < CLUSTER) barrier_arrive_there(place_of(w.base + EMPTY(w.stage), w.lane));
    if (++w.stage == STAGES) w.stage = 0, w.parity ^= 1;
  }
  gather<N>(acc, sums, w);
  store<N>(sums, terms, tile, t, w.lane);
}

DEVICE void work(Worker& w, const Task& t) {
  for (;;) {
    barrier_wait(w.base + FULL(w.stage), w.parity);
    const u32 at = w.base + TILE_AT + w.stage * 32;
    const uint4 first = load_shared4(at);
    const Tile tile{same(first.x), same(first.y), same(first.z), same(first.w), same(shared_word(at + 16))};
    if (tile.rows == 0) return;
    if (ROWS == 8 || tile.rows <= 8)
      do_tile<8>(w, tile, t);
#if ROWS > 8
    else if (ROWS == 16 || tile.rows <= 16)
      do_tile<16>(w, tile, t);
#endif
#if ROWS > 16
    else if (ROWS == 24 || tile.rows <= 24)
      do_tile<24>(w, tile, t);
#endif
#if ROWS > 24
    else
      do_tile<32>(w, tile, t);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_codes(const __grid_constant__ DecodeArguments args) {
  const Task t(args);
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == WARPS * 32) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(base + FULL(s), HELPERS);
      barrier_init(base + EMPTY(s), WARPS * CLUSTER);
    }
    barrier_init_done();
  } else if (warp == 0) {
    list_slots(t, base, lane);
  }
  __syncthreads();
  cluster_sync();
  if (warp >= WARPS) {
    give_registers<HELPER_REGISTERS>();
    const int helper = same(warp) - WARPS;
    if (elected()) produce(t, &args.x, &args.inner, base, helper);
    __syncwarp();
  } else {
    take_registers<WORKER_REGISTERS>();
    const int share = same(warp / (WARPS / 2)), chunk = warp % (WARPS / 2);
    Worker w{base, share, chunk, lane};
    w.codes = CODES_AT + chunk / 4 * CODE_BYTES + share * (CODE_BYTES / 2) + chunk % 4 * 512 + lane * 16;
    w.scales = SCALES_AT + chunk / 4 * SCALE_BYTES + share * (SCALE_BYTES / 2) + chunk % 4 * 128 + lane / 4 * 16;
    w.rows = base + share * 2 * ROWS * 128;
    w.stage = 0, w.parity = 0;
    work(w, t);
  }
  __syncthreads();
  cluster_sync();  // nobody copies here any more, or arrives at this block's barriers
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(t.made, 1) == gridDim.x - 1) {
      for (int slot = 0; slot < t.slots; ++slot) t.made[1 + slot] = 0;
      t.made[0] = 0;
    }
  }
}
