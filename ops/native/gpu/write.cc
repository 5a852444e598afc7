// CollectiveWriteRows: gives rows of a variable new values, in place, by a kernel of write.cu. The
// host waits for nothing.
//
// TensorFlow's ResourceScatterUpdate of integers, and of all types where operations must be
// deterministic, copies the whole variable to the host and back: of a dynamic table it is address
// space, most of it without memory.

#include <algorithm>

#include "../variables.h"
#include "segments.h"
#include "stream.h"
#include "table_updates.h"

namespace collective {
namespace gpu {
namespace write_op {

using namespace tensorflow;

// How a kernel goes over rows: `words` accesses of `width` bytes each, by groups of `lanes`.
struct RowAccess {
  int32_t width = 16, lanes = 1;
  int64_t words;

  RowAccess(int64_t bytes, const Tensor& values, const Tensor& variable) {
    const int64_t all = bytes | AddressOf(static_cast<const char*>(values.data())) |
                        AddressOf(static_cast<const char*>(variable.data()));
    while (all % width != 0) width /= 2;
    words = bytes / width;
    while (lanes < std::min(words, kLanesOfWarp)) lanes *= 2;
  }
};

class WriteRowsOp : public OpKernel {
 public:
  explicit WriteRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    DataType dtype;
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype));
    OP_REQUIRES(context, DataTypeCanUseMemcpy(dtype),
                errors::InvalidArgument(DataTypeString(dtype), " can't be copied as bytes"));
  }

  void Compute(OpKernelContext* context) override {
    const ResourceHandle& handle = HandleFromInput(context, 0);
    const Tensor &rows = context->input(1), &values = context->input(2);
    core::RefCountPtr<Var> variable;
    OP_REQUIRES(context, LookupResource(context, handle, &variable).ok(),
                errors::FailedPrecondition("the variable ", handle.name(),
                                           " does not exist: was it initialized?"));
    OP_REQUIRES_OK(context, EnsureOwned(context, variable.get()));
    tf_shared_lock lock(*variable->mu());
    const Tensor& held = *variable->tensor();
    OP_REQUIRES_OK(context, Check(handle.name(), held, rows, values));
    if (values.NumElements() == 0) return;
    Stream stream(context);  // Where its end waits, the variable is locked still.
    OP_REQUIRES_OK(context, stream.Open());
    const int64_t count = rows.NumElements();
    const RowAccess access(values.TotalBytes() / count, values, held);
    OP_REQUIRES_OK(
        context,
        stream.Launch(Kernel::kWriteRows, CeilOfQuotient(count, kThreads / access.lanes * kFlight),
                      rows.data(), count, values.data(), held.data(), held.dim_size(0),
                      access.words, access.lanes, access.width));
  }

 private:
  static constexpr int64_t kFlight = 4;  // as in write.cu

  static Status Check(const string& name, const Tensor& held, const Tensor& rows,
                      const Tensor& values) {
    if (!held.IsInitialized())
      return errors::FailedPrecondition("the variable ", name, " is not initialized");
    TensorShape wanted = held.shape();
    if (held.dims() > 0) wanted.set_dim(0, rows.NumElements());
    if (held.dims() > 0 && rows.dims() == 1 && held.dtype() == values.dtype() &&
        values.shape() == wanted) {
      return OkStatus();
    }
    return errors::InvalidArgument("the variable ", name, " is ", DataTypeString(held.dtype()),
                                   held.shape().DebugString(), "; its rows ",
                                   rows.shape().DebugString(), " can't be ",
                                   DataTypeString(values.dtype()), values.shape().DebugString());
  }
};

class ElsewhereOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    context->SetStatus(IsElsewhere(context, kOnGpu));
  }
};

REGISTER_KERNEL_BUILDER(Name("CollectiveWriteRows").Device(DEVICE_GPU).HostMemory("resource"),
                        WriteRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveWriteRows").Device(DEVICE_CPU).Label("emulated"),
                        WriteRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveWriteRows").Device(DEVICE_CPU), ElsewhereOp);

}  // namespace write_op
}  // namespace gpu
}  // namespace collective
