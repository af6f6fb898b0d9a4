// The warps that copy weights, rows and scales of rows into the rings.

// Where a tile's codes begin, in steps of 128 of K from the weights' beginning.
DEVICE u64 first_step(const Task& t, int slot, int block) {
  const int blocks = weight_blocks(t), steps = EIGHT ? t.k_blocks : (t.k_blocks + 1) / 2 * 2;
  return ((u64)slot * blocks + min(block, blocks - 1)) * steps;
}

// Codes and scales of W_STEPS steps; all of it where the weights are padded to that.
DEVICE void copy_weights(u32 to, const Task& t, u64 step, int steps, u32 full) {
#if EIGHT
  copy_bytes(to, t.codes + step * BLOCK_BYTES, steps * BLOCK_BYTES, full);
#else
  copy_bytes(to, t.codes + step * CODE_BYTES, W_STEPS * CODE_BYTES, full);
  copy_bytes(to + W_STEPS * CODE_BYTES, t.scales + step * SCALE_BYTES, W_STEPS * SCALE_BYTES, full);
#endif
}

DEVICE void produce_weights(u32 base, u32 rank, const Task& t) {
  const int across = tiles_across(t), total = min(t.tiles[0] * across, t.last);
  Turn<W_STAGES> ws;
  for (int tile = t.first + blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const int slot = t.tiles[4 + tile / across * 4], block = (tile % across * CLUSTER + (int)rank) * (OWN / 64);
    const u64 first = first_step(t, slot, block), second = first_step(t, slot, block + (FUSED ? t.n / 64 : 1));
    for (int kb = 0; kb < t.k_blocks; kb += W_STEPS, ws.next()) {
      const u32 full = base + W_FULL(ws.stage), to = base + W_AT + ws.stage * W_BYTES;
      const int steps = EIGHT ? min(W_STEPS, t.k_blocks - kb) : W_STEPS;
      barrier_wait(base + W_EMPTY(ws.stage), ws.parity ^ 1);
      barrier_expect(full, steps * 2 * BLOCK_BYTES);
      copy_weights(to, t, first + kb, steps, full);
      copy_weights(to + W_BYTES / 2, t, second + kb, steps, full);
    }
  }
}

DEVICE void produce_rows(u32 base, u32 rank, const TensorMap* x, const Task& t) {
  const int across = tiles_across(t), total = min(t.tiles[0] * across, t.last);
  Turn<X_STAGES> xs;
  for (int tile = t.first + blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const int4 group = ((const int4*)(t.tiles + 4))[tile / across];
    const int boxes = boxes_of(group.z);
    for (int step = 0; step < t.k_blocks * X_STEPS; ++step, xs.next()) {
      const u32 full = base + X_FULL(xs.stage), to = base + X_AT + xs.stage * X_BYTES;
      barrier_wait(base + X_EMPTY(xs.stage), xs.parity ^ 1);
      barrier_expect(full, boxes * (BOX * 128));
      for (int u = rank; u < boxes; u += CLUSTER)
        copy_box_to((1 << CLUSTER) - 1, to + u * (BOX * 128), x, step * X_COLUMNS, group.y + u * BOX, full);
    }
  }
}

#if EIGHT
DEVICE void produce_scales(u32 base, const Task& t) {
  const int across = tiles_across(t), total = min(t.tiles[0] * across, t.last);
  Turn<X_STAGES> xs;
  for (int tile = t.first + blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const float* scale = t.x_scale + (u64)(tile / across) * t.k_blocks * MOST;
    const u32 bytes = (t.tiles[4 + tile / across * 4 + 2] + 3) / 4 * 16;
    for (int kb = 0; kb < t.k_blocks; ++kb, scale += MOST, xs.next()) {
      const u32 full = base + X_FULL(xs.stage);
      barrier_wait(base + X_EMPTY(xs.stage), xs.parity ^ 1);
      barrier_expect(full, bytes);
      copy_bytes(base + X_SCALE_AT + xs.stage * X_SCALE_BYTES, scale, bytes, full);
    }
  }
}
#elif SCALED
// A scale as a unit of sums, none of which is 0: what a row of zeros may have, and nothing else has.
DEVICE float unit_of(float scale) { return scale < 1e-20f ? 1e-20f : scale; }

// With each first half of a step of 128 but a tile's first, what brings sums in units of the scale before to those of
// this one. By one warp.
DEVICE void produce_ratios(u32 base, const Task& t, int lane) {
  const int across = tiles_across(t), total = min(t.tiles[0] * across, t.last);
  Turn<X_STAGES> xs;
  for (int tile = t.first + blockIdx.x / CLUSTER; tile < total; tile += gridDim.x / CLUSTER) {
    const float* scale = t.x_scale + (u64)(tile / across) * t.k_blocks * MOST;
    const int rows = t.tiles[4 + tile / across * 4 + 2];
    for (int step = 0; step < t.k_blocks * X_STEPS; ++step, xs.next()) {
      barrier_wait(base + X_EMPTY(xs.stage), xs.parity ^ 1);
      if (step && step % X_STEPS == 0) {
        const float* own = scale + step / X_STEPS * MOST;
        const u32 to = base + X_SCALE_AT + xs.stage * X_SCALE_BYTES;
#pragma unroll 4
        for (int row = lane; row < rows; row += 32)
          store_shared1(to + row * 4, __fdividef(unit_of(__ldg(own + row - MOST)), unit_of(__ldg(own + row))));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(base + X_FULL(xs.stage));
    }
  }
}
#endif
