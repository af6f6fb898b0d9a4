// Dispatch of the high-throughput carrier, first part: what all its warps share, where rows go, and block 0.
//
// Given by -D besides: RECEIVERS (warps), RING (rows that a receiving warp holds).
// Block 0 counts all rows by slot, tells every rank, and from all ranks' counts lays out the batch.

#define WARPS (SENDERS + RECEIVERS)
#define DEPTH 2                         // records that a sending warp holds
#define LOADS (RING - 1)                // rows on their way from memory to a receiving warp
#define SHARE (SENDERS / RECEIVERS)     // channels of a receiving warp
#define STREAMS (RANKS * SHARE)         // what it watches, one a lane
#define TAIL_INTS (1 + 2 * TOP_K)       // behind a record: token in its channel, slots, weights
#define ROW_BYTES (RECORD_BYTES + (4 * TAIL_INTS + 15) / 16 * 16)
#define PLACED_BYTES (ROW_BYTES + (4 * TOP_K + 15) / 16 * 16)  // with positions behind, stored apart
#define TABLE (RANKS * SLOTS)
#define TABLE_BARRIER 1                 // of the receiving warps

struct Lane {
  const u8* rows;  // hidden states or records [tokens]
  float factor;
  const int* slots;      // [tokens, TOP_K]
  const float* weights;  // [tokens, TOP_K]
  int tokens;
};

struct Batch {
  u8* parts[3];  // of the wire format, [capacity, PART<i>_BYTES]
  int* counts;   // [SLOTS]
  int* offsets;  // [SLOTS + 1]
  int* arrived;  // [RANKS, CHANNELS] rows
  int* homes;    // [RANKS, CHANNELS * CHANNEL_ROWS, HOME_INTS]
};

// ---- where rows go: counts by slot, and a row's position among its lane's rows of a slot -----------------

DEVICE void add_slot(int* table, int slot) {
  if ((u32)slot < (u32)TABLE) atomicAdd(table + slot, 1);
}

// Adds the first `entries` slots of the lane to the table, by `threads` threads.
DEVICE void count_slots(const int* slots, int entries, int* table, int thread, int threads) {
  int wide = (u64)slots % 16 == 0 ? entries / 4 : 0;
  for (int first = thread; first < wide; first += 8 * threads) {
    int4 found[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      found[i] =
          first + i * threads < wide ? ((const int4*)slots)[first + i * threads] : make_int4(-1, -1, -1, -1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      add_slot(table, found[i].x), add_slot(table, found[i].y);
      add_slot(table, found[i].z), add_slot(table, found[i].w);
    }
  }
  for (int i = 4 * wide + thread; i < entries; i += threads) add_slot(table, slots[i]);
}

// A choice: its slot, and how many rows of its lane go to that slot before it.
struct Placed {
  int slot, position;
};

// Positions of `entries` slots, in order, after those the table has; one warp.
DEVICE void take_positions(const int* slots, int entries, int* table, Placed* placed) {
  int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int first = 0; first < entries; first += 32)
    if (first + lane < entries) placed[first + lane].slot = slots[first + lane];
  __syncwarp();
  for (int first = 0; first < entries; first += 32) {
    int slot = first + lane < entries ? placed[first + lane].slot : -1;
    u32 alike = __match_any_sync(FULL, slot);
    bool counts = (u32)slot < (u32)TABLE;
    int before = counts ? table[slot] : 0;
    if (counts) placed[first + lane].position = before + __popc(alike & ((1u << lane) - 1u));
    __syncwarp();
    if (counts && lane == __ffs(alike) - 1) table[slot] = before + __popc(alike);
    __syncwarp();
  }
}

// ---- block 0 ---------------------------------------------------------------------------------------------

// Tells every rank how many rows its slots get from here, and reads what all ranks tell this one.
DEVICE void exchange_counts(const Watch& w, u32 before, u32 epoch, int* table, int* present) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int peer = warp; peer < RANKS; peer += WARPS) {
    int open = lane == 0 && await_word(w, peer, epoch, words_at(w, w.rank, COUNTED_CREDIT_AT) + peer, before);
    if (!__shfl_sync(FULL, open, 0)) continue;
    int* there = (int*)(w.memory[peer] + COUNTS_AT) + w.rank * SLOTS;
    for (int i = lane; i < SLOTS; i += 32) there[i] = table[SLICED ? i : peer * SLOTS + i];
    __threadfence_system();
    __syncwarp();
    if (lane == 0) store_word(words_at(w, peer, COUNTED_AT) + w.rank, word_of(epoch, 0));
  }
  __syncthreads();
  for (int peer = warp; peer < RANKS; peer += WARPS) {
    int here = lane == 0 && await_word(w, peer, epoch, words_at(w, w.rank, COUNTED_AT) + peer, epoch);
    here = __shfl_sync(FULL, here, 0);
    const int* told = (const int*)(w.memory[w.rank] + COUNTS_AT) + peer * SLOTS;
    for (int i = lane; i < SLOTS; i += 32) table[peer * SLOTS + i] = here ? __ldcg(told + i) : 0;
    if (lane == 0) present[peer] = here;
  }
  __syncthreads();
}

// Segments of the batch, and where each rank's rows begin in each; one warp.
DEVICE void lay_out(const Batch& batch, const int* table, const int* present, int* bases) {
  int lane = threadIdx.x % 32, end = 0;
  for (int first = 0; first < SLOTS; first += 32) {
    int slot = first + lane, total = 0;
    if (slot < SLOTS)
      for (int source = 0; source < RANKS; ++source) total += table[source * SLOTS + slot];
    int room = (total + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN, upto = room;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int left = __shfl_up_sync(FULL, upto, step);
      if (lane >= step) upto += left;
    }
    if (slot < SLOTS) {
      int at = end + upto - room;
      batch.counts[slot] = total, batch.offsets[slot] = at;
      for (int source = 0; source < RANKS; ++source) {
        bases[source * SLOTS + slot] = present[source] ? at : -1;
        at += table[source * SLOTS + slot];
      }
    }
    end += __shfl_sync(FULL, upto, 31);
  }
  if (lane == 0) batch.offsets[SLOTS] = end;
}

DEVICE void lead(const Watch& w, u64* state, const Lane& mine, const Batch& batch, int* table) {
  __shared__ int present[RANKS];
  u32 before = (u32)state[DISPATCH_EPOCH], epoch = next_epoch(before);
  count_slots(mine.slots, mine.tokens * TOP_K, table, threadIdx.x, 32 * WARPS);
  __syncthreads();
  exchange_counts(w, before, epoch, table, present);
  if (threadIdx.x >= 32) return;
  lay_out(batch, table, present, (int*)(state + STATE_WORDS));
  __threadfence();
  __syncwarp();
  if (threadIdx.x == 0) store_word(state + BASES_READY, word_of(epoch, 0));
  for (int peer = threadIdx.x; peer < RANKS; peer += 32)
    if (is_live(w, peer)) store_word(words_at(w, peer, COUNTED_CREDIT_AT) + w.rank, word_of(epoch, 0));
}
