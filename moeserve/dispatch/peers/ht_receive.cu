// Dispatch of the high-throughput carrier, third part: RECEIVERS warps of a block number its tokens among those
// of their slots, tell that, and copy what arrives to its places in the batch.

// ---- positions -------------------------------------------------------------------------------------------

// Tells every rank the positions of the rows that the block's channels send there, `first` the first of them.
// One warp a rank; positions stand behind the rows, in the order in which they are sent.
DEVICE void tell_positions(const Watch& w, u64* state, const Lane& mine, int first, const Placed* placed) {
  int lane = threadIdx.x % 32, start = first_token(first, mine.tokens);
  u32 before = (u32)state[DISPATCH_EPOCH], epoch = next_epoch(before);
  for (int peer = threadIdx.x / 32 - SENDERS; peer < RANKS; peer += RECEIVERS) {
    bool open = is_live(w, peer);
    if (open && lane < SENDERS) {
      const u64* credit = words_at(w, w.rank, CREDIT_AT) + peer * CHANNELS + first + lane;
      open = await(w, peer, epoch, [&] {  // a channel without rows may be through already
        u32 found = epoch_of(load_word(credit));
        return found == before || found == epoch;
      });
    }
    if (!__all_sync(FULL, open)) continue;
    for (int channel = first; channel < first + SENDERS; ++channel) {
      u8* there = rows_at(w, peer, channel) + ROW_BYTES;
      int last = first_token(channel + 1, mine.tokens);
      for (int token = first_token(channel, mine.tokens); token < last; ++token) {
        const Placed* choice = placed + (token - start) * TOP_K + lane;
        int slot = lane < TOP_K ? choice->slot : -1;
        if (!(destinations(slot) >> peer & 1u)) continue;
        if (slot >= 0) ((int*)there)[lane] = choice->position;
        there += ROW_STRIDE;
      }
    }
    __threadfence_system();
    __syncwarp();
    u64* word = words_at(w, peer, POSITIONED_AT) + w.rank * (CHANNELS / SENDERS) + first / SENDERS;
    if (lane == 0) store_word(word, word_of(epoch, 0));
  }
}

DEVICE void table_sync() {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"n"(TABLE_BARRIER), "n"(32 * RECEIVERS) : "memory");
}

// Positions of the block's own tokens to all ranks, and all ranks' bases into the table; the receiving warps.
DEVICE void prepare(const Watch& w, u64* state, const Lane& mine, int first, int* table, Placed* placed) {
  int thread = threadIdx.x - 32 * SENDERS;
  int start = first_token(first, mine.tokens) * TOP_K;
  int end = first_token(first + SENDERS, mine.tokens) * TOP_K;
  count_slots(mine.slots, start, table, thread, 32 * RECEIVERS);
  table_sync();
  if (thread < 32) take_positions(mine.slots + start, end - start, table, placed);
  table_sync();
  tell_positions(w, state, mine, first, placed);
  u32 epoch = next_epoch((u32)state[DISPATCH_EPOCH]);
  if (thread == 0)
    while (epoch_of(load_word(state + BASES_READY)) != epoch) {
    }
  table_sync();
  const int* bases = (const int*)(state + STATE_WORDS);
  for (int i = thread; i < TABLE; i += 32 * RECEIVERS) table[i] = __ldcg(bases + i);
  table_sync();
}

// ---- rows ------------------------------------------------------------------------------------------------

// A part of a row to its place by the whole warp, for parts that bulk copies are too coarse for.
template <int BYTES>
DEVICE void copy_part(u8* to, const u8* from) {
  int lane = threadIdx.x % 32;
  if (BYTES % 4 == 0)
    for (int i = lane; i < BYTES / 4; i += 32) ((u32*)to)[i] = ((const u32*)from)[i];
  else
    for (int i = lane; i < BYTES; i += 32) to[i] = from[i];
}

// A part to all places of its row, one place a lane; -1 is none.
template <int BYTES>
DEVICE void place_part(u8* part, const u8* from, int place) {
  if constexpr (BYTES % 16 == 0) {
    if (place >= 0) bulk_store(part + (u64)place * BYTES, from, BYTES);
  } else {
    for (u32 left = __ballot_sync(FULL, place >= 0); left; left &= left - 1)
      copy_part<BYTES>(part + (u64)__shfl_sync(FULL, place, __ffs(left) - 1) * BYTES, from);
  }
}

// An arrived row to its places in the batch, and what combine must know of it to `home`.
DEVICE void expand(const Watch& w, const Batch& batch, const u8* record, const int* bases, int* home) {
  int lane = threadIdx.x % 32, place = -1;
  const int* tail = (const int*)(record + RECORD_BYTES);
  if (lane < TOP_K) {
    int slot = tail[1 + lane], local = SLICED ? slot : slot - w.rank * SLOTS;
    int base = slot >= 0 && (u32)local < (u32)SLOTS ? bases[local] : -1;
    if (base >= 0) place = base + ((const int*)(record + ROW_BYTES))[lane];
    home[1 + lane] = place, home[1 + TOP_K + lane] = tail[1 + TOP_K + lane];
  }
  if (lane == 0) home[0] = tail[0];
  place_part<PART0_BYTES>(batch.parts[0], record + PART0_AT, place);
#if PARTS > 1
  place_part<PART1_BYTES>(batch.parts[1], record + PART1_AT, place);
#endif
#if PARTS > 2
  place_part<PART2_BYTES>(batch.parts[2], record + PART2_AT, place);
#endif
  bulk_commit();
}

// What a lane knows of one rank's channel.
struct Stream {
  int source;
  const u64 *progress, *positioned;
  bool open, placed;  // more may come; its positions are here
  u32 here, taken;    // rows

  DEVICE bool ready() const { return placed && taken < here; }
  DEVICE bool waits() const { return open || taken < here; }

  DEVICE void poll(const Watch& w, u32 epoch, bool check) {
    if (open) {
      u64 found = load_word(progress);
      if (epoch_of(found) == epoch) here = (u32)found & ~DONE, open = !((u32)found & DONE);
    }
    if (!placed && taken < here) placed = epoch_of(load_word(positioned)) == epoch;
    if (check && waits() && !ready() && is_gone(w, source, epoch)) open = false, here = taken;
  }
};

// Receives the channels `first .. first + SHARE` of all ranks; lane i watches rank i / SHARE.
DEVICE void receive(const Watch& w, u64* state, const Batch& batch, int first, const int* bases, u8* ring,
                    u64* barriers) {
  __shared__ int row_of[RECEIVERS][RING], source_of[RECEIVERS][RING];
  int lane = threadIdx.x % 32, own = threadIdx.x / 32 - SENDERS;
  u32 epoch = next_epoch((u32)state[DISPATCH_EPOCH]);
  int source = lane / SHARE, channel = first + lane % SHARE;
  bool watched = lane < STREAMS;
  Stream stream{source, words_at(w, w.rank, PROGRESS_AT) + source * CHANNELS + channel,
                words_at(w, w.rank, POSITIONED_AT) + source * (CHANNELS / SENDERS) + channel / SENDERS,
                watched && is_live(w, source), false, 0, 0};
  int issued = 0, placed = 0, turn = 31;
  for (u32 polls = 1;; ++polls) {
    u32 ready = __ballot_sync(FULL, stream.ready());
    if (ready && issued - placed < LOADS) {
      u32 later = ready & ~((2u << turn) - 1u);
      turn = __ffs(later ? later : ready) - 1;
      u32 row = __shfl_sync(FULL, stream.taken, turn);
      stream.taken += lane == turn;
      bulk_wait_read<RING - LOADS>();
      __syncwarp();
      int slot = issued++ % RING;
      if (lane == 0) {
        u64 at = ((u64)(turn / SHARE) * CHANNELS + first + turn % SHARE) * CHANNEL_ROWS + row;
        row_of[own][slot] = (int)at, source_of[own][slot] = turn / SHARE;
        proxy_fence();
        barrier_expect(barriers + slot, PLACED_BYTES);
        bulk_load(ring + slot * ROW_STRIDE, (u8*)w.memory[w.rank] + ROWS_AT + at * ROW_STRIDE, PLACED_BYTES,
                  barriers + slot);
      }
      __syncwarp();
    } else if (issued != placed) {
      int slot = placed % RING;
      barrier_wait(barriers + slot, placed / RING & 1);
      int* home = batch.homes + (u64)row_of[own][slot] * HOME_INTS;
      expand(w, batch, ring + slot * ROW_STRIDE, bases + source_of[own][slot] * SLOTS, home);
      __syncwarp();
      ++placed;
    } else if (__any_sync(FULL, stream.waits())) {
      stream.poll(w, epoch, polls % 64 == 0);
    } else {
      break;
    }
  }
  if (watched) {
    batch.arrived[source * CHANNELS + channel] = (int)stream.taken;
    if (is_live(w, source))
      store_word(words_at(w, source, CREDIT_AT) + w.rank * CHANNELS + channel, word_of(epoch, 0));
  }
  bulk_wait<0>();
}
