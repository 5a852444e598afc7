// Rows of int64 keys. hash_table.py describes and launches these kernels.

#include "hash_table.cuh"
#include "partition.cuh"

constexpr int kFlight = 4;  // keys of a thread whose first sectors are fetched at once

// Calls visit(position, key, home, what that holds) for the keys of a thread.
template <class Visit>
__device__ __forceinline__ void visit_keys(const Tile& tile, const Table& table, const i64* keys,
                                           Visit visit) {
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kFlight) {
    u64 key[kFlight];
    u32 sector[kFlight];
    Sector seen[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const i64 at = tile.key(turn + f);
      key[f] = at < tile.end ? static_cast<u64>(keys[at]) : kFree;
      sector[f] = home(table, key[f]);
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) seen[f] = fetch(table, sector[f]);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const i64 at = tile.key(turn + f);
      if (at < tile.end) visit(at, key[f], sector[f], seen[f]);
    }
  }
}

__device__ __forceinline__ const Table& table_of(const Table* tables, const Segment* segments,
                                                 int segment_count) {
  return tables[holding(segments, segment_count, blockIdx.x).section];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_find(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                    int segment_count, const Table* __restrict__ tables, i64* __restrict__ rows) {
  const Table table = table_of(tables, segments, segment_count);
  visit_keys(Tile(segments, segment_count), table, keys,
             [&](i64 at, u64 key, u32 sector, const Sector& seen) {
               const Place place = find(table, key, sector, seen);
               rows[at] = place.there && is_row(place.row) ? place.row : 0;
             });
}

// rows[i] of the keys that have rows. The others have their places in slots, and -1 for now.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_insert(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                      int segment_count, const Table* __restrict__ tables, i64* __restrict__ rows,
                      u32* __restrict__ slots) {
  __shared__ u32 used;
  if (threadIdx.x == 0) used = 0;
  __syncthreads();
  const Table table = table_of(tables, segments, segment_count);
  const u32 step = static_cast<u32>(table.step);
  u32 mine = 0;
  visit_keys(Tile(segments, segment_count), table, keys,
             [&](i64 at, u64 key, u32 sector, const Sector& seen) {
               const Place place = find_or_put(table, key, sector, seen);
               if (place.slot == kNowhere) {
                 table.add(kLost, 1);
                 rows[at] = 0;
                 return;
               }
               Slot* slot = table.slot(place.slot);
               if (is_row(place.row)) {
                 if (place.step < step) put(&slot->step, step);
                 rows[at] = place.row;
                 return;
               }
               const u32 position = kFirst | (kMost - static_cast<u32>(at));
               if (place.row < position) atomicMax(&slot->row, position);
               mine += !place.there;
               rows[at] = -1;
               slots[at] = place.slot;
             });
  if (mine != 0) atomicAdd(&used, mine);
  __syncthreads();
  if (threadIdx.x == 0 && used != 0) table.add(kUsed, used);
}

// Counts new keys by tile. rows[i] of a key that was -1 becomes ~its first position.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_count(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                     int segment_count, const Table* __restrict__ tables, i64* __restrict__ rows,
                     const u32* __restrict__ slots, u32* __restrict__ counts, u32 tiles) {
  extern __shared__ u32 counters[];
  const Table table = table_of(tables, segments, segment_count);
  count_tile(Tile(segments, segment_count), keys, 1, ByOwner{kDynamic, 1}, counts, tiles, counters,
             [&](i64 at) {
               if (rows[at] >= 0) return false;
               const i64 first = kMost - (fetch_slot(table.slot(slots[at])).row & kMost);
               rows[at] = ~first;
               return first == at;
             });
}

// Gives new rows, by table, then first position: those after the highest.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_number(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                      int segment_count, const Table* __restrict__ tables, i64* __restrict__ rows,
                      const u32* __restrict__ slots, const u32* __restrict__ counts, u32 tiles,
                      const u32* __restrict__ starts, i64* __restrict__ new_keys,
                      i64* __restrict__ new_rows) {
  extern __shared__ u32 counters[];
  const Table table = table_of(tables, segments, segment_count);
  const u32 before = counts[table.first_tile];
  const i64 highest = *table.counter(kHighest);
  place_tile(
      Tile(segments, segment_count), keys, 1, ByOwner{kDynamic, 1}, counts, tiles, starts, counters,
      [=](i64 at) { return rows[at] == ~at; },
      [=](i64 at, i64 key, u32 number) {
        const i64 added = highest + (number - before) + 1;
        const i64 row = added <= table.most_rows ? added : 0;
        Slot* slot = table.slot(slots[at]);
        slot->row = static_cast<u32>(row);
        slot->step = static_cast<u32>(table.step);
        rows[at] = row;
        new_keys[number] = key;
        new_rows[number] = row;
      });
}

// Every key takes the row of its first position; then the counters of all tables go on.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_settle(i64 count, const Table* __restrict__ tables, int table_count,
                      const int* __restrict__ new_counts, i64* __restrict__ rows) {
  const i64 first = static_cast<i64>(blockIdx.x) * kTile + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 at = first + turn * kThreads;
    if (at < count && rows[at] < 0) rows[at] = rows[~rows[at]];
  }
  if (blockIdx.x != 0) return;
  for (int t = threadIdx.x; t < table_count; t += kThreads) {
    const Table table = tables[t];
    const i64 made = new_counts[t], room = table.most_rows - *table.counter(kHighest);
    const i64 numbered = made < room ? made : room;
    *table.counter(kHighest) += numbered;
    *table.counter(kRefused) += made - numbered;
    *table.counter(kDead) += made - numbered;
  }
}

// ---- Maintenance: one table each, a key or a slot each thread; slots with those of the last
// sector

__device__ __forceinline__ i64 thread_index() {
  return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ Place find(const Table& table, u64 key) {
  const u32 sector = home(table, key);
  return find(table, key, sector, fetch(table, sector));
}

// Takes their rows from keys. Of several threads with the same key one counts it.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_remove(const i64* __restrict__ keys, i64 count, const Table* __restrict__ table) {
  const i64 at = thread_index();
  bool removed = false;
  if (at < count) {
    const Place place = find(*table, static_cast<u64>(keys[at]));
    removed = place.there && is_row(atomicExch(&table->slot(place.slot)->row, 0u));
  }
  const int dead = __syncthreads_count(removed);
  if (threadIdx.x == 0 && dead != 0) table->add(kDead, static_cast<u32>(dead));
}

// Gives keys that have rows other ones.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_move(const i64* __restrict__ keys, i64 count, const Table* __restrict__ table,
                    const u32* __restrict__ rows) {
  const i64 at = thread_index();
  if (at >= count) return;
  const Place place = find(*table, static_cast<u64>(keys[at]));
  if (place.there && is_row(place.row)) put(&table->slot(place.slot)->row, rows[at]);
}

// Puts what lives of `old` into `table`, whose slots are all free.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_rebuild(const Table* __restrict__ old, i64 slots, const Table* __restrict__ table) {
  const i64 at = thread_index();
  Slot slot = {kFree, 0, 0};
  if (at < slots) slot = fetch_slot(old->slot(static_cast<u32>(at)));
  bool used = false;
  if (is_row(slot.row)) {
    const u32 sector = home(*table, slot.key);
    const Place place = find_or_put(*table, slot.key, sector, fetch(*table, sector));
    if (place.slot == kNowhere) {
      table->add(kLost, 1);
    } else {
      Slot* to = table->slot(place.slot);
      put(&to->row, slot.row);
      put(&to->step, slot.step);
      used = slot.key != kFree;
    }
  }
  const int moved = __syncthreads_count(used);
  if (threadIdx.x == 0 && moved != 0) table->add(kUsed, static_cast<u32>(moved));
}

// Lists when the key of each row was last used.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_steps(const Table* __restrict__ table, i64 slots, u32* __restrict__ steps) {
  const i64 at = thread_index();
  if (at >= slots) return;
  const Slot slot = fetch_slot(table->slot(static_cast<u32>(at)));
  if (is_row(slot.row)) steps[slot.row] = slot.step;
}

// Sets when keys that have rows were last used.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_set_steps(const i64* __restrict__ keys, i64 count, const Table* __restrict__ table,
                         const u32* __restrict__ steps) {
  const i64 at = thread_index();
  if (at >= count) return;
  const Place place = find(*table, static_cast<u64>(keys[at]));
  if (place.there && is_row(place.row)) put(&table->slot(place.slot)->step, steps[at]);
}
