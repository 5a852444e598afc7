// Places a table's rows on ranks: the twin of ops/placement.py for compiled operations, as
// ops/gpu/placement.cuh is for kernels.

#ifndef COLLECTIVE_NATIVE_PLACEMENT_H_
#define COLLECTIVE_NATIVE_PLACEMENT_H_

#include <cstdint>

namespace collective {

// The kind of a table: how its keys are placed on ranks. The kind of a table that rank r has whole
// is kOnOneRank * (1 + r) more.
enum Kind { kStatic = 0, kDynamic = 1, kOnOneRank = 2 };

inline int MostKinds(int ranks) { return kOnOneRank * (1 + ranks); }

inline bool IsKind(int kind, int ranks) { return kind >= 0 && kind < MostKinds(ranks); }

inline bool IsDynamic(int kind) { return kind % kOnOneRank == kDynamic; }

// SplitMix64's output function, as in ops/key_hashing.py.
inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Tells which rank owns a key of a table of this kind, and where the owner stores it.
class Placement {
 public:
  Placement(int kind, int ranks)
      : dynamic_(IsDynamic(kind)),
        only_(kind / kOnOneRank - 1),
        ranks_(ranks),
        mask_((ranks & (ranks - 1)) == 0 ? ranks - 1 : -1) {
    while ((1 << shift_) < ranks) ++shift_;
  }

  int32_t Owner(int64_t key) const {
    if (only_ >= 0) return only_;
    if (dynamic_) {
      const uint64_t mixed = Mix(static_cast<uint64_t>(key));
      return static_cast<int32_t>(mask_ >= 0 ? mixed & static_cast<uint64_t>(mask_)
                                             : mixed % static_cast<uint64_t>(ranks_));
    }
    if (mask_ >= 0) return static_cast<int32_t>(key & mask_);
    if (IsUint32(key))
      return static_cast<int32_t>(static_cast<uint32_t>(key) % static_cast<uint32_t>(ranks_));
    const int64_t rest = key % ranks_;
    return static_cast<int32_t>(rest < 0 ? rest + ranks_ : rest);
  }

  // Returns the row of a static table's key in its owner's shard; a dynamic table's key itself,
  // whose row its row store finds.
  int64_t Row(int64_t key) const {
    if (dynamic_ || only_ >= 0) return key;
    if (mask_ >= 0) return key >> shift_;
    if (IsUint32(key)) return static_cast<uint32_t>(key) / static_cast<uint32_t>(ranks_);
    return key / ranks_ - (key % ranks_ < 0 ? 1 : 0);
  }

 private:
  static bool IsUint32(int64_t key) { return static_cast<uint64_t>(key) >> 32 == 0; }

  bool dynamic_;
  int32_t only_;  // The rank that has all rows, or -1.
  int ranks_;
  int64_t mask_;
  int shift_ = 0;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_PLACEMENT_H_
