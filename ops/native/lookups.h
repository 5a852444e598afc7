// What CollectivePool and its gradient have in common: the members, and their inputs.

#ifndef COLLECTIVE_NATIVE_LOOKUPS_H_
#define COLLECTIVE_NATIVE_LOOKUPS_H_

#include <vector>

#include "parallel.h"
#include "vectors.h"
#include "wire.h"

namespace collective {

struct Lookup {
  int section = 0, combiner = kRows;
  int samples = -1, weights = -1;  // its number among the members that have them
  int64_t dim = 0;
  float max_norm = 0;
};

tensorflow::Status ReadLookups(tensorflow::OpKernelConstruction* context,
                               std::vector<Lookup>* members);

struct LookupScratch {
  Room<int64_t> iota, bag_samples;
  Room<int32_t> starts;
  Room<float> divisors, factors;
};

struct LookupInputs {
  const tensorflow::Tensor* flat = nullptr;
  tensorflow::OpInputList positions, samples, weights;

  tensorflow::Status Read(tensorflow::OpKernelContext* context);
};

// Of each bag, the ids of one sample: what the sum of its rows is divided by, its sample, and where
// it starts among the ids.
struct BagDivisors {
  const float* of;
  const int64_t* samples;
  const int32_t* starts;  // one more, of the end
};

// One member's inputs, checked. Valid as long as they are.
class Opened {
 public:
  tensorflow::Status Open(const Lookup& member, int number, const LookupInputs& inputs);

  int64_t ids = 0;
  int64_t out = 0;       // rows of the output
  int64_t bags = 0;      // of them that have ids
  Rows<int32_t> rows{};  // that came back
  const int64_t* samples =
      nullptr;  // row of the output that each id belongs to; null if they are 0, 1, 2, ...
  const float* weights = nullptr;  // or null

  // `samples`, made in `scratch` if need be.
  const int64_t* Samples(LookupScratch* scratch) const;

  // 1 for a sum. In `scratch`.
  BagDivisors Divisors(const Lookup& member, LookupScratch* scratch) const;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_LOOKUPS_H_
