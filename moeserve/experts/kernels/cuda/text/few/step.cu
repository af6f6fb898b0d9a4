// The kernel: what a worker does with its tiles, and how a block begins.

template <int N>
DEVICE void do_tile(Worker& w, Stream& s, const Cursor& c, const Task& t) {
  float acc[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = 0;
  const Side side = side_of(t, c.phase);
  const int pieces = pieces_of(t, c.phase), shares = shares_of(c), share = w.worker >> c.log;
  const bool kept = keeps_rows(t, c.phase);
  const int unit = c.first + (w.worker & c.units - 1);
#if FP4
  const Held held = held_at(c.phase, w.warp, w.lane);
#endif
  for (int k = share; k < pieces; k += shares, ++w.step) {
    const int stage = w.step % STAGES, piece = w.pieces + k, p = piece % PIECES;
    const u32 weights = w.base + RINGS_AT + w.worker * RING_BYTES + stage * STAGE_BYTES;
    const u32 rows = w.base + PIECES_AT + p * PIECE_BYTES, used = w.base + USED(w.worker, stage);
    barrier_wait(w.base + READY(w.worker, stage), w.step / STAGES & 1);
    barrier_wait(w.base + FULL(p), piece / PIECES & 1);
#if FP4
    multiply_stage<N>(acc, held, weights, rows, used, w.lane);
#elif FP8
    const float2 scales = load_shared2(w.base + SCALES_AT + (w.worker * STAGES + stage) * 8);
    float part[N / 2];
    multiply_stage<N>(part, weights, rows, 0);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 x = load_shared2(w.base + ROW_SCALES_AT + (p * ROWS + n * 8 + w.lane % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        acc[n * 4 + i] += part[n * 4 + i] * ((i % 2 ? x.y : x.x) * (i < 2 ? scales.x : scales.y));
    }
#else
    multiply_stage<N>(acc, weights, rows, 1);
#endif
    __syncwarp();
    if (w.lane == 0) {
#if !FP4
      barrier_arrive(used);
#endif
      if (!kept)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(w.base + EMPTY(p)), "r"(WORKERS >> c.log)
                     : "memory");
    }
    if (w.step) ask(s, t, w);
  }
  if (kept && c.last)
    for (int k = w.lane; k < pieces; k += 32) barrier_arrive(w.base + EMPTY((w.pieces + k) % PIECES));
  if (c.last) w.pieces += pieces;
  Terms terms;
  if (share == 0) terms = load_terms(c, side, unit, w.warp, w.lane);
  gather<N>(acc, c, w.base, w.worker);
#if FP8
  if (c.whole && !c.phase) {
    store_whole<N>(acc, c, t, w, terms);
    w.turn = (w.turn + 1) % 3;
    return;
  }
#endif
  if (share == 0) store<N>(acc, terms, c, t, w.lane);
}

DEVICE void work(Worker& w, const Task& t) {
  const int groups = shared_word(w.base + TOTALS_AT);
  Stream s;
  s.step = 0, s.over = false;
  enter(s.c, t, groups, 0);
  settle(s, t, w);
  for (int i = 0; i < STAGES; ++i) ask(s, t, w);
  for (int phase = 0; phase < 2; ++phase) {
    Cursor c;
    enter(c, t, groups, phase);
    for (; c.at < c.end; c.at += c.units) {
      look(c, t, w.base);
      if (ROWS == 8 || c.rows <= 8)
        do_tile<8>(w, s, c, t);
#if ROWS > 8
      else if (ROWS == 16 || c.rows <= 16)
        do_tile<16>(w, s, c, t);
#endif
#if ROWS > 16
      else if (ROWS == 24 || c.rows <= 24)
        do_tile<24>(w, s, c, t);
#endif
#if ROWS > 24
      else
        do_tile<32>(w, s, c, t);
#endif
    }
    if (phase == 0) {
      __threadfence();
      asm volatile("fence.proxy.async;" ::: "memory");
      all_workers();
      if (threadIdx.x == 0)
        asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(t.turns), "l"((u64)1) : "memory");
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    few(const __grid_constant__ FewArguments args) {
  const Task t(args);
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == WORKERS * 128 + 32) {
    prefetch_map(&args.gate_up);
    prefetch_map(&args.x);
    prefetch_map(&args.inner);
#if FP4
    prefetch_map(&args.gate_up_scales);
#else
    prefetch_map(&args.down);
#endif
  }
  if (threadIdx.x == WORKERS * 128) {
    for (int i = 0; i < WORKERS * STAGES; ++i) {
      barrier_init(base + READY(0, i), FP8 ? 2 : 1);  // the copy, and FP8's scales
      barrier_init(base + USED(0, i), 4);
    }
    for (int p = 0; p < PIECES; ++p) {
      barrier_init(base + FULL(p), 1);
      barrier_init(base + EMPTY(p), 4 * WORKERS);
    }
    barrier_init_done();
    u64 turn;  // of an earlier launch, or of this one: all blocks come once
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(turn) : "l"(t.turns) : "memory");
    const u64 all_there = (turn / gridDim.x + 1) * gridDim.x;
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(base + TARGET_AT), "l"(all_there) : "memory");
  } else if (warp == 0) {
    list_slots(t, base, lane);
    for (int i = lane; i < 3 * ROWS; i += 32) store_word(base + SUMS_AT + i * 4, 0);
  }
  __syncthreads();
  if (warp >= WORKERS * 4) {
    give_registers<HELPER_REGISTERS>();
    const TensorMap* maps[2] = {&args.x, &args.inner};
    bring_rows(t, maps, base, warp - WORKERS * 4, lane);
  } else {
    take_registers<WORKER_REGISTERS>();
    Worker w{base, warp / 4, warp % 4, lane, streaming_policy(), 0, 0, 0};
    work(w, t);
  }
}
