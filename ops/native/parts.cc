// CollectiveParts: splits a tensor into parts that follow one another, each a vector, or a matrix
// of a given dimension.
//
// A part that begins where TensorFlow wants tensors to begin shares the memory of the whole; others
// are copied.

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "variables.h"

namespace collective {
namespace parts_op {

using namespace tensorflow;

class PartsOp : public OpKernel {
 public:
  explicit PartsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& given = context->input(0);
    const Tensor& sizes = context->input(1);
    Tensor whole;
    OP_REQUIRES(context, whole.CopyFrom(given, TensorShape({given.NumElements()})),
                errors::Internal("no vector of it"));
    OP_REQUIRES(context, sizes.NumElements() == static_cast<int64_t>(dims_.size()),
                errors::InvalidArgument("there are ", dims_.size(), " parts, but ",
                                        sizes.NumElements(), " sizes"));
    int64_t first = 0;
    for (size_t part = 0; part < dims_.size(); ++part) {
      const int64_t size = sizes.flat<int64_t>()(part), dim = dims_[part];
      OP_REQUIRES(
          context,
          size >= 0 && size <= whole.NumElements() - first && (dim == 0 || size % dim == 0),
          errors::InvalidArgument("part ", part, " can not have ", size, " elements of dimension ",
                                  dim, ", from ", first, " of ", whole.NumElements()));
      const TensorShape shape = dim == 0 ? TensorShape({size}) : TensorShape({size / dim, dim});
      Tensor out, slice = whole.Slice(first, first + size);
      if (size == 0 || !slice.IsAligned()) {
        OP_REQUIRES_OK(context, context->allocate_temp(whole.dtype(), shape, &out));
        if (size > 0) OP_REQUIRES_OK(context, Copy(context, slice, &out));
      } else {
        OP_REQUIRES(context, out.CopyFrom(slice, shape), errors::Internal("no part of it"));
      }
      context->set_output(part, out);
      first += size;
    }
    OP_REQUIRES(context, first == whole.NumElements(),
                errors::InvalidArgument("the parts have ", first, " of ", whole.NumElements(),
                                        " elements"));
  }

 private:
  std::vector<int64_t> dims_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveParts").Device(DEVICE_CPU), PartsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveParts").Device(DEVICE_GPU).HostMemory("sizes"), PartsOp);

}  // namespace parts_op
}  // namespace collective
