// Defines how a gradient changes a row of a table and the rows of its slots, on a CPU: one rule for
// each optimizer. gpu/rules.h has those of a GPU.
//
// A rule has `kNumbers` numbers, and updates one row: g is its gradient, w the row of the table;
// the other rows are those of its `kSlots` slots. The calculations are in TensorFlow's order, so
// that the results are TensorFlow's.

#ifndef COLLECTIVE_NATIVE_UPDATE_RULES_H_
#define COLLECTIVE_NATIVE_UPDATE_RULES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "clones.h"
#include "vectors.h"

namespace collective {

// What most rules are.
struct UpdateRule {
  static constexpr bool kRowWise = false;  // A slot has one number per row.
  static constexpr bool kAllRows = false;  // Rows without a gradient are updated by one of zeros.
};

// a += g * g; w -= rate * g / sqrt(a).
struct Adagrad : UpdateRule {
  static constexpr int kNumbers = 1, kSlots = 1;
  float rate;

  explicit Adagrad(const float* numbers) : rate(numbers[0]) {}

  INLINE void operator()(int64_t dim, const float* __restrict g, float* __restrict w,
                         float* __restrict a) const {
    for (int64_t c = 0; c < dim; ++c) {
      const float sum = a[c] + g[c] * g[c];
      a[c] = sum;
      w[c] -= rate * g[c] / std::sqrt(sum);
    }
  }
};

// a += g * g; w -= rate * g / sqrt(a + epsilon), as Keras computes it.
struct KerasAdagrad : UpdateRule {
  static constexpr int kNumbers = 2, kSlots = 1;
  float rate, epsilon;

  explicit KerasAdagrad(const float* numbers) : rate(numbers[0]), epsilon(numbers[1]) {}

  INLINE void operator()(int64_t dim, const float* __restrict g, float* __restrict w,
                         float* __restrict a) const {
    for (int64_t c = 0; c < dim; ++c) {
      const float sum = a[c] + g[c] * g[c];
      a[c] = sum;
      w[c] -= rate * g[c] / std::sqrt(sum + epsilon);
    }
  }
};

// a += mean(g * g), one number; w -= rate * g / (sqrt(a) + epsilon).
struct RowWiseAdagrad : UpdateRule {
  static constexpr int kNumbers = 2, kSlots = 1;
  static constexpr bool kRowWise = true;
  float rate, epsilon;

  explicit RowWiseAdagrad(const float* numbers) : rate(numbers[0]), epsilon(numbers[1]) {}

  INLINE void operator()(int64_t dim, const float* __restrict g, float* __restrict w,
                         float* __restrict a) const {
    const float sum = a[0] + Dot(g, g, dim) / static_cast<float>(dim);
    a[0] = sum;
    const float divisor = std::sqrt(sum) + epsilon;
    for (int64_t c = 0; c < dim; ++c) w[c] -= rate * g[c] / divisor;
  }
};

// m = momentum * m + g; w -= rate * m, or rate * g + rate * momentum * m.
template <bool kNesterov>
struct AnyMomentum : UpdateRule {
  static constexpr int kNumbers = 2, kSlots = 1;
  float rate, momentum;

  explicit AnyMomentum(const float* numbers) : rate(numbers[0]), momentum(numbers[1]) {}

  INLINE void operator()(int64_t dim, const float* __restrict g, float* __restrict w,
                         float* __restrict m) const {
    const float of_momentum = rate * momentum;
    for (int64_t c = 0; c < dim; ++c) {
      const float next = m[c] * momentum + g[c];
      m[c] = next;
      w[c] -= kNesterov ? rate * g[c] + of_momentum * next : rate * next;
    }
  }
};

struct Momentum : AnyMomentum<false> {
  using AnyMomentum::AnyMomentum;
};

struct NesterovMomentum : AnyMomentum<true> {
  using AnyMomentum::AnyMomentum;
};

// m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g;
// w -= rate * m / (sqrt(v) + epsilon). The rate is corrected for the first steps already.
struct LazyAdam : UpdateRule {
  static constexpr int kNumbers = 4, kSlots = 2;
  float rate, beta1, beta2, rest1, rest2, epsilon;

  explicit LazyAdam(const float* numbers)
      : rate(numbers[0]),
        beta1(numbers[1]),
        beta2(numbers[2]),
        rest1(1 - beta1),
        rest2(1 - beta2),
        epsilon(numbers[3]) {}

  INLINE void operator()(int64_t dim, const float* __restrict g, float* __restrict w,
                         float* __restrict m, float* __restrict v) const {
    for (int64_t c = 0; c < dim; ++c) {
      const float mean = m[c] * beta1 + g[c] * rest1;
      const float square = v[c] * beta2 + g[c] * g[c] * rest2;
      m[c] = mean;
      v[c] = square;
      w[c] -= rate * mean / (std::sqrt(square) + epsilon);
    }
  }
};

struct Adam : LazyAdam {
  static constexpr bool kAllRows = true;
  using LazyAdam::LazyAdam;
};

// Adam by 1 - beta1 and 1 - beta2, which Keras has from double precision: 1 - 0.999f is another
// number than 0.001f.
struct KerasAdam : Adam {
  explicit KerasAdam(const float* numbers) : Adam(numbers) {
    rest1 = numbers[1];
    rest2 = numbers[2];
    beta1 = 1 - rest1;
    beta2 = 1 - rest2;
  }
};

// With r(a) = a^-power: l += g + 2 * shrinkage * w - (r(a + g * g) - r(a)) / rate * w; a += g * g;
// w = (clip(l, -l1, l1) - l) / (r(a) / rate + 2 * l2).
struct Ftrl : UpdateRule {
  static constexpr int kNumbers = 5, kSlots = 2;
  float rate, l1, l2, shrinkage, power;

  explicit Ftrl(const float* numbers)
      : rate(numbers[0]),
        l1(numbers[1]),
        l2(numbers[2]),
        shrinkage(numbers[3]),
        power(numbers[4]) {}

  INLINE void operator()(int64_t dim, const float* __restrict g, float* __restrict w,
                         float* __restrict a, float* __restrict l) const {
    if (power == -0.5f) {
      Update(dim, g, w, a, l, [](float x) INLINED { return std::sqrt(x); });
    } else {
      const float exponent = -power;
      Update(dim, g, w, a, l, [exponent](float x) INLINED { return std::pow(x, exponent); });
    }
  }

 private:
  template <class Root>
  INLINE void Update(int64_t dim, const float* __restrict g, float* __restrict w,
                     float* __restrict a, float* __restrict l, Root root) const {
    const float pull = 2 * shrinkage, stiffness = 2 * l2;
    for (int64_t c = 0; c < dim; ++c) {
      const float sum = a[c] + g[c] * g[c], new_root = root(sum);
      // Without shrinkage an infinite weight is multiplied by nothing.
      const float pulled = shrinkage > 0 ? g[c] + pull * w[c] : g[c];
      const float linear = l[c] + (pulled - (new_root - root(a[c])) / rate * w[c]);
      a[c] = sum;
      l[c] = linear;
      const float clipped = std::max(std::min(linear, l1), -l1);
      w[c] = (clipped - linear) / (new_root / rate + stiffness);
    }
  }
};

// All rules, by the names that operations have as `rule`.
#define FOR_EACH_UPDATE_RULE(RULE) \
  RULE(Adagrad)                    \
  RULE(KerasAdagrad)               \
  RULE(RowWiseAdagrad)             \
  RULE(Momentum)                   \
  RULE(NesterovMomentum)           \
  RULE(LazyAdam)                   \
  RULE(Adam)                       \
  RULE(KerasAdam)                  \
  RULE(Ftrl)

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_UPDATE_RULES_H_
