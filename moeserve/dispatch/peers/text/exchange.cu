// What the blocks of a dispatch share; packets.cu precedes it. Given by -D: RAGGED, whether segments follow one another
// in the batch.
//
// Some blocks read, some send choices, some send rows: in a block that stores to peers, loads would wait behind the
// stores.

#define THREADS 512
#define WARPS (THREADS / 32)
#define WARPS_LOG2 4
#define LEAST_TEAM 2  // warps that place a row together
#define AHEAD (4096 / TOP_K)  // rows a block places at once
#define AT_ONCE 8  // packets a warp has under way
#define RECORD_PACKETS PACKETS_OF(RECORD_BYTES)
#define COUNT_WORDS(SLOTS) (((SLOTS) + 5) / 6)       // of counts, six in a checked word
#define SLOT_WORDS(ROWS) (((ROWS) * TOP_K + 5) / 6)  // of a lane's choices, six in a checked word

// Where sections of every owner's arrivals begin.
struct Sections {
  u64 choices, weights, records;
  u64 lane_words;  // of choices that a lane has room for
};

// What this member's lane brings.
struct Lane {
  int number;            // -1 without a lane
  const u8* rows;
  int row_bytes;
  const int* slots;      // [rows, TOP_K]
  const float* weights;  // [rows, TOP_K]
  float factor;
};

// The batch that is made here.
struct Batch {
  u8* parts[3];
  int *counts, *offsets;  // [slots], [slots + 1]
  int* places;            // [rows of all lanes, TOP_K]
  float* weights;
  int row_align;
};

// One dispatch as a block of it knows it.
struct Exchange {
  const Step& step;
  const Watch& w;
  Lanes lanes;
  Places here;
  Sections at;
  Lane mine;
  Batch batch;
  u32 own_place;         // this owner's bit; 0 without an owner's place
  uint4* shared_counts;  // [readers, COUNT_WORDS] of this GPU
  int lane_rows;

  // A row of lane `source` among all that an owner's memory has room for.
  DEVICE u64 room(int source, int row) const { return (u64)source * lane_rows + row; }
  DEVICE bool comes(int lane) const { return step.lanes >> lane & 1u; }
  DEVICE bool reaches(int owner) const { return step.owners >> owner & 1u; }
  DEVICE int own_rows() const { return HAS_LANE ? lanes.rows(mine.number) : 0; }
  DEVICE const uint4* arrived(u64 section) const { return (const uint4*)(step.here + section); }
};

// How the step's work is divided among blocks: the first read, then some send choices, the others send rows.
struct Division {
  int choice_senders, senders, groups_log2;  // a sending block has 1 << groups_log2 rows under way
  int run, stretch;  // rows of a reading block; of each of its teams, where there are many
  int shares;        // whether reading blocks count a run each and share what they counted
};
