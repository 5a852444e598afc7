// A hash table of int64 keys, and how a key is found in it.
//
// Open addressing, a sector of 32 bytes at a time: all that is known of a key is in the sector
// where it is found. A key is put in the first free slot of its sequence, by one compare-and-swap
// of the slot's key. Slots become free only when the table is rebuilt: a search for the
// same key, at the same time or later, finds it.
//
// A slot is free where its key is kFree. The key that equals kFree has a slot of its own, in the
// sector after the last.

#include "integers.cuh"

constexpr u64 kFree = 0;

// The word `row` of a slot: a row, 0 if its key has none, because it was removed or refused; from
// kFirst on, during one call, the first position of a key that gets one: the smaller it is, the
// larger the word. The word `step`: when the key was last used.
constexpr u32 kFirst = 1u << 31, kMost = (1u << 30) - 1;

struct __align__(16) Slot {
  u64 key;
  u32 row, step;
};

struct Sector {
  Slot slots[2];
};

// kDead: slots in use whose keys have no row, some of which may have come back.
// kLost: keys that found no free slot, which can't be unless the host's bound of the slots in use,
// or the table, was broken.
enum Counter { kUsed, kDead, kHighest, kRefused, kLost };

struct Table {
  i64 sectors;   // address
  i64 count;     // of sectors, without the last
  i64 counters;  // address of i64 by Counter
  i64 most_rows;
  i64 step;        // to which a use leads
  i64 first_tile;  // of its keys

  __device__ __forceinline__ Slot* slot(u32 index) const {
    return reinterpret_cast<Slot*>(sectors) + index;
  }
  __device__ __forceinline__ i64* counter(Counter which) const {
    return reinterpret_cast<i64*>(counters) + which;
  }
  __device__ __forceinline__ void add(Counter which, u32 value) const {
    atomicAdd(reinterpret_cast<u64*>(counter(which)), static_cast<u64>(value));
  }
};

// The words that a slot held when its sector was read.
struct Place {
  u32 slot;
  u32 row, step;
  bool there;
};

// MurmurHash3's finalizer, as in the CPU's key map: keys of a rank have a residue of `mix` in
// common.
__device__ __forceinline__ u64 hash(u64 x) {
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDull;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return x ^ (x >> 33);
}

__device__ __forceinline__ u32 home(const Table& table, u64 key) {
  return static_cast<u32>(key == kFree ? table.count : __umul64hi(hash(key), table.count));
}

__device__ __forceinline__ u32 next(const Table& table, u32 sector) {
  return sector + 1 == table.count ? 0 : sector + 1;
}

// A slot is read while other threads write words of it. Both pass through the L2 cache, which
// blocks share. CUDA doesn't promise that 16 bytes are read at one moment. That 8 bytes are holds
// on all of NVIDIA's GPUs: the key is never half of another one.
__device__ __forceinline__ void put(u32* word, u32 value) { __stcg(word, value); }

__device__ __forceinline__ Slot fetch_slot(const Slot* at) {
  const ulonglong2 words = __ldcg(reinterpret_cast<const ulonglong2*>(at));
  return {words.x, static_cast<u32>(words.y), static_cast<u32>(words.y >> 32)};
}

__device__ __forceinline__ Sector fetch(const Table& table, u32 sector) {
  const Slot* first = table.slot(2 * sector);
  return {{fetch_slot(first), fetch_slot(first + 1)}};
}

constexpr u32 kNowhere = 0xFFFFFFFFu;  // no slot
constexpr u32 kMostProbes = 1u << 16;

// Bounds the sectors in which a key is looked for. With as many slots free as there must be, none
// needs a hundredth of these; in a table without a free slot every key would be looked for in all
// of it.
__device__ __forceinline__ u32 probes(const Table& table) {
  return table.count < kMostProbes ? static_cast<u32>(table.count) : kMostProbes;
}

// Finds a key; `sector` is its home and `seen` what that holds.
__device__ __forceinline__ Place find(const Table& table, u64 key, u32 sector, Sector seen) {
  for (u32 more = probes(table); more != 0; --more) {
    const Slot &left = seen.slots[0], &right = seen.slots[1];
    const bool in_left = left.key == key, in_right = !in_left && right.key == key;
    if (in_left || in_right || left.key == kFree || right.key == kFree) {
      return {2 * sector + in_right, in_left ? left.row : right.row,
              in_left ? left.step : right.step, in_left || in_right};
    }
    sector = next(table, sector);
    seen = fetch(table, sector);
  }
  return {kNowhere, 0, 0, false};
}

// Finds a key, or puts it in a free slot. What was read may be old, but a slot changes only from
// free to a key.
__device__ __forceinline__ Place find_or_put(const Table& table, u64 key, u32 sector, Sector seen) {
  for (u32 more = probes(table); more != 0; --more) {
#pragma unroll
    for (u32 s = 0; s < 2; ++s) {
      // By an index some compilers would keep the sector in local memory.
      const Slot slot = s == 0 ? seen.slots[0] : seen.slots[1];
      const u32 index = 2 * sector + s;
      if (slot.key == key) return {index, slot.row, slot.step, true};
      if (slot.key != kFree) continue;
      const u64 was = atomicCAS(&table.slot(index)->key, kFree, key);
      if (was == kFree || was == key) return {index, 0, 0, was == key};
    }
    sector = next(table, sector);
    seen = fetch(table, sector);
  }
  return {kNowhere, 0, 0, false};
}

__device__ __forceinline__ bool is_row(u32 row) { return row - 1 < kFirst - 1; }
