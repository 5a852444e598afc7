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
                      int segment_count, const Table* __restrict__ tables,
                      const int* __restrict__ counts, u32 step, i64* __restrict__ rows,
                      u32* __restrict__ slots) {
  __shared__ u32 used;
  if (threadIdx.x == 0) used = 0;
  __syncthreads();
  const Table table = table_of(tables, segments, segment_count);
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
                 if (place.step != step) slot->step = step;
                 rows[at] = place.row;
                 return;
               }
               const u32 position = kSeen | (kMost - static_cast<u32>(at));
               if (place.row < position) atomicMax(&slot->row, position);
               if (table.filter > 1)
                 atomicAdd(&slot->step, counts == nullptr ? 1u : static_cast<u32>(counts[at]));
               mine += !place.there;
               rows[at] = -1;
               slots[at] = place.slot;
             });
  if (mine != 0) atomicAdd(&used, mine);
  __syncthreads();
  if (threadIdx.x == 0 && used != 0) table.add(kUsed, used);
}

// Counts the keys that get a row, by tile. rows[i] of a key that was -1 becomes ~its first position
// if it gets one, else 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_count(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                     int segment_count, const Table* __restrict__ tables, u32 step,
                     i64* __restrict__ rows, const u32* __restrict__ slots,
                     u32* __restrict__ counts, u32 tiles) {
  extern __shared__ u32 counters[];
  const Table table = table_of(tables, segments, segment_count);
  count_tile(Tile(segments, segment_count), keys, 1, ByOwner{true, 1}, counts, tiles, counters,
             [&](i64 at) {
               if (rows[at] >= 0) return false;
               Slot* slot = table.slot(slots[at]);
               const Slot seen = fetch_slot(slot);
               const i64 first = kMost - (seen.row & kMost);
               const bool marked = seen.row >= kSeen;
               if (marked && (table.filter <= 1 || seen.step >= table.filter)) {
                 rows[at] = ~first;
                 return first == at;
               }
               // Whoever comes later finds no mark, which says the same.
               if (marked && first == at) slot->row = kNoRow | step;
               rows[at] = 0;
               return false;
             });
}

// Gives new rows, by table, then first position: from the free ones, then behind the highest.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_number(const i64* __restrict__ keys, const Segment* __restrict__ segments,
                      int segment_count, const Table* __restrict__ tables, u32 step,
                      i64* __restrict__ rows, const u32* __restrict__ slots,
                      const u32* __restrict__ counts, u32 tiles, const u32* __restrict__ starts,
                      i64* __restrict__ new_keys, i64* __restrict__ new_rows) {
  extern __shared__ u32 counters[];
  const Table table = table_of(tables, segments, segment_count);
  const u32 before = counts[table.first_tile];
  const i64 first = *table.counter(kFreeFirst), free = *table.counter(kFreeEnd) - first,
            highest = *table.counter(kHighest);
  place_tile(
      Tile(segments, segment_count), keys, 1, ByOwner{true, 1}, counts, tiles, starts, counters,
      [=](i64 at) { return rows[at] == ~at; },
      [=](i64 at, i64 key, u32 number) {
        const i64 i = number - before;
        i64 row = i < free ? reinterpret_cast<const u32*>(table.free_rows)[first + i]
                           : highest + i - free + 1;
        Slot* slot = table.slot(slots[at]);
        if (row <= table.most_rows) {
          slot->row = static_cast<u32>(row);
          slot->step = step;
        } else {
          slot->row = kNoRow | step;
          row = 0;
        }
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
    const i64 free = *table.counter(kFreeEnd) - *table.counter(kFreeFirst), made = new_counts[t];
    const i64 reused = made < free ? made : free, room = table.most_rows - *table.counter(kHighest);
    const i64 numbered = made - reused < room ? made - reused : room;
    *table.counter(kFreeFirst) += reused;
    *table.counter(kHighest) += numbered;
    *table.counter(kRefused) += made - reused - numbered;
    if (table.filter <= 1) *table.counter(kDead) += made - reused - numbered;  // they don't wait
  }
}

// ---- Maintenance: one table each, a key or a slot each thread; slots with those of the last
// sector

__device__ __forceinline__ i64 thread_index() {
  return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
}

// Says whether a key has a row, or waits for one; a removed key does neither.
__device__ __forceinline__ bool is_live(const Slot& slot) {
  return is_row(slot.row) || (slot.row != 0 && slot.step != 0);
}

// Removes a key, and says whether it was there: of several threads one is told so. Bits of `freed`
// say which rows become free.
__device__ __forceinline__ bool remove(Slot* slot, u32* freed) {
  const u64 words =
      atomicExch(reinterpret_cast<u64*>(&slot->row), static_cast<u64>(kNoRow));  // step 0
  const Slot was = {0, static_cast<u32>(words), static_cast<u32>(words >> 32)};
  if (is_row(was.row)) atomicOr(freed + was.row / 32, 1u << was.row % 32);
  return is_live(was);
}

// All threads of a block call it.
__device__ __forceinline__ void count_dead(const Table& table, bool removed) {
  const int dead = __syncthreads_count(removed);
  if (threadIdx.x == 0 && dead != 0) table.add(kDead, static_cast<u32>(dead));
}

__device__ __forceinline__ Place find(const Table& table, u64 key) {
  const u32 sector = home(table, key);
  return find(table, key, sector, fetch(table, sector));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_remove(const i64* __restrict__ keys, i64 count, const Table* __restrict__ table,
                      u32* freed) {
  const i64 at = thread_index();
  bool removed = false;
  if (at < count) {
    const Place place = find(*table, static_cast<u64>(keys[at]));
    removed = place.there && remove(table->slot(place.slot), freed);
  }
  count_dead(*table, removed);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_remove_unused(u32 since, i64 slots, const Table* __restrict__ table, u32* freed) {
  const i64 at = thread_index();
  bool removed = false;
  if (at < slots) {
    Slot* place = table->slot(static_cast<u32>(at));
    const Slot slot = fetch_slot(place);
    removed = is_live(slot) && (is_row(slot.row) ? slot.step : slot.row & kMost) < since &&
              remove(place, freed);
  }
  count_dead(*table, removed);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_mark_free(const Table* __restrict__ table, u32* freed) {
  const i64 at = *table->counter(kFreeFirst) + thread_index();
  if (at >= *table->counter(kFreeEnd)) return;
  const u32 row = reinterpret_cast<const u32*>(table->free_rows)[at];
  atomicOr(freed + row / 32, 1u << row % 32);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_count_free(const u32* __restrict__ freed, i64 words, int* __restrict__ counts) {
  const i64 at = thread_index();
  if (at < words) counts[at] = __popc(freed[at]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_list_free(const u32* __restrict__ freed, i64 words, const int* __restrict__ starts,
                         i64* __restrict__ counters, u32* __restrict__ free_rows) {
  const i64 at = thread_index();
  if (at == 0) {
    counters[kFreeFirst] = 0;
    counters[kFreeEnd] = starts[words];
  }
  if (at >= words) return;
  int to = starts[at];
  for (u32 bits = freed[at]; bits != 0; bits &= bits - 1) {
    free_rows[to++] = static_cast<u32>(32 * at + __ffs(static_cast<int>(bits)) - 1);
  }
}

// Puts what lives of `old` into `table`, whose slots are all free.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_rebuild(const Table* __restrict__ old, i64 slots, const Table* __restrict__ table) {
  const i64 at = thread_index();
  Slot slot = {kFree, 0, 0};
  if (at < slots) slot = fetch_slot(old->slot(static_cast<u32>(at)));
  bool used = false;
  if (is_live(slot)) {
    const u32 sector = home(*table, slot.key);
    const Place place = find_or_put(*table, slot.key, sector, fetch(*table, sector));
    if (place.slot == kNowhere) {
      table->add(kLost, 1);
    } else {
      Slot* to = table->slot(place.slot);
      to->row = slot.row;
      to->step = slot.step;
      used = slot.key != kFree;
    }
  }
  const int moved = __syncthreads_count(used);
  if (threadIdx.x == 0 && moved != 0) table->add(kUsed, static_cast<u32>(moved));
}

// Lists all that lives, in any order. `ended` is 0, and becomes how many there are.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_export(const Table* __restrict__ table, i64 slots, Slot* __restrict__ out,
                      u32* ended) {
  const i64 at = thread_index();
  Slot slot = {0, 0, 0};
  if (at < slots) slot = fetch_slot(table->slot(static_cast<u32>(at)));
  const u32 lane = threadIdx.x % 32, lanes = __ballot_sync(kAllLanes, is_live(slot));
  u32 first = 0;
  if (lane == 0 && lanes != 0) first = atomicAdd(ended, static_cast<u32>(__popc(lanes)));
  first = __shfl_sync(kAllLanes, first, 0);
  if (is_live(slot)) out[first + __popc(lanes & ((1u << lane) - 1))] = slot;
}

// Sets when keys that are there were last used or seen.
extern "C" __global__ void __launch_bounds__(kThreads)
    hash_table_set_steps(const i64* __restrict__ keys, i64 count, const Table* __restrict__ table,
                         const u32* __restrict__ steps) {
  const i64 at = thread_index();
  if (at >= count) return;
  const Place place = find(*table, static_cast<u64>(keys[at]));
  if (!place.there || !is_live({0, place.row, place.step})) return;
  Slot* slot = table->slot(place.slot);
  if (is_row(place.row)) {
    slot->step = steps[at];
  } else {
    slot->row = kNoRow | steps[at];
  }
}
