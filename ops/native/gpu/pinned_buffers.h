// Keeps uploaded data in pinned memory until it has been copied.
//
// For a copy from pageable memory, the driver may wait for all earlier work of the stream. Pinned
// memory is read while the host goes on: it must not change before an event after the copy.

#ifndef COLLECTIVE_NATIVE_GPU_PINNED_BUFFERS_H_
#define COLLECTIVE_NATIVE_GPU_PINNED_BUFFERS_H_

#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "driver.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/mutex.h"

namespace collective {
namespace gpu {

// Holds the buffers of one device in a session. Nothing waits for a buffer: if none is free,
// another one is made, so that there are as many as were ever in use at the same time.
class PinnedBuffers : public tensorflow::ResourceBase {
 public:
  static tensorflow::Status Of(tensorflow::OpKernelContext* context,
                               tensorflow::core::RefCountPtr<PinnedBuffers>* buffers) {
    tensorflow::ResourceMgr* resources = context->resource_manager();
    PinnedBuffers* found = nullptr;
    TF_RETURN_IF_ERROR(resources->LookupOrCreate<PinnedBuffers>(resources->default_container(),
                                                                "collective_pinned_buffers", &found,
                                                                [](PinnedBuffers** made) {
                                                                  *made = new PinnedBuffers;
                                                                  return tensorflow::OkStatus();
                                                                }));
    buffers->reset(found);
    return tensorflow::OkStatus();
  }

  ~PinnedBuffers() override {
    const Driver* driver = nullptr;
    if (!FindDriver(&driver).ok()) return;
    for (const Buffer& buffer : copying_) {
      if (driver->query_event(buffer.event) != 0) driver->wait_for_event(buffer.event);
      driver->destroy_event(buffer.event);
    }
  }

  std::string DebugString() const override { return "pinned memory that is copied to a GPU"; }

  // Copies to the device through a buffer. `from` may be used again once it returns.
  tensorflow::Status Copy(tensorflow::OpKernelContext* context, const Driver* driver, void* stream,
                          const void* from, size_t bytes, void* to) {
    Buffer buffer = Take(driver);
    const tensorflow::Status status = Copy(context, driver, stream, from, bytes, to, &buffer);
    if (status.ok()) {
      tensorflow::mutex_lock lock(mutex_);
      copying_.push_back(std::move(buffer));
    } else if (buffer.event != nullptr) {
      driver->wait_for_stream(stream);
      driver->destroy_event(buffer.event);
    }
    return status;
  }

 private:
  struct Buffer {
    tensorflow::Tensor memory;
    void* event = nullptr;
  };

  // Returns the oldest buffer if it has been copied, else a new one.
  Buffer Take(const Driver* driver) {
    Buffer taken;
    tensorflow::mutex_lock lock(mutex_);
    if (!copying_.empty() && driver->query_event(copying_.front().event) == 0) {
      taken = std::move(copying_.front());
      copying_.pop_front();
    }
    return taken;
  }

  static tensorflow::Status Copy(tensorflow::OpKernelContext* context, const Driver* driver,
                                 void* stream, const void* from, size_t bytes, void* to,
                                 Buffer* buffer) {
    if (buffer->event == nullptr) {
      TF_RETURN_IF_ERROR(
          Checked(driver->create_event(&buffer->event, kWithoutTiming), "cuEventCreate"));
    }
    if (buffer->memory.TotalBytes() < bytes) {
      tensorflow::AllocatorAttributes pinned;
      pinned.set_on_host(true);
      pinned.set_gpu_compatible(true);
      TF_RETURN_IF_ERROR(context->allocate_temp(
          tensorflow::DT_INT8, tensorflow::TensorShape({static_cast<int64_t>(bytes)}),
          &buffer->memory, pinned));
    }
    std::memcpy(buffer->memory.data(), from, bytes);
    TF_RETURN_IF_ERROR(Checked(driver->copy_to_device(reinterpret_cast<uint64_t>(to),
                                                      buffer->memory.data(), bytes, stream),
                               "cuMemcpyHtoDAsync"));
    return Checked(driver->record_event(buffer->event, stream), "cuEventRecord");
  }

  tensorflow::mutex mutex_;
  std::deque<Buffer> copying_ TF_GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_PINNED_BUFFERS_H_
