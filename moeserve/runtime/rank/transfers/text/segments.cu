// Copies of short pieces of memory, all in one launch: rows of many callers to a step's room, and answers home. The
// host's memory is registered, and read and written over PCIe as it lies. The device's copy engines take some 20 us for
// each piece, however short, and the host as long to ask for it.

#define AT_ONCE 4  // words that a thread asks for before it waits for the first

// One row of blocks copies one piece. Its line of the table: to where, from where, and how many words of 16 bytes.
extern "C" __global__ void __launch_bounds__(512)
    copy_segments(const __grid_constant__ SegmentsArguments args) {
  const uint4* line = args.table + 2 * blockIdx.y;
  const uint4 places = line[0];
  const int words = (int)line[1].x;
  uint4* into = (uint4*)((unsigned long long)places.y << 32 | places.x);
  const uint4* from = (const uint4*)((unsigned long long)places.w << 32 | places.z);
  const int step = gridDim.x * blockDim.x;
  for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < words; first += AT_ONCE * step) {
    uint4 found[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i * step < words) found[i] = from[first + i * step];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i * step < words) into[first + i * step] = found[i];
    }
  }
}
