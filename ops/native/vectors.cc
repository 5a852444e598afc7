#include "vectors.h"

#include <algorithm>

#include "clones.h"

#define UNROLL _Pragma("GCC unroll 8")

// Calls with `kDim` for `dim`: the common dimensions get loops of their own.
#define BY_DIM(call)                \
  switch (dim) {                    \
    case 16: {                      \
      constexpr int64_t kDim = 16;  \
      return call;                  \
    }                               \
    case 32: {                      \
      constexpr int64_t kDim = 32;  \
      return call;                  \
    }                               \
    case 64: {                      \
      constexpr int64_t kDim = 64;  \
      return call;                  \
    }                               \
    case 128: {                     \
      constexpr int64_t kDim = 128; \
      return call;                  \
    }                               \
    default: {                      \
      const int64_t kDim = dim;     \
      return call;                  \
    }                               \
  }

namespace collective {
namespace {

constexpr int64_t kLine = 16;  // floats of a cache line

// How many rows ahead memory is prefetched: a few kilobytes.
INLINE int64_t Ahead(int64_t dim) { return dim >= 64 ? 8 : 16; }

INLINE void Prefetch(const float* row, int64_t dim) {
  UNROLL for (int64_t c = 0; c < dim; c += kLine) __builtin_prefetch(row + c);
}

// Eight columns, in a register or two. They may begin anywhere; a template's argument would lose
// this.
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Bits8 __attribute__((vector_size(32), aligned(4), may_alias));

// out[c] = (out[c] & keep) + factor * in[c]. Whether a row is new can't be predicted, so there is
// no branch: memory that may hold anything is read, and masked.
template <bool kMasked, bool kScaled>
INLINE void AddRow(const float* in, int64_t dim, float factor, int32_t keep, float* out) {
  int64_t c = 0;
  UNROLL for (; c + 8 <= dim; c += 8) {
    const Eight& row = *reinterpret_cast<const Eight*>(in + c);
    Eight& sum = *reinterpret_cast<Eight*>(out + c);
    const Eight before =
        kMasked ? reinterpret_cast<Eight>(reinterpret_cast<Bits8>(sum) & keep) : sum;
    sum = before + (kScaled ? factor * row : row);
  }
  for (; c < dim; ++c)
    out[c] = (kMasked && keep == 0 ? 0 : out[c]) + (kScaled ? factor * in[c] : in[c]);
}

template <First kFirst>
INLINE int64_t Place(uint32_t to) {
  return kFirst == First::kFlags ? to & ~kNew : to;
}
template <First kFirst>
INLINE int64_t Place(int64_t to) {
  return to;
}
template <First kFirst>
INLINE int64_t Place(int32_t to) {
  return to;
}

template <bool kScaled, First kFirst, class From, class To>
INLINE void SumBody(Sums<From, To> sums, int64_t dim) {
  const auto in = [&](int64_t k) INLINED {
    return sums.in.base + static_cast<int64_t>(sums.in.at[k]) * sums.in.stride;
  };
  const auto out = [&](int64_t k)
                       INLINED { return sums.out + Place<kFirst>(sums.to[k]) * sums.to_stride; };
  int64_t before = -1;
  for (int64_t k = 0; k < sums.n; ++k) {
    const int64_t ahead = std::min(k + Ahead(dim), sums.n - 1);
    Prefetch(kFirst == First::kRuns ? in(ahead) : out(ahead), dim);
    const int64_t to = static_cast<int64_t>(sums.to[k]);
    const bool is_new =
        kFirst == First::kRuns ? to != before : kFirst == First::kFlags && (to & kNew) != 0;
    before = to;
    const float factor =
        kScaled ? (sums.factors == nullptr ? sums.scale : sums.scale * sums.factors[k]) : 1;
    AddRow<kFirst != First::kNever, kScaled>(in(k), dim, factor, is_new ? 0 : -1, out(k));
  }
}

template <First kFirst, class From, class To>
INLINE void SumEither(const Sums<From, To>& sums, int64_t dim) {
  if (sums.factors == nullptr && sums.scale == 1) {
    SumBody<false, kFirst>(sums, dim);
  } else {
    SumBody<true, kFirst>(sums, dim);
  }
}

template <First kFirst, class To>
INLINE void AddBody(const float* in, int64_t n, float scale, const To* to, int64_t to_stride,
                    int64_t dim, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    Prefetch(out + Place<kFirst>(to[std::min(i + Ahead(dim), n - 1)]) * to_stride, dim);
    const int32_t keep =
        kFirst == First::kFlags && (static_cast<uint32_t>(to[i]) & kNew) != 0 ? 0 : -1;
    AddRow<kFirst == First::kFlags, true>(in + i * dim, dim, scale, keep,
                                          out + Place<kFirst>(to[i]) * to_stride);
  }
}

template <class Index>
INLINE void CopyBody(Rows<Index> rows, int64_t n, int64_t dim, float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) {
    Prefetch(
        rows.base + static_cast<int64_t>(rows.at[std::min(i + Ahead(dim), n - 1)]) * rows.stride,
        dim);
    const float* __restrict from = rows.base + static_cast<int64_t>(rows.at[i]) * rows.stride;
    for (int64_t c = 0; c < dim; ++c) out[i * dim + c] = from[c];
  }
}

}  // namespace

CLONES void DivideRows(float* out, const int64_t* at, const float* divisors, int64_t n,
                       int64_t dim) {
  for (int64_t i = 0; i < n; ++i) {
    float* row = out + at[i] * dim;
    const float divisor = divisors[i];
    for (int64_t c = 0; c < dim; ++c) row[c] = divisor == 0 ? 0 : row[c] / divisor;
  }
}

CLONES void Scale(float* values, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) values[i] *= scale;
}

#define COPY(Index)                                                                   \
  template <>                                                                         \
  CLONES void CopyRows<Index>(Rows<Index> rows, int64_t n, int64_t dim, float* out) { \
    BY_DIM(CopyBody(rows, n, kDim, out))                                              \
  }
COPY(int32_t)
COPY(int64_t)

#define ADD(kFirst, To)                                                                  \
  template <>                                                                            \
  CLONES void AddRows<kFirst, To>(const float* in, int64_t n, float scale, const To* to, \
                                  int64_t to_stride, int64_t dim, float* out) {          \
    BY_DIM((AddBody<kFirst>(in, n, scale, to, to_stride, kDim, out)))                    \
  }
ADD(First::kNever, int32_t)   // gradients of rows to positions
ADD(First::kFlags, uint32_t)  // gradients of keys to distinct rows

#define SUM(kFirst, From, To)                                                      \
  template <>                                                                      \
  CLONES void SumRows<kFirst, From, To>(const Sums<From, To>& sums, int64_t dim) { \
    BY_DIM(SumEither<kFirst>(sums, kDim))                                          \
  }
SUM(First::kRuns, int32_t, int64_t)    // rows that came back, to samples
SUM(First::kNever, int64_t, int32_t)   // gradients of samples, to positions
SUM(First::kNever, int32_t, int32_t)   // rows that came back, to positions
SUM(First::kRuns, int64_t, int32_t)    // rows of a table, to bags
SUM(First::kRuns, int32_t, int32_t)    // distinct rows, to bags
SUM(First::kFlags, int32_t, uint32_t)  // gradients of bags, to distinct rows
SUM(First::kFlags, int64_t, uint32_t)  // rows of a table, to distinct rows

#define PRODUCTS(Index, Other)                                                                     \
  template <>                                                                                      \
  CLONES void Products<Index, Other>(Rows<Index> rows, Rows<Other> others, int64_t n, int64_t dim, \
                                     float* products) {                                            \
    for (int64_t k = 0; k < n; ++k) {                                                              \
      products[k] = Dot(rows.base + rows.at[k] * rows.stride,                                      \
                        others.base + others.at[k] * others.stride, dim);                          \
    }                                                                                              \
  }
PRODUCTS(int32_t, int32_t)  // rows that came back, with themselves
PRODUCTS(int32_t, int64_t)  // rows that came back, with gradients of samples
PRODUCTS(int64_t, int64_t)  // rows of a table, with themselves
PRODUCTS(int64_t, int32_t)  // rows of a table, with gradients of bags

}  // namespace collective
