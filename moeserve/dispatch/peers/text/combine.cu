// The kernel of a combine; packets.cu precedes it.
//
// A warp makes one packet of a row at a time. The first `homes` blocks work for this lane's own rows, the others
// send partial sums to other lanes and wait for nobody.

#define COMBINE_THREADS 768
#define COMBINE_WARPS (COMBINE_THREADS / 32)
#if SOURCE == 2
#define VECTOR 4  // columns of a word
#else
#define VECTOR 8
#endif
#define ENTRY (HIDDEN / VECTOR)  // words of 16 bytes
#define PARTIAL_PACKETS PACKETS_OF(16 * ENTRY)
#define AT_A_TIME 4  // outputs whose loads are under way at once

DEVICE void add_word(float (&sum)[VECTOR], uint4 word, float weight) {
  const u32 four[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if SOURCE == 2
    sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, from_bits(four[i])));
#else
    float low, high;
    widen(four[i], low, high);
    sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight, low));
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight, high));
#endif
  }
}

// Sums as they travel: rounded to SOURCE.
DEVICE uint4 rounded(const float (&sum)[VECTOR]) {
#if SOURCE == 2
  return make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                    __float_as_uint(sum[3]));
#else
  return make_uint4(narrow(sum[0], sum[1]), narrow(sum[2], sum[3]), narrow(sum[4], sum[5]),
                    narrow(sum[6], sum[7]));
#endif
}

// Where the outputs of one row's choices stand, and their weights: one choice in each thread.
struct Choice {
  int place;
  float weight;
};

DEVICE Choice choice_of(const int* places, const float* place_weights, int g) {
  const int warp_thread = threadIdx.x % 32;
  Choice found{-1, 0.0f};
  if (HAS_OWNER && warp_thread < TOP_K)
    found.place = places[(u64)g * TOP_K + warp_thread], found.weight = place_weights[(u64)g * TOP_K + warp_thread];
  return found;
}

// Which word of a row this thread has in a packet; -1 for none.
DEVICE int word_at(int packet) {
  const int warp_thread = threadIdx.x % 32, at = packet * PACKET_WORDS + warp_thread;
  return warp_thread < PACKET_WORDS && at < ENTRY ? at : -1;
}

// A packet of a row's weighted outputs, in order of choice: loads of the first are begun, and added later.
struct Gather {
  u32 hits;
  uint4 words[AT_A_TIME];

  DEVICE void load(const uint4* outputs, const Choice& choice, int at) {
    u32 left = hits;
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const int from = __shfl_sync(WHOLE_WARP, choice.place, left ? __ffs(left) - 1 : 0);
      if (left && at >= 0) words[i] = outputs[(u64)from * ENTRY + at];
      left &= left - (left ? 1u : 0u);
    }
  }
  DEVICE void begin(const uint4* outputs, const Choice& choice, int packet) {
    hits = __ballot_sync(WHOLE_WARP, choice.place >= 0);
    load(outputs, choice, word_at(packet));
  }
  DEVICE uint4 sum(const uint4* outputs, const Choice& choice, int packet) {
    float total[VECTOR] = {};
    while (hits) {
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        if (!hits) break;
        add_word(total, words[i], __shfl_sync(WHOLE_WARP, choice.weight, __ffs(hits) - 1));
        hits &= hits - 1;
      }
      if (hits) load(outputs, choice, word_at(packet));
    }
    return rounded(total);
  }
};

// A packet of a partial sum that this owner sends.
struct Away {
  int source, row, packet;
  Choice choice;
};

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 1)
    peer_combine(const __grid_constant__ CombineArguments args) {
  __shared__ Step step;
  const int lane_rows = args.lane_rows, homes = args.homes;
  const uint4* const outputs = args.outputs;
  const Lanes lanes(&args.rows_0);
  const Places here{0, args.slots_here, args.stride, 0, args.sliced};
  const int warp = threadIdx.x / 32, warp_thread = threadIdx.x % 32;
  const int lane = HAS_LANE ? args.lane : -1, own_rows = HAS_LANE ? lanes.rows(lane) : 0;
  const u32 own_place = HAS_OWNER ? 1u << args.owner : 0u;
  const Opening opening(args.sums, LANES, args.live, warp == COMBINE_WARPS - 1);
  u32 sequence = 0, spoiled = 0;
  if (warp == COMBINE_WARPS - 1) sequence = *(volatile const u32*)args.sequence, spoiled = *(volatile const u32*)args.spoiled;
  const Watch w = watch(args);
  auto open = [&] {  // to no lane, when what would be sent is spoiled
    if (warp == COMBINE_WARPS - 1) opening.open(step, sequence, spoiled ? ~0u : 0u, args.sums_here, args.parity_bytes);
    __syncthreads();
  };

  if (HAS_OWNER && (int)blockIdx.x >= homes) {
    constexpr int OTHERS = !HAS_LANE ? LANES : LANES > 1 ? LANES - 1 : 1;
    int most = 0;
#pragma unroll
    for (int l = 0; l < LANES; ++l) most = max(most, l == lane ? 0 : lanes.rows(l));
    const int blocks = gridDim.x - homes, stride = blocks * COMBINE_WARPS;
    const int end = most * OTHERS * PARTIAL_PACKETS;
    // A row of every other lane in turn, so that no lane is stored to by all at once, and none waits long.
    auto find = [&](int unit) {
      const int turn = unit / PARTIAL_PACKETS, source = (lane + 1 + turn % OTHERS) % LANES;
      Away found{source, turn / OTHERS, unit % PARTIAL_PACKETS, Choice{-1, 0.0f}};
      if (unit >= end || found.row >= lanes.rows(source)) return found;
      found.choice = choice_of(args.places, args.place_weights, lanes.before(source) + found.row);
      return found;
    };
    int unit = (int)blockIdx.x - homes + blocks * warp;
    Away now = find(unit), next = find(unit + stride);
    Gather gather;
    gather.begin(outputs, now.choice, now.packet);
    u32 sums = 0;
    open();
    for (; unit < end; unit += stride) {
      const Away after = find(unit + 2 * stride);
      const bool goes = gather.hits && (step.lanes >> now.source & 1u);
      const uint4 sum = gather.sum(outputs, now.choice, now.packet);
      gather.begin(outputs, next.choice, next.packet);
      if (goes) {
        sums += now.packet == 0;
        const int last = last_thread<16 * ENTRY>(now.packet);
        const u64 to = ((u64)args.owner * lane_rows + now.row) * PARTIAL_PACKETS + now.packet;
        store_packet((uint4*)step.memory[now.source] + to * PACKET,
                    tagged(sum, step.sequence, last), last);
      }
      now = next, next = after;
    }
    if (warp_thread == 0 && sums) atomicAdd(args.sent + 1, (u64)sums);
    return;
  }

  if (!HAS_LANE) return;
  const int before = lanes.before(lane);
  const int stride = homes * COMBINE_WARPS, end = own_rows * PARTIAL_PACKETS;
  int unit = blockIdx.x + homes * warp;
  auto find = [&](int at) {
    return at < end ? choice_of(args.places, args.place_weights, before + at / PARTIAL_PACKETS) : Choice{-1, 0.0f};
  };
  auto holders_of = [&](int at) {  // of this thread's choice
    return here.holders(at < end && warp_thread < TOP_K ? args.slots[(u64)(at / PARTIAL_PACKETS) * TOP_K + warp_thread] : -1);
  };
  Choice next = find(unit);
  u32 next_holders = holders_of(unit);
  open();
  const u64 owner_words = (u64)lane_rows * PARTIAL_PACKETS * PACKET;
  Gather gather;
  gather.begin(outputs, next, unit % PARTIAL_PACKETS);
  for (; unit < end; unit += stride) {
    const Choice choice = next;
    const int row = unit / PARTIAL_PACKETS, packet = unit % PARTIAL_PACKETS;
    const int last = last_thread<16 * ENTRY>(packet);
    const u32 needed = __reduce_or_sync(WHOLE_WARP, next_holders) & step.owners & ~own_place;
    const uint4* arrived = (const uint4*)step.here + (u64)unit * PACKET;
    uint4 words[OWNERS];
#pragma unroll
    for (int o = 0; o < OWNERS; ++o)
      if (needed >> o & 1u) words[o] = load_packet(arrived + o * owner_words, last);
    next = find(unit + stride), next_holders = holders_of(unit + stride);
    const uint4 own = gather.sum(outputs, choice, packet);
    gather.begin(outputs, next, (unit + stride) % PARTIAL_PACKETS);  // while others' sums are waited for
    u32 missing = needed, gone = 0;
    for (u32 polls = 1, lately = 0;; ++polls) {
#pragma unroll
      for (int o = 0; o < OWNERS; ++o)
        if ((missing >> o & 1u) && is_whole(words[o], step.sequence, last)) missing &= ~(1u << o);
      if (!missing) break;
      const u32 asked = to_ask(missing, lately);
#pragma unroll
      for (int o = 0; o < OWNERS; ++o)
        if (asked >> o & 1u) words[o] = load_packet(arrived + o * owner_words, last);
      lately = missing;
      if (polls % 64) continue;
#pragma unroll 1
      for (int o = 0; o < OWNERS; ++o)
        if ((missing >> o & 1u) && __any_sync(WHOLE_WARP, warp_thread == 0 && is_gone(w, LANES + o, step.sequence)))
          gone |= 1u << o, missing &= ~(1u << o);
    }
    float total[VECTOR] = {};
#pragma unroll
    for (int o = 0; o < OWNERS; ++o) {
      if (own_place >> o & 1u) add_word(total, own, 1.0f);
      if ((needed & ~gone) >> o & 1u) add_word(total, untagged(words[o], last), 1.0f);
    }
    const int at = word_at(packet);
    if (at >= 0) args.answer[(u64)row * ENTRY + at] = rounded(total);
  }
}
