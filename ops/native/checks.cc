// CollectiveBounds, CollectiveMismatches: check the inputs of lookups, before anything moves.

#include <vector>

#include "scans.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace checks_op {

using namespace tensorflow;

class BoundsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList ids;
    OP_REQUIRES_OK(context, context->input_list("ids", &ids));
    Tensor* bounds = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({ids.size(), 2}), &bounds));
    int64_t* out = bounds->flat<int64_t>().data();
    for (int m = 0; m < ids.size(); ++m) {
      SmallestAndLargest(ids[m].flat<int64_t>().data(), ids[m].NumElements(), &out[2 * m],
                         &out[2 * m + 1]);
    }
  }
};

class MismatchesOp : public OpKernel {
 public:
  explicit MismatchesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("weighted", &weighted_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList ids, samples, weights;
    OP_REQUIRES_OK(context, context->input_list("ids", &ids));
    OP_REQUIRES_OK(context, context->input_list("samples", &samples));
    OP_REQUIRES_OK(context, context->input_list("weights", &weights));
    const int lookups = ids.size();
    OP_REQUIRES(
        context, static_cast<int>(weighted_.size()) == weights.size(),
        errors::InvalidArgument(weights.size(), " weights, but weighted has ", weighted_.size()));
    Tensor* found = nullptr;
    OP_REQUIRES_OK(
        context, context->allocate_output(0, TensorShape({2 * lookups + weights.size()}), &found));
    int64_t* out = found->flat<int64_t>().data();
    for (int m = 0; m < lookups; ++m) {
      const int64_t n = samples[m].NumElements();
      *out++ = n - ids[m].NumElements();
      *out++ = CountFalls(samples[m].flat<int64_t>().data(), n);
    }
    for (int w = 0; w < weights.size(); ++w) {
      OP_REQUIRES(context, weighted_[w] >= 0 && weighted_[w] < lookups,
                  errors::InvalidArgument("weights of lookup ", weighted_[w], " of ", lookups));
      *out++ = weights[w].NumElements() - ids[weighted_[w]].NumElements();
    }
  }

 private:
  std::vector<int> weighted_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveBounds").Device(DEVICE_CPU), BoundsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveMismatches").Device(DEVICE_CPU), MismatchesOp);

}  // namespace checks_op
}  // namespace collective
