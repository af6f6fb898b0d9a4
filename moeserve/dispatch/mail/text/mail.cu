// Rows from a caller's GPU to an owner's and answers home, over memory that both map. No host is between: whoever
// reads waits, for a bounded time, for the tag of what it reads.
//
// A *line* of 32 bytes for each block says that the block's share is there. Whoever writes a step of `count` rows divides
// it among `blocks_of(count)` blocks. Where it is read by a few blocks, each waits for all lines; where by many, one
// block waits in their place, and they divide the step as it was written. `memory.cu` and the structs of arguments
// precede this text.
//
// A hop is a chain of latencies: what does not depend on one another is asked for at once, before anything is waited for.

struct __align__(32) Line {
  u64 tag;  // written last
  u32 count;
  u32 first, second, third;  // of a mailbox: layer, kind; of answers: status, epoch, version
  u32 unused[2];
};

// Words of a caller's table, and of an owner's state of a lane. Steps and tickets: one word a stage.
enum { MAILBOX, ANSWERS, NUMBER, PATIENCE, ENDED, ABORT, MIRROR, TAKEN, EPOCH, VERSION, AGREED, LEAST, TOOK, READ, DONE, OWN, STEPS = 16, TICKETS = 24 };
enum { LATE = 2, LOST = 3, REFUSED = 5 };  // statuses of a pass
enum { MISFIT = 64 };                      // the step has more rows than were launched for: it is to be launched anew
enum { YIELD = 2 };  // of the host's word: others want the device, and what waits is launched anew
enum { HEADER_TAG, HEADER_LAYER, HEADER_STAGE, HEADER_COUNT, HEADER_KIND };

#define WARP 32
#define LANE_WORDS 32 // of a table, or a state
#define SHARE 896    // 16-byte words of rows for which a block more pays
#define POLLS 64     // of a tag, between two looks at the host's word, which is read over PCIe; a block's first one looks
#define LONGEST_POST 1000000000  // nanoseconds
#define AT_ONCE 4    // words that a thread asks for before it waits for the first

DEVICE u64 load_acquire(const u64* at) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

DEVICE void store_release(u64* at, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Past the first cache, which does not see what other GPUs write.
DEVICE uint4 load_fresh(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

DEVICE u32 load_fresh(const u32* at) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}

// Has bytes come to the second cache, which the weights of the step before have passed through. All threads of a grid call it.
DEVICE void ask_for(const u8* from, long bytes) {
  for (long at = ((long)blockIdx.x * blockDim.x + threadIdx.x) * 128; at < bytes; at += (long)gridDim.x * blockDim.x * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

// A word of a table or a state, as other kernels that run now leave it.
DEVICE u64 word(const u64* words, int at) { return *(const volatile u64*)(words + at); }

DEVICE int blocks_of(u32 count, int row_words, int most) {
  long wanted = (long)count * row_words / SHARE;
  return wanted < 1 ? 1 : wanted > most ? most : (int)wanted;
}

// The tag of a step of pass `number`, as `tag_of` in mailbox.py.
DEVICE u64 tag_of(u64 number, u64 steps) { return number << 32 | (steps % 0xffffffffull + 1); }

// What was written before by kernels of this stream is there; and the next one may begin, which waits likewise.
DEVICE void await_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void begin_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A block's share of rows. The first words of each thread are asked for when this is made, and waited for when they are
// stored.
struct Copy {
  const uint4* from;
  long at, last;
  uint4 found[AT_ONCE];

  DEVICE Copy(const uint4* from, long words, int block, int blocks)
      : from(from), at(words * block / blocks + threadIdx.x), last(words * (block + 1) / blocks) {
    load();
  }

  DEVICE void load() {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (at + i * blockDim.x < last) found[i] = load_fresh(from + at + i * blockDim.x);
  }

  DEVICE void store(uint4* to) {
    while (at < last) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (at + i * blockDim.x < last) to[at + i * blockDim.x] = found[i];
      at += AT_ONCE * blockDim.x;
      load();
    }
  }
};

DEVICE void copy_share(const uint4* from, uint4* to, long words, int block, int blocks) {
  Copy(from, words, block, blocks).store(to);
}

// A block's share of ids and weights, or of logits alone. The first word of each thread is asked for when this is made,
// and waited for when it is stored.
struct Routes {
  const u32 *ids, *weights;  // without weights `ids` are logits
  long first, last;
  u32 id, weight;

  DEVICE Routes(const u32* ids, const u32* weights, long words, int block, int blocks)
      : ids(ids), weights(weights), first(words * block / blocks + threadIdx.x), last(words * (block + 1) / blocks) {
    load(first);
  }

  DEVICE void load(long at) {
    if (at >= last) return;
    id = load_fresh(ids + at);
    if (weights) weight = load_fresh(weights + at);
  }

  // Stores all of them; `known` says of a word of `ids` what is stored.
  template <class Known>
  DEVICE void store(u32* to_ids, u32* to_weights, Known known) {
    for (long at = first; at < last; at += blockDim.x) {
      if (at != first) load(at);
      to_ids[at] = known(id);
      if (weights) to_weights[at] = weight;
    }
  }
};

// Notes how a pass has ended, where it had not.
DEVICE void note_end(u64* words, u64 status) { atomicCAS(words + ENDED, 0ull, status); }

// Waits until the post before, which runs and waits for nobody, has read what it gives, and whether the pass had ended.
DEVICE void await_read(u64* words, u64 took) {
  const u64 began = nanoseconds();
  while (word(words, READ) < took)
    if (nanoseconds() - began > LONGEST_POST) note_end(words, LOST);  // and it waits: what is read may not be written
}

// Notes how a pass has ended behind the post of the step that was taken as number `took`, which may run.
DEVICE void note_end(u64* words, u64 status, u64 took) {
  await_read(words, took);
  note_end(words, status);
}

// Waits for a line's tag, unless the pass has ended or is aborted by the host. One thread asks. `took`: steps that were taken
// before, of a take that begins beside a post; 0 elsewhere.
DEVICE bool await_tag(const Line* line, u64 tag, u64* words, u64 late, u64 took = 0) {
  const u64 began = nanoseconds();
  const u32* abort = (const u32*)words[ABORT];
  for (u32 polls = 1; load_acquire(&line->tag) != tag; ++polls) {
    if (polls % POLLS && (polls > 1 || threadIdx.x)) continue;
    if (word(words, ENDED)) return false;
    const u32 said = abort ? load_relaxed(abort) : 0;
    if (said) {
      note_end(words, said == YIELD ? MISFIT : LOST, took);
      return false;
    }
    if (nanoseconds() - began <= words[PATIENCE]) continue;
    note_end(words, late, took);
    return false;
  }
  return true;
}

// The last of so many blocks counts the step; whether this is it. All threads of a block have read the count, `steps`, before
// one of them calls this.
DEVICE bool count_step(u64* words, int stage, u64 steps, int blocks) {
  if (blocks > 1) {
    __threadfence();  // whoever counts last may copy all words
    if ((u32)atomicAdd(words + TICKETS + stage, 1ull) != blocks - 1) return false;
    words[TICKETS + stage] = 0;
  }
  words[STEPS + stage] = steps + 1;
  return true;
}

#if WIRE == WIRE_FP8_GROUP128
#define MAIL_ROW_BYTES(args) RECORD_BYTES  // of a row in the mailbox
#define GROUP_PIECES 8  // of 16 columns, that have a scale
#define ROW_GROUPS (HIDDEN / 128)

// Which pieces of rows are a block's: whole groups.
struct Share {
  long first, last;
  DEVICE Share(long rows, int block, int blocks)
      : first(rows * ROW_GROUPS * block / blocks * GROUP_PIECES),
        last(rows * ROW_GROUPS * (block + 1) / blocks * GROUP_PIECES) {}
};

// Rounds rows to records, which lie one after another.
DEVICE void send_rows(const uint4* from, u8* to, long rows, int, int block, int blocks) {
  const Share share(rows, block, blocks);
  for (long at = share.first + threadIdx.x; at - threadIdx.x % 32 < share.last; at += blockDim.x) {
    const bool valid = at < share.last;
    Piece piece;
#pragma unroll
    for (int i = 0; i < PIECE_WORDS; ++i)
      piece.words[i] = valid ? load_fresh(from + at * PIECE_WORDS + i) : make_uint4(0u, 0u, 0u, 0u);
    float x[16];
    widen_piece(piece, x);
    encode_columns(x, (int)(at % PIECES), valid, to + at / PIECES * RECORD_BYTES, 1.f);
  }
}

// Four codes times their scale, in two pairs of 16 bits.
DEVICE uint2 widen_codes(u32 codes, float scale) {
  float x[4];
  e4m3_values((u16)codes, x[0], x[1]);
  e4m3_values((u16)(codes >> 16), x[2], x[3]);
  return make_uint2(narrow(__fmul_rn(x[0], scale), __fmul_rn(x[1], scale)),
                    narrow(__fmul_rn(x[2], scale), __fmul_rn(x[3], scale)));
}

// Records as rows again: what rounds them once more finds the same scales and codes (bfloat16 holds a group's largest
// element, from which the scale follows, and every other to far less than half a code's distance).
DEVICE void take_rows(const u8* from, uint4* to, long rows, int, int block, int blocks) {
  const Share share(rows, block, blocks);
  for (long base = share.first + threadIdx.x; base < share.last; base += AT_ONCE * blockDim.x) {
    uint4 codes[AT_ONCE];
    u32 scales[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const long at = base + i * blockDim.x;
      if (at >= share.last) continue;
      const u8* record = from + at / PIECES * RECORD_BYTES;
      codes[i] = load_fresh((const uint4*)record + at % PIECES);
      scales[i] = load_fresh((const u32*)(record + PART1_AT) + at % PIECES / GROUP_PIECES);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const long at = base + i * blockDim.x;
      if (at >= share.last) continue;
      const float scale = from_bits(scales[i]);
      const uint2 a = widen_codes(codes[i].x, scale), b = widen_codes(codes[i].y, scale);
      const uint2 c = widen_codes(codes[i].z, scale), d = widen_codes(codes[i].w, scale);
      to[2 * at] = make_uint4(a.x, a.y, b.x, b.y);
      to[2 * at + 1] = make_uint4(c.x, c.y, d.x, d.y);
    }
  }
}
#else
#define MAIL_ROW_BYTES(args) (args.row_words * 16l)

DEVICE void send_rows(const uint4* from, u8* to, long rows, int row_words, int block, int blocks) {
  copy_share(from, (uint4*)to, rows * row_words, block, blocks);
}

DEVICE void take_rows(const u8* from, uint4* to, long rows, int row_words, int block, int blocks) {
  copy_share((const uint4*)from, to, rows * row_words, block, blocks);
}
#endif

// -- the caller's -------------------------------------------------------------------------------------------

// Brings `count` rows of `layer` into the mailbox, by so many blocks. Whether the pass had ended is read once: a fetch beside
// it may end the pass, and then nobody wants what some threads bring.
template <class Rows>
DEVICE void bring(const Rows& args, int block, int blocks, u64 number, u64 steps, u64 ended) {
  u64* words = args.table;
  const u64 mirror = words[MIRROR];
  u8* box = (u8*)words[MAILBOX];
  Routes routes(args.route, args.weights, (long)args.count * args.route_words, block, blocks);
  if (!ended) {
    send_rows(args.hidden, box + args.hidden_at, args.count, args.row_words, block, blocks);
    routes.store((u32*)(box + args.route_at), (u32*)(box + args.weights_at), [](u32 id) { return id; });
  }
  if (!__syncthreads_and(!ended)) return;  // the release below is of what all threads of the block have written
  const u64 tag = tag_of(number, steps);
  if (threadIdx.x == 0) {
    Line* line = (Line*)(box + args.lines_at) + block;
    store_relaxed(&line->count, args.count);
    store_relaxed(&line->first, args.layer);
    store_relaxed(&line->second, args.kind);
    store_release(&line->tag, tag);
  } else if (threadIdx.x == WARP && block == 0 && mirror) {  // beside it: a release takes a microsecond or two
    volatile u64* header = (volatile u64*)((u8*)mirror + args.header_at);  // for the owner's host
    header[HEADER_LAYER] = args.layer;
    header[HEADER_STAGE] = args.stage;
    header[HEADER_COUNT] = args.count;
    header[HEADER_KIND] = args.kind;
    store_release((u64*)header + HEADER_TAG, tag);
  }
}

// The answer to a stage's rows, which was written by `lines` blocks.
struct Answer {
  u64* words;
  uint4* out;
  u64 lines_at, rows_at;
  int stage, count, row_words, lines;
};

// Waits for an answer and stores it, by so many blocks; `awaited`: another kernel has waited for all but the block's own line.
// What has no answer is filled with zeros, and ENDED says why. `beside`: it began beside what was launched before, which may
// use `out` until it is over.
DEVICE void fetch(const Answer& of, int block, int blocks, bool awaited, bool beside) {
  u64* words = of.words;
  const u64 steps = word(words, STEPS + of.stage), tag = tag_of(words[NUMBER], steps);
  const u8* answers = (const u8*)words[ANSWERS];
  const int lines = awaited ? 1 : of.lines;  // that this block looks at
  bool there = true;
  if (threadIdx.x < lines) {
    const Line* line = (const Line*)(answers + of.lines_at) + (awaited ? block : threadIdx.x);
    there = !word(words, ENDED) && await_tag(line, tag, words, LOST);
    if (const u32 status = there ? load_relaxed(&line->first) : 0u) {
      note_end(words, status);
      there = false;
    }
  }
  there = __syncthreads_and(there);
  const long all = (long)of.count * of.row_words;
  Copy answer((const uint4*)(answers + of.rows_at), there ? all : 0, block, blocks);
  if (beside) await_launch();
  if (threadIdx.x == 0) count_step(words, of.stage, steps, blocks);
  if (there) {
    answer.store(of.out);
  } else {
    const long first = all * block / blocks, last = all * (block + 1) / blocks;
    for (long at = first + threadIdx.x; at < last; at += blockDim.x) of.out[at] = make_uint4(0, 0, 0, 0);
  }
}

// A fetch that comes next begins beside it.
extern "C" __global__ void mail_bring(const __grid_constant__ BringArguments args) {
  const u64* words = args.table;
  const u64 number = words[NUMBER], steps = words[STEPS + args.stage], ended = words[ENDED];
  begin_next();
  bring(args, blockIdx.x, gridDim.x, number, steps, ended);
}

extern "C" __global__ void mail_fetch(const __grid_constant__ FetchArguments args) {
  if (args.awaited) await_launch();
  const Answer of = {args.table, args.out, args.lines_at, args.rows_at, args.stage, args.count, args.row_words, args.lines};
  fetch(of, blockIdx.x, gridDim.x, args.awaited, !args.awaited);
}

// Brings rows by its first `bringing` blocks, and fetches the answer of another stage by the others: neither waits for what the
// other asks for.
extern "C" __global__ void mail_exchange(const __grid_constant__ ExchangeArguments args) {
  u64* words = args.table;
  const int block = blockIdx.x;
  if (block < args.bringing) {
    bring(args, block, args.bringing, words[NUMBER], words[STEPS + args.stage], word(words, ENDED));
    return;
  }
  const Answer of = {words, args.out, args.answer_lines_at, args.answer_at, args.answer_stage, args.answer_count, args.row_words,
                     args.lines};
  fetch(of, block - args.bringing, gridDim.x - args.bringing, false, false);
}

// -- the owner's --------------------------------------------------------------------------------------------

// The step that AGREED is of, in its upper half: another one than that of the step before. A pass begins with 0.
DEVICE u64 agreed_key(u64 tag, int stage) { return tag << 35 | (u64)stage << 32; }

// How many rows a step has, for all blocks of a take alike: as many as the first of them has read. The word has one more,
// and is in memory that the caller has not mapped.
DEVICE u32 agree(u64* words, u64 key, u32 count) {
  const u64 mine = key | (count + 1);
  for (u64 before = word(words, AGREED);;) {
    if ((before & ~0xffffffffull) == key && (u32)before) return (u32)before - 1;
    const u64 found = atomicCAS(words + AGREED, before, mine);
    if (found == before) return count;
    before = found;
  }
}

// Waits until all posts before have ended, for which no take had to wait that began beside one.
DEVICE void await_posts(u64* words, u64 took) {
  const u64 began = nanoseconds();
  while (load_acquire(words + DONE) + 1 < took)
    if (nanoseconds() - began > LONGEST_POST) return note_end(words, LOST);
}

// Takes the rows of a step of `layer` into a room of `padded` rows; those that are none are not valid.
//
// The room still holds what another caller's step left there, and the caller may write its lines anew at any time, so
// that two reads of a count may differ. It is therefore agreed upon once: by the kernel that waits before many blocks,
// or by the first block that has read it. From it alone follow which rows are valid, how they are divided, and how many
// are posted. So each valid row has been written by this step; where a block has not come to its share, it has noted
// that the pass has ended, and nothing is posted. Rows, ids, weights and logits may change under a reader, too; whatever
// is read is the caller's own.
//
// A step that was launched before anybody knew of its rows has in LEAST how few there may be, for as many as were
// launched for. Others are launched anew, and so are those of another kind, or layer: the run before had fewer steps.
//
// Where it follows a post of another stage (`early`) it begins beside that: all before the post is over then, so that
// nobody reads the room any more. What the post reads or writes itself (TAKEN, ENDED) waits until the post has read all that
// it gives: the kernels behind this one run while it is on its way.
extern "C" __global__ void mail_take(const __grid_constant__ TakeArguments args) {
  u64* words = args.state;
  if (!args.early || args.awaited) await_launch();
  const u64 tag = tag_of(words[NUMBER], word(words, STEPS + args.stage)), least = word(words, LEAST);
  const u64 took = word(words, TOOK), behind = args.early ? took : 0;
  const u8* box = (const u8*)words[MAILBOX];
  const Line* lines = (const Line*)(box + args.lines_at);
  if (!args.awaited) {  // rows are likely there
    const long most = min(args.padded, args.most);
    ask_for(box + args.hidden_at, most * MAIL_ROW_BYTES(args));
    ask_for(box + args.route_at, most * args.route_words * 4);
    if (args.weights) ask_for(box + args.weights_at, most * args.route_words * 4);
  }
  __shared__ u32 rows;
  const int block = blockIdx.x;
  u32 layer = 0, kind = 0, count_there = 0;
  bool began = false;
  if (threadIdx.x == 0) {
    rows = 0;
    began = !word(words, ENDED) && (args.awaited || await_tag(lines, tag, words, LATE, behind));
    layer = load_relaxed(&lines->first), kind = load_relaxed(&lines->second);
    count_there = load_relaxed(&lines->count);
  }
  if (threadIdx.x == 0) {
    if (began) {
      u32 count = count_there;
      if (args.awaited) count = (u32)word(words, AGREED) - 1;
      else if (gridDim.x > 1) count = agree(words, agreed_key(tag, args.stage), count);
      const bool other = layer != (u32)args.layer || kind != (u32)args.kind;
      if ((other && !least) || count > (u32)args.most) {
        note_end(words, REFUSED, behind);
      } else if (other || count > (u32)args.padded || count < least) {
        note_end(words, MISFIT, behind);
      } else {
        rows = count;
        if (block == 0 && least) words[LEAST] = 0;  // of the run's first step; another block that reads 0 agrees
      }
    }
  }
  __syncthreads();
  const u32 count = rows;
  const int lines_there = blocks_of(count, args.row_words, args.blocks);
  bool there = count > 0;
  if (there && !args.awaited && threadIdx.x && threadIdx.x < lines_there)
    there = await_tag(lines + threadIdx.x, tag, words, LATE, behind);
  there = __syncthreads_and(there);
  const int blocks = args.awaited ? lines_there : gridDim.x;
  if (there && block < blocks) {
    Routes routes((const u32*)(box + args.route_at), args.weights ? (const u32*)(box + args.weights_at) : nullptr,
                  (long)count * args.route_words, block, blocks);
    take_rows(box + args.hidden_at, args.hidden, count, args.row_words, block, blocks);
    const u32 experts = args.weights ? (u32)args.experts : 0xffffffffu;
    routes.store(args.route, args.weights, [&](u32 id) {
      const bool known = !args.weights || id + 1 <= experts;  // -1: none
      if (!known) note_end(words, REFUSED, behind);  // and nobody computes it
      return known ? id : 0xffffffffu;
    });
  }
  if (block == 0)
    for (int at = threadIdx.x; at < args.padded; at += blockDim.x) args.valid[at] = at < count;
  if (block || threadIdx.x) return;
  if (args.early) await_read(words, took);
  words[TAKEN] = count;
  words[TOOK] = took + 1;
}

// Whether a member is waited for no more whose sums the answer should have. Each of the first 64 threads looks at a place.
DEVICE bool lacks_sums(const PostArguments& args) {
  const int place = threadIdx.x;
  return args.living && place < 64 && (args.places >> place & 1) && !args.living[place];
}

// Adds the rows that each slot's expert computed in this step to what it did before. By one block. The first of each
// thread are asked for when this is made.
struct Tally {
  u64 sum;

  DEVICE Tally(const PostArguments& args) : sum(of(args, threadIdx.x)) {}

  static DEVICE u64 of(const PostArguments& args, int slot) {
    return slot < args.slots ? args.totals[slot] + args.counts[slot] : 0;
  }

  DEVICE void store(const PostArguments& args) {
    for (int slot = threadIdx.x; slot < args.slots; slot += blockDim.x, sum = of(args, slot)) args.totals[slot] = sum;
  }
};

DEVICE void note_read(u64* words, u64 took) { *(volatile u64*)(words + READ) = took; }

// A block of a post has read its share, and whether the pass had ended; the last one notes that all is read. All blocks come
// here, once.
DEVICE void count_read(u64* words, int stage, u64 took) {
  if (gridDim.x > 1 && (atomicAdd(words + TICKETS + stage, 1ull << 32) >> 32) != gridDim.x - 1) return;
  note_read(words, took);
}

DEVICE void note_post(u64* words, u64 took) {
  note_read(words, took);
  store_release(words + DONE, took);
}

// Brings the words of a run that has ended to its lane's own state and to the host, by one block.
DEVICE void bring_back(const u64* words) {
  if (threadIdx.x >= LANE_WORDS) return;
  const u64 value = word(words, threadIdx.x);
  ((u64*)word(words, OWN))[threadIdx.x] = value;
  ((volatile u64*)word(words, MIRROR))[threadIdx.x] = value;
}

// Gives the answer of the step that was taken last to its caller, and counts the step and its rows. Behind the last step of
// a run it brings the words back.
//
// READ says that whatever is launched behind it may write what it reads, DONE that it is over; both by how many steps
// were taken (TOOK), since a take that begins beside a post may end before it. A take begins as soon as all before the post is
// over: it asks for what it needs meanwhile, and writes nothing that the post reads.
extern "C" __global__ void mail_post(const __grid_constant__ PostArguments args) {
  u64* words = args.state;
  await_launch();
  begin_next();
  Tally counted(args);
  if (args.living && __syncthreads_or(lacks_sums(args))) {
    if (threadIdx.x == 0) note_end(words, LOST);
    __syncthreads();
  }
  const u64 took = word(words, TOOK);
  __shared__ u64 seen;  // once for all threads: another block may end the pass meanwhile
  if (threadIdx.x == 0) {
    u64 ended = word(words, ENDED);
    if (word(words, DONE) + 1 < took) {
      await_posts(words, took);
      ended = word(words, ENDED);
    }
    seen = ended;
  }
  const u64 number = words[NUMBER];
  const u32 count = (u32)word(words, TAKEN), epoch = (u32)words[EPOCH], version = (u32)words[VERSION];
  u8* answers = (u8*)words[ANSWERS];
  __syncthreads();
  const u64 ended = seen, steps = word(words, STEPS + args.stage), tag = tag_of(number, steps);
  const int blocks = ended ? args.blocks : blocks_of(count, args.row_words, args.blocks);
  if (blockIdx.x == 0) counted.store(args);
  if (ended == MISFIT) {
    if (blockIdx.x) return;
    __syncthreads();
    if (threadIdx.x == 0) note_post(words, took);
    __syncthreads();
    if (args.last) bring_back(words);
    return;
  }
  if (!ended && blockIdx.x >= blocks && threadIdx.x == 0) count_read(words, args.stage, took);  // it has no share
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {  // more than once where the pass has ended
    if (!ended)
      copy_share(args.answer, (uint4*)(answers + args.rows_at), (long)count * args.row_words, block, blocks);
    __syncthreads();  // the release below is of what all threads of the block have written
    if (threadIdx.x) continue;
    if (!ended) count_read(words, args.stage, took);
    Line* line = (Line*)(answers + args.lines_at) + block;
    store_relaxed(&line->count, count);
    store_relaxed(&line->first, (u32)ended);
    store_relaxed(&line->second, epoch);
    store_relaxed(&line->third, version);
    store_release(&line->tag, tag);
  }
  __syncthreads();
  bool counted_last = false;
  if (threadIdx.x == 0 && (counted_last = count_step(words, args.stage, steps, gridDim.x))) note_post(words, took);
  if (args.last && __syncthreads_or(counted_last)) bring_back(words);
}

// -- both ---------------------------------------------------------------------------------------------------

// Begins a run: the words of the lane whose run it is come to those that all kernels of the owner read, and with them
// where the host is told of them in the end. `again`: steps before it were left, whose end is not the pass's. Where a launch
// has failed behind a take, the post before that may not be over, which writes to those that are copied over.
extern "C" __global__ void mail_words(const __grid_constant__ WordsArguments args) {
  if (threadIdx.x == 0) await_posts(args.to, word(args.to, TOOK));
  __syncthreads();
  u64 value = args.from[threadIdx.x];
  if (threadIdx.x == MIRROR) value = args.host;
  else if (threadIdx.x == LEAST && (args.least || args.again)) value = args.least;
  else if (threadIdx.x == ENDED && args.again) value = 0;
  args.to[threadIdx.x] = value;
}

// One block waits for all lines of a step, before a kernel of many blocks is launched: waiting takes a stream and no
// multiprocessors. `box`: MAILBOX or ANSWERS. Before a take it says how many rows the step has, as `agree` does. The
// kernel behind it may begin as soon as the first line is there, since the others are on their way then, and waits until this
// one is over; before a fetch until all else is, too. `early`: as of a take.
extern "C" __global__ void mail_await(const __grid_constant__ AwaitArguments args) {
  u64* words = args.words;
  if (!args.early) await_launch();
  const u64 behind = args.early && args.box == MAILBOX ? word(words, TOOK) : 0;
  const u64 tag = tag_of(words[NUMBER], word(words, STEPS + args.stage));
  const Line* lines = (const Line*)((const u8*)words[args.box] + args.lines_at);
  __shared__ int blocks;
  u64 agreed = 0;
  if (threadIdx.x == 0) {
    blocks = 0;
    if (!word(words, ENDED) && await_tag(lines, tag, words, args.late, behind)) {
      const u32 count = load_relaxed(&lines->count);
      agreed = agreed_key(tag, args.stage) | (count + 1);
      blocks = blocks_of(count, args.row_words, args.blocks);
    }
  }
  __syncthreads();
  begin_next();
  if (threadIdx.x && threadIdx.x < blocks) await_tag(lines + threadIdx.x, tag, words, args.late, behind);
  if (args.early && args.box == ANSWERS) await_launch();
  if (agreed && args.box == MAILBOX) words[AGREED] = agreed;
}
