// Clips rows to max_norm before they are used. A clipped row passes on only the part of a gradient
// that is orthogonal to it.

#ifndef COLLECTIVE_NATIVE_CLIP_H_
#define COLLECTIVE_NATIVE_CLIP_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace collective {

template <class Index>
class Clip {
 public:
  Clip(Rows<Index> rows, int64_t n, int64_t dim, float max_norm)
      : rows_(rows), dim_(dim), max_norm_(max_norm), squares_(n) {
    Products(rows, rows, n, dim, squares_.data());
  }

  // factors[k] = (weights[k], or 1) * the factor that clips row k.
  void Factors(const float* weights, float* factors) const {
    for (size_t k = 0; k < squares_.size(); ++k) {
      factors[k] = (weights == nullptr ? 1 : weights[k]) *
                   (max_norm_ / std::max(std::sqrt(squares_[k]), max_norm_));
    }
  }

  // Returns the factors of rows that are also added to the gradient; its other part is factors[k]
  // times row k of `gradients`.
  template <class Other>
  std::vector<float> Backward(Rows<Other> gradients, const float* factors) const {
    std::vector<float> along(squares_.size());
    Products(rows_, gradients, static_cast<int64_t>(squares_.size()), dim_, along.data());
    for (size_t k = 0; k < squares_.size(); ++k) {
      const bool clipped = squares_[k] > 0 && std::sqrt(squares_[k]) >= max_norm_;
      along[k] = clipped ? -factors[k] * along[k] / squares_[k] : 0;
    }
    return along;
  }

 private:
  Rows<Index> rows_;
  int64_t dim_;
  float max_norm_;
  std::vector<float> squares_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_CLIP_H_
