// CollectiveEmptyRows: gives memory for rows as a tensor, to be filled and assigned to a variable.

#include "row_pages.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace empty_rows_op {

using namespace tensorflow;

class EmptyRowsOp : public OpKernel {
 public:
  explicit EmptyRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("shape", &shape_));
    OP_REQUIRES(context, DataTypeCanUseMemcpy(dtype_),
                errors::InvalidArgument(DataTypeString(dtype_), " is no type of numbers"));
  }

  void Compute(OpKernelContext* context) override {
    Tensor rows;
    OP_REQUIRES_OK(context, TakeRows(context, dtype_, shape_, &rows));
    context->set_output(0, rows);
  }

 private:
  DataType dtype_;
  TensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveEmptyRows").Device(DEVICE_CPU), EmptyRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveEmptyRows").Device(DEVICE_GPU), EmptyRowsOp);

}  // namespace empty_rows_op
}  // namespace collective
