// CollectiveBounds, -Mismatches, -Refuse: check the inputs of lookups, before anything moves.

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "parallel.h"
#include "scans.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace checks_op {

using namespace tensorflow;

// A part of one of several arrays.
struct Part {
  int array;
  const int64_t* values;
  int64_t first, count;
};

std::vector<Part> PartsOf(const OpInputList& arrays) {
  constexpr int64_t kMost = 64 * 1024;
  std::vector<Part> parts;
  for (int a = 0; a < arrays.size(); ++a) {
    const int64_t size = arrays[a].NumElements();
    const int64_t* values = arrays[a].flat<int64_t>().data();
    for (int64_t first = 0; first < size; first += kMost)
      parts.push_back({a, values, first, std::min(kMost, size - first)});
  }
  return parts;
}

// Calls task(number) for each part, on several threads if that is worth it.
template <class Task>
void ForEach(OpKernelContext* context, const std::vector<Part>& parts, const Task& task) {
  int64_t nanoseconds = 0;
  for (const Part& part : parts) nanoseconds += part.count;  // One a value, about.
  Parallel(context, static_cast<int64_t>(parts.size()), nanoseconds, task);
}

class BoundsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList ids;
    OP_REQUIRES_OK(context, context->input_list("ids", &ids));
    Tensor* bounds = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({ids.size(), 2}), &bounds));
    int64_t* out = bounds->flat<int64_t>().data();
    for (int m = 0; m < ids.size(); ++m)
      SmallestAndLargest(nullptr, 0, &out[2 * m], &out[2 * m + 1]);
    const std::vector<Part> parts = PartsOf(ids);
    std::vector<std::array<int64_t, 2>> found(parts.size());
    ForEach(context, parts, [&](int64_t number) {
      const Part& part = parts[number];
      SmallestAndLargest(part.values + part.first, part.count, &found[number][0],
                         &found[number][1]);
    });
    for (size_t number = 0; number < parts.size(); ++number) {
      int64_t* of = out + 2 * parts[number].array;
      of[0] = std::min(of[0], found[number][0]);
      of[1] = std::max(of[1], found[number][1]);
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
    const std::vector<Part> parts = PartsOf(samples);
    std::vector<int64_t> falls(parts.size());
    ForEach(context, parts, [&](int64_t number) { falls[number] = FallsOf(parts[number]); });
    for (int m = 0; m < lookups; ++m) {
      out[2 * m] = samples[m].NumElements() - ids[m].NumElements();
      out[2 * m + 1] = 0;
    }
    for (size_t number = 0; number < parts.size(); ++number)
      out[2 * parts[number].array + 1] += falls[number];
    out += 2 * lookups;
    for (int w = 0; w < weights.size(); ++w) {
      OP_REQUIRES(context, weighted_[w] >= 0 && weighted_[w] < lookups,
                  errors::InvalidArgument("weights of lookup ", weighted_[w], " of ", lookups));
      *out++ = weights[w].NumElements() - ids[weighted_[w]].NumElements();
    }
  }

 private:
  // Counts those of a part, the first of which is next to the one before the part.
  static int64_t FallsOf(const Part& part) {
    if (part.first == 0) return CountFalls(part.values, part.count);
    const int64_t* before = part.values + part.first - 1;
    return CountFalls(before, part.count + 1) - (*before < 0);
  }

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
