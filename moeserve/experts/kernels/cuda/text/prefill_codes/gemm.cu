// The kernel: a cluster's tiles one after the other, and how a block begins.

DEVICE void consume(const Place& p, const Task& t) {
  const int across = tiles_across(t), total = min(t.tiles[0] * across, t.last);
  Turn<X_STAGES> xs;
  Turn<W_STAGES> ws;
  int turn = 0;
  for (int tile = t.first + blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER, ++turn) {
    int4 group = ((const int4*)(t.tiles + 4))[tile / across];
    group.w = tile / across;
    const int column = tile % across * COLUMNS + (int)p.rank * OWN;
    float acc[MOST / 2];
#pragma unroll
    for (int i = 0; i < MOST / 2; ++i) acc[i] = 0;
    sum(acc, p, group.z, t.k_blocks, xs, ws);
#if RATIOS
    leave_units(acc, p, t, group);
#endif
    const Factors f = factors_of(p, t, group.x, column + p.own_column() + p.lane / 4);
    finish_tile(acc, p, t, f, group, column + p.group * (OWN / 2), turn);
  }
}

// Of a thread that multiplies. Its addresses are hidden from the compiler, which would keep one for each load.
DEVICE Place place_in(u32 base, u32 rank, int group, int warp, int lane) {
  Place p{base, rank, group, warp, lane};
#if EIGHT
  const u32 codes = base + W_AT + p.block(0) * (W_BYTES / 2);
  const int eight = p.warp_rows(0) * 2 + p.upper(0);  // rows of the weights
  p.codes = codes + (eight * 32 + lane) * 16;
  p.factors = codes + CODE_BYTES + (eight * 8 + lane / 4) * 4 * SCALE_WORDS;
  p.x_scales = base + X_SCALE_AT + lane % 4 * 8;
  p.empty = place_of(base + X_EMPTY(0), lane % CLUSTER);
  p.first = lane == 0, p.shares = lane < CLUSTER;
  asm volatile("" : "+r"(p.codes), "+r"(p.factors), "+r"(p.x_scales), "+r"(p.empty), "+r"(p.first), "+r"(p.shares));
#endif
  return p;
}

DEVICE void begin(u32 base) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < X_STAGES; ++s) {
      barrier_init(base + X_FULL(s), 1 + SCALED);
      barrier_init(base + X_EMPTY(s), CLUSTER * 8);
    }
    for (int s = 0; s < W_STAGES; ++s) {
      barrier_init(base + W_FULL(s), 1);
      barrier_init(base + W_EMPTY(s), 8);
    }
#if SCALED
    barrier_init(base + PEAKS, 16);
    for (int i = 0; i < PEAK_BUFFERS * MOST; ++i) store_shared1(base + PEAK_AT + i * 4, 0);
#endif
    barrier_init_done();
  }
  cluster_sync();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_codes(const __grid_constant__ CodesArguments args) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory), rank = cluster_rank();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const Task t(args);
  begin(base);
  if (group == 2) {
    give_registers<PRODUCER_REGISTERS>();
    if (elected()) {
      if (warp == 0) produce_weights(base, rank, t);
      if (warp == 1) produce_rows(base, rank, &args.x, t);
#if EIGHT
      if (warp == 2) produce_scales(base, t);
#endif
    }
    __syncwarp();
#if RATIOS
    if (warp == 2) produce_ratios(base, t, lane);
#endif
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(place_in(base, rank, group, warp, lane), t);
  }
  cluster_sync();
}
