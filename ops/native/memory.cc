// CollectiveMemory: gives reserved memory as a tensor, to be assigned to a variable.
//
// TensorFlow takes the memory for its own: a variable that is updated row by row stays where it is.
// As long as the memory is used, it keeps another tensor (`keeper`), by whose end the owner of the
// memory knows when to give it back.

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace collective {
namespace memory_op {

using namespace tensorflow;

class Reserved : public TensorBuffer {
 public:
  Reserved(void* address, size_t size, const Tensor& keeper)
      : TensorBuffer(address), size_(size), keeper_(keeper) {}
  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(AllocationDescription*) const override {}
  bool OwnsMemory() const override { return true; }

 private:
  size_t size_;
  Tensor keeper_;
};

class MemoryOp : public OpKernel {
 public:
  explicit MemoryOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("shape", &shape_));
    OP_REQUIRES_OK(context, context->GetAttr("device", &device_));
    OP_REQUIRES(context, DataTypeCanUseMemcpy(dtype_),
                errors::InvalidArgument(DataTypeString(dtype_), " is no type of numbers"));
  }

  void Compute(OpKernelContext* context) override {
    // TensorFlow runs this where the variable is, whatever device was requested. On another device
    // the address would mean nothing.
    const string& device = context->device()->attributes().device_type();
    OP_REQUIRES(
        context, device_.empty() || device == device_,
        errors::FailedPrecondition("the dynamic table's memory is on a ", device_,
                                   ", but TensorFlow has its variable on a ", device,
                                   ", since it has no kernel for a ", device_,
                                   " of something that is done with it: "
                                   "use another optimizer, or set COLLECTIVE_DYNAMIC_TABLES=host"));
    const int64_t address = context->input(0).scalar<int64_t>()();
    OP_REQUIRES(context, address != 0 && address % EIGEN_MAX_ALIGN_BYTES == 0,
                errors::InvalidArgument("the address ", address, " is none of reserved memory"));
    const size_t size = shape_.num_elements() * DataTypeSize(dtype_);
    core::RefCountPtr<TensorBuffer> memory(
        new Reserved(reinterpret_cast<void*>(address), size, context->input(1)));
    context->set_output(0, Tensor(dtype_, shape_, memory.get()));
  }

 private:
  DataType dtype_;
  TensorShape shape_;
  string device_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveMemory").Device(DEVICE_CPU), MemoryOp);
REGISTER_KERNEL_BUILDER(
    Name("CollectiveMemory").Device(DEVICE_GPU).HostMemory("address").HostMemory("keeper"),
    MemoryOp);

}  // namespace memory_op
}  // namespace collective
