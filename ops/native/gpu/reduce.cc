// CollectiveReduceRows on a GPU: sums the gradients of the bags that the ranks requested, by row of
// each table (gradient_sums.h).

#include <algorithm>
#include <vector>

#include "gather_plan.h"
#include "gradient_sums.h"

namespace collective {
namespace gpu {
namespace reduce_op {

using namespace tensorflow;

class ReduceRowsOp : public OpKernel {
 public:
  explicit ReduceRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, sums_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList handles;
    LockedVariables variables;
    GradientSums::Run run;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    if (sums_.clips()) OP_REQUIRES_OK(context, variables.Lock(context, handles, &run.tables));
    OP_REQUIRES_OK(context, sums_.Open(context, &run));
    OP_REQUIRES_OK(context, sums_.Number(&stream, &run));
    OP_REQUIRES_OK(context, Sum(context, &stream, &run));
  }

 private:
  // Makes the outputs: sums the gradients of each row.
  Status Sum(OpKernelContext* context, Stream* stream, GradientSums::Run* run) const {
    OpOutputList values, indices, inverse;
    TF_RETURN_IF_ERROR(context->output_list("values", &values));
    TF_RETURN_IF_ERROR(context->output_list("indices", &indices));
    TF_RETURN_IF_ERROR(context->output_list("inverse", &inverse));
    Targets targets(kSumsInFlight);
    Tiled<PartWords> keys, numbers;
    GatherPlan clipped;
    void* own = nullptr;
    TF_RETURN_IF_ERROR(TakeOwn(stream, *run, &own));
    int64_t first = 0, first_key = 0, element = 0;
    for (int64_t t = 0; t < sums_.size(); ++t) {
      const int64_t count = run->count[t], came = run->came[t], dim = sums_.dim(t);
      Tensor *value = nullptr, *index = nullptr, *number = nullptr;
      TF_RETURN_IF_ERROR(values.allocate(t, TensorShape({count, dim}), &value));
      TF_RETURN_IF_ERROR(indices.allocate(t, TensorShape({count}), &index));
      const int64_t out = AddressOf(value->flat<float>().data());
      if (own == nullptr) {
        targets.Add(count, TargetOfSums(count, dim, out, 0));
      } else {
        clipped.Add(run->distinct + first, count, run->tables[t], element);
        targets.Add(count,
                    TargetOfSums(count, dim, out, AddressOf(static_cast<float*>(own) + element)));
        element += count * dim;
      }
      AddPart(run->distinct + first, index->data(), count, 0, &keys);
      if (inverse.required(t)) {
        TF_RETURN_IF_ERROR(inverse.allocate(t, TensorShape({came}), &number));
        AddPart(run->inverse + first_key, number->data(), came, first, &numbers);
      }
      first += count;
      first_key += came;
    }
    if (run->keys == 0) return OkStatus();
    Packed packed;
    const size_t keys_at = packed.Add(keys), numbers_at = packed.Add(numbers),
                 clipped_at = packed.Add(clipped.pieces());
    TF_RETURN_IF_ERROR(sums_.Pack(stream, targets, run, &packed));
    const int64_t *there = nullptr, *in_order = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
    TF_RETURN_IF_ERROR(
        stream->Launch(Kernel::kCopyKeys, keys.tiles(), there + keys_at, keys.count()));
    TF_RETURN_IF_ERROR(
        stream->Launch(Kernel::kCopyNumbers, numbers.tiles(), there + numbers_at, numbers.count()));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kGatherRows, clipped.pieces().tiles(),
                                      there + clipped_at, clipped.pieces().count(), own));
    TF_RETURN_IF_ERROR(sums_.Start(stream, in_order, there, run));
    TF_RETURN_IF_ERROR(run->sums.Launch(stream, Kernel::kSumRows, sums_.scale()));
    return run->sums.LaunchLong(stream, Kernel::kSumRowsLong, sums_.scale());
  }

  // Takes room for the distinct rows themselves, which belong to their gradients where rows are
  // clipped.
  Status TakeOwn(Stream* stream, const GradientSums::Run& run, void** own) const {
    if (!sums_.clips()) return OkStatus();
    int64_t elements = 0;
    for (int64_t t = 0; t < sums_.size(); ++t) elements += run.count[t] * sums_.dim(t);
    return stream->Scratch(elements * kFloatBytes, own);
  }

  GradientSums sums_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveReduceRows")
                            .Device(DEVICE_GPU)
                            .HostMemory("handles")
                            .HostMemory("splits")
                            .HostMemory("headers"),
                        ReduceRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveReduceRows").Device(DEVICE_CPU).Label("emulated"),
                        ReduceRowsOp);

}  // namespace reduce_op
}  // namespace gpu
}  // namespace collective
