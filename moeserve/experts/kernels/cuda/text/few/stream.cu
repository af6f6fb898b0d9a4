// The stream of weights of each worker: which stage comes next, and the copies that bring it.

DEVICE u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// What a copy reads: bytes; columns of 64 rows; or half a panel of gate and its half of up by turns, eight rows of
// each, from the eight `group` of both.
struct Bytes {
  const void* from;
  u32 bytes;
};

struct Box {
  const TensorMap* map;
  int column, row;
};

struct Eights {
  const TensorMap* map;
  int group, panel;
};

DEVICE void copy_stream(u32 to, const Bytes& c, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :
      : "r"(to), "l"(c.from), "r"(c.bytes), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_stream(u32 to, const Box& c, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(to),
      "l"((u64)c.map), "r"(c.column), "r"(c.row), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_stream(u32 to, const Eights& c, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%2, %2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"((u64)c.map), "r"(0), "r"(c.group), "r"(c.panel), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_word(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// A warp of a worker.
struct Worker {
  u32 base;
  int worker, warp, lane;  // warp of the worker
  u64 policy;
  int step, pieces, turn;  // stages used; pieces of rows before this tile; see `store_whole`
};

// A worker's own stream of weights: what it asks for next. Its warps all know, and ask by turns.
struct Stream {
  Cursor c;
  int unit;
  int piece, pieces, shares;  // of K: the next one, all of them, and how far the next but one is
  int step;                   // stages asked for
  bool over;
#if FP8
  const float* scales[2];  // of the 128 x 128 that hold the next stage's halves
#endif
};

// Finds the next tile that has something for this worker.
DEVICE void settle(Stream& s, const Task& t, const Worker& w) {
  for (;;) {
    if (s.c.at >= s.c.end) {
      if (s.c.phase) {
        s.over = true;
        return;
      }
      enter(s.c, t, shared_word(w.base + TOTALS_AT), 1);
      continue;
    }
    look(s.c, t, w.base);
    s.shares = shares_of(s.c);
    s.piece = w.worker >> s.c.log;
    s.pieces = pieces_of(t, s.c.phase);
    if (s.piece < s.pieces) {
      const int unit = s.unit = s.c.first + (w.worker & s.c.units - 1);
#if FP8
      const Side side = side_of(t, s.c.phase);
      const int columns = (side.k + 127) / 128, rows = (side.n + 127) / 128;
      const int first = s.c.phase ? unit / 2 : unit / 4, second = s.c.phase ? first : (side.n / 2 + unit * 32) / 128;
      const float* of_slot = side.scale + (u64)s.c.slot * rows * columns + s.piece;
      s.scales[0] = of_slot + first * columns, s.scales[1] = of_slot + second * columns;
#endif
      return;
    }
    s.c.at += s.c.units;
  }
}

// Copies the next stage. By one thread.
DEVICE void copy_stage(const Stream& s, const Task& t, const Worker& w) {
  const int stage = s.step % STAGES;
  const u32 to = w.base + RINGS_AT + w.worker * RING_BYTES + stage * STAGE_BYTES;
  const u32 ready = w.base + READY(w.worker, stage);
  barrier_wait(w.base + USED(w.worker, stage), (s.step / STAGES & 1) ^ 1);
  barrier_expect(ready, STAGE_BYTES);
#if FP4
  const Side side = side_of(t, s.c.phase);
  const int packed = (side.k + DEPTH - 1) / DEPTH, first = s.c.slot * ((side.n + 63) / 64);
  if (s.c.phase) {
    const u64 at = (u64)(first + s.unit) * packed + s.piece;
    copy_stream(to, Bytes{t.down_codes + at * CODE_BYTES, CODE_BYTES}, ready, w.policy);
    copy_stream(to + CODE_BYTES, Bytes{t.down_scales + at * SCALE_BYTES, SCALE_BYTES}, ready, w.policy);
    return;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int half = s.unit + j * (side.n / 64), at = (first + half / 2) * packed + s.piece;
    copy_stream(to + j * 4096, Box{t.gate_up_codes, half % 2 * 256, at * 4}, ready, w.policy);
    copy_stream(to + CODE_BYTES + j * 512, Box{t.gate_up_scales, half % 2 * 64, at * 2}, ready, w.policy);
  }
#else
#if FP8
  const u32 scales = w.base + SCALES_AT + (w.worker * STAGES + stage) * 8;
  copy_word(scales, s.scales[0]);
  copy_word(scales + 4, s.scales[1]);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ready) : "memory");
#endif
  const int own = s.c.phase ? (t.down.n + 63) / 64 : (t.gate_up.n / 2 + 63) / 64 * 2;  // panels of a slot, by K
  const int first = s.c.slot * own + (s.c.phase ? s.unit : s.unit / 2);
  const int panel = first * pieces_of(t, s.c.phase) + s.piece;
  if (s.c.phase)
    copy_stream(to, Box{t.down_codes, 0, panel * 64}, ready, w.policy);
  else
    copy_stream(to, Eights{t.gate_up_codes, s.unit % 2 * 4, panel}, ready, w.policy);
#endif
}

// Asks for the next stage, if there is one.
DEVICE void ask(Stream& s, const Task& t, const Worker& w) {
  if (s.over) return;
  if ((s.step & 3) == w.warp) {
    if (w.lane == 0) copy_stage(s, t, w);
    __syncwarp();
  }
#if FP8
  s.scales[0] += s.shares, s.scales[1] += s.shares;
#endif
  ++s.step;
  s.piece += s.shares;
  if (s.piece >= s.pieces) {
    s.c.at += s.c.units;
    settle(s, t, w);
  }
}
