// Sequence numbers, which members are live, and who is late. A member's lane and its owner's place are places of their
// own: lane l has place l, owner o has place LANES + o.

#define PLACES (LANES + OWNERS)

// Sequence numbers count from 1 to 2^32 - 2 and start over; 0 is memory that nobody wrote. Their parity alternates also
// where they start over.
DEVICE u32 next_sequence(u32 sequence) { return sequence == 0xFFFFFFFEu ? 1u : sequence + 1u; }

// Every member's memory begins with a header: word s is set once the member of seat s has given it up, and after
// GIVEN_UP_BYTES stand the sequence numbers that owners have begun.
#define GIVEN_UP_BYTES 256
#define BEGUN (GIVEN_UP_BYTES / 4)

// What a thread needs while it waits for other members: what the kernel was given of them, and until when it waits.
struct Watch {
  const PeerArguments* peers;
  mutable u64 deadline;  // nanoseconds(); 0 before this thread waited for anybody
};

// Every kernel's arguments begin with those of PeerArguments.
template <class Arguments>
DEVICE Watch watch(const Arguments& args) {
  return {(const PeerArguments*)&args, 0};
}

DEVICE bool is_live(const PeerArguments& peers, int place) { return *(volatile u32*)(peers.live + place) != 0; }

// Gives the member of `place` up: from here on it is neither waited for nor stored to. The host finds that in its flags,
// and the member in its own memory.
DEVICE void give_up(const PeerArguments& peers, int place, u32 sequence) {
  *(volatile u32*)(peers.live + place) = 0;
  *(volatile u32*)(peers.live + peers.partners[place]) = 0;
  store_relaxed(peers.host_flags + place, sequence);
  store_relaxed((u32*)peers.headers[place] + peers.seat, sequence);
}

// Heeds the host's word: places that it has ended are live no more, and none of them is late. One thread in each tick of
// 2^17 ns reads the word, since many waiting threads would hold up the bus that it lies behind.
DEVICE void heed_host(const PeerArguments& peers, u64 now) {
  const u32 tick = (u32)(now >> 17);
  u32* const asked = peers.live + PLACES;
  if (*(volatile u32*)asked == tick || atomicExch(asked, tick) == tick) return;
  const u64 word = load_relaxed(peers.host_word);
  if (!word) return;
#pragma unroll 1
  for (int place = 0; place < PLACES; ++place)
    if (word >> 63 || word >> place & 1u) *(volatile u32*)(peers.live + place) = 0;
}

// Until when a thread may go on waiting for the member of `place`, which it has done until `deadline` (0: it begins); 0
// when the member will not come: it is not live, the host has ended waiting for it, it has given this member up, or its
// time is over. Every loop that waits calls it now and then; it stands aside, so that what they do else stays small.
__device__ __noinline__ u64 waits_until(const PeerArguments& peers, int place, u32 sequence, u64 deadline) {
  const u64 now = nanoseconds();
  heed_host(peers, now);
  if (!is_live(peers, place)) return 0;
  if (deadline == 0) deadline = now + peers.patience;
  if (now <= deadline && load_relaxed(peers.header + peers.partners[PLACES + place]) == 0) return deadline;
  give_up(peers, place, sequence);
  return 0;
}

DEVICE bool is_gone(const Watch& w, int place, u32 sequence) {
  const u64 until = waits_until(*w.peers, place, sequence, w.deadline);
  if (until) w.deadline = until;
  return until == 0;
}

// Waits until `here()`; false when the member of `place` will not come.
template <class Here>
DEVICE bool await(const Watch& w, int place, u32 sequence, Here here) {
  for (u32 polls = 1;; ++polls) {
    if (here()) return true;
    if (polls % 64 == 0 && is_gone(w, place, sequence)) return false;
  }
}

// Waits until `here()`, which other blocks of this grid bring about. They wait for other members only, so a time of twice
// the patience is over only when some of them do not run: then the host is told, nobody is stored to any more, since the
// answer means nothing, and it is false.
template <class Here>
DEVICE bool await_blocks(const Watch& w, u32 sequence, Here here) {
  u64 end = 0;
  for (u32 polls = 1;; ++polls) {
    if (here()) return true;
    if (polls % 64) continue;
    const u64 now = nanoseconds();
    if (end == 0) end = now + 2 * w.peers->patience;
    if (now < end) continue;
    store_relaxed(w.peers->host_flags + PLACES, sequence);
#pragma unroll 1
    for (int place = 0; place < PLACES; ++place) *(volatile u32*)(w.peers->live + place) = 0;
    return false;
  }
}
