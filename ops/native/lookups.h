// What CollectivePool and its gradient have in common: the members, their inputs, and which ids make a row.

#ifndef COLLECTIVE_NATIVE_LOOKUPS_H_
#define COLLECTIVE_NATIVE_LOOKUPS_H_

#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace collective {

enum Combiner { kRows = 0, kSum = 1, kMean = 2, kSqrtN = 3 };

struct Lookup {
  int section = 0, combiner = kRows;
  int samples = -1, weights = -1;  // its number among the members that have them
  int64_t dim = 0;
  float max_norm = 0;
};

struct Lookups {
  std::vector<Lookup> members;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
};

struct LookupScratch {
  Room<int32_t> starts;
  Room<float> divisors, factors, products;
  Room<uint32_t> targets;
};

// One member's inputs, checked.
struct Opened {
  int64_t ids = 0;
  int64_t out = 0;  // rows of its output
  Rows<int32_t> rows{};
  const float* weights = nullptr;
  Bags bags{};  // of a member without a combiner: one for each id

  // The result is valid as long as `scratch` and the inputs are.
  tensorflow::Status Open(const Lookup& member, int m, const tensorflow::Tensor& flat, const tensorflow::OpInputList& positions,
                          const tensorflow::OpInputList& samples, const tensorflow::OpInputList& weights, LookupScratch* scratch);

  // What each row is multiplied by, if by anything.
  const float* Factors(const Lookup& member, LookupScratch* scratch) const;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_LOOKUPS_H_
