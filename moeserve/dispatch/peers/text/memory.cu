// Memory that other GPUs write or read: the loads, stores and checked words of every kernel over peer memory. It comes
// first in the kernels' text.
//
// Given by -D: LANES and OWNERS (places of both, reserved ones too), HAS_LANE and HAS_OWNER (1 where this member is
// that), HIDDEN (columns), SOURCE (0 bfloat16, 1 float16, 2 float32: hidden states and answers),
// WIRE (the WIRE_* below), TRUE_DIVISION (0 where this torch divides by a constant as a product),
// RECORD_BYTES, PARTS, and of each part i: PART<i>_AT, PART<i>_BYTES in a record.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

#define WIRE_RECORDS 0  // rows come as records: hidden states as they are, or packed before
#define WIRE_FP8_GROUP128 1
#define WIRE_MXFP8 2
#define WIRE_NVFP4 3  // with a constant outer scale

DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

DEVICE void store_release(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

DEVICE u32 load_acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

DEVICE void store_relaxed(u32* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

DEVICE u32 load_relaxed(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

DEVICE u64 load_relaxed(const u64* at) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// 16 bytes in one piece: what is read is what one store wrote. The assembler reads only the components that
// are used, and then one by one; a checked word needs them all.
DEVICE void store_whole(void* at, uint4 value) {
  asm volatile(
      "{\n.reg .b128 word;\n.reg .b64 low, high;\n"
      "mov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\nmov.b128 word, {low, high};\n"
      "st.relaxed.sys.global.b128 [%0], word;\n}" ::"l"(at),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

DEVICE uint4 load_whole(const void* at) {
  uint4 value;
  asm volatile(
      "{\n.reg .b128 word;\n.reg .b64 low, high;\n"
      "ld.relaxed.sys.global.b128 word, [%4];\n"
      "mov.b128 {low, high}, word;\nmov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(at)
      : "memory");
  return value;
}

// A checked word: 12 bytes of content, and a check that holds for one sequence number only.
DEVICE uint4 checked(u32 x, u32 y, u32 z, u32 sequence) { return make_uint4(x, y, z, sequence ^ x ^ y ^ z); }

DEVICE bool belongs(uint4 word, u32 sequence) { return (word.x ^ word.y ^ word.z ^ word.w) == sequence; }

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
