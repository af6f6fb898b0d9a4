// The place in the batch of each choice, and its weight.

// Choices that a warp places at once: those of whole rows.
#define PLACED_AT_ONCE (32 / TOP_K * TOP_K)

// The place of this thread's choice, among those of `span` from `first` on; -1 for none. A warp calls it.
DEVICE int place_of(const Exchange& x, DispatchSpan span, int first, const Tables& t, bool counts) {
  const int warp_thread = threadIdx.x % 32;
  const bool mine = warp_thread < PLACED_AT_ONCE && first + warp_thread < span.count * TOP_K;
  const int slot = mine ? (&t.choices[0][0])[first + warp_thread] : -1;
  const u32 same = __match_any_sync(WHOLE_WARP, slot);
  int place = -1;
  if (slot >= 0) place = t.before[slot] + __popc(same & ((1u << warp_thread) - 1u));
  __syncwarp();
  if (counts && slot >= 0 && same >> warp_thread == 1u) t.before[slot] = place + 1;
  __syncwarp();
#if !RAGGED
  if (slot >= 0) place += slot * x.here.capacity;
#endif
  return place;
}

// Makes places of the slots of the span's choices, in the order of rows. A warp calls it.
DEVICE void place_rows(const Exchange& x, DispatchSpan span, const Tables& t) {
  const int warp_thread = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < span.count * TOP_K; first += PLACED_AT_ONCE) {
    const int place = place_of(x, span, first, t, true);
    if (warp_thread < PLACED_AT_ONCE && first + warp_thread < span.count * TOP_K)
      (&t.choices[0][0])[first + warp_thread] = x.batch.places[(u64)span.from * TOP_K + first + warp_thread] = place;
  }
}

// Keeps the weights of the span's choices; the block's threads from `first` on call it.
DEVICE void keep_weights(const Exchange& x, DispatchSpan span, int first) {
#pragma unroll 1
  for (int i = (int)threadIdx.x - first; i < span.count * WEIGHT_WORDS; i += THREADS - first) {
    int source, row;
    const int at = span.from + i / WEIGHT_WORDS, k = i % WEIGHT_WORDS * 3;
    x.lanes.find(at, source, row);
    const uint4* word = x.arrived(x.at.weights) + x.room(source, row) * WEIGHT_WORDS + i % WEIGHT_WORDS;
    if (!x.comes(source)) continue;
    uint4 found = load_whole(word);
    if (!receive(x.w, word, source, x.step.sequence, found)) continue;
    const u32 three[3] = {found.x, found.y, found.z};
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (k + j < TOP_K) x.batch.weights[(u64)at * TOP_K + k + j] = from_bits(three[j]);
  }
}
