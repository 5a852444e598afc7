// Draws the initial values of rows: the numbers of collective/tables/rows/initializers.py, bit for
// bit.
//
// Element d of the row of key k comes from a hash of (seed, k, d). All is integer arithmetic, and
// double arithmetic that is exact to the last bit in the order in which it is written: this file
// must not be compiled with contraction (-ffp-contract=off). A distribution that needs a logarithm
// or a cosine, whose last bits depend on the library, is drawn by Python.

#ifndef COLLECTIVE_NATIVE_ROW_GENERATOR_H_
#define COLLECTIVE_NATIVE_ROW_GENERATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/status.h"

namespace collective {

// Kinds of initial values. Their numbers are those of `collective.ops.rows.compiled_row_store`.
enum RowKind {
  kByPython = 0,               // drawn by a function of Python
  kSameRow = 1,                // one row for all keys
  kUniform = 2,                // a + b u, with u in [0, 1)
  kCenteredUniform = 3,        // (2 u - 1) a
  kTruncatedNormal = 4,        // a + b z, with z a standard normal, truncated at 2
  kScaledTruncatedNormal = 5,  // z a
};

// Draws `count` rows of `keys` into `out`. Returns 0, or writes a text into `message`, of `size`
// bytes, and returns 1 if there was no memory, 2 if it failed otherwise.
using RowFunction = int (*)(int64_t number, const int64_t* keys, int64_t count, void* out,
                            char* message, int64_t size);

// The cubics by which the quantiles of the truncated normal are approximated.
struct QuantileCubic {
  double c0, c1, c2, c3;
};
constexpr int kQuantileCubics = 4096;

class RowGenerator {
 public:
  int kind = kByPython;
  uint64_t seed = 0;
  double a = 0, b = 0;
  std::vector<char> row;  // For kSameRow, in the table's type.
  RowFunction function = nullptr;
  int64_t number = 0;  // The store's, by which `function` finds its data.
  // Elements that `function` draws at once.
  int64_t block = 1 << 16;
  std::shared_ptr<const std::vector<QuantileCubic>> cubics;

  // Returns an error if these rows can't be drawn.
  tensorflow::Status Check(tensorflow::DataType dtype, int64_t dim) const;

  // Writes `count` rows [dim] of `dtype`.
  tensorflow::Status Draw(const int64_t* keys, int64_t count, tensorflow::DataType dtype,
                          int64_t dim, char* out) const;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ROW_GENERATOR_H_
