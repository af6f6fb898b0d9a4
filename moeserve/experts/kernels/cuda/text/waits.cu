// Waiting for other blocks of the launch, for a bounded time. `hopper.cu` precedes it.
//
// A block may find no multiprocessor, while another kernel holds some. Blocks that wait for it then tell the host and
// go on with whatever they find, so that the launch ends: memory that they read is there, its content means nothing.

// Of 2^20 ns each; differences hold for 24 days.
DEVICE u32 ticks_of(u64 nanoseconds) { return (u32)(nanoseconds >> 20); }

// Waits until `here()`, or until `bound` nanoseconds have passed since a thread with this `deadline` began to wait:
// 0 before. Then `expired`, a word of the host's, is set, and `spoiled`, one of the device's. The clock is read once in 64 polls, 50 us or so.
template <class Here>
DEVICE void await_blocks(Here here, u32& deadline, u64 bound, u32* expired, u32* spoiled) {
  for (u32 polls = 1; !here(); ++polls) {
    __nanosleep(50);
    if (polls % 64) continue;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (deadline == 0) deadline = ticks_of(now + bound) | 1;
    if ((int)(ticks_of(now) - deadline) <= 0) continue;
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(expired), "r"(1) : "memory");
    *(volatile u32*)spoiled = 1;
    return;
  }
}
