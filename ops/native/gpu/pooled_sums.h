// Sums the gradients of lookups that were pooled, by the row that came back: what CollectivePool's
// gradient and the update of tables by it have in common. It uses the kernels of pool.cu,
// occurrences.cu and sums.cu; the host waits for nothing.

#ifndef COLLECTIVE_NATIVE_GPU_POOLED_SUMS_H_
#define COLLECTIVE_NATIVE_GPU_POOLED_SUMS_H_

#include <optional>
#include <vector>

#include "occurrences.h"
#include "pooling.h"
#include "sums.h"

namespace collective {
namespace gpu {

class PooledSums {
 public:
  // Args:
  //   pooling: the members that have a gradient.
  //   of_weights: for each of them, where the gradient of the weight of the first id of all would
  //     be; 0 if there is none.
  PooledSums(const Pooling& pooling, std::vector<int64_t> of_weights)
      : pooling_(pooling), of_weights_(std::move(of_weights)) {}

  // Checks the members' gradients, each [samples, D].
  tensorflow::Status Take(const tensorflow::OpInputList& gradients) {
    for (size_t g = 0; g < pooling_.members.size(); ++g) {
      const Member& member = pooling_.members[g];
      const tensorflow::TensorShape wanted({member.samples, member.attributes.dim});
      if (gradients[g].shape() != wanted) {
        return tensorflow::errors::InvalidArgument("the gradient of member ", member.number,
                                                   " with ", member.ids, " ids must be of shape ",
                                                   wanted.DebugString(), ", but is ",
                                                   gradients[g].shape().DebugString());
      }
      gradients_.Add(AddressOf(gradients[g].flat<float>().data()), member.samples,
                     member.attributes.dim);
    }
    return tensorflow::OkStatus();
  }

  // Takes room, and packs what kernels read. `targets`: of each row that came back.
  tensorflow::Status Pack(Stream* stream, const Targets& targets, Packed* packed) {
    row_count_ = targets.rows();
    occurrences_.emplace(pooling_.ids, row_count_);
    batches_ = pooling_.Batches();
    by_sample_ = pooling_.Lookups(1, Samples::kOne, of_weights_);
    by_id_ = pooling_.Lookups(0, Samples::kOne, of_weights_);
    batches_at_ = packed->Add(batches_);
    by_sample_at_ = packed->Add(by_sample_);
    by_id_at_ = packed->Add(by_id_);
    runs_at_ = packed->Add(pooling_.RunsOfRows());
    gradients_at_ = packed->Add(gradients_.entries());
    occurrences_->AddTo(packed);
    return sums.Pack(stream, targets, gradients_, *occurrences_, packed, RunsOfSections());
  }

  // Makes weights' gradients, and orders those of rows, so that `sums` sums them.
  //
  // Args:
  //   rows: for each target the address of the numbers of its rows; null: they are in order.
  //   there: what was packed.
  tensorflow::Status Start(Stream* stream, const int64_t* rows, const int64_t* there) {
    TF_RETURN_IF_ERROR(MakeTerms(stream, there));
    // What belongs to the rows themselves is found by an occurrence's number.
    const void* placed = along_ == nullptr ? terms_ : nullptr;
    TF_RETURN_IF_ERROR(occurrences_->Order(stream, numbers_, there, placed));
    return sums.Start(stream, *occurrences_, rows, terms_, along_, there);
  }

  RowSums sums;

 private:
  // Says which gradients the rows of each section that came back take part in: those of its
  // members, often of one.
  std::vector<RunsOfTarget> RunsOfSections() const {
    std::vector<int64_t> begins(pooling_.sections, gradients_.rows()), ends(pooling_.sections, 0);
    int64_t sample = 0;
    for (const Member& member : pooling_.members) {
      const int section = member.attributes.section;
      const int64_t end = sample + member.samples;
      if (member.samples > 0) {
        begins[section] = std::min(begins[section], gradients_.RunOf(sample));
        ends[section] = std::max(ends[section], gradients_.RunOf(end - 1) + 1);
      }
      sample = end;
    }
    std::vector<RunsOfTarget> known;
    int64_t row = 0;
    for (size_t run = 0; run < pooling_.run_counts.size(); ++run) {
      if (pooling_.run_counts[run] == 0) continue;
      const size_t section = run % pooling_.sections;
      // Nothing is summed for the rows of a section whose members have no samples.
      const int64_t begin = std::min(begins[section], ends[section]);
      known.push_back({row, begin, std::max<int64_t>(ends[section] - begin, 1)});
      row += pooling_.run_counts[run];
    }
    return known;
  }

  // Makes the terms of which the gradients of rows are sums.
  tensorflow::Status MakeTerms(Stream* stream, const int64_t* there) {
    const bool has_weights =
        std::any_of(of_weights_.begin(), of_weights_.end(), [](int64_t at) { return at != 0; });
    const int64_t bytes = pooling_.ids * kFloatBytes;
    void *offsets = nullptr, *squares = nullptr, *products = nullptr;
    TF_RETURN_IF_ERROR(stream->Scratch((pooling_.samples + 1) * sizeof(int32_t), &offsets));
    TF_RETURN_IF_ERROR(stream->Scratch(2 * bytes, &terms_));
    TF_RETURN_IF_ERROR(stream->Scratch(bytes, &numbers_));
    if (pooling_.clips) {
      TF_RETURN_IF_ERROR(stream->Scratch(bytes, &squares));
      TF_RETURN_IF_ERROR(stream->Scratch(bytes, &along_));
    }
    if (pooling_.clips || has_weights) TF_RETURN_IF_ERROR(stream->Scratch(bytes, &products));
    const void* none = nullptr;
    const int64_t *runs = there + runs_at_, *given = there + gradients_at_;
    const int32_t given_count = static_cast<int32_t>(gradients_.entries().size());
    constexpr int32_t kWide = 0;
    const auto multiply = [&](const void* with, int32_t count, const void* to) {
      return stream->Launch(Kernel::kPoolProducts, Grid(by_id_.tiles()), there + by_id_at_,
                            by_id_.count(), kWide, offsets, none, runs, with, count, to);
    };
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kSampleOffsets, Grid(batches_.tiles()),
                                      there + batches_at_, batches_.count(), offsets));
    if (squares != nullptr) TF_RETURN_IF_ERROR(multiply(none, 0, squares));
    if (products != nullptr) TF_RETURN_IF_ERROR(multiply(given, given_count, products));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kPoolTerms, Grid(by_sample_.tiles()),
                                      there + by_sample_at_, by_sample_.count(), kWide, offsets,
                                      squares, products, terms_, along_, numbers_, row_count_));
    if (!has_weights) return tensorflow::OkStatus();
    return stream->Launch(Kernel::kPoolWeights, Grid(by_sample_.tiles()), there + by_sample_at_,
                          by_sample_.count(), kWide, offsets, squares, products);
  }

  const Pooling& pooling_;
  const std::vector<int64_t> of_weights_;
  Runs gradients_;
  std::optional<Occurrences> occurrences_;
  Tiled<BatchWords> batches_;
  Tiled<LookupWords> by_sample_, by_id_;
  int64_t row_count_ = 0;
  size_t batches_at_ = 0, by_sample_at_ = 0, by_id_at_ = 0, runs_at_ = 0, gradients_at_ = 0;
  void *terms_ = nullptr, *along_ = nullptr, *numbers_ = nullptr;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_POOLED_SUMS_H_
