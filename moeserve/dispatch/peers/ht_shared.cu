// What both kernels of the high-throughput carrier share; it follows common.cu.
//
// Given by -D besides common.cu's: SLOTS (of a rank), TOP_K, ROW_ALIGN, SLICED, CHANNELS, CHANNEL_ROWS,
// SENDERS (channels of a block), ROW_STRIDE, and where the sections of every rank's memory begin: COUNTED_AT,
// COUNTED_CREDIT_AT, COUNTS_AT, POSITIONED_AT, PROGRESS_AT, CREDIT_AT, BACK_PROGRESS_AT, BACK_CREDIT_AT,
// ROWS_AT, BACK_AT.
//
// A lane's tokens are cut into CHANNELS runs. One warp sends a channel, one warp of every rank receives it,
// and the two need nothing of other channels, so blocks need not be resident at once.

#define FULL 0xFFFFFFFFu
#define HOME_INTS (1 + 2 * TOP_K)  // of an arrived row: token in its channel, places, weights

// Words of `state`, this GPU's own.
#define DISPATCH_EPOCH 0
#define DISPATCH_BLOCKS 1
#define COMBINE_EPOCH 2
#define COMBINE_BLOCKS 3
#define BASES_READY 4
#define DISPATCHED_ROWS 5  // to other ranks, ever
#define COMBINED_ROWS 6
#define STATE_WORDS 8      // then int bases[RANKS][SLOTS]

// ---- words: an epoch above, a number below ---------------------------------------------------------------

#define DONE 0x80000000u  // in the number: nothing will follow

DEVICE u64 word_of(u32 epoch, u32 number) { return (u64)epoch << 32 | number; }
DEVICE u32 epoch_of(u64 word) { return (u32)(word >> 32); }

DEVICE u64 load_word(const u64* at) {
  u64 word;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}

DEVICE void store_word(u64* at, u64 word) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

DEVICE u64* words_at(const Watch& w, int rank, u64 section) { return (u64*)(w.memory[rank] + section); }

// Waits until the word holds `epoch`; false when `source` will not come.
DEVICE bool await_word(const Watch& w, int source, u32 now, const u64* at, u32 epoch) {
  return is_live(w, source) && await(w, source, now, [&] { return epoch_of(load_word(at)) == epoch; });
}

// ---- bulk copies -----------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

DEVICE void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int PENDING>  // until all but the last PENDING groups of this thread are written
DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int PENDING>  // until their shared memory may be used again
DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Between this thread's own reads and writes and the copy engine's.
DEVICE void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

DEVICE void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

DEVICE void barrier_wait(u64* barrier, u32 parity) {
  u32 passed = 0;
  while (!passed)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// ---- tokens, channels, destinations ----------------------------------------------------------------------

DEVICE int first_token(int channel, int tokens) { return (int)((u64)channel * tokens / CHANNELS); }

// Ranks that a token's slots, one a lane (negative: none), are on. All lanes of the warp call it.
DEVICE u32 destinations(int slot) {
#if SLICED
  return __any_sync(FULL, slot >= 0) ? (RANKS == 32 ? FULL : (1u << RANKS) - 1u) : 0u;
#else
  return __reduce_or_sync(FULL, slot >= 0 ? 1u << (slot / SLOTS) : 0u);
#endif
}

// The last block to come here ends the phase: the next launch counts on from `epoch`.
DEVICE void end_phase(u64* state, int epoch_word, u32 epoch, int sum, u64* board) {
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence();
  if (atomicAdd(state + epoch_word + 1, 1ull) != gridDim.x - 1) return;
  state[epoch_word + 1] = 0;
  state[epoch_word] = epoch;
  *(volatile u64*)board = atomicAdd(state + sum, 0ull);
}
