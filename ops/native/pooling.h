// Pools the rows of one lookup: when all rows have arrived (pool.cc), or while others still arrive
// (answer.cc).

#ifndef COLLECTIVE_NATIVE_POOLING_H_
#define COLLECTIVE_NATIVE_POOLING_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lookups.h"
#include "tensorflow/core/framework/variant_encode_decode.h"

namespace collective {

// Computes a member's result, [opened.out, member.dim].
void Pool(const Lookup& member, const MemberInputs& opened, LookupScratch* scratch, float* out);

// Holds results that were pooled while other rows still arrived.
struct PooledEarly {
  std::vector<std::optional<tensorflow::Tensor>> results;  // By member; none: not pooled yet.
};

// Carries them from one operation to the other; null if there are none.
struct PooledEarlyHandle {
  std::shared_ptr<const PooledEarly> pooled;

  std::string TypeName() const { return "collective::PooledEarlyHandle"; }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
  std::string DebugString() const { return TypeName(); }
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_POOLING_H_
