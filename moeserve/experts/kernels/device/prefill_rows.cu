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

// The sum of `value` over the block's threads before this one; `all` becomes the whole sum.
DEVICE int sum_before(int value, int& all) {
  __shared__ int warps[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int by = 1; by < 32; by *= 2) {
    const int below = __shfl_up_sync(~0u, sum, by);
    if (lane >= by) sum += below;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  all = 0;
  int before = sum - value;
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  return before;
}

// `tiles`: the number of groups and three zeros to count with; of each group its slot, first row, number of rows,
// and how many groups its slot has, times 65536, with its own place among them. A slot's groups stand together, so
// that its weights are read while they are in the cache; slots of the largest first, so that blocks end together.
DEVICE void list(const int* counts, const int* offsets, int slots, int* tiles) {
  int listed = 0;
  for (int units = UNITS; units > 0; --units) {
    for (int first = 0; first < slots; first += THREADS) {
      const int slot = first + threadIdx.x;
      const Cut cut(slot < slots ? counts[slot] : 0);
      const int own = units == cut.size ? cut.large + cut.small : 0;
      int all, row = 0;
      int at = listed + sum_before(own, all);
      for (int i = 0; i < own; ++i, ++at) {
        const int rows = (i < cut.large ? units : units - 1) * UNIT;
        ((int4*)(tiles + 4))[at] = make_int4(slot, offsets[slot] + row, min(rows, cut.rows - row), own << 16 | i);
        row += rows;
      }
      listed += all;
    }
  }
  if (threadIdx.x == 0) *(int4*)tiles = make_int4(listed, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    list_groups(const int* counts, const int* offsets, int slots, int* tiles) {
  list(counts, offsets, slots, tiles);
}

// `scale`, of row r and block k of 128 columns at r * row_step + k * block_step, to `grouped [groups, blocks,
// 256]`; block g of the grid takes group g, 32 blocks of columns at a time.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_scales(const float* scale, float* grouped, const int* tiles, int blocks, int row_step, int block_step) {
  __shared__ float held[32][UNITS * UNIT + 1];
  if (blockIdx.x >= tiles[0]) return;
  const int4 group = ((const int4*)(tiles + 4))[blockIdx.x];
  float* own = grouped + (u64)blockIdx.x * blocks * (UNITS * UNIT);
  for (int k0 = 0; k0 < blocks; k0 += 32) {
    for (int i = threadIdx.x; i < group.z * 32; i += THREADS) {
      const int row = i / 32, k = i % 32;
      if (k0 + k < blocks) held[k][row] = scale[(u64)(group.y + row) * row_step + (u64)(k0 + k) * block_step];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * UNITS * UNIT; i += THREADS) {
      const int row = i % (UNITS * UNIT), k = i / (UNITS * UNIT);
      if (k0 + k < blocks && row < group.z) own[(k0 + k) * (UNITS * UNIT) + row] = held[k][row];
    }
    __syncthreads();
  }
}
