// Loops over rows of floats.
//
// A row of a matrix is found at an index times a stride: the stride is D for row numbers, 1 for
// element offsets.

#ifndef COLLECTIVE_NATIVE_VECTORS_H_
#define COLLECTIVE_NATIVE_VECTORS_H_

#include <cstdint>

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

// When a row of the result is written for the first time, what it held before doesn't count.
enum class First {
  kNever,  // it always counts
  kRuns,   // where `to` isn't what it was before: equal ones stand together
  kFlags,  // where kNew is set in `to`
};
constexpr uint32_t kNew = uint32_t{1} << 31;

// out[to[k]] += scale * factors[k] * (row k of `in`), for k in [0, n) and in this order; `factors`
// may be null. The other of `in.at` and `to` should be ascending: memory is announced ahead for one
// of them only, which is `to` but for kRuns.
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

// out[to[i]] += scale * row i of `in`. As SumRows with ascending rows.
template <First kFirst, class To>
void AddRows(const float* in, int64_t n, float scale, const To* to, int64_t to_stride, int64_t dim,
             float* out);

// products[k] = row k . row k of `others`, for k in [0, n).
template <class Index, class Other>
void Products(Rows<Index> rows, Rows<Other> others, int64_t n, int64_t dim, float* products);

// Row at[i] of `out` is divided by divisors[i]; it becomes 0 where that is 0.
void DivideRows(float* out, const int64_t* at, const float* divisors, int64_t n, int64_t dim);

void Scale(float* values, int64_t n, float scale);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_VECTORS_H_
