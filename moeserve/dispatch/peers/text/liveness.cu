// Sequence numbers, which ranks are live, and who is late.

// Sequence numbers count from 1 to 2^32 - 2 and start over; 0 is memory that nobody wrote. Their parity alternates also
// where they start over.
DEVICE u32 next_sequence(u32 sequence) { return sequence == 0xFFFFFFFEu ? 1u : sequence + 1u; }

// The first GIVEN_UP_BYTES of every rank's memory: word r is set once rank r has given this rank up.
#define GIVEN_UP_BYTES 256

// What a thread needs while it waits for other ranks.
struct Watch {
  u32* live;  // [RANKS + 1] of this GPU: 0 for a rank given up; the last word is the tick in which the host was asked
  u32* host_flags;  // [RANKS + 1] of the host: the sequence number in which a rank was late; last, whether all is over
  const u64* memory;  // [RANKS] addresses of all ranks' peer memory, as mapped here
  int rank;
  u64 patience;          // nanoseconds
  mutable u64 deadline;  // nanoseconds(); 0 before this thread waited for anybody
};

DEVICE bool is_live(const Watch& w, int rank) { return *(volatile u32*)(w.live + rank) != 0; }

// Gives `source` up: from here on it is neither waited for nor stored to. The host finds that in its flags, and
// `source` in its own memory.
DEVICE void give_up(const Watch& w, int source, u32 sequence) {
  *(volatile u32*)(w.live + source) = 0;
  store_relaxed(w.host_flags + source, sequence);
  store_relaxed((u32*)w.memory[source] + w.rank, sequence);
}

// Whether the host has ended all waiting: then no rank is live any more, and none is late. One thread in each tick of
// 2^17 ns reads the host's flag, since many waiting threads would hold up the bus that it lies behind.
DEVICE bool is_over(const Watch& w) {
  u32 tick = (u32)(nanoseconds() >> 17), *asked = w.live + RANKS;
  if (*(volatile u32*)asked == tick || atomicExch(asked, tick) == tick) return false;
  bool over = load_relaxed(w.host_flags + RANKS) != 0;
  if (over)
    for (int rank = 0; rank < RANKS; ++rank) *(volatile u32*)(w.live + rank) = 0;
  return over;
}

// Whether `source` will not come: it is not live, it has given this rank up, its time is over, or the host has ended
// all waiting.
DEVICE bool is_gone(const Watch& w, int source, u32 sequence) {
  if (!is_live(w, source)) return true;
  if (is_over(w)) return true;
  if (w.deadline == 0) w.deadline = nanoseconds() + w.patience;
  bool late = nanoseconds() > w.deadline || load_relaxed((const u32*)w.memory[w.rank] + source) != 0;
  if (late) give_up(w, source, sequence);
  return late;
}

// Waits until `here()`; false when `source` will not come.
template <class Here>
DEVICE bool await(const Watch& w, int source, u32 sequence, Here here) {
  for (u32 polls = 1;; ++polls) {
    if (here()) return true;
    if (polls % 64 == 0 && is_gone(w, source, sequence)) return false;
  }
}
