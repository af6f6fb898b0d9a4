// Rows as their records, which lie one after another in global memory. A block has a row. It waits for what was launched
// before, and lets the next launch begin, which waits likewise.
extern "C" __global__ void round_rows(const __grid_constant__ RoundArguments args) {
  await_launch();
  begin_next();
  const u8* row = args.rows + (long)blockIdx.x * HIDDEN * sizeof(Element);
  const Team team = {(int)threadIdx.x / 32, (int)blockDim.x / 32};
  Piece piece;
  piece.load(row, team.thread());
  make_record(piece, row, args.records + (long)blockIdx.x * RECORD_BYTES, args.factor, team);
}
