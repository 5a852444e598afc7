// Orders the work of one operation on TensorFlow's stream: copies, kernels, and scratch memory.

#ifndef COLLECTIVE_NATIVE_GPU_STREAM_H_
#define COLLECTIVE_NATIVE_GPU_STREAM_H_

#include <cstdint>
#include <vector>

#include "driver.h"
#include "pinned_buffers.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace collective {
namespace gpu {

// Returns the CUstream of the operation; null on a CPU, which has none.
inline void* StreamOf(tensorflow::OpKernelContext* context) {
  tensorflow::DeviceContext* device = context->op_device_context();
  if (device == nullptr || device->stream() == nullptr) return nullptr;
  return device->stream()->platform_specific_handle().stream;
}

constexpr int kThreads = 256;  // of a block, as in segments.cuh

// How a kernel is launched: blocks, threads of each, bytes of dynamic shared memory.
struct Grid {
  Grid(int64_t blocks, int threads = kThreads, size_t shared = 0)  // NOLINT: blocks alone will do
      : blocks(blocks), threads(threads), shared(shared) {}
  int64_t blocks;
  int threads;
  size_t shared;
};

// TensorFlow launches all kernels of a GPU on one stream, in the order in which its operations run,
// and its allocator reuses memory in that order. So nothing waits for what is launched here, but
// for what an operation reads on the host itself.
//
// Where the operation runs on a CPU, by kernels that are emulated, the next one is not ordered
// after them: the end of this object waits. So does the end of one whose copies to the host were
// not waited for, after an error.
class Stream {
 public:
  explicit Stream(tensorflow::OpKernelContext* context) : context_(context) {
    stream_ = StreamOf(context);
    is_emulated_ = stream_ == nullptr;
  }
  Stream(const Stream&) = delete;

  ~Stream() {
    if (event_ != nullptr) driver_->destroy_event(event_);
    if (driver_ == nullptr || (!is_emulated_ && !is_copying_)) return;
    context_->SetStatus(Checked(driver_->wait_for_stream(stream_), "cuStreamSynchronize"));
  }

  tensorflow::Status Open() { return FindDriver(&driver_); }

  // Makes memory on the device that lives as long as this object, and longer for what was launched.
  tensorflow::Status Scratch(size_t bytes, void** scratch) {
    return Allocate(bytes, tensorflow::AllocatorAttributes(), scratch);
  }

  // Copies `words` to the device. An operation does so once, with all that its kernels need.
  tensorflow::Status Upload(const std::vector<int64_t>& words, const int64_t** uploaded) {
    void* there = nullptr;
    const size_t bytes = words.size() * sizeof(int64_t);
    TF_RETURN_IF_ERROR(Scratch(bytes, &there));
    *uploaded = static_cast<const int64_t*>(there);
    if (bytes == 0) return tensorflow::OkStatus();
    tensorflow::core::RefCountPtr<PinnedBuffers> buffers;
    TF_RETURN_IF_ERROR(PinnedBuffers::Of(context_, &buffers));
    return buffers->Copy(context_, driver_, stream_, words.data(), bytes, there);
  }

  // Makes memory on the device that is 0.
  tensorflow::Status ZeroScratch(size_t bytes, void** scratch) {
    TF_RETURN_IF_ERROR(Scratch(bytes, scratch));
    if (bytes == 0) return tensorflow::OkStatus();
    return Checked(driver_->set_memory(reinterpret_cast<uint64_t>(*scratch), 0, bytes, stream_),
                   "cuMemsetD8Async");
  }

  // Fills memory on the device with zeros.
  tensorflow::Status Zero(void* there, size_t bytes) {
    if (bytes == 0) return tensorflow::OkStatus();
    return Checked(driver_->set_memory(reinterpret_cast<uint64_t>(there), 0, bytes, stream_),
                   "cuMemsetD8Async");
  }

  // Makes memory on the host that `CopyToHost` fills, or that `CopyToDevice` reads.
  tensorflow::Status HostScratch(size_t bytes, void** scratch) {
    tensorflow::AllocatorAttributes attributes;
    attributes.set_on_host(true);
    attributes.set_gpu_compatible(true);
    return Allocate(bytes, attributes, scratch);
  }

  // Makes the output `index`, which is in host memory, so that `CopyToHost` fills it.
  tensorflow::Status HostOutput(int index, const tensorflow::TensorShape& shape,
                                tensorflow::Tensor** output) {
    tensorflow::AllocatorAttributes attributes = context_->output_alloc_attr(index);
    attributes.set_on_host(true);
    attributes.set_gpu_compatible(true);
    return context_->allocate_output(index, shape, output, attributes);
  }

  // Starts a copy out of memory of `HostScratch`, which is read until `WaitForCopies` returns.
  tensorflow::Status CopyToDevice(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return tensorflow::OkStatus();
    is_copying_ = true;
    return Checked(driver_->copy_to_device(reinterpret_cast<uint64_t>(to), from, bytes, stream_),
                   "cuMemcpyHtoDAsync", "");
  }

  // Starts a copy to the host. It is there once `WaitForCopies` returns.
  tensorflow::Status CopyToHost(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return tensorflow::OkStatus();
    is_copying_ = true;
    return Checked(driver_->copy_to_host(to, reinterpret_cast<uint64_t>(from), bytes, stream_),
                   "cuMemcpyDtoHAsync");
  }

  // Waits for the copies so far, not for what others launch meanwhile.
  tensorflow::Status WaitForCopies() {
    if (!is_copying_) return tensorflow::OkStatus();
    if (event_ == nullptr) {
      TF_RETURN_IF_ERROR(Checked(driver_->create_event(&event_, kWithoutTiming), "cuEventCreate"));
    }
    TF_RETURN_IF_ERROR(Checked(driver_->record_event(event_, stream_), "cuEventRecord"));
    TF_RETURN_IF_ERROR(Checked(driver_->wait_for_event(event_), "cuEventSynchronize"));
    is_copying_ = false;
    return tensorflow::OkStatus();
  }

  // Arguments are of exactly the kernel's types. Nothing happens for no blocks.
  template <class... Arguments>
  tensorflow::Status Launch(Kernel kernel, Grid grid, Arguments... arguments) {
    if (grid.blocks == 0) return tensorflow::OkStatus();
    void* handle = nullptr;
    TF_RETURN_IF_ERROR(FindKernel(kernel, &handle));
    void* addresses[] = {&arguments...};
    return Checked(driver_->launch(handle, static_cast<unsigned>(grid.blocks), 1, 1,
                                   static_cast<unsigned>(grid.threads), 1, 1,
                                   static_cast<unsigned>(grid.shared), stream_, addresses, nullptr),
                   "cuLaunchKernel of ", NameOf(kernel));
  }

 private:
  tensorflow::Status Allocate(size_t bytes, const tensorflow::AllocatorAttributes& attributes,
                              void** memory) {
    tensorflow::Tensor made;
    TF_RETURN_IF_ERROR(context_->allocate_temp(
        tensorflow::DT_INT8, tensorflow::TensorShape({static_cast<int64_t>(bytes)}), &made,
        attributes));
    *memory = made.data();
    scratch_.push_back(made);
    return tensorflow::OkStatus();
  }

  tensorflow::OpKernelContext* context_;
  const Driver* driver_ = nullptr;
  void *stream_ = nullptr, *event_ = nullptr;
  bool is_emulated_ = false, is_copying_ = false;
  std::vector<tensorflow::Tensor> scratch_;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_STREAM_H_
