// Loops over rows of floats.
//
// A row of a matrix is found at an index times a stride: the stride is D for row numbers, 1 for
// element offsets.

#ifndef COLLECTIVE_NATIVE_VECTORS_H_
#define COLLECTIVE_NATIVE_VECTORS_H_

#include <cstdint>

#include "clones.h"

namespace collective {

template <class Index>
struct Rows {
  const float* base;
  const Index* at;
  int64_t stride;
};

// out[i] = row i, for i in [0, n).
template <class Index>
void CopyRows(Rows<Index> rows, int64_t n, int64_t dim, float* out);

// Says when a row of the result is written for the first time: then its old content is ignored.
enum class First {
  kNever,  // The content always counts.
  kRuns,   // Where `to` differs from the one before: equal ones are adjacent.
  kFlags,  // Where kNew is set in `to`.
};
constexpr uint32_t kNew = uint32_t{1} << 31;

// out[to[k]] += scale * factors[k] * (row k of `in`), for k in [0, n) and in this order; `factors`
// may be null. Memory is prefetched for `to`, with kRuns for `in.at`: the other one of the two
// should be ascending.
template <class From, class To>
struct Sums {
  Rows<From> in;
  int64_t n;
  const float* factors;
  float scale;
  const To* to;
  int64_t to_stride;
  float* out;
};
template <First kFirst, class From, class To>
void SumRows(const Sums<From, To>& sums, int64_t dim);

// out[to[i]] += scale * row i of `in`, as SumRows with ascending rows.
template <First kFirst, class To>
void AddRows(const float* in, int64_t n, float scale, const To* to, int64_t to_stride, int64_t dim,
             float* out);

// products[k] = row k . row k of `others`, for k in [0, n).
template <class Index, class Other>
void Products(Rows<Index> rows, Rows<Other> others, int64_t n, int64_t dim, float* products);

// Divides row at[i] of `out` by divisors[i]; the row becomes 0 if that is 0.
void DivideRows(float* out, const int64_t* at, const float* divisors, int64_t n, int64_t dim);

void Scale(float* values, int64_t n, float scale);

// Returns a . b, added up in sixteen lanes.
INLINE float Dot(const float* a, const float* b, int64_t dim) {
  float lanes[16] = {};
  int64_t c = 0;
  for (; c + 16 <= dim; c += 16) {
    for (int l = 0; l < 16; ++l) lanes[l] += a[c + l] * b[c + l];
  }
  for (int l = 0; c < dim; ++c, ++l) lanes[l] += a[c] * b[c];
  for (int width = 8; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_VECTORS_H_
