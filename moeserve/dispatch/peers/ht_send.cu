// Dispatch of the high-throughput carrier, second part: SENDERS warps of a block make records of their
// channel's tokens and store each to every rank it needs, a word behind it.

DEVICE uint4 load_once(const void* at) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(at));
  return word;
}

#if WIRE != WIRE_RECORDS
#if SOURCE == 2
DEVICE void columns_of(const uint4 (&words)[4], float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[4 * i] = from_bits(words[i].x), x[4 * i + 1] = from_bits(words[i].y);
    x[4 * i + 2] = from_bits(words[i].z), x[4 * i + 3] = from_bits(words[i].w);
  }
}
#else
DEVICE void columns_of(const uint4 (&words)[2], float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    widen(words[i].x, x[8 * i], x[8 * i + 1]), widen(words[i].y, x[8 * i + 2], x[8 * i + 3]);
    widen(words[i].z, x[8 * i + 4], x[8 * i + 5]), widen(words[i].w, x[8 * i + 6], x[8 * i + 7]);
  }
}
#endif
#endif

#if WIRE == WIRE_FP8_GROUP128
// x / scale to the last bit, zero's sign too: one step of correction by the quotient's exact remainder, which
// all of a group share the reciprocal for. Of an infinite scale it makes what division makes: 0 or NaN.
DEVICE float over_scale(float x, float scale, float reciprocal) {
  float quotient = __fmul_rn(x, reciprocal);
  float rest = __fmaf_rn(-quotient, fminf(scale, 3.402823466e38f), x);
  return copysignf(__fmaf_rn(rest, reciprocal, quotient), quotient);
}

// Eight lanes share a group; lanes past the row's end bring zeros.
DEVICE void encode_unit(float (&x)[16], int unit, bool valid, u8* record, float) {
  float amax = largest_of(x);
#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) amax = larger(amax, __shfl_xor_sync(FULL, amax, lane));
  float scale = over_constant(amax < 1e-10f ? 1e-10f : amax, 448.0f), reciprocal = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = over_scale(x[i], scale, reciprocal);
  if (!valid) return;
  *(uint4*)(record + 16 * unit) = e4m3_codes(x);
  if (unit % 8 == 0) *(float*)(record + PART1_AT + unit / 2) = scale;
}
#elif WIRE != WIRE_RECORDS
DEVICE void encode_unit(float (&x)[16], int unit, bool valid, u8* record, float factor) {
  encode_columns(x, unit, valid, record, factor);
}
#endif

// One row as its record, by one warp, all loads of a stretch under way at once.
DEVICE void make_row(const Lane& mine, int token, u8* record) {
  int lane = threadIdx.x % 32;
#if WIRE == WIRE_RECORDS
  constexpr int WORDS = RECORD_BYTES / 16, STRETCH = 8;
  const uint4* from = (const uint4*)(mine.rows + (u64)token * RECORD_BYTES);
  for (int first = lane; first < WORDS; first += 32 * STRETCH) {
    uint4 found[STRETCH];
#pragma unroll
    for (int i = 0; i < STRETCH; ++i)
      if (first + 32 * i < WORDS) found[i] = load_once(from + first + 32 * i);
#pragma unroll
    for (int i = 0; i < STRETCH; ++i)
      if (first + 32 * i < WORDS) ((uint4*)record)[first + 32 * i] = found[i];
  }
#else
  constexpr int UNITS = HIDDEN / 16, STRETCH = SOURCE == 2 ? 4 : 7, WORDS = SOURCE == 2 ? 4 : 2;
  const Element* from = (const Element*)mine.rows + (u64)token * HIDDEN;
  for (int first = 0; first < UNITS; first += 32 * STRETCH) {
    uint4 found[STRETCH][WORDS];
#pragma unroll
    for (int i = 0; i < STRETCH; ++i)
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        int unit = first + 32 * i + lane;
        const uint4* at = (const uint4*)(from + 16 * unit) + word;
        found[i][word] = unit < UNITS ? load_once(at) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
    for (int i = 0; i < STRETCH; ++i) {
      if (first + 32 * i >= UNITS) break;
      int unit = first + 32 * i + lane;
      float x[16];
      columns_of(found[i], x);
      encode_unit(x, unit, unit < UNITS, record, mine.factor);
    }
  }
#endif
}

// What travels behind the record.
DEVICE void make_tail(const Lane& mine, int token, int slot, int* tail) {
  int lane = threadIdx.x % 32;
  if (lane >= TOP_K) return;
  tail[1 + lane] = slot;
  tail[1 + TOP_K + lane] = __float_as_int(mine.weights[(u64)token * TOP_K + lane]);
}

// Where `peer` keeps the rows of a channel of this rank.
DEVICE u8* rows_at(const Watch& w, int peer, int channel) {
  return (u8*)w.memory[peer] + ROWS_AT + ((u64)w.rank * CHANNELS + channel) * CHANNEL_ROWS * ROW_STRIDE;
}

// Sends a channel's tokens: lane r stores to rank r.
DEVICE void send(const Watch& w, u64* state, const Lane& mine, int channel, u8* stage) {
  int lane = threadIdx.x % 32;
  u32 before = (u32)state[DISPATCH_EPOCH], epoch = next_epoch(before);
  int first = first_token(channel, mine.tokens), last = first_token(channel + 1, mine.tokens);
  bool open = lane < RANKS && is_live(w, lane), asked = false;
  u64* word = open ? words_at(w, lane, PROGRESS_AT) + w.rank * CHANNELS + channel : 0;
  u8* there = open ? rows_at(w, lane, channel) : 0;
  const u64* credit = words_at(w, w.rank, CREDIT_AT) + lane * CHANNELS + channel;
  u32 sent = 0, told = 0;
  for (int token = first, made = 0; token < last || !asked; ++token) {
    bool any = token < last;
    int slot = any && lane < TOP_K ? mine.slots[(u64)token * TOP_K + lane] : -1;
    u32 needed = destinations(slot);
    u8* record = stage + made % DEPTH * ROW_STRIDE;  // free: the row before the last is written
    if (needed) {
      make_row(mine, token, record);
      make_tail(mine, token, slot, (int*)(record + RECORD_BYTES));
      if (lane == 0) *(int*)(record + RECORD_BYTES) = token - first;
    }
    if (!asked) {
      asked = true;
      open = open && await_word(w, lane, epoch, credit, before);
    }
    if (!needed) continue;
    proxy_fence();
    __syncwarp();
    bool goes = open && (needed >> lane & 1u);
    if (goes) bulk_store(there + (u64)sent * ROW_STRIDE, record, ROW_BYTES);
    bulk_commit();
    ++made;
    bulk_wait<DEPTH - 1>();
    if (sent > told) store_word(word, word_of(epoch, told = sent));
    __syncwarp();
    sent += goes;
  }
  bulk_wait<0>();
  if (open) store_word(word, word_of(epoch, DONE | sent));
  if (open && lane != w.rank && sent) atomicAdd(state + DISPATCHED_ROWS, (u64)sent);
}
