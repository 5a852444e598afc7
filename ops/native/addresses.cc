// CollectiveAddresses: where tensors lie, once the device has done all that TensorFlow has launched; and what shapes they have: for
// each its address, rank, first dimension, and the product of the others.

#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace addresses_op {

using namespace tensorflow;

class AddressesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* addresses = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({context->num_inputs(), 4}), &addresses));
    auto described = addresses->matrix<int64_t>();
    for (int i = 0; i < context->num_inputs(); ++i) {
      OP_REQUIRES(context, DataTypeCanUseMemcpy(context->input_dtype(i)),
                  errors::InvalidArgument("a tensor of type ", DataTypeString(context->input_dtype(i)), " is no array"));
      const Tensor& tensor = context->input(i);
      described(i, 0) = reinterpret_cast<int64_t>(tensor.data());
      described(i, 1) = tensor.dims();
      described(i, 2) = described(i, 3) = 1;
      for (int d = 0; d < tensor.dims(); ++d) described(i, d == 0 ? 2 : 3) *= tensor.dim_size(d);
    }
    OP_REQUIRES_OK(context, static_cast<Device*>(context->device())->Sync());
  }
};

REGISTER_KERNEL_BUILDER(Name("CollectiveAddresses").Device(DEVICE_CPU), AddressesOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveAddresses").Device(DEVICE_GPU).HostMemory("addresses"), AddressesOp);

}  // namespace addresses_op
}  // namespace collective
