// The caller's kernels: they bring rows and fetch answers. `mail.cu` precedes this text.

// Brings `count` rows of `layer` into the mailbox, by so many blocks. Whether the pass had ended is read once: a fetch beside
// it may end the pass, and then nobody wants what some threads bring.
template <class Rows>
DEVICE void bring(const Rows& args, int block, int blocks, u64 number, u64 steps, u64 ended) {
  u8* box = (u8*)args.table[MAILBOX];
  Sending rows(args.hidden, args.count, args.row_words, block, blocks);
  Routes routes(args.route, args.weights, (long)args.count * args.route_words, block, blocks);
  if (!ended) {
    rows.store(box + args.hidden_at);
    routes.store((u32*)(box + args.route_at), (u32*)(box + args.weights_at), [](u32 id) { return id; });
  }
  if (!__syncthreads_and(!ended) || threadIdx.x) return;  // the release below is of what all threads of the block have written
  Line* line = (Line*)(box + args.lines_at) + block;
  store_relaxed(&line->count, args.count);
  store_relaxed(&line->first, args.layer);
  store_relaxed(&line->second, args.kind);
  store_release(&line->tag, tag_of(number, steps));
}

// Tells the owner's host of the rows, by a block of its own: what is written to host memory takes a microsecond or two until
// it may be followed by a tag. The rows may come a moment later; kernels wait for their lines.
template <class Rows>
DEVICE void tell(const Rows& args, u64 number, u64 steps, u64 ended) {
  const u64 mirror = args.table[MIRROR];
  if (!mirror || ended || threadIdx.x) return;
  volatile u64* header = (volatile u64*)((u8*)mirror + args.header_at);
  header[HEADER_LAYER] = args.layer;
  header[HEADER_STAGE] = args.stage;
  header[HEADER_COUNT] = args.count;
  header[HEADER_KIND] = args.kind;
  store_release((u64*)header + HEADER_TAG, tag_of(number, steps));
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
  const u64 steps = word(words, STEPS + of.stage), ended = word(words, ENDED), tag = tag_of(words[NUMBER], steps);
  const u8* answers = (const u8*)words[ANSWERS];
  const int lines = awaited ? 1 : of.lines;  // that this block looks at
  bool there = true;
  u32 status = 0;
  if (threadIdx.x < lines) {
    const Line* line = (const Line*)(answers + of.lines_at) + (awaited ? block : threadIdx.x);
    there = !ended && await_tag(line, tag, words, LOST);
    if (there) status = load_relaxed(&line->first);
  }
  there = __syncthreads_and(there);
  const long all = (long)of.count * of.row_words;
  Copy answer((const uint4*)(answers + of.rows_at), there ? all : 0, block, blocks);  // beside the status
  if (status) note_end(words, status);
  there = __syncthreads_and(there && !status);
  if (beside) await_launch();
  if (threadIdx.x == 0) count_step(words, of.stage, steps, blocks);
  if (there) {
    answer.store(of.out);
  } else {
    const long first = all * block / blocks, last = all * (block + 1) / blocks;
    for (long at = first + threadIdx.x; at < last; at += blockDim.x) of.out[at] = make_uint4(0, 0, 0, 0);
  }
}

// The last block tells, the others bring. A fetch that comes next begins beside it.
extern "C" __global__ void mail_bring(const __grid_constant__ BringArguments args) {
  await_launch();
  const u64* words = args.table;
  const u64 number = words[NUMBER], steps = words[STEPS + args.stage], ended = words[ENDED];
  const int block = blockIdx.x, bringing = gridDim.x - 1;
  begin_next();
  if (block < bringing) bring(args, block, bringing, number, steps, ended);
  else tell(args, number, steps, ended);
}

extern "C" __global__ void mail_fetch(const __grid_constant__ FetchArguments args) {
  if (args.awaited) await_launch();
  const Answer of = {args.table, args.out, args.lines_at, args.rows_at, args.stage, args.count, args.row_words, args.lines};
  fetch(of, blockIdx.x, gridDim.x, args.awaited, !args.awaited);
}

// Brings rows by its first `bringing` blocks, tells of them by its last one, and fetches the answer of another stage by the
// others: neither waits for what another asks for. An answer is asked for beside what was launched before.
extern "C" __global__ void mail_exchange(const __grid_constant__ ExchangeArguments args) {
  u64* words = args.table;
  const int block = blockIdx.x, last = gridDim.x - 1;
  if (block < args.bringing) {
    await_launch();
    bring(args, block, args.bringing, words[NUMBER], words[STEPS + args.stage], word(words, ENDED));
  } else if (block == last) {
    await_launch();
    tell(args, words[NUMBER], words[STEPS + args.stage], word(words, ENDED));
  } else {
    const Answer of = {words, args.out, args.answer_lines_at, args.answer_at, args.answer_stage, args.answer_count, args.row_words,
                       args.lines};
    fetch(of, block - args.bringing, last - args.bringing, false, true);
  }
}
