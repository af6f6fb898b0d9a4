// What leaves this lane: its choices to all owners, its rows as records to the owners that need them.

// Sends the record of row `t` of this lane, which is in shared memory, to all owners of `reached`.
DEVICE void send_record(const Exchange& x, const u8* record, int t, u32 reached, Team team) {
  const int warp_thread = threadIdx.x % 32;
#pragma unroll 1
  for (int packet = team.warp; packet < RECORD_PACKETS; packet += team.warps) {
    const int at = PACKET_WORDS * packet + warp_thread, last = last_thread<RECORD_BYTES>(packet);
    uint4 word = make_uint4(0u, 0u, 0u, 0u);
    if (warp_thread < PACKET_WORDS && at < WORDS_OF(RECORD_BYTES)) word = ((const uint4*)record)[at];
    word = tagged(word, x.step.sequence, last);
    const u64 to_word = (x.room(x.mine.number, t) * RECORD_PACKETS + packet) * PACKET;
#pragma unroll
    for (int turn = 1; turn <= OWNERS; ++turn) {
      const int to = (x.mine.number + turn) % OWNERS;
      if (reached >> to & 1u) store_packet((uint4*)(x.step.memory[to] + x.at.records) + to_word, word, last);
    }
  }
}

// Sends all owners the slots that this lane's rows choose, and then their weights; it is block `block` of
// `choice_senders`. Opens the step once its first loads are under way.
template <class Open>
DEVICE void send_choices(const Exchange& x, int block, int choice_senders, Open open) {
  const int rows = x.own_rows(), words = SLOT_WORDS(rows), begin = (words + 31) / 32 * 32;
  const int end = begin + rows * WEIGHT_WORDS, size = x.here.sliced ? x.here.stride : OWNERS * x.here.stride;
  u32 three[3];
  auto fetch = [&](int i) {
#pragma unroll
    for (int j = 0; j < 3; ++j) three[j] = i < begin ? NOWHERE * 0x10001u : 0u;
    if (i < words) {
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        const int slot = 6 * i + j < rows * TOP_K ? x.mine.slots[6 * i + j] : -1;
        if ((u32)slot < (u32)size) three[j / 2] ^= (u32)(slot ^ NOWHERE) << 16 * (j % 2);
      }
    } else if (i >= begin && i < end) {
      const int row = (i - begin) / WEIGHT_WORDS, k = (i - begin) % WEIGHT_WORDS * 3;
#pragma unroll
      for (int j = 0; j < 3; ++j)
        if (k + j < TOP_K) three[j] = __float_as_uint(x.mine.weights[(u64)row * TOP_K + k + j]);
    }
  };
  int i = (threadIdx.x / 32 * choice_senders + block) * 32 + threadIdx.x % 32;
  fetch(i);
  open();
  const u64 choices = x.at.choices + x.mine.number * x.at.lane_words * 16;
  const u64 weights = x.at.weights + x.room(x.mine.number, 0) * WEIGHT_WORDS * 16;
  for (; i < end; i += choice_senders * THREADS) {
    const uint4 word = checked(three[0], three[1], three[2], x.step.sequence);
    const u64 to_word = i < begin ? choices + 16 * (u64)i : weights + 16 * (u64)(i - begin);
#pragma unroll
    for (int to = 0; to < OWNERS; ++to)
      if (x.reaches(to) && (i < words || i >= begin)) store_whole((u8*)x.step.memory[to] + to_word, word);
    if (i + choice_senders * THREADS < end) fetch(i + choice_senders * THREADS);
  }
}

// Sends the rows of sending block `block`: each of its teams makes and stores a row at a time. Rows go in the order in
// which reading blocks take them up: the first of each stretch, then the second. Opens the step once the first loads are
// under way. Returns how many copies a team sent to other members.
template <class Open>
DEVICE u32 send_rows(const Exchange& x, const Division& d, int block, u8* records, Open open) {
  const int warp_thread = threadIdx.x % 32, warps = WARPS >> d.groups_log2, own_rows = x.own_rows();
  const Team team{(int)threadIdx.x / 32 & warps - 1, warps};
  const int group = threadIdx.x / 32 >> WARPS_LOG2 - d.groups_log2;
  const int before = x.lanes.before(x.mine.number);
  int first = before, stretches = own_rows;
  if (d.stretch > 1) first = before / d.stretch, stretches = (before + own_rows - 1) / d.stretch - first + 1;
  int turn = (block << d.groups_log2) + group, row = -1, slot = -1;
  Piece piece;
  auto load_next = [&] {  // row: -1 behind the last
    row = -1;
#pragma unroll 1
    for (; row < 0 && turn < stretches * d.stretch; turn += d.senders << d.groups_log2) {
      row = d.stretch > 1 ? (first + turn % stretches) * d.stretch + turn / stretches - before : turn;
      if (row >= own_rows) row = -1;
    }
    if (row < 0) return;
    piece.load(x.mine.rows + (u64)row * x.mine.row_bytes, team.thread());
    slot = warp_thread < TOP_K ? x.mine.slots[(u64)row * TOP_K + warp_thread] : -1;
  };
  load_next();
  open();
  u8* const record = records + group * RECORD_BYTES;
  auto sync = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(32 * warps) : "memory"); };
  u32 copies = 0;
#pragma unroll 1
  while (row >= 0) {
    const int t = row;
    const u32 reached = __reduce_or_sync(WHOLE_WARP, x.here.holders(slot)) & x.step.owners;
    make_record(piece, x.mine.rows + (u64)t * x.mine.row_bytes, record, x.mine.factor, team);
    sync();
    load_next();
    send_record(x, record, t, reached, team);
    copies += __popc(reached & ~x.own_place);
    sync();
  }
  return team.thread() == 0 ? copies : 0;
}
