// Rows from a caller's GPU to an owner's and answers home, over memory that both map. No host is between: whoever
// reads waits, for a bounded time, for the tag of what it reads.
//
// A *line* of 32 bytes for each block says that the block's share is there. Whoever writes a step of `count` rows divides
// it among `blocks_of(count)` blocks. Where it is read by a few blocks, each waits for all lines. Where by many, one block
// waits in their place, and where others want the multiprocessors, too; the readers divide the step among as many as wrote
// it, or as there are. `memory.cu` and the structs of arguments precede this text, `caller.cu` and `owner.cu` follow it.
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
enum { HEADER_TAG, HEADER_LAYER, HEADER_STAGE, HEADER_COUNT, HEADER_KIND, HEADER_FILLED, HEADER_BUFFER };
enum { ANSWER_TAG, ANSWER_EPOCH, ANSWER_VERSION, ANSWER_FILLED };  // words of an answer's header in host memory

#define WARP 32
#define LANE_WORDS 32 // of a table, or a state
#define SHARE 896    // 16-byte words of rows for which a block more pays
#define POLLS 64     // of a tag, between two looks at the host's word, which is read over PCIe; a block's first one looks
#define HOST_POLLS 8 // likewise, where the tag is read over PCIe itself
#define LONGEST_POST 1000000000  // nanoseconds
#define MOST_SAID 0x7fffffffu    // of a number in a header of host memory; larger ones are as wrong
#define PARTS 4      // of an answer in host memory that is told of part by part; PART_BITS of each have to fit in a ticket
#define PARTED 524288 // 16-byte words of an answer from which on it is
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

// What a take leaves to the post of its step, of the two that may be under way: rows, and above them the buffer of the answer.
// No lane has memory for so many rows.
#define BUFFER_BIT 28
DEVICE volatile u32* taken_at(u64* words, u64 took) { return (volatile u32*)(words + TAKEN) + (took & 1); }
DEVICE u32 rows_of(u32 taken) { return taken & ((1u << BUFFER_BIT) - 1); }

// READ of a state, of the step that was taken as number `took`. Its kernels have ended, so that those of the next step may write
// what they worked in; and its post has read all that it gives, too.
DEVICE u64 over_at(u64 took) { return 2 * took - 1; }
DEVICE u64 read_at(u64 took) { return 2 * took; }

// Waits until the kernels of the step before have ended, beside whose post a take has begun. As with a launch that waits for
// the one before, they have bounds of their own. One thread asks.
DEVICE void await_over(u64* words, u64 took) {
  while (word(words, READ) < over_at(took)) continue;
}

// Waits until the post before, which waits for nobody once its step is over, has read what it gives, and whether the pass had
// ended. `took`: 0 where no post is under way.
DEVICE void await_read(u64* words, u64 took) {
  if (!took) return;
  await_over(words, took);
  const u64 began = nanoseconds();
  while (word(words, READ) < read_at(took))
    if (nanoseconds() - began > LONGEST_POST) note_end(words, LOST);  // and it waits: what is read may not be written
}

// Notes how a pass has ended behind the post of the step that was taken as number `took`, which may run.
DEVICE void note_end(u64* words, u64 status, u64 took) {
  await_read(words, took);
  note_end(words, status);
}

// Waits until `there` is, unless the pass has ended or is aborted by the host. One thread asks. `took`: steps that were taken
// before, of a take that begins beside a post; 0 elsewhere.
template <u32 LOOK, class There>
DEVICE bool await(There there, u64* words, u64 late, u64 took) {
  const u64 began = nanoseconds();
  const u32* abort = (const u32*)words[ABORT];
  for (u32 polls = 1; !there(); ++polls) {
    if (polls % LOOK && (polls > 1 || threadIdx.x)) continue;
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

// Waits for a line's tag, likewise.
template <u32 LOOK = POLLS>
DEVICE bool await_tag(const Line* line, u64 tag, u64* words, u64 late, u64 took = 0) {
  return await<LOOK>([&] { return load_acquire(&line->tag) == tag; }, words, late, took);
}

// A stage's ticket in a pass: blocks that have counted the step, blocks of a post that have read their shares, and for each
// part of an answer those that have written theirs.
#define READ_BIT 16
#define PART_BIT 32
#define PART_BITS 8
DEVICE u32 field(u64 ticket, int bit, int bits) { return (u32)(ticket >> bit) & ((1u << bits) - 1); }

// The last of so many blocks counts the step; whether this is it. All threads of a block have read the count, `steps`, before
// one of them calls this. `read`: how many blocks of a post have counted what they read.
DEVICE bool count_step(u64* words, int stage, u64 steps, int blocks, u32* read = nullptr) {
  if (blocks > 1) {
    __threadfence();  // whoever counts last may copy all words
    const u64 before = atomicAdd(words + TICKETS + stage, 1ull);
    if (field(before, 0, READ_BIT) != blocks - 1) return false;
    if (read) *read = field(before, READ_BIT, PART_BIT - READ_BIT);
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

// Rounds a block's share of rows to records, which lie one after another. The first piece of each thread is asked for when
// this is made, and waited for when it is stored.
struct Sending {
  const uint4* from;
  Share share;
  long at;
  Piece piece;

  DEVICE Sending(const uint4* from, long rows, int, int block, int blocks)
      : from(from), share(rows, block, blocks), at(share.first + threadIdx.x) {
    load();
  }

  DEVICE void load() {
#pragma unroll
    for (int i = 0; i < PIECE_WORDS; ++i)
      piece.words[i] = at < share.last ? load_fresh(from + at * PIECE_WORDS + i) : make_uint4(0u, 0u, 0u, 0u);
  }

  DEVICE void store(u8* to) {
    while (at - threadIdx.x % 32 < share.last) {
      float x[16];
      widen_piece(piece, x);
      encode_columns(x, (int)(at % PIECES), at < share.last, to + at / PIECES * RECORD_BYTES, 1.f);
      at += blockDim.x;
      load();
    }
  }
};

// Four codes times their scale, in two pairs of 16 bits.
DEVICE uint2 widen_codes(u32 codes, float scale) {
  float x[4];
  e4m3_values((u16)codes, x[0], x[1]);
  e4m3_values((u16)(codes >> 16), x[2], x[3]);
  return make_uint2(narrow(__fmul_rn(x[0], scale), __fmul_rn(x[1], scale)),
                    narrow(__fmul_rn(x[2], scale), __fmul_rn(x[3], scale)));
}

// A block's share of records, which become rows again: what rounds them once more finds the same scales and codes (bfloat16
// holds a group's largest element, from which the scale follows, and every other to far less than half a code's distance).
// The first pieces of each thread are asked for when this is made, and waited for when they are stored.
struct Taking {
  const u8* from;
  Share share;
  long base;
  uint4 codes[AT_ONCE];
  u32 scales[AT_ONCE];

  DEVICE Taking(const u8* from, long rows, int, int block, int blocks)
      : from(from), share(rows, block, blocks), base(share.first + threadIdx.x) {
    load();
  }

  DEVICE void load() {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const long at = base + i * blockDim.x;
      if (at >= share.last) continue;
      const u8* record = from + at / PIECES * RECORD_BYTES;
      codes[i] = load_fresh((const uint4*)record + at % PIECES);
      scales[i] = load_fresh((const u32*)(record + PART1_AT) + at % PIECES / GROUP_PIECES);
    }
  }

  DEVICE void store(uint4* to) {
    while (base < share.last) {
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
      base += AT_ONCE * blockDim.x;
      load();
    }
  }
};
#else
#define MAIL_ROW_BYTES(args) (args.row_words * 16l)

struct Sending : Copy {
  DEVICE Sending(const uint4* from, long rows, int row_words, int block, int blocks)
      : Copy(from, rows * row_words, block, blocks) {}

  DEVICE void store(u8* to) { Copy::store((uint4*)to); }
};

struct Taking : Copy {
  DEVICE Taking(const u8* from, long rows, int row_words, int block, int blocks)
      : Copy((const uint4*)from, rows * row_words, block, blocks) {}
};
#endif
