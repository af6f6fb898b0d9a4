// What a step of many rows starts with: its list of groups of rows, and their scales in the list's order.
//
// Given by -D: UNIT, the rows that a group is cut by, and UNITS, most of them in a group.

#ifndef UNIT
#define UNIT 64
#define UNITS 4
#endif
#define THREADS 512

// How a slot's rows are cut: groups of `size` units, then groups of one less, none above UNITS.
struct Cut {
  int rows, size, large, small;

  DEVICE explicit Cut(int rows_) : rows(rows_) {
    const int units = (rows + UNIT - 1) / UNIT, groups = (units + UNITS - 1) / UNITS;
    size = groups ? (units + groups - 1) / groups : 0;
    large = units - groups * (size - 1);
    small = groups - large;
  }
};

// `tiles`: the number of groups and three zeros to count with; of each group its slot, first row, number of rows,
// and how many groups its slot has, times 65536, with its own place among them. A slot's groups stand together, so
// that its weights are read while they are in the cache; slots of the largest first, so that blocks end together.
DEVICE void list(const ListArguments& a) {
  __shared__ int2 cuts[THREADS];  // of some slots: size and groups
  int listed = 0;
  for (int first = 0; first < a.slots; first += THREADS) {
    const int slot = first + threadIdx.x;
    const Cut cut(slot < a.slots ? a.counts[slot] : 0);
    const int own = cut.large + cut.small;
    int at = listed = 0, row = 0;
    for (int others = 0; others < a.slots; others += THREADS) {
      const int there = others + threadIdx.x;
      const Cut other(there < a.slots ? a.counts[there] : 0);
      __syncthreads();
      cuts[threadIdx.x] = make_int2(other.size, other.large + other.small);
      __syncthreads();
      for (int i = 0; i < min(THREADS, a.slots - others); ++i) {
        listed += cuts[i].y;
        if (cuts[i].x > cut.size || (cuts[i].x == cut.size && others + i < slot)) at += cuts[i].y;
      }
    }
    for (int i = 0; i < own; ++i, ++at) {
      const int rows = (i < cut.large ? cut.size : cut.size - 1) * UNIT;
      ((int4*)(a.tiles + 4))[at] = make_int4(slot, a.offsets[slot] + row, min(rows, cut.rows - row), own << 16 | i);
      row += rows;
    }
  }
  if (threadIdx.x == 0) *(int4*)a.tiles = make_int4(listed, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    list_groups(const __grid_constant__ ListArguments args) {
  grid_wait();
  grid_release();
  list(args);
}

// `scale`, of row r and block k of 128 columns at r * row_step + k * block_step, to `grouped [groups, blocks,
// 256]`; block g of the grid takes group g, 32 blocks of columns at a time.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_scales(const __grid_constant__ ScaleArguments args) {
  __shared__ float held[32][UNITS * UNIT + 1];
  grid_wait();
  grid_release();
  if (blockIdx.x >= args.tiles[0]) return;
  const int4 group = ((const int4*)(args.tiles + 4))[blockIdx.x];
  const int blocks = args.blocks, row_step = args.row_step, block_step = args.block_step;
  const float* scale = args.scale;
  float* own = args.grouped + (u64)blockIdx.x * blocks * (UNITS * UNIT);
  for (int k0 = 0; k0 < blocks; k0 += 32) {
    float own_scales[UNITS * UNIT * 32 / THREADS];  // all asked for at once
#pragma unroll
    for (int i = 0; i < UNITS * UNIT * 32 / THREADS; ++i) {
      const int row = (i * THREADS + threadIdx.x) / 32, k = k0 + threadIdx.x % 32;
      const bool there = row < group.z && k < blocks;
      own_scales[i] = there ? scale[(u64)(group.y + row) * row_step + (u64)k * block_step] : 0;
    }
#pragma unroll
    for (int i = 0; i < UNITS * UNIT * 32 / THREADS; ++i)
      held[threadIdx.x % 32][(i * THREADS + threadIdx.x) / 32] = own_scales[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * UNITS * UNIT; i += THREADS) {
      const int row = i % (UNITS * UNIT), k = i / (UNITS * UNIT);
      if (k0 + k < blocks && row < group.z) own[(k0 + k) * (UNITS * UNIT) + row] = held[k][row];
    }
    __syncthreads();
  }
}
