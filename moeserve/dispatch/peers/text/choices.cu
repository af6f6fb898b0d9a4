// Choices that arrive: read, counted by slot, and laid out as the segments of the batch.

// Rows from .. from + count - 1 of all lanes' rows, one lane after the other.
struct DispatchSpan {
  int from, count;
};

// What a block counts and keeps of all lanes' choices, in shared memory.
struct Tables {
  int *before, *others;   // [slots]: rows of each slot that stand before the block's, and all other ones
  int (*choices)[TOP_K];  // of the rows that it places at once: slots here, -1 for none; then places
};

// Among the words of all lanes' choices, the one in which row `g` of all lanes' rows begins.
DEVICE int word_of(const Lanes& lanes, int g) {
  int source, row, before = 0;
  lanes.find(g, source, row);
#pragma unroll
  for (int l = 0; l < LANES; ++l) before += l < source ? SLOT_WORDS(lanes.rows(l)) : 0;
  return before + row * TOP_K / 6;
}

// Reads the choices of the rows of `scope`: counts them, if it `counts`, by whether they stand before `kept`,
// and keeps those of `kept`. The block calls it.
DEVICE void read_choices(const Exchange& x, DispatchSpan scope, DispatchSpan kept, bool counts, const Tables& t) {
  const int upto = scope.from + scope.count;
  int words = 0;
#pragma unroll
  for (int l = 0; l < LANES; ++l) words += SLOT_WORDS(x.lanes.rows(l));
  if (upto < x.lanes.all()) words = word_of(x.lanes, upto) + 1;
  const int low = (scope.from - kept.from) * TOP_K, high = counts ? (upto - kept.from) * TOP_K : low;
#pragma unroll 1
  for (int i = word_of(x.lanes, scope.from) + threadIdx.x; i < words; i += THREADS) {
    int source = 0, word = i, before = 0;
#pragma unroll
    for (int l = 0; l < LANES - 1; ++l)
      if (source == l && word >= SLOT_WORDS(x.lanes.rows(l)))
        word -= SLOT_WORDS(x.lanes.rows(l)), before += x.lanes.rows(l), ++source;
    const int first = (before - kept.from) * TOP_K + 6 * word;
    const int end = min(kept.count, before - kept.from + x.lanes.rows(source)) * TOP_K;
    const uint4* at = x.arrived(x.at.choices) + source * x.at.lane_words + word;
    uint4 found = make_uint4(~0u, ~0u, ~0u, 0u);  // of no slot
    if (x.comes(source)) found = received(x.w, at, source, x.step.sequence, found);
    const u32 three[3] = {found.x, found.y, found.z};
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const int slot = x.here.local(three[j / 2] >> 16 * (j % 2) & 0xFFFFu), c = first + j;
      if (slot >= 0 && c >= low && c < high) atomicAdd((c < 0 ? t.before : t.others) + slot, 1);
      if (c >= 0 && c < end) (&t.choices[0][0])[c] = slot;
    }
  }
}

// Shares the block's counts, which are in `others`, with all reading blocks, and makes of all counts those of rows that
// stand before the block's and those of the others. The block calls it.
DEVICE void share_counts(const Exchange& x, const Tables& t, int block, int readers) {
  const int slots = x.here.slots, words = COUNT_WORDS(slots);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < words; i += THREADS) {
    u32 three[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int slot = 6 * i + 2 * j;
      three[j] = slot < slots ? t.others[slot] : 0;
      if (slot + 1 < slots) three[j] |= t.others[slot + 1] << 16;
    }
    store_whole(x.shared_counts + block * words + i, checked(three[0], three[1], three[2], x.step.sequence));
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < slots; i += THREADS) t.others[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < readers * words; i += THREADS) {
    const uint4* at = x.shared_counts + i;
    uint4 word = load_whole(at);
    if (!belongs(word, x.step.sequence) &&
        !await_blocks(x.w, x.step.sequence, [&] { return belongs(word = load_whole(at), x.step.sequence); }))
      continue;
    const u32 three[3] = {word.x, word.y, word.z};
    int* table = i / words < block ? t.before : t.others;
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const int rows = three[j / 2] >> 16 * (j % 2) & 0xFFFFu;
      if (rows) atomicAdd(table + i % words * 6 + j, rows);
    }
  }
}

// Adds where segments begin to `before`, or `writes` it into the batch, which the block without rows does. A warp calls
// it.
DEVICE void lay_out(const Exchange& x, const Tables& t, bool writes) {
  const int warp_thread = threadIdx.x % 32;
  int end = 0;
#pragma unroll 1
  for (int first = 0; first < x.here.slots; first += 32) {
    const int slot = first + warp_thread;
    const bool mine = slot < x.here.slots;
    const int before = mine ? t.before[slot] : 0, rows = before + (mine ? t.others[slot] : 0);
#if RAGGED
    const int room = (rows + x.batch.row_align - 1) / x.batch.row_align * x.batch.row_align;
    int upto = room;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(WHOLE_WARP, upto, step);
      if (warp_thread >= step) upto += left;
    }
#else
    const int room = x.here.capacity, upto = room * (warp_thread + 1);
#endif
    if (mine && writes)
      x.batch.counts[slot] = rows, x.batch.offsets[slot + 1] = end + upto;
    else if (mine)
      t.before[slot] = before + end + upto - room;
    end += __shfl_sync(WHOLE_WARP, upto, 31);
  }
  if (writes && warp_thread == 0) x.batch.offsets[0] = 0;
  __syncwarp();
}

// The choices of a reading block's rows, from its first `span` on: counted among all lanes' choices, or among
// the block's, whose counts it then shares; kept of `span`. The block calls it, and synchronises.
DEVICE void count_choices(const Exchange& x, const Division& d, int block, DispatchSpan span, const Tables& t) {
  const int all = x.lanes.all(), readers = gridDim.x - d.senders - d.choice_senders;
  const DispatchSpan scope = d.shares ? DispatchSpan{span.from, min(d.run, all - span.from)} : DispatchSpan{0, all};
  read_choices(x, scope, span, true, t);
  if (d.shares) share_counts(x, t, block, readers);
}
