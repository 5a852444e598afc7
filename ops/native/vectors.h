// Loops over rows of floats. Compiled for several instruction sets, the best of which is chosen when the library is loaded;
// the numbers are the same with each.
//
// `at` says where a row stands in `base`: at[i] * stride elements from its start (stride D for row numbers, 1 for offsets).

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

// Consecutive entries of an `at` that make one row: bag b has those from starts[b] to before starts[b + 1]. Its row is that of
// number b of a matrix, or of number samples[starts[b]] where there are samples.
struct Bags {
  int64_t count;
  const int32_t* starts;   // [count + 1], ascending
  const int64_t* samples;  // or null
  const float* divisors;   // [count], what the sum is divided by (0 where that is 0), or null

  int64_t Row(int64_t b) const { return samples == nullptr ? b : samples[starts[b]]; }
};

// out[i] = row i, for i in [0, n).
template <class Index>
void CopyRows(Rows<Index> rows, int64_t n, int64_t dim, float* out);

// out[bag] = sum of factors[k] * row k over the bag's k (of the rows where `factors` is null), divided by its divisor.
template <class Index>
void SumRows(Rows<Index> rows, const float* factors, const Bags& bags, int64_t dim, float* out);

// factors[k] = (weights[k], or 1) * max_norm / max(norm of row k, max_norm), for k in [0, n).
template <class Index>
void ClipFactors(Rows<Index> rows, int64_t n, int64_t dim, float max_norm, const float* weights, float* factors);

// Where row k is added to: row targets[k] & ~kFirst of a matrix, which is overwritten if kFirst is set.
constexpr uint32_t kFirst = uint32_t{1} << 31;

// out[targets[i]] += scale * row i of `gradients`, for i in [0, n).
void AddRows(const float* gradients, int64_t n, int64_t dim, float scale, const uint32_t* targets, int64_t stride, float* out);

// For each bag and its k: out[targets[k]] += scale * factors[k] * (row of the bag in `gradients`) / divisor.
void AddBags(const float* gradients, const Bags& bags, int64_t dim, float scale, const float* factors, const uint32_t* targets,
             int64_t stride, float* out);

// As AddBags, where factors[k] is that of ClipFactors: a row that was clipped passes on only what is orthogonal to it.
template <class Index>
void AddClipped(Rows<Index> rows, const float* gradients, const Bags& bags, int64_t dim, float scale, float max_norm,
                const float* factors, const uint32_t* targets, int64_t stride, float* out);

// products[k] = row k . (row of its bag in `gradients`).
template <class Index>
void Products(Rows<Index> rows, const float* gradients, const Bags& bags, int64_t dim, float* products);

// row of `values` *= scale.
void Scale(float* values, int64_t n, float scale);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_VECTORS_H_
