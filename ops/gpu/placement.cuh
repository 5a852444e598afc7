// Places a table's rows on ranks, for kernels: the twin of ops/native/placement.h and
// ops/placement.py.

#include "integers.cuh"

// The kinds of tables; that of a table that rank r has whole is kOnOneRank * (1 + r) more.
constexpr int kStatic = 0, kDynamic = 1, kOnOneRank = 2;

// SplitMix64's output function.
__device__ __forceinline__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// key mod N for a static table that is dealt to all ranks, mix(key) mod N for a dynamic one.
// Divisions of 64 bits are slow, and seldom needed.
__device__ __forceinline__ u32 owner_of(i64 key, int kind, u32 ranks) {
  if (kind >= kOnOneRank) return static_cast<u32>(kind / kOnOneRank - 1);
  const bool dynamic = kind == kDynamic;
  const u64 x = dynamic ? mix(static_cast<u64>(key)) : static_cast<u64>(key);
  if ((ranks & (ranks - 1)) == 0) return static_cast<u32>(x) & (ranks - 1);
  if (dynamic) return static_cast<u32>(x % ranks);
  if (x >> 32 == 0) return static_cast<u32>(x) % ranks;
  const i64 rest = key % static_cast<i64>(ranks);
  return static_cast<u32>(rest < 0 ? rest + ranks : rest);
}

// Finds where the owner keeps a key: row key div N of a static table that is dealt to all ranks,
// else the key itself.
__device__ __forceinline__ i64 local_row_of(i64 key, int kind, u32 ranks) {
  if (kind != kStatic || ranks == 1) return key;
  if (static_cast<u64>(key) >> 32 == 0) return static_cast<u32>(key) / ranks;
  const i64 quotient = key / static_cast<i64>(ranks);
  return quotient - (key % static_cast<i64>(ranks) < 0 ? 1 : 0);
}
