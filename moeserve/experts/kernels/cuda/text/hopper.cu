// Hopper's own instructions, by name: barriers in shared memory, bulk copies into a cluster, wgmma.
// Another source follows it in one text. `lane` in these texts is CUDA's: a thread's place in its warp, 0 to 31.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

struct alignas(64) TensorMap {
  u64 words[16];
};

// Opaque, so that the compiler keeps the address and does not make it anew.
DEVICE u32 shared_address(const void* at) {
  u32 address = (u32)__cvta_generic_to_shared(at);
  asm volatile("" : "+r"(address));
  return address;
}

// ---- clusters ----------------------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// True in one thread of a warp that is here as a whole.
DEVICE bool elected() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen;
}

// All threads of the cluster; what they wrote before is there after.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The same place of shared memory in block `rank` of the cluster.
DEVICE u32 place_of(u32 shared, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

DEVICE void store_there(u32 there, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

// ---- barriers ----------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What was initialised is seen by the cluster and by bulk copies.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_arrive_there(u32 there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// As it says, and what this thread stored in that block is seen by who waits with `barrier_wait_cluster`.
DEVICE void barrier_release_there(u32 there) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// Arrives, and has the phase wait for `bytes` of bulk copies too.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE bool barrier_passed(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed;
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
  u32 passed;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!passed);
}

// Whether the phase is over, without waiting.
DEVICE bool barrier_over(u32 barrier, u32 parity) {
  u32 over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over;
}

// A turn that one of two warp groups waits for and the other gives.
DEVICE void turn_wait(int turn) { asm volatile("bar.sync %0, 256;" ::"r"(turn) : "memory"); }
DEVICE void turn_give(int turn) { asm volatile("bar.arrive %0, 256;" ::"r"(turn) : "memory"); }

// ---- bulk copies -------------------------------------------------------------------------------------------

DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"((u64)map) : "memory");
}

DEVICE void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"((u64)map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Into every block of the cluster that `blocks` has a bit for, each with its own barrier at that place.
DEVICE void copy_box_to(u16 blocks, u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"((u64)map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

DEVICE void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Ordinary stores to shared memory, before the tensor cores read them.
DEVICE void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- launches that overlap ---------------------------------------------------------------------------------

// Until the launches before this one are over, and what they wrote is there.
DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next launch begin where there is room for it.
DEVICE void grid_release() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- shared memory -----------------------------------------------------------------------------------------

DEVICE float load_shared(u32 at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}

DEVICE float2 load_shared2(u32 at) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(at) : "memory");
  return value;
}

DEVICE uint4 load_shared4(u32 at) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(at)
               : "memory");
  return value;
}

DEVICE u32 load_shared_half(u32 at) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(at) : "memory");
  return value;
}

DEVICE void store_shared2(u32 at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

DEVICE void store_shared4(u32 at, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// The value of the cluster's first block of `blocks`: it stores its own at `at` in each other block, with a barrier of
// that block.
DEVICE int value_of_first(int value, u32 rank, u32 blocks, u32 at, u32 barrier, u32 parity) {
  if (rank) {
    barrier_wait_cluster(barrier, parity);
    return __float_as_int(load_shared(at));
  }
#pragma unroll
  for (u32 r = 1; r < blocks; ++r) {
    store_there(place_of(at, r), __int_as_float(value));
    barrier_release_there(place_of(barrier, r));
  }
  return value;
}

// Four of the eight bytes of (low, high), each by a nibble below 8 of the lower half of `which`.
DEVICE u32 pick_bytes(u32 low, u32 high, u32 which) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(which));
  return bytes;
}

// ---- wgmma -------------------------------------------------------------------------------------------------

// A tile of rows of 128 bytes in 128-byte swizzle, eight rows to 1024 bytes.
DEVICE u64 tile_descriptor(u32 shared) {
  return (u64)((shared & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all products are there; the sums are named so that nothing reads them earlier.
DEVICE void products_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d [64 x 128] (+)= a [64 x 32] b [128 x 32]^T of E4M3; `more` 0 starts a new sum.
DEVICE void product(float (&d)[64], u64 a, u64 b, int more) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n}"
      : D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)
      : "l"(a), "l"(b), "r"(more));
}

template <int COUNT>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- of bf16, the rows of x wide ---------------------------------------------------------------------------

// Of panels by eights: all of gate panel `panel` and of its up panel.
DEVICE void copy_eights(u32 to, const TensorMap* map, int panel, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, %2, %3}],"
      " [%4];" ::"r"(to),
      "l"((u64)map), "r"(0), "r"(panel), "r"(barrier)
      : "memory");
}

// Of 8 x 8 halves of words, row lane / 4 and columns 2 (lane % 4): rows become columns.
DEVICE u32 transposed(u32 pair) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

// Until only the products committed last may be unfinished.
DEVICE void products_wait_for_older() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

template <int SUMS>
DEVICE void products_wait(float (&d)[SUMS]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HELD_8 D8(0)
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define HELD_16 HELD_8, D8(8)
#define SUMS_24 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define HELD_24 HELD_16, D8(16)
#define SUMS_32 SUMS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define HELD_32 HELD_24, D8(24)
#define SUMS_40 SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define HELD_40 HELD_32, D8(32)
#define SUMS_48 SUMS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define HELD_48 HELD_40, D8(40)
#define SUMS_56 SUMS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define HELD_56 HELD_48, D8(48)
#define SUMS_64 SUMS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define HELD_64 HELD_56, D8(56)
#define SUMS_72 SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define HELD_72 HELD_64, D8(64)
#define SUMS_80 SUMS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define HELD_80 HELD_72, D8(72)
#define SUMS_88 SUMS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define HELD_88 HELD_80, D8(80)
#define SUMS_96 SUMS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define HELD_96 HELD_88, D8(88)
#define SUMS_104 SUMS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define HELD_104 HELD_96, D8(96)
#define SUMS_112 SUMS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define HELD_112 HELD_104, D8(104)
#define SUMS_120 SUMS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define HELD_120 HELD_112, D8(112)
#define SUMS_128 SUMS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define HELD_128 HELD_120, D8(120)

#define PRODUCT_WIDE(n, sums, w, x) \
  if constexpr (N == n) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" SUMS_##sums "}, %" #w ", %" #x \
                 ", 1, 1, 1, 0, 0;" : HELD_##sums : "l"(w_tile), "l"(x_tile));

// d [64 x N] += w [64 x 16] x [N x 16]^T of bf16.
template <int N, int SUMS>
DEVICE void product_wide(float (&d)[SUMS], u64 w_tile, u64 x_tile) {
  PRODUCT_WIDE(16, 8, 8, 9)
  PRODUCT_WIDE(32, 16, 16, 17)
  PRODUCT_WIDE(48, 24, 24, 25)
  PRODUCT_WIDE(64, 32, 32, 33)
  PRODUCT_WIDE(80, 40, 40, 41)
  PRODUCT_WIDE(96, 48, 48, 49)
  PRODUCT_WIDE(112, 56, 56, 57)
  PRODUCT_WIDE(128, 64, 64, 65)
  PRODUCT_WIDE(144, 72, 72, 73)
  PRODUCT_WIDE(160, 80, 80, 81)
  PRODUCT_WIDE(176, 88, 88, 89)
  PRODUCT_WIDE(192, 96, 96, 97)
  PRODUCT_WIDE(208, 104, 104, 105)
  PRODUCT_WIDE(224, 112, 112, 113)
  PRODUCT_WIDE(240, 120, 120, 121)
  PRODUCT_WIDE(256, 128, 128, 129)
}
