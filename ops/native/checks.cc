// CollectiveBounds, -Mismatches, -Refuse: check the inputs of lookups, before anything moves.

#include <string>
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

// Refuses a smallest or largest value outside of [0, end), in the words of its message, which has
// kValue in the place of the value (gate.py).
class RefuseOp : public OpKernel {
 public:
  explicit RefuseOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ends", &ends_));
    OP_REQUIRES_OK(context, context->GetAttr("messages", &messages_));
    OP_REQUIRES(context, ends_.size() == messages_.size(),
                errors::InvalidArgument(ends_.size(), " ends, ", messages_.size(), " messages"));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& bounds = context->input(0);
    const int64_t count = ends_.size();
    OP_REQUIRES(context, bounds.NumElements() == 2 * count,
                errors::InvalidArgument(bounds.NumElements(), " bounds for ", count, " ranges"));
    const auto values = bounds.flat<int64_t>();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t low = values(2 * i), high = values(2 * i + 1);
      if (low > high || (low >= 0 && high < ends_[i])) continue;
      context->SetStatus(errors::InvalidArgument(Said(messages_[i], low < 0 ? low : high)));
      return;
    }
  }

 private:
  static std::string Said(std::string message, int64_t value) {
    const std::string kValue = "<value>";
    size_t place = message.find(kValue);
    if (place == std::string::npos) return message;
    message.replace(place, kValue.size(), std::to_string(value));
    const bool has_two_signs = value < 0 && place > 0 && message[place - 1] == '+';
    return has_two_signs ? message.erase(place - 1, 1) : message;
  }

  std::vector<int64_t> ends_;
  std::vector<std::string> messages_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveRefuse").Device(DEVICE_CPU), RefuseOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveBounds").Device(DEVICE_CPU), BoundsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveMismatches").Device(DEVICE_CPU), MismatchesOp);

}  // namespace checks_op
}  // namespace collective
