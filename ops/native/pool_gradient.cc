// CollectivePoolGradient: the gradient of CollectivePool with respect to the rows that came back,
// and to weights.

#include <algorithm>
#include <cstring>

#include "clip.h"
#include "lookups.h"

namespace collective {
namespace pool_gradient_op {

using namespace tensorflow;

class PoolGradientOp : public OpKernel {
 public:
  explicit PoolGradientOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
    OP_REQUIRES_OK(context, ReadMembersOfGradients(context, members_.size(), &of_));
    std::vector<int> group_of;
    for (size_t g = 0; g < of_.size(); ++g) {
      const size_t section = members_[of_[g]].section;
      if (section >= group_of.size()) group_of.resize(section + 1, -1);
      if (group_of[section] < 0) {
        group_of[section] = static_cast<int>(groups_.size());
        groups_.emplace_back();
      }
      groups_[group_of[section]].push_back(static_cast<int>(g));
    }
  }

  void Compute(OpKernelContext* context) override {
    LookupInputs inputs;
    OpInputList gradients;
    OpOutputList weight_gradients;
    OP_REQUIRES_OK(context, inputs.Read(context));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->output_list("weight_gradients", &weight_gradients));
    Tensor* flat = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, inputs.flat->shape(), &flat));
    float* out = flat->flat<float>().data();
    std::memset(out, 0, flat->NumElements() * sizeof(float));

    std::vector<float*> of_weights(members_.size());
    for (size_t m = 0; m < members_.size(); ++m) {
      const int w = members_[m].weights;
      if (w < 0 || !weight_gradients.required(w)) continue;
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, weight_gradients.allocate(w, inputs.weights[w].shape(), &output));
      of_weights[m] = output->flat<float>().data();
      std::memset(of_weights[m], 0, output->NumElements() * sizeof(float));
    }
    int64_t cost = 0;
    for (const Tensor& gradient : gradients) cost += 2 * gradient.NumElements();
    std::vector<Status> errors(groups_.size());
    // Members of one section may add to the same rows, so they run one after the other.
    Parallel(context, static_cast<int64_t>(groups_.size()), cost, [&](int64_t group) {
      auto scratch = scratch_.Take();
      for (int g : groups_[group]) {
        const int m = of_[g];
        const Lookup& member = members_[m];
        MemberInputs opened;
        errors[group] = opened.Open(member, m, inputs);
        if (!errors[group].ok()) return;
        if (gradients[g].dims() != 2 || gradients[g].dim_size(0) != opened.out ||
            gradients[g].dim_size(1) != member.dim) {
          errors[group] = errors::InvalidArgument(
              "the gradient of member ", m, " must be of shape [", opened.out, ", ", member.dim,
              "], but is ", gradients[g].shape().DebugString());
          return;
        }
        const float* gradient = gradients[g].flat<float>().data();
        Add(member, opened, gradient, &*scratch, out);
        if (of_weights[m] != nullptr)
          AddWeights(member, opened, gradient, &*scratch, of_weights[m]);
      }
    });
    for (const Status& error : errors) OP_REQUIRES_OK(context, error);
  }

 private:
  static void Add(const Lookup& member, const MemberInputs& opened, const float* gradient,
                  LookupScratch* scratch, float* out) {
    const int64_t dim = member.dim;
    const int32_t* positions = opened.rows.at;
    if (member.combiner == kRows && member.max_norm == 0) {
      return AddRows<First::kNever>(gradient, opened.ids, 1, positions, 1, dim, out);
    }
    const Rows<int64_t> of_samples{gradient, opened.Samples(scratch), dim};
    if (member.max_norm == 0 && member.combiner == kSum) {
      return SumRows<First::kNever>(
          Sums<int64_t, int32_t>{of_samples, opened.ids, opened.weights, 1, positions, 1, out},
          dim);
    }
    float* factors = scratch->factors.At(opened.ids);
    const Clip<int32_t> clip(opened.rows, member.max_norm > 0 ? opened.ids : 0, dim,
                             member.max_norm);
    if (member.max_norm > 0) {
      clip.Factors(opened.weights, factors);
    } else if (opened.weights != nullptr) {
      std::copy_n(opened.weights, opened.ids, factors);
    } else {
      std::fill_n(factors, opened.ids, 1.f);
    }
    if (member.combiner == kMean || member.combiner == kSqrtN) {
      const BagDivisors divisors = opened.Divisors(member, scratch);
      for (int64_t b = 0; b < opened.bags; ++b) {
        const float share = divisors.of[b] == 0 ? 0 : 1 / divisors.of[b];
        for (int64_t k = divisors.starts[b]; k < divisors.starts[b + 1]; ++k) factors[k] *= share;
      }
    }
    SumRows<First::kNever>(
        Sums<int64_t, int32_t>{of_samples, opened.ids, factors, 1, positions, 1, out}, dim);
    if (member.max_norm == 0) return;
    const std::vector<float> back = clip.Backward(of_samples, factors);
    SumRows<First::kNever>(
        Sums<int32_t, int32_t>{opened.rows, opened.ids, back.data(), 1, positions, 1, out}, dim);
  }

  // With p the product of each (clipped) row and its sample's gradient: p for sums; (p - sum(w p) /
  // sum(w)) / sum(w) for means; (p - w sum(w p) / q) / sqrt(q) with q = sum(w w) for sqrtn. 0 where
  // the sum of weights is.
  static void AddWeights(const Lookup& member, const MemberInputs& opened, const float* gradient,
                         LookupScratch* scratch, float* out) {
    Products(opened.rows, Rows<int64_t>{gradient, opened.samples, member.dim}, opened.ids,
             member.dim, out);
    if (member.max_norm > 0) {
      Clip<int32_t>(opened.rows, opened.ids, member.dim, member.max_norm).Factors(out, out);
    }
    if (member.combiner == kSum) return;
    const BagDivisors divisors = opened.Divisors(member, scratch);
    for (int64_t b = 0; b < opened.bags; ++b) {
      const int64_t first = divisors.starts[b], end = divisors.starts[b + 1];
      const double divisor = divisors.of[b];
      double pooled = 0;
      for (int64_t k = first; k < end; ++k)
        pooled += static_cast<double>(opened.weights[k]) * out[k];
      for (int64_t k = first; k < end; ++k) {
        const double share =
            member.combiner == kMean ? 1 / divisor : opened.weights[k] / (divisor * divisor);
        out[k] = divisor == 0 ? 0.f : static_cast<float>((out[k] - share * pooled) / divisor);
      }
    }
  }

  std::vector<Lookup> members_;
  std::vector<int> of_;                   // [G], which member each gradient is of
  std::vector<std::vector<int>> groups_;  // gradients of members of one section
  ObjectPool<LookupScratch> scratch_;
};

REGISTER_KERNEL_BUILDER(Name("CollectivePoolGradient").Device(DEVICE_CPU), PoolGradientOp);

}  // namespace pool_gradient_op
}  // namespace collective
