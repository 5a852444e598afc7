// CollectivePoolGradient on a GPU: the gradient of CollectivePool with respect to the rows that
// came back, and to weights (pooled_sums.h). The host waits for nothing.

#include <vector>

#include "pooled_sums.h"

namespace collective {
namespace gpu {
namespace pool_gradient_op {

using namespace tensorflow;

class PoolGradientOp : public OpKernel {
 public:
  explicit PoolGradientOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
    OP_REQUIRES_OK(context, ReadMembersOfGradients(context, members_.size(), &of_));
    OP_REQUIRES_OK(context, context->GetAttr("without_rows", &without_rows_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList gradients;
    OpOutputList weight_gradients;
    Tensor* flat = nullptr;
    Pooling pooling;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->output_list("weight_gradients", &weight_gradients));
    OP_REQUIRES_OK(context, pooling.Open(context, members_, of_, !without_rows_));
    std::vector<int64_t> of_weights;
    OP_REQUIRES_OK(context, Allocate(context, &stream, pooling, &weight_gradients, &of_weights));
    OP_REQUIRES(
        context,
        !without_rows_ || (!pooling.clips && std::count(of_weights.begin(), of_weights.end(), 0) ==
                                                 static_cast<int64_t>(of_weights.size())),
        errors::InvalidArgument("gradients of weights, and of rows that are clipped, take "
                                "the rows, but without_rows is set"));
    PooledSums sums(pooling, std::move(of_weights));
    OP_REQUIRES_OK(context, sums.Take(gradients));
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({pooling.elements}), &flat));
    if (flat->NumElements() > 0) OP_REQUIRES_OK(context, Launch(&stream, pooling, flat, &sums));
  }

 private:
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

  static Status Launch(Stream* stream, const Pooling& pooling, Tensor* flat, PooledSums* pooled) {
    Targets targets(kSumsInFlight);
    const int64_t begin = AddressOf(flat->flat<float>().data());
    for (size_t run = 0; run < pooling.run_counts.size(); ++run) {
      const int64_t own = pooling.run_addresses[run];
      const int64_t count = pooling.run_counts[run];
      targets.Add(count,
                  TargetOfSums(count, pooling.run_dims[run], begin + own - pooling.run_addresses[0],
                               pooling.clips ? own : 0));
    }
    Packed packed;
    TF_RETURN_IF_ERROR(pooled->Pack(stream, targets, &packed));
    const int64_t *there = nullptr, *in_order = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
    TF_RETURN_IF_ERROR(pooled->Start(stream, in_order, there));
    TF_RETURN_IF_ERROR(pooled->sums.Launch(stream, Kernel::kSumRows, 1.0f));
    return pooled->sums.LaunchLong(stream, Kernel::kSumRowsLong, 1.0f);
  }

  std::vector<Lookup> members_;
  std::vector<int> of_;  // [G], which member each gradient is of
  bool without_rows_ = false;
};

REGISTER_KERNEL_BUILDER(Name("CollectivePoolGradient").Device(DEVICE_GPU).HostMemory("counts"),
                        PoolGradientOp);
REGISTER_KERNEL_BUILDER(Name("CollectivePoolGradient").Device(DEVICE_CPU).Label("emulated"),
                        PoolGradientOp);

}  // namespace pool_gradient_op
}  // namespace gpu
}  // namespace collective
