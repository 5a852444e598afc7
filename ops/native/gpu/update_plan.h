// Plans how blocks of the kernels of update.cu share the rows of many tables.

#ifndef COLLECTIVE_NATIVE_GPU_UPDATE_PLAN_H_
#define COLLECTIVE_NATIVE_GPU_UPDATE_PLAN_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "segments.h"
#include "targets.h"

namespace collective {
namespace gpu {

// A table with its slots, and the rows of it that a rule updates.
struct RowsToUpdate {
  const void* gradients;  // [n, dim]; null: they are sums that nobody keeps
  const void* rows;       // [n]
  int64_t n, dim;
  const float* values;
  const float* slots[kMostSlots];
  int64_t first, last;     // of the rows that there are
  unsigned char* touched;  // a byte for each row up to `last`; null if nobody asks
  float bound;             // of weights; infinity for none

  // Returns the target that begins at a row of the table.
  TargetWords TargetFrom(int64_t row) const {
    TargetWords words{};
    words.dim = dim;
    words.values = At(values, row);
    words.count = last - row;
    for (int s = 0; s < kMostSlots; ++s) words.slots[s] = At(slots[s], row);
    if (touched != nullptr) words.touched = AddressOf(touched + row);
    return words;
  }

 private:
  int64_t At(const float* matrix, int64_t row) const {
    return matrix == nullptr ? 0 : AddressOf(matrix + row * dim);
  }
};

// Plans the update of rows, each at most once.
class UpdatePlan {
 public:
  // Args:
  //   decays: rows without a gradient are updated, too.
  explicit UpdatePlan(bool decays) : decays_(decays) {}

  void Add(const RowsToUpdate& of) {
    updated_.Add(of.n, of.TargetFrom(0));
    if (decays_) decayed_.Add(of.last - of.first, of.TargetFrom(of.first));
    if (of.n == 0) return;
    rows_.push_back(AddressOf(static_cast<const char*>(of.rows)));
    bounds_.push_back(of.bound);
    is_bounded_ |= std::isfinite(of.bound);
    gradients_.Add(AddressOf(static_cast<const char*>(of.gradients)), of.n, of.dim);
  }

  const Targets& updated() const { return updated_; }
  const Targets& decayed() const { return decayed_; }
  // Where each row has a gradient of its own: these.
  const Runs& gradients() const { return gradients_; }

  // Packs what kernels read in addition to targets and gradients. The bounds follow a rule's
  // options.
  void Pack(std::vector<float> options, Packed* packed) {
    rows_at_ = packed->Add(rows_);
    decayed_at_ = packed->Add(decayed_.tiled());
    option_count_ = options.size();
    if (is_bounded_) options.insert(options.end(), bounds_.begin(), bounds_.end());
    std::vector<int64_t> words((options.size() + 1) / 2);
    std::memcpy(words.data(), options.data(), options.size() * sizeof(float));
    options_at_ = packed->Add(words);
  }

  // Of what was packed and is at `uploaded`.
  const int64_t* rows(const int64_t* uploaded) const { return uploaded + rows_at_; }
  const int64_t* decayed(const int64_t* uploaded) const { return uploaded + decayed_at_; }
  const float* options(const int64_t* uploaded) const {
    return reinterpret_cast<const float*>(uploaded + options_at_);
  }
  // For each target; null if there are none.
  const float* bounds(const int64_t* uploaded) const {
    return is_bounded_ ? options(uploaded) + option_count_ : nullptr;
  }

 private:
  static constexpr int64_t kFlight = 2;  // as in update.cu

  const bool decays_;
  Targets updated_{kFlight}, decayed_{1};
  std::vector<int64_t> rows_;
  std::vector<float> bounds_;
  Runs gradients_;
  bool is_bounded_ = false;
  size_t rows_at_ = 0, decayed_at_ = 0, options_at_ = 0, option_count_ = 0;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_UPDATE_PLAN_H_
