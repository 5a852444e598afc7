#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// glibc picks the clone that the processor can run when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "avx512f", "default")))
#else
#define CLONES
#endif
#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED
#define UNROLL _Pragma("GCC unroll 16")

// The common dimensions get loops of their own.
#define BY_DIM(call)                                 \
  if (dim == 16) {                                   \
    constexpr int64_t kDim = 16;                     \
    call;                                            \
  } else if (dim == 32) {                            \
    constexpr int64_t kDim = 32;                     \
    call;                                            \
  } else if (dim == 64) {                            \
    constexpr int64_t kDim = 64;                     \
    call;                                            \
  } else if (dim == 128) {                           \
    constexpr int64_t kDim = 128;                    \
    call;                                            \
  } else {                                           \
    const int64_t kDim = dim;                        \
    call;                                            \
  }

namespace collective {
namespace {

constexpr int64_t kLine = 16;  // floats of a cache line

// How many rows ahead memory is announced: a few kilobytes.
INLINE int64_t Ahead(int64_t dim) { return dim >= 64 ? 8 : 16; }

INLINE void Prefetch(const float* row, int64_t dim) {
  UNROLL for (int64_t c = 0; c < dim; c += kLine) __builtin_prefetch(row + c);
}

template <class Index>
INLINE const float* Row(const Rows<Index>& rows, int64_t i, int64_t stride) {
  return rows.base + static_cast<int64_t>(rows.at[i]) * stride;
}

INLINE float* Target(float* out, uint32_t target, int64_t stride) {
  return out + static_cast<int64_t>(target & ~kFirst) * stride;
}

// Columns of a row, in registers.
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

template <int kWidth>
struct Block {
  static constexpr int kParts = kWidth / 8;
  Eight part[kParts];

  INLINE void Zero() {
    UNROLL for (int j = 0; j < kParts; ++j) part[j] = Eight{};
  }
  INLINE void Load(const float* from) {
    UNROLL for (int j = 0; j < kParts; ++j) part[j] = reinterpret_cast<const Eight*>(from)[j];
  }
  INLINE void Store(float* to) const {
    UNROLL for (int j = 0; j < kParts; ++j) reinterpret_cast<Eight*>(to)[j] = part[j];
  }
  INLINE void Add(const float* from) {
    UNROLL for (int j = 0; j < kParts; ++j) part[j] += reinterpret_cast<const Eight*>(from)[j];
  }
  INLINE void Add(const float* from, float factor) {
    UNROLL for (int j = 0; j < kParts; ++j) part[j] += factor * reinterpret_cast<const Eight*>(from)[j];
  }
  INLINE void Multiply(float factor) {
    UNROLL for (int j = 0; j < kParts; ++j) part[j] *= factor;
  }
  INLINE void Divide(float by) {
    UNROLL for (int j = 0; j < kParts; ++j) part[j] = by == 0 ? Eight{} : part[j] / by;
  }
  INLINE void AddTo(float* to) const {
    UNROLL for (int j = 0; j < kParts; ++j) reinterpret_cast<Eight*>(to)[j] += part[j];
  }
  INLINE void AddTo(float* to, float factor) const {
    UNROLL for (int j = 0; j < kParts; ++j) reinterpret_cast<Eight*>(to)[j] += factor * part[j];
  }
  INLINE void StoreTo(float* to, float factor) const {
    UNROLL for (int j = 0; j < kParts; ++j) reinterpret_cast<Eight*>(to)[j] = factor * part[j];
  }
};

template <>
struct Block<1> {
  float part;

  INLINE void Zero() { part = 0; }
  INLINE void Load(const float* from) { part = *from; }
  INLINE void Store(float* to) const { *to = part; }
  INLINE void Add(const float* from) { part += *from; }
  INLINE void Add(const float* from, float factor) { part += factor * *from; }
  INLINE void Multiply(float factor) { part *= factor; }
  INLINE void Divide(float by) { part = by == 0 ? 0 : part / by; }
  INLINE void AddTo(float* to) const { *to += part; }
  INLINE void AddTo(float* to, float factor) const { *to += factor * part; }
  INLINE void StoreTo(float* to, float factor) const { *to = factor * part; }
};

// Calls f.template operator()<width>(column) for blocks that cover `dim` columns.
template <class F>
INLINE void ForBlocks(int64_t dim, const F& f) {
  int64_t column = 0;
  for (; column + 64 <= dim; column += 64) f(Block<64>(), column);
  for (; column + 16 <= dim; column += 16) f(Block<16>(), column);
  for (; column < dim; ++column) f(Block<1>(), column);
}

// Sums of products in sixteen lanes: the same order of additions with every width of vectors.
INLINE float Dot(const float* __restrict a, const float* __restrict b, int64_t dim) {
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

template <class Index>
INLINE void CopyBody(const Rows<Index>& rows, int64_t n, int64_t dim, int64_t stride, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    Prefetch(Row(rows, std::min(i + Ahead(dim), n - 1), stride), dim);
    const float* from = Row(rows, i, stride);
    ForBlocks(dim, [&](auto block, int64_t column) INLINED {
      block.Load(from + column);
      block.Store(out + i * dim + column);
    });
  }
}

template <class Index>
INLINE void SumBody(const Rows<Index>& rows, const float* factors, const Bags& bags, int64_t dim, int64_t stride, float* out) {
  const int64_t last = bags.starts[bags.count] - 1;
  for (int64_t b = 0; b < bags.count; ++b) {
    const int64_t first = bags.starts[b], end = bags.starts[b + 1];
    float* to = out + bags.Row(b) * dim;
    for (int64_t k = first; k < end; ++k) Prefetch(Row(rows, std::min(k + Ahead(dim), last), stride), dim);
    ForBlocks(dim, [&](auto sum, int64_t column) INLINED {
      sum.Zero();
      if (factors == nullptr) {
        for (int64_t k = first; k < end; ++k) sum.Add(Row(rows, k, stride) + column);
      } else {
        for (int64_t k = first; k < end; ++k) sum.Add(Row(rows, k, stride) + column, factors[k]);
      }
      if (bags.divisors != nullptr) sum.Divide(bags.divisors[b]);
      sum.Store(to + column);
    });
  }
}

// What a bag's gradient is multiplied by before it is passed on.
INLINE float Share(const Bags& bags, int64_t b, float scale) {
  if (bags.divisors == nullptr) return scale;
  return bags.divisors[b] == 0 ? 0 : scale / bags.divisors[b];
}

INLINE void AddBagsBody(const float* gradients, const Bags& bags, int64_t dim, float scale, const float* factors,
                        const uint32_t* targets, int64_t stride, float* out) {
  const int64_t last = bags.starts[bags.count] - 1;
  for (int64_t b = 0; b < bags.count; ++b) {
    const int64_t first = bags.starts[b], end = bags.starts[b + 1];
    const float* from = gradients + bags.Row(b) * dim;
    const float share = Share(bags, b, scale);
    for (int64_t k = first; k < end; ++k) Prefetch(Target(out, targets[std::min(k + Ahead(dim), last)], stride), dim);
    ForBlocks(dim, [&](auto block, int64_t column) INLINED {
      block.Load(from + column);
      block.Multiply(share);
      for (int64_t k = first; k < end; ++k) {
        float* to = Target(out, targets[k], stride) + column;
        if ((targets[k] & kFirst) != 0) {
          block.StoreTo(to, factors == nullptr ? 1 : factors[k]);
        } else if (factors == nullptr) {
          block.AddTo(to);
        } else {
          block.AddTo(to, factors[k]);
        }
      }
    });
  }
}

INLINE void AddRowsBody(const float* gradients, int64_t n, int64_t dim, float scale, const uint32_t* targets, int64_t stride,
                        float* out) {
  for (int64_t i = 0; i < n; ++i) {
    Prefetch(Target(out, targets[std::min(i + Ahead(dim), n - 1)], stride), dim);
    float* to = Target(out, targets[i], stride);
    const bool is_first = (targets[i] & kFirst) != 0;
    ForBlocks(dim, [&](auto block, int64_t column) INLINED {
      block.Load(gradients + i * dim + column);
      if (is_first) {
        block.StoreTo(to + column, scale);
      } else {
        block.AddTo(to + column, scale);
      }
    });
  }
}

}  // namespace

CLONES void AddRows(const float* gradients, int64_t n, int64_t dim, float scale, const uint32_t* targets, int64_t stride,
                    float* out) {
  BY_DIM(AddRowsBody(gradients, n, kDim, scale, targets, stride, out))
}

CLONES void AddBags(const float* gradients, const Bags& bags, int64_t dim, float scale, const float* factors,
                    const uint32_t* targets, int64_t stride, float* out) {
  BY_DIM(AddBagsBody(gradients, bags, kDim, scale, factors, targets, stride, out))
}

CLONES void Scale(float* values, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) values[i] *= scale;
}

#define FOR_INDEX(Index)                                                                                                     \
  template <>                                                                                                                \
  CLONES void CopyRows<Index>(Rows<Index> rows, int64_t n, int64_t dim, float* out) {                                        \
    BY_DIM(CopyBody(rows, n, kDim, rows.stride, out))                                                                        \
  }                                                                                                                          \
  template <>                                                                                                                \
  CLONES void SumRows<Index>(Rows<Index> rows, const float* factors, const Bags& bags, int64_t dim, float* out) {            \
    BY_DIM(SumBody(rows, factors, bags, kDim, rows.stride, out))                                                             \
  }                                                                                                                          \
  template <>                                                                                                                \
  CLONES void ClipFactors<Index>(Rows<Index> rows, int64_t n, int64_t dim, float max_norm, const float* weights,             \
                                 float* factors) {                                                                           \
    for (int64_t k = 0; k < n; ++k) {                                                                                        \
      const float* row = Row(rows, k, rows.stride);                                                                          \
      const float norm = std::sqrt(Dot(row, row, dim));                                                                      \
      factors[k] = (weights == nullptr ? 1 : weights[k]) * (max_norm / std::max(norm, max_norm));                            \
    }                                                                                                                        \
  }                                                                                                                          \
  template <>                                                                                                                \
  CLONES void Products<Index>(Rows<Index> rows, const float* gradients, const Bags& bags, int64_t dim, float* products) {    \
    for (int64_t b = 0; b < bags.count; ++b) {                                                                               \
      const float* gradient = gradients + bags.Row(b) * dim;                                                                 \
      for (int64_t k = bags.starts[b]; k < bags.starts[b + 1]; ++k) {                                                        \
        products[k] = Dot(Row(rows, k, rows.stride), gradient, dim);                                                         \
      }                                                                                                                      \
    }                                                                                                                        \
  }                                                                                                                          \
  template <>                                                                                                                \
  CLONES void AddClipped<Index>(Rows<Index> rows, const float* gradients, const Bags& bags, int64_t dim, float scale,        \
                                float max_norm, const float* factors, const uint32_t* targets, int64_t stride, float* out) { \
    for (int64_t b = 0; b < bags.count; ++b) {                                                                               \
      const float* gradient = gradients + bags.Row(b) * dim;                                                                 \
      for (int64_t k = bags.starts[b]; k < bags.starts[b + 1]; ++k) {                                                        \
        const float* row = Row(rows, k, rows.stride);                                                                        \
        const float factor = factors[k] * Share(bags, b, scale), square = Dot(row, row, dim);                                \
        const bool clipped = square > 0 && std::sqrt(square) >= max_norm;                                                    \
        const float along = clipped ? Dot(row, gradient, dim) / square : 0;                                                  \
        const float keep = (targets[k] & kFirst) != 0 ? 0 : 1;                                                               \
        float* to = Target(out, targets[k], stride);                                                                         \
        for (int64_t c = 0; c < dim; ++c) {                                                                                  \
          to[c] = (keep == 0 ? 0 : to[c]) + factor * (gradient[c] - along * row[c]);                                         \
        }                                                                                                                    \
      }                                                                                                                      \
    }                                                                                                                        \
  }
FOR_INDEX(int32_t)
FOR_INDEX(int64_t)

}  // namespace collective
