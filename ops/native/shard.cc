// CollectiveShard, CollectiveSparseShard: give the memory of a variable as a tensor, for kernels
// that read or update rows in place.
//
// Unlike ReadVariableOp they never copy a variable that is marked as updated in place.
// CollectiveSparseShard marks it so, like TensorFlow's own sparse updates: then nothing moves the
// variable to other memory while rows are written.

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "variables.h"

namespace collective {
namespace shard_op {

using namespace tensorflow;

bool IsInitialized(Var* variable) {
  tf_shared_lock lock(*variable->mu());
  return variable->tensor()->IsInitialized();
}

template <bool kUpdates>
class ShardOp : public OpKernel {
 public:
  explicit ShardOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("device", &device_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> variable;
    const ResourceHandle& handle = HandleFromInput(context, 0);
    // TensorFlow runs this where the variable is, whatever device was requested. On another device
    // an update would be one of a copy.
    const string& device = context->device()->attributes().device_type();
    OP_REQUIRES(context, device_.empty() || device == device_,
                errors::FailedPrecondition("the variable ", handle.name(), " is on a ", device,
                                           ", but is looked up and updated on a ", device_,
                                           ": make its table outside of tf.device, and use an "
                                           "optimizer that TensorFlow has a kernel of for a ",
                                           device_, "; or set COLLECTIVE_KERNELS=cpu"));
    OP_REQUIRES(context, LookupResource(context, handle, &variable).ok(),
                errors::FailedPrecondition("the variable ", handle.name(),
                                           " does not exist: was it initialized?"));
    OP_REQUIRES(context, IsInitialized(variable.get()),
                errors::FailedPrecondition("the variable ", handle.name(), " is not initialized"));
    if (kUpdates) OP_REQUIRES_OK(context, EnsureOwned(context, variable.get()));
    tf_shared_lock lock(*variable->mu());
    const Tensor& value = *variable->tensor();
    OP_REQUIRES(
        context, value.dtype() == dtype_,
        errors::InvalidArgument("the variable ", handle.name(), " is ",
                                DataTypeString(value.dtype()), ", not ", DataTypeString(dtype_)));
    context->set_output(0, value);
  }

 private:
  DataType dtype_;
  string device_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveShard").Device(DEVICE_CPU), ShardOp<false>);
REGISTER_KERNEL_BUILDER(Name("CollectiveShard").Device(DEVICE_GPU).HostMemory("handle"),
                        ShardOp<false>);
REGISTER_KERNEL_BUILDER(Name("CollectiveSparseShard").Device(DEVICE_CPU), ShardOp<true>);
REGISTER_KERNEL_BUILDER(Name("CollectiveSparseShard").Device(DEVICE_GPU).HostMemory("handle"),
                        ShardOp<true>);

}  // namespace shard_op
}  // namespace collective
