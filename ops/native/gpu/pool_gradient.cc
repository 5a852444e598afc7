// CollectivePoolGradient on a GPU: the gradient of CollectivePool with respect to the rows that
// came back, and to weights. The kernels of pool.cu, occurrences.cu and sums.cu; the host waits for
// nothing.

#include <vector>

#include "occurrences.h"
#include "pooling.h"
#include "sums.h"

namespace collective {
namespace gpu {
namespace pool_gradient_op {

using namespace tensorflow;

class PoolGradientOp : public OpKernel {
 public:
  explicit PoolGradientOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
    OP_REQUIRES_OK(context, ReadMembersOfGradients(context, members_.size(), &of_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList gradients;
    OpOutputList weight_gradients;
    const Tensor* rows = nullptr;
    Tensor* flat = nullptr;
    Pooling pooling;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, context->input("rows", &rows));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->output_list("weight_gradients", &weight_gradients));
    OP_REQUIRES_OK(context, pooling.Open(context, members_, of_));
    for (size_t g = 0; g < of_.size(); ++g)
      OP_REQUIRES_OK(context, Check(gradients[g], pooling.members[g]));
    OP_REQUIRES_OK(context, context->allocate_output(0, rows->shape(), &flat));
    std::vector<int64_t> of_weights;
    OP_REQUIRES_OK(context, Allocate(context, &stream, pooling, &weight_gradients, &of_weights));
    if (flat->NumElements() > 0)
      OP_REQUIRES_OK(context, Launch(&stream, pooling, gradients, of_weights, flat));
  }

 private:
  static Status Check(const Tensor& gradient, const Member& member) {
    const TensorShape wanted({member.samples, member.attributes.dim});
    if (gradient.shape() == wanted) return OkStatus();
    return errors::InvalidArgument("the gradient of member ", member.number, " with ", member.ids,
                                   " ids must be of shape ", wanted.DebugString(), ", but is ",
                                   gradient.shape().DebugString());
  }

  // Makes the outputs for weights' gradients. Returns for each of the wanted members where that of
  // the first id of all would be; 0 if there is none.
  Status Allocate(OpKernelContext* context, Stream* stream, const Pooling& pooling,
                  OpOutputList* outputs, std::vector<int64_t>* addresses) const {
    std::vector<Tensor*> by_weights(outputs->size(), nullptr);
    std::vector<bool> wanted(outputs->size(), false);
    OpInputList weights;
    TF_RETURN_IF_ERROR(context->input_list("weights", &weights));
    for (int w = 0; w < outputs->size(); ++w) {
      if (outputs->required(w))
        TF_RETURN_IF_ERROR(outputs->allocate(w, weights[w].shape(), &by_weights[w]));
    }
    for (const Member& member : pooling.members) {
      const int w = member.attributes.weights;
      Tensor* output = w < 0 ? nullptr : by_weights[w];
      if (w >= 0) wanted[w] = true;
      addresses->push_back(output == nullptr
                               ? 0
                               : AddressOf(output->flat<float>().data()) - member.id * kFloatBytes);
    }
    for (int w = 0; w < outputs->size(); ++w) {
      if (by_weights[w] != nullptr && !wanted[w])
        TF_RETURN_IF_ERROR(stream->Zero(by_weights[w]->data(), by_weights[w]->TotalBytes()));
    }
    return OkStatus();
  }

  Status Launch(Stream* stream, const Pooling& pooling, const OpInputList& gradients,
                const std::vector<int64_t>& of_weights, Tensor* flat) const {
    // 1. Plan all of it, and upload the plan.
    const bool has_weights =
        std::any_of(of_weights.begin(), of_weights.end(), [](int64_t at) { return at != 0; });
    const Tiled<BatchWords> batches = pooling.Batches();
    const Tiled<LookupWords> by_sample = pooling.Lookups(1, Samples::kOne, of_weights),
                             by_id = pooling.Lookups(0, Samples::kOne, of_weights);
    Runs gradient_runs;
    for (size_t g = 0; g < of_.size(); ++g) {
      gradient_runs.Add(AddressOf(gradients[g].flat<float>().data()), pooling.members[g].samples,
                        pooling.members[g].attributes.dim);
    }
    Targets targets(kSumsInFlight);
    const int64_t begin = AddressOf(flat->flat<float>().data());
    for (size_t run = 0; run < pooling.run_counts.size(); ++run) {
      const int64_t own = pooling.run_addresses[run];
      const int64_t count = pooling.run_counts[run];
      targets.Add(count,
                  TargetOfSums(count, pooling.run_dims[run], begin + own - pooling.run_addresses[0],
                               pooling.clips ? own : 0));
    }
    RowSums sums;
    Occurrences occurrences(pooling.ids, targets.rows());
    Packed packed;
    const size_t batches_at = packed.Add(batches), by_sample_at = packed.Add(by_sample),
                 by_id_at = packed.Add(by_id), runs_at = packed.Add(pooling.rows.entries()),
                 gradients_at = packed.Add(gradient_runs.entries());
    occurrences.AddTo(&packed);
    TF_RETURN_IF_ERROR(sums.Pack(stream, targets, gradient_runs, occurrences, &packed));
    void *offsets = nullptr, *squares = nullptr, *products = nullptr, *terms = nullptr,
         *along = nullptr, *numbers = nullptr;
    const int64_t bytes = pooling.ids * kFloatBytes;
    TF_RETURN_IF_ERROR(stream->Scratch((pooling.samples + 1) * sizeof(int32_t), &offsets));
    TF_RETURN_IF_ERROR(stream->Scratch(2 * bytes, &terms));
    TF_RETURN_IF_ERROR(stream->Scratch(bytes, &numbers));
    if (pooling.clips) {
      TF_RETURN_IF_ERROR(stream->Scratch(bytes, &squares));
      TF_RETURN_IF_ERROR(stream->Scratch(bytes, &along));
    }
    if (pooling.clips || has_weights) TF_RETURN_IF_ERROR(stream->Scratch(bytes, &products));
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));

    // 2. Make the terms of which the gradients of rows are sums.
    const void* none = nullptr;
    const int64_t *runs = there + runs_at, *given = there + gradients_at;
    const int32_t given_count = static_cast<int32_t>(gradient_runs.entries().size());
    constexpr int32_t kWide = 0;
    const auto multiply = [&](const void* with, int32_t count, const void* to) {
      return stream->Launch(Kernel::kPoolProducts, Grid(by_id.tiles()), there + by_id_at,
                            by_id.count(), kWide, offsets, none, runs, with, count, to);
    };
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kSampleOffsets, Grid(batches.tiles()),
                                      there + batches_at, batches.count(), offsets));
    if (squares != nullptr) TF_RETURN_IF_ERROR(multiply(none, 0, squares));
    if (products != nullptr) TF_RETURN_IF_ERROR(multiply(given, given_count, products));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kPoolTerms, Grid(by_sample.tiles()),
                                      there + by_sample_at, by_sample.count(), kWide, offsets,
                                      squares, products, terms, along, numbers, targets.rows()));
    if (has_weights) {
      TF_RETURN_IF_ERROR(stream->Launch(Kernel::kPoolWeights, Grid(by_sample.tiles()),
                                        there + by_sample_at, by_sample.count(), kWide, offsets,
                                        squares, products));
    }

    // 3. Sum them by row.
    TF_RETURN_IF_ERROR(occurrences.Order(stream, numbers, there));
    const int64_t* in_order = nullptr;
    TF_RETURN_IF_ERROR(sums.Start(stream, occurrences, in_order, terms, along, there));
    TF_RETURN_IF_ERROR(sums.Launch(stream, Kernel::kSumRows, 1.0f));
    return sums.LaunchLong(stream, Kernel::kSumRowsLong, 1.0f);
  }

  std::vector<Lookup> members_;
  std::vector<int> of_;  // [G], which member each gradient is of
};

REGISTER_KERNEL_BUILDER(Name("CollectivePoolGradient").Device(DEVICE_GPU).HostMemory("counts"),
                        PoolGradientOp);
REGISTER_KERNEL_BUILDER(Name("CollectivePoolGradient").Device(DEVICE_CPU).Label("emulated"),
                        PoolGradientOp);

}  // namespace pool_gradient_op
}  // namespace gpu
}  // namespace collective
