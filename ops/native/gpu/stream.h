// Gives the stream on which a device runs an operation: its kernels are ordered by it alone.

#ifndef COLLECTIVE_NATIVE_GPU_STREAM_H_
#define COLLECTIVE_NATIVE_GPU_STREAM_H_

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/stream_executor.h"

namespace collective {
namespace gpu {

// Returns the CUstream of the operation; null on a CPU, which has none.
inline void* StreamOf(tensorflow::OpKernelContext* context) {
  tensorflow::DeviceContext* device = context->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return nullptr;
  return device->stream()->platform_specific_handle().stream;
}

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_STREAM_H_
