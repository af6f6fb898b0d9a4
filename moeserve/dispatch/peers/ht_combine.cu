// Combine of the high-throughput carrier: one launch; it follows ht_shared.cu.
//
// Given by -D besides: SPLIT (parts of a row that go their own way, an even number), OUTPUT (the experts'
// outputs' type, counted as SOURCE is). A lane of a channel is one part of its rows. One warp a lane weighs
// the rows that came by the channel, sums them in float32 over this rank's experts, and stores the sums,
// rounded to SOURCE, to the ranks they came from, a word behind each row; one warp adds up what comes by two
// lanes for this rank's own tokens, in float32 and in rank order.

#define PUSHERS (SENDERS * SPLIT)  // lanes of a block
#define HOMES (PUSHERS / 2)
#define WARPS (PUSHERS + HOMES)
#define STAGES 3                   // pieces that a pushing warp holds
#define ANSWER_BYTES (HIDDEN * (SOURCE == 2 ? 4 : 2))
#define UNITS (HIDDEN / 8)                      // a lane works on 8 columns at a time
#define UNIT_BYTES (SOURCE == 2 ? 32 : 16)
#define PIECE_BYTES 4096                        // of a row, in one bulk copy
#define PIECE_UNITS (PIECE_BYTES / UNIT_BYTES)
#define PART_UNITS ((UNITS + SPLIT - 1) / SPLIT)
#define PIECES ((PART_UNITS + PIECE_UNITS - 1) / PIECE_UNITS)
#define TOGETHER (OUTPUT == 2 ? 2 : 4)          // outputs whose loads are under way at once
// Units that a warp at home has under way.
#define HOMEWARD (SOURCE == 2 || RANKS > 4 ? 1 : 8 / (RANKS > 2 ? 4 : 2))

// ---- 8 columns at a time ---------------------------------------------------------------------------------

template <int TYPE>
struct Unit {
  uint4 words[TYPE == 2 ? 2 : 1];
};

template <int TYPE>
DEVICE Unit<TYPE> load_outputs(const u8* row, int unit) {  // written before this launch
  Unit<TYPE> found;
#pragma unroll
  for (int i = 0; i < (TYPE == 2 ? 2 : 1); ++i)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.words[i].x), "=r"(found.words[i].y), "=r"(found.words[i].z),
                   "=r"(found.words[i].w)
                 : "l"(row + ((u64)unit * (TYPE == 2 ? 2 : 1) + i) * 16));
  return found;
}

DEVICE Unit<SOURCE> load_arrived(const u8* row, int unit) {  // written by another GPU meanwhile
  Unit<SOURCE> found;
#pragma unroll
  for (int i = 0; i < UNIT_BYTES / 16; ++i)
    found.words[i] = __ldcg((const uint4*)(row + unit * UNIT_BYTES) + i);
  return found;
}

template <int TYPE>
DEVICE void widen_two(u32 pair, float& low, float& high) {
  if (TYPE == 1)
    low = half_float((u16)pair), high = half_float((u16)(pair >> 16));
  else
    low = from_bits(pair << 16), high = from_bits(pair & 0xFFFF0000u);
}

template <int TYPE>
DEVICE void columns_of(const Unit<TYPE>& unit, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < (TYPE == 2 ? 2 : 1); ++i) {
    uint4 word = unit.words[i];
    if constexpr (TYPE == 2) {
      x[4 * i] = from_bits(word.x), x[4 * i + 1] = from_bits(word.y);
      x[4 * i + 2] = from_bits(word.z), x[4 * i + 3] = from_bits(word.w);
    } else {
      widen_two<TYPE>(word.x, x[0], x[1]), widen_two<TYPE>(word.y, x[2], x[3]);
      widen_two<TYPE>(word.z, x[4], x[5]), widen_two<TYPE>(word.w, x[6], x[7]);
    }
  }
}

DEVICE void store_columns(u8* at, const float (&x)[8]) {
#if SOURCE == 2
#pragma unroll
  for (int i = 0; i < 2; ++i)
    ((uint4*)at)[i] = make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]),
                                 __float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3]));
#else
  *(uint4*)at = make_uint4(narrow(x[0], x[1]), narrow(x[2], x[3]), narrow(x[4], x[5]), narrow(x[6], x[7]));
#endif
}

// ---- rows on their way home ------------------------------------------------------------------------------

// Where the outputs of one arrived row stand, in order of choice.
struct Choices {
  int places[TOP_K];
  float weights[TOP_K];
};

DEVICE int read_choices(const int* home, Choices& choices) {
  int lane = threadIdx.x % 32, place = lane < TOP_K ? home[1 + lane] : -1;
  u32 here = __ballot_sync(FULL, place >= 0);
  if (place >= 0) {
    int order = __popc(here & ((1u << lane) - 1u));
    choices.places[order] = place, choices.weights[order] = __int_as_float(home[1 + TOP_K + lane]);
  }
  __syncwarp();
  return __popc(here);
}

// Adds `count` weighted outputs, in order, to two units of columns; a product is rounded first, as in
// weigh_rows.
DEVICE void add_outputs(const u8* outputs, const Choices& choices, int count, int unit, bool second,
                        float (&sums)[2][8]) {
  constexpr u64 OUTPUT_BYTES = (u64)HIDDEN * (OUTPUT == 2 ? 4 : 2);
  for (int first = 0; first < count; first += TOGETHER) {
    Unit<OUTPUT> found[TOGETHER][2];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      if (first + i >= count) break;
      const u8* row = outputs + choices.places[first + i] * OUTPUT_BYTES;
      found[i][0] = load_outputs<OUTPUT>(row, unit);
      if (second) found[i][1] = load_outputs<OUTPUT>(row, unit + 32);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      if (first + i >= count) break;
      float weight = choices.weights[first + i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[8];
        columns_of<OUTPUT>(found[i][half], x);
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[half][c] = __fadd_rn(sums[half][c], __fmul_rn(weight, x[c]));
      }
    }
  }
}

// Which of a row's units a lane has.
struct Part {
  int first, last;
};

DEVICE Part part_of(int lane) {
  int part = lane % SPLIT;
  return Part{part * PART_UNITS, min((part + 1) * PART_UNITS, UNITS)};
}

// A part of the weighted sum of one row's outputs, piece by piece through `stage` to `there`, by one warp.
DEVICE void push_row(const u8* outputs, const Choices& choices, int count, Part part, u8* stage, u8* there,
                   int& pieces) {
  int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int piece = 0; piece < PIECES; ++piece) {
    int first = part.first + piece * PIECE_UNITS, last = min(first + PIECE_UNITS, part.last);
    u8* staged = stage + pieces++ % STAGES * PIECE_BYTES;
    if (lane == 0) bulk_wait_read<STAGES - 1>();
    __syncwarp();
    for (int unit = first + lane; unit < last; unit += 64) {
      float sums[2][8] = {};
      add_outputs(outputs, choices, count, unit, unit + 32 < last, sums);
      store_columns(staged + (unit - first) * UNIT_BYTES, sums[0]);
      if (unit + 32 < last) store_columns(staged + (unit + 32 - first) * UNIT_BYTES, sums[1]);
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) {
      if (first < last) bulk_store(there + (u64)first * UNIT_BYTES, staged, (last - first) * UNIT_BYTES);
      bulk_commit();
    }
  }
}

// Sends home one lane of what came; thread r of the warp knows about rank r.
DEVICE void push(const Watch& w, u64* state, const u8* outputs, const int* arrived, const int* homes,
                 int lane_of, u8* stage) {
  __shared__ Choices chosen[PUSHERS];
  Choices& choices = chosen[threadIdx.x / 32];
  Part part = part_of(lane_of);
  int lane = threadIdx.x % 32, channel = lane_of / SPLIT;
  u32 before = (u32)state[COMBINE_EPOCH], epoch = next_epoch(before);
  const u64* credit = words_at(w, w.rank, BACK_CREDIT_AT) + lane * CHANNELS * SPLIT + lane_of;
  bool open = lane < RANKS && await_word(w, lane, epoch, credit, before);
  __syncwarp();
  int rows = open ? arrived[lane * CHANNELS + channel] : 0;
  int most = __reduce_max_sync(FULL, rows), pieces = 0;
  u32 reached = 0;
  u64 *told = 0, tell = 0;
  for (int row = 0; row < most; ++row) {
    for (int step = 0; step < RANKS; ++step) {
      int source = (w.rank + step) % RANKS;
      if (row >= __shfl_sync(FULL, rows, source)) continue;
      const int* home = homes + (((u64)source * CHANNELS + channel) * CHANNEL_ROWS + row) * HOME_INTS;
      int token = home[0], count = read_choices(home, choices);
      u64 at = ((u64)w.rank * CHANNELS + channel) * CHANNEL_ROWS + token;
      u8* there = (u8*)w.memory[source] + BACK_AT + at * ANSWER_BYTES;
      push_row(outputs, choices, count, part, stage, there, pieces);
      if (lane == source) reached = token + 1;
      if (lane == 0) {
        bulk_wait<PIECES>();  // the row before is written
        if (told) store_word(told, tell);
        told = words_at(w, source, BACK_PROGRESS_AT) + w.rank * CHANNELS * SPLIT + lane_of;
        tell = word_of(epoch, token + 1);
      }
      __syncwarp();
    }
  }
  if (lane == 0) {
    bulk_wait<0>();
    __threadfence_system();
  }
  __syncwarp();
  if (!open) return;
  u64* word = words_at(w, lane, BACK_PROGRESS_AT) + w.rank * CHANNELS * SPLIT + lane_of;
  store_word(word, word_of(epoch, DONE | reached));
  if (lane != w.rank && rows && part.first == 0) atomicAdd(state + COMBINED_ROWS, (u64)rows);
}

// ---- at home ---------------------------------------------------------------------------------------------

// Whether this lane's rank has sent the sum of the channel's token `index`; waits until it has or never will.
DEVICE bool has_come(const Watch& w, u32 epoch, int source, const u64* word, u32 index) {
  bool here = false;
  if (!is_live(w, source)) return false;
  await(w, source, epoch, [&] {
    u64 found = load_word(word);
    if (epoch_of(found) != epoch) return false;
    here = ((u32)found & ~DONE) > index;
    return here || ((u32)found & DONE) != 0;
  });
  return here;
}

// Adds up the sums of a part of one token from the ranks in `here`, in rank order.
DEVICE void add_up(const u8* back, u32 here, Part part, u8* answer) {
  constexpr u64 RANK_BYTES = (u64)CHANNELS * CHANNEL_ROWS * ANSWER_BYTES;
  for (int unit = part.first + threadIdx.x % 32; unit < part.last; unit += 32 * HOMEWARD) {
    Unit<SOURCE> found[RANKS][HOMEWARD];
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank)
#pragma unroll
      for (int i = 0; i < HOMEWARD; ++i)
        if ((here >> rank & 1u) && unit + 32 * i < part.last)
          found[rank][i] = load_arrived(back + rank * RANK_BYTES, unit + 32 * i);
#pragma unroll
    for (int i = 0; i < HOMEWARD; ++i) {
      if (unit + 32 * i >= part.last) break;
      float sum[8] = {};
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        if (!(here >> rank & 1u)) continue;
        float x[8];
        columns_of<SOURCE>(found[rank][i], x);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] += x[c];
      }
      store_columns(answer + (unit + 32 * i) * UNIT_BYTES, sum);
    }
  }
}

// Answers two parts of the tokens of one channel, `lane_of` and the next; thread i of the warp knows about
// rank i / 2 and part i % 2.
DEVICE void answer_lanes(const Watch& w, u64* state, const int* slots, int tokens, int lane_of, u8* answer) {
  int lane = threadIdx.x % 32, source = lane / 2, channel = lane_of / SPLIT;
  bool watches = source < RANKS;
  u32 epoch = next_epoch((u32)state[COMBINE_EPOCH]);
  const u64* word = words_at(w, w.rank, BACK_PROGRESS_AT) + source * CHANNELS * SPLIT + lane_of + lane % 2;
  const u8* back = (const u8*)w.memory[w.rank] + BACK_AT + (u64)channel * CHANNEL_ROWS * ANSWER_BYTES;
  Part parts{part_of(lane_of).first, part_of(lane_of + 1).last};
  int first = first_token(channel, tokens), last = first_token(channel + 1, tokens);
  for (int token = first; token < last; ++token) {
    u32 needed = destinations(lane < TOP_K ? slots[(u64)token * TOP_K + lane] : -1);
    bool here = watches && (needed >> source & 1u) && has_come(w, epoch, source, word, token - first);
    u32 halves = __ballot_sync(FULL, here);
    u32 ranks = __reduce_or_sync(FULL, watches && (halves >> 2 * source & 3u) == 3u ? 1u << source : 0u);
    add_up(back + (u64)(token - first) * ANSWER_BYTES, ranks, parts, answer + (u64)token * ANSWER_BYTES);
  }
  __syncwarp();
  if (!watches || !is_live(w, source)) return;
  bool done = await(w, source, epoch, [&] {  // of ranks that no token needed too
    u64 found = load_word(word);
    return epoch_of(found) == epoch && ((u32)found & DONE) != 0;
  });
  if (!done) return;
  u64* credit = words_at(w, source, BACK_CREDIT_AT) + w.rank * CHANNELS * SPLIT + lane_of + lane % 2;
  store_word(credit, word_of(epoch, 0));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    ht_combine(const u64* memory, u32* live, u32* board, u64* state, int rank, u64 patience,
               const u8* outputs, const int* slots, int tokens, const int* arrived, const int* homes,
               u8* answer, u64* traffic) {
  extern __shared__ __align__(128) u8 stages[];  // PUSHERS x STAGES pieces
  Watch w = watch(live, board, memory, rank, patience);
  u32 epoch = next_epoch((u32)state[COMBINE_EPOCH]);
  int warp = threadIdx.x / 32, first = (int)blockIdx.x * PUSHERS;
  if (warp < PUSHERS)
    push(w, state, outputs, arrived, homes, first + warp, stages + warp * STAGES * PIECE_BYTES);
  else
    answer_lanes(w, state, slots, tokens, first + 2 * (warp - PUSHERS), answer);
  end_phase(state, COMBINE_EPOCH, epoch, COMBINED_ROWS, traffic);
}
