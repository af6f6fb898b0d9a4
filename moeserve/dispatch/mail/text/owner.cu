// The owner's kernels: they take rows and post answers. `mail.cu` precedes this text.

// Rows in host memory (`host`) have one header for all blocks in place of lines, whose tag comes first, too. It lies in
// memory that the caller may write at any time: each word that is used of it is read once, and is a number that fits.
DEVICE u32 said(const Line* header, int at) {
  const u64 value = load_relaxed((const u64*)header + at);
  return value < MOST_SAID ? (u32)value : MOST_SAID;
}

// What a step says of itself, in its first line.
struct Said {
  u64 tag;
  u32 layer, kind, count;
  u32 buffer;  // in which the answer is wanted, of a caller's in host memory
};

// Reads a line as it is. It is the step's whose tag it has.
DEVICE Said read_line(const Line* line, int stage, bool host) {
  Said found = {load_acquire(&line->tag)};
  if (host) {
    const u32 of = said(line, HEADER_STAGE);
    found.buffer = said(line, HEADER_BUFFER);
    found.layer = said(line, HEADER_LAYER), found.kind = said(line, HEADER_KIND), found.count = said(line, HEADER_COUNT);
    if (of != (u32)stage) found.layer = MOST_SAID;  // no layer's
  } else {
    found.layer = load_relaxed(&line->first), found.kind = load_relaxed(&line->second);
    found.count = load_relaxed(&line->count);
  }
  return found;
}

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

// A stage's next step, as a first look finds it.
struct Next {
  u64 tag;     // that the step will have
  Said found;  // what is in its first line
  bool ended;  // the pass had
};

// Looks for a stage's next step, of which `behind` steps of the run were taken before: the post that counted the stage's last
// one is over. 0: all posts are. The tag and the line do not wait for each other: a warp of its own asks for each. All
// threads of a block call it, two warps or more.
DEVICE void look(Next& next, u64* words, u64 number, const Line* line, int stage, u64 behind, bool host) {
  if (threadIdx.x == 0) {
    const u64 ended = word(words, ENDED);  // asked for before anything is waited for
    if (behind) await_posts(words, behind);
    next.tag = tag_of(number, word(words, STEPS + stage));
    next.ended = ended;
  } else if (threadIdx.x == WARP) {
    next.found = read_line(line, stage, host);
  }
  __syncthreads();
}

// Waits until the step is there for which a first look has been; what it says of itself is in `next` then. One thread calls it.
DEVICE bool await_next(Next& next, u64* words, const Line* line, int stage, u64 late, u64 behind, bool host) {
  if (next.ended) return false;
  if (next.found.tag == next.tag) return true;
  const bool there = host ? await_tag<HOST_POLLS>(line, next.tag, words, late, behind)
                          : await_tag(line, next.tag, words, late, behind);
  if (there) next.found = read_line(line, stage, host);
  return there;
}

// Waits until the caller's host has filled so many rows: it may say that a step is there before they are. 0: all are.
DEVICE bool await_filled(const Line* header, long rows, u64* words, u64 behind) {
  const u64* filled = (const u64*)header + HEADER_FILLED;
  return await<HOST_POLLS>([&] {
    const u64 found = load_acquire(filled);
    return !found || found > (u64)rows;
  }, words, LATE, behind);
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
// Where it follows a post of another stage (`early`) it begins beside that, and perhaps beside the kernel before: it looks for
// its rows, and takes them to another room than that of the step before. When it is over, so is that step, and the kernels behind
// this one begin, while the post may still be on its way: what that reads is not theirs, and TAKEN has two halves, of which this
// writes the other. A pass is ended by this (ENDED) when the post has read all that it gives.
//
// `early` is how many steps of the run were taken before. A block may find a place only when the first one, which counts this
// step in TOOK, is over: what all blocks go by is not read from there.
extern "C" __global__ void mail_take(const __grid_constant__ TakeArguments args) {
  u64* words = args.state;
  if (!args.early || args.awaited) await_launch();
  const u64 least = word(words, LEAST), number = words[NUMBER], behind = args.early;
  const u64 took = behind ? behind : word(words, TOOK);
  const u8* box = (const u8*)words[MAILBOX];
  const Line* lines = (const Line*)(box + args.lines_at);
  if (!args.awaited && !args.host) {  // rows are likely there
    const long most = min(args.padded, args.most);
    ask_for(box + args.hidden_at, most * MAIL_ROW_BYTES(args));
    ask_for(box + args.route_at, most * args.route_words * 4);
    if (args.weights) ask_for(box + args.weights_at, most * args.route_words * 4);
  }
  __shared__ u32 rows;
  __shared__ Next next;
  const int block = blockIdx.x;
  look(next, words, number, lines, args.stage, behind, args.host);
  if (threadIdx.x == 0) {
    rows = 0;
    if (args.awaited ? !next.ended : await_next(next, words, lines, args.stage, LATE, behind, args.host)) {
      const Said& found = next.found;
      u32 count = found.count;
      if (args.awaited) count = (u32)word(words, AGREED) - 1;
      else if (gridDim.x > 1) count = agree(words, agreed_key(next.tag, args.stage), count);
      const bool other = found.layer != (u32)args.layer || found.kind != (u32)args.kind;
      const bool wrong = other && !(args.host && found.layer == (u32)args.layer && found.kind <= 1);  // its host may change the kind
      if ((wrong && !least) || count > (u32)args.most || found.buffer >= (u32)args.buffers) {
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
  const u64 tag = next.tag;
  const int lines_there = blocks_of(count, args.row_words, args.blocks);
  bool there = count > 0;
  if (there && !args.awaited && !args.host && threadIdx.x && threadIdx.x < lines_there)
    there = await_tag(lines + threadIdx.x, tag, words, LATE, behind);
  const int blocks = args.awaited ? min(lines_there, (int)gridDim.x) : gridDim.x;  // few may read what one waits for
  if (there && args.host && threadIdx.x == 0 && block < blocks) {
    const long end = (long)count * args.row_words * (block + 1) / blocks;  // of its share
    there = await_filled(lines, (end + args.row_words - 1) / args.row_words, words, behind);
  }
  there = __syncthreads_and(there);
  begin_next();  // it waits until this is over; not before, since it holds a multiprocessor, too
  const long mine = there && block < blocks ? count : 0;
  Routes routes((const u32*)(box + args.route_at), args.weights ? (const u32*)(box + args.weights_at) : nullptr,
                mine * args.route_words, block, blocks);
  Taking rows_here(box + args.hidden_at, mine, args.row_words, block, blocks);
  const u32 experts = args.weights ? (u32)args.experts : 0xffffffffu;
  rows_here.store(args.hidden);
  routes.store(args.route, args.weights, [&](u32 id) {
    const bool known = !args.weights || id + 1 <= experts;  // -1: none
    if (!known) note_end(words, REFUSED, behind);  // and nobody computes it
    return known ? id : 0xffffffffu;
  });
  if (block == 0)
    for (int at = threadIdx.x; at < args.padded; at += blockDim.x) args.valid[at] = at < count;
  if (block || threadIdx.x) return;
  *taken_at(words, took + 1) = next.found.buffer << BUFFER_BIT | count;
  words[TOOK] = took + 1;
  if (args.early) await_over(words, took);
}

// Whether a member is waited for no more whose sums the answer should have. Each of the first 64 threads looks at a place.
DEVICE bool lacks_sums(const PostArguments& args) {
  const int place = threadIdx.x;
  return args.living && place < 64 && (args.places >> place & 1) && !args.living[place];
}

// Adds the rows that each slot's expert computed in this step to what it did before. By one block; another track's post may
// do so at the same time. The first of each thread is asked for when this is made.
struct Tally {
  u32 rows;

  DEVICE Tally(const PostArguments& args) : rows(of(args, threadIdx.x)) {}

  static DEVICE u32 of(const PostArguments& args, int slot) { return slot < args.slots ? args.counts[slot] : 0; }

  DEVICE void store(const PostArguments& args) {
    for (int slot = threadIdx.x; slot < args.slots; slot += blockDim.x, rows = of(args, slot))
      if (rows) atomicAdd(args.totals + slot, (u64)rows);
  }
};

DEVICE void note_read(u64* words, u64 took) { *(volatile u64*)(words + READ) = read_at(took); }

// A block of a post has read its share, and whether the pass had ended; the last one notes that all is read. All blocks come
// here, once.
DEVICE void count_read(u64* words, int stage, u64 took) {
  if (gridDim.x > 1 &&
      field(atomicAdd(words + TICKETS + stage, 1ull << READ_BIT), READ_BIT, PART_BIT - READ_BIT) != gridDim.x - 1)
    return;
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

// How many rows of a step's answer are in host memory, as `filled_of` in mailbox.py.
DEVICE u64 filled_of(u64 tag, u32 rows) { return (tag >> 32 & 0xffff) << 48 | (tag & 0xffff) << 32 | rows; }

// Says in host memory that an answer is there: by the block that counts last, which has seen all others' tickets.
DEVICE void tell_host(u64* header, u64 tag, u32 count, u32 epoch, u32 version) {
  volatile u64* words = header;
  words[ANSWER_EPOCH] = epoch;
  words[ANSWER_VERSION] = version;
  words[ANSWER_FILLED] = filled_of(tag, count);
  __threadfence_system();  // behind what those have written, too
  words[ANSWER_TAG] = tag;
}

// Says in host memory how many rows of an answer are there, once all blocks have written their shares of a part. All threads
// of each of so many blocks call it.
DEVICE void tell_part(u64* words, int stage, int part, int blocks, u64* header, u64 filled) {
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence_system();  // before this block's ticket
  const int bit = PART_BIT + PART_BITS * part;
  if (field(atomicAdd(words + TICKETS + stage, 1ull << bit), bit, PART_BITS) != blocks - 1) return;
  __threadfence_system();
  *(volatile u64*)(header + ANSWER_FILLED) = filled;
}

// Writes a block's share of an answer; of a large one in host memory its share of each part, so that the caller copies what
// is there while the rest comes.
DEVICE void give_share(const PostArguments& args, u64* words, u8* answers, u32 taken, u64 tag, int block, int blocks) {
  const u32 count = rows_of(taken);
  const long whole = (long)count * args.row_words;
  uint4* home = (uint4*)(answers + args.rows_at + (taken >> BUFFER_BIT) * args.buffer_bytes);
  const int parts = args.host && whole >= PARTED ? PARTS : 1;
  for (int part = 0; part < parts; ++part) {
    const u32 rows = (u32)((u64)count * (part + 1) / parts);
    const long from = (long)((u64)count * part / parts) * args.row_words;
    copy_share(args.answer + from, home + from, (long)rows * args.row_words - from, block, blocks);
    if (part + 1 < parts)
      tell_part(words, args.stage, part, blocks, (u64*)(answers + args.lines_at), filled_of(tag, rows));
  }
}

// Gives the answer of the step that was taken last to its caller, and counts the step, its rows and those of experts. Behind
// the last step of a run it brings the words back. Of a caller's rows in host memory the owner's host says how a pass has ended.
//
// READ says that the step's kernels are over, and then that this has read what it gives; DONE that it is over. All of them go by
// which step of the run it is, `took`: takes that begin beside this may count further ones before it has begun. Given 0, none does,
// and TOOK has it. A take begins as soon as this does, and the kernels behind it when READ says that those of the step are over:
// they leave the answer and the counts alone. The post behind this one waits for DONE, so that those of the next step but one do
// not.
//
// `early`: between the take of the step and this is a kernel that has waited for the take. What the take has left is asked for
// then while the last of those kernels runs.
extern "C" __global__ void mail_post(const __grid_constant__ PostArguments args) {
  u64* words = args.state;
  if (!args.early) await_launch();
  begin_next();
  const u64 took = args.took ? args.took : word(words, TOOK);
  __shared__ u64 seen;  // once for all threads: another block may end the pass meanwhile
  __shared__ u32 taken;  // likewise: when this thread has counted what is read, a take may write it
  if (threadIdx.x == 0) {
    taken = *taken_at(words, took);
    u64 ended = word(words, ENDED);
    if (word(words, DONE) + 1 < took) {
      await_posts(words, took);
      ended = word(words, ENDED);
    }
    seen = ended;
  }
  const u64 number = words[NUMBER];
  const u32 epoch = (u32)words[EPOCH], version = (u32)words[VERSION];
  u8* answers = (u8*)words[ANSWERS];
  __syncthreads();
  const u32 count = rows_of(taken);
  const u64 steps = word(words, STEPS + args.stage), tag = tag_of(number, steps);
  if (args.early) await_launch();
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicMax(words + READ, over_at(took));
  Tally counted(args);
  if (args.living && __syncthreads_or(lacks_sums(args))) {
    if (threadIdx.x == 0) {
      note_end(words, LOST);
      seen = word(words, ENDED);
    }
    __syncthreads();
  }
  const u64 ended = seen;
  const int blocks = ended ? args.blocks : blocks_of(count, args.row_words, args.blocks);
  if (blockIdx.x == 0) {
    counted.store(args);
    if (threadIdx.x == 0 && args.taken && !ended) atomicAdd(args.taken, (u64)count);
  }
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
    if (!ended) give_share(args, words, answers, taken, tag, block, blocks);
    __syncthreads();  // the release below is of what all threads of the block have written
    if (threadIdx.x) continue;
    if (!ended) count_read(words, args.stage, took);
    if (args.host) continue;
    Line* line = (Line*)(answers + args.lines_at) + block;
    store_relaxed(&line->count, count);
    store_relaxed(&line->first, (u32)ended);
    store_relaxed(&line->second, epoch);
    store_relaxed(&line->third, version);
    store_release(&line->tag, tag);
  }
  __syncthreads();
  bool counted_last = false;
  if (args.host && gridDim.x > 1 && threadIdx.x == 0) __threadfence_system();  // before this block's ticket
  u32 read = 0;  // blocks that found the pass as it was, of which all have to be there where one tag speaks for all
  if (threadIdx.x == 0 && (counted_last = count_step(words, args.stage, steps, gridDim.x, &read))) {
    const bool whole = !ended && (gridDim.x == 1 || read == gridDim.x);
    if (args.host && whole) tell_host((u64*)(answers + args.lines_at), tag, count, epoch, version);
    note_post(words, took);
  }
  if (args.last && __syncthreads_or(counted_last)) bring_back(words);
}

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
  else if (threadIdx.x == TOOK || threadIdx.x == READ || threadIdx.x == DONE) value = 0;  // of this run
  args.to[threadIdx.x] = value;
}

// The owner's and the caller's. One block waits for all lines of a step, before a kernel of many blocks is launched: waiting
// for rows takes a stream and no multiprocessors. `box`: MAILBOX or ANSWERS. Before a take it says how many rows the step has, as `agree` does. The
// kernel behind it may begin as soon as the first line is there, since the others are on their way then, and waits until this
// one is over; before a fetch until all else is, too. `early`: as of a take. Rows in host memory have one header, for which
// it waits alone.
extern "C" __global__ void mail_await(const __grid_constant__ AwaitArguments args) {
  u64* words = args.words;
  if (!args.early) await_launch();
  const u64 number = words[NUMBER], behind = args.box == MAILBOX ? args.early : 0;
  const Line* lines = (const Line*)((const u8*)words[args.box] + args.lines_at);
  __shared__ int blocks;
  __shared__ Next next;
  u64 agreed = 0;
  look(next, words, number, lines, args.stage, behind, args.host);
  if (threadIdx.x == 0) {
    blocks = 0;
    if (await_next(next, words, lines, args.stage, args.late, behind, args.host)) {
      const u32 count = next.found.count;
      agreed = agreed_key(next.tag, args.stage) | (count + 1);
      blocks = args.host ? 1 : blocks_of(count, args.row_words, args.blocks);
    }
  }
  __syncthreads();
  begin_next();
  if (threadIdx.x && threadIdx.x < blocks) await_tag(lines + threadIdx.x, next.tag, words, args.late, behind);
  if (args.early && args.box == ANSWERS) await_launch();
  if (agreed && args.box == MAILBOX) words[AGREED] = agreed;
}
