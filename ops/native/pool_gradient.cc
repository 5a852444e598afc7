// CollectivePoolGradient: the gradient of CollectivePool with respect to the rows that came back, and to weights.

#include <cmath>
#include <cstring>

#include "lookups.h"

namespace collective {
namespace {

using namespace tensorflow;

class PoolGradientOp : public OpKernel {
 public:
  explicit PoolGradientOp(OpKernelConstruction* context) : OpKernel(context) {
    int gradients = 0;
    OP_REQUIRES_OK(context, lookups_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("members", &of_));
    OP_REQUIRES_OK(context, context->GetAttr("G", &gradients));
    OP_REQUIRES(context, of_.size() == static_cast<size_t>(gradients),
                errors::InvalidArgument("there are ", gradients, " gradients, of ", of_.size(), " members"));
    const int count = static_cast<int>(lookups_.members.size());
    std::vector<bool> seen(count);
    std::vector<int> group_of;
    for (int g = 0; g < gradients; ++g) {
      OP_REQUIRES(context, of_[g] >= 0 && of_[g] < count && !seen[of_[g]],
                  errors::InvalidArgument("gradient ", g, " is of member ", of_[g], " of ", count, ", or that has two"));
      seen[of_[g]] = true;
      const size_t section = lookups_.members[of_[g]].section;
      if (section >= group_of.size()) group_of.resize(section + 1, -1);
      if (group_of[section] < 0) {
        group_of[section] = static_cast<int>(groups_.size());
        groups_.emplace_back();
      }
      groups_[group_of[section]].push_back(g);
    }
  }

  void Compute(OpKernelContext* context) override {
    OpInputList positions, samples, weights, gradients;
    OpOutputList weight_gradients;
    OP_REQUIRES_OK(context, context->input_list("positions", &positions));
    OP_REQUIRES_OK(context, context->input_list("samples", &samples));
    OP_REQUIRES_OK(context, context->input_list("weights", &weights));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->output_list("weight_gradients", &weight_gradients));
    const Tensor& rows = context->input(0);
    Tensor* flat = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, rows.shape(), &flat));
    float* out = flat->flat<float>().data();
    std::memset(out, 0, flat->NumElements() * sizeof(float));

    std::vector<float*> of_weights(lookups_.members.size());
    for (size_t m = 0; m < lookups_.members.size(); ++m) {
      const int w = lookups_.members[m].weights;
      if (w < 0 || !weight_gradients.required(w)) continue;
      Tensor* made = nullptr;
      OP_REQUIRES_OK(context, weight_gradients.allocate(w, weights[w].shape(), &made));
      of_weights[m] = made->flat<float>().data();
      std::memset(of_weights[m], 0, made->NumElements() * sizeof(float));
    }
    int64_t cost = 0;
    for (const Tensor& gradient : gradients) cost += 2 * gradient.NumElements();
    std::vector<Status> errors(groups_.size());
    // Members of one section may add to the same rows: one after the other.
    Parallel(context, static_cast<int64_t>(groups_.size()), cost, [&](int64_t group) {
      auto scratch = scratch_.Take();
      for (int g : groups_[group]) {
        const int m = of_[g];
        const Lookup& member = lookups_.members[m];
        Opened opened;
        errors[group] = opened.Open(member, m, rows, positions, samples, weights, &*scratch);
        if (!errors[group].ok()) return;
        if (gradients[g].dims() != 2 || gradients[g].dim_size(0) != opened.out || gradients[g].dim_size(1) != member.dim) {
          errors[group] = errors::InvalidArgument("the gradient of member ", m, " must be of shape [", opened.out, ", ", member.dim,
                                                  "], but is ", gradients[g].shape().DebugString());
          return;
        }
        const float* gradient = gradients[g].flat<float>().data();
        Add(member, opened, gradient, &*scratch, out);
        if (of_weights[m] != nullptr) AddWeights(member, opened, gradient, &*scratch, of_weights[m]);
      }
    });
    for (const Status& error : errors) OP_REQUIRES_OK(context, error);
  }

 private:
  static void Add(const Lookup& member, const Opened& opened, const float* gradient, LookupScratch* scratch, float* out) {
    const uint32_t* targets = reinterpret_cast<const uint32_t*>(opened.rows.at);
    const float* factors = opened.Factors(member, scratch);
    if (member.max_norm > 0) {
      AddClipped(opened.rows, gradient, opened.bags, member.dim, 1, member.max_norm, factors, targets, 1, out);
    } else if (member.combiner == kRows) {
      AddRows(gradient, opened.ids, member.dim, 1, targets, 1, out);
    } else {
      AddBags(gradient, opened.bags, member.dim, 1, factors, targets, 1, out);
    }
  }

  // With p the product of each (clipped) row and its sample's gradient: p for sums; (p - sum(w p) / sum(w)) / sum(w) for means;
  // (p - w sum(w p) / q) / sqrt(q) with q = sum(w w) for sqrtn. 0 where the sum of weights is.
  static void AddWeights(const Lookup& member, const Opened& opened, const float* gradient, LookupScratch* scratch, float* out) {
    Products(opened.rows, gradient, opened.bags, member.dim, out);
    if (member.max_norm > 0) {
      float* clip = scratch->products.At(opened.ids);
      ClipFactors(opened.rows, opened.ids, member.dim, member.max_norm, nullptr, clip);
      for (int64_t k = 0; k < opened.ids; ++k) out[k] *= clip[k];
    }
    if (member.combiner == kSum) return;
    for (int64_t b = 0; b < opened.bags.count; ++b) {
      const int64_t first = opened.bags.starts[b], end = opened.bags.starts[b + 1];
      const double divisor = opened.bags.divisors[b];
      double pooled = 0;
      for (int64_t k = first; k < end; ++k) pooled += static_cast<double>(opened.weights[k]) * out[k];
      for (int64_t k = first; k < end; ++k) {
        const double share = member.combiner == kMean ? 1 / divisor : opened.weights[k] / (divisor * divisor);
        out[k] = divisor == 0 ? 0.f : static_cast<float>((out[k] - share * pooled) / divisor);
      }
    }
  }

  Lookups lookups_;
  std::vector<int> of_;                   // [G], which member each gradient is of
  std::vector<std::vector<int>> groups_;  // gradients of members of one section
  Kept<LookupScratch> scratch_;
};

REGISTER_KERNEL_BUILDER(Name("CollectivePoolGradient").Device(DEVICE_CPU), PoolGradientOp);

}  // namespace
}  // namespace collective
