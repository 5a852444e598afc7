// Reads the members of CollectivePool and of its gradient, and their inputs.

#ifndef COLLECTIVE_NATIVE_LOOKUPS_H_
#define COLLECTIVE_NATIVE_LOOKUPS_H_

#include <vector>

#include "parallel.h"
#include "vectors.h"
#include "wire.h"

namespace collective {

struct Lookup {
  int section = 0, combiner = kRows;
  int samples = -1, weights = -1;  // Its number among the members that have them.
  int64_t dim = 0;
  float max_norm = 0;
};

tensorflow::Status ReadLookups(tensorflow::OpKernelConstruction* context,
                               std::vector<Lookup>* members);

// Reads which member each of CollectivePoolGradient's gradients is of: each has at most one.
tensorflow::Status ReadMembersOfGradients(tensorflow::OpKernelConstruction* context, size_t members,
                                          std::vector<int>* of);

struct LookupScratch {
  Buffer<int64_t> iota, bag_samples;
  Buffer<int32_t> starts;
  Buffer<float> divisors, factors;
};

struct LookupInputs {
  const tensorflow::Tensor* flat = nullptr;  // Null: rows are not read.
  tensorflow::OpInputList positions, samples, weights;

  // Args:
  //   with_rows: there is an input `rows` that is read.
  tensorflow::Status Read(tensorflow::OpKernelContext* context, bool with_rows = true);
};

// For each bag (the ids of one sample): the divisor of the sum of its rows, its sample, and where
// it starts among the ids.
struct BagDivisors {
  const float* of;
  const int64_t* samples;
  const int32_t* starts;  // [bags + 1], the last is the end.
};

// Holds one member's inputs, checked. Valid as long as they are.
class MemberInputs {
 public:
  tensorflow::Status Open(const Lookup& member, int number, const LookupInputs& inputs);

  int64_t ids = 0;
  int64_t out = 0;       // Rows of the output.
  int64_t bags = 0;      // Rows of the output that have ids.
  Rows<int32_t> rows{};  // The rows that came back.
  // The row of the output that each id belongs to; null if these are 0, 1, 2, ...
  const int64_t* samples = nullptr;
  const float* weights = nullptr;  // Null without weights.

  // Returns `samples`, made in `scratch` if need be.
  const int64_t* Samples(LookupScratch* scratch) const;

  // Returns the bags' divisors, in `scratch`: 1 for a sum.
  BagDivisors Divisors(const Lookup& member, LookupScratch* scratch) const;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_LOOKUPS_H_
