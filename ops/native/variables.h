// Finds, locks and prepares shards that are read or updated in place.

#ifndef COLLECTIVE_NATIVE_VARIABLES_H_
#define COLLECTIVE_NATIVE_VARIABLES_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "row_pages.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace collective {

// A matrix of floats whose memory is held elsewhere.
struct Table {
  const float* values = nullptr;
  int64_t rows = 0, dim = 0;
};

// Starts to load the memory that a look-up of the handles' variables reads. It is scattered over
// memory, so that a loop over hundreds of them would wait for each in turn.
inline void PrefetchHandles(const tensorflow::OpInputList& handles) {
  constexpr size_t kLine = 64;
  for (int t = 0; t < handles.size(); ++t) {
    const char* handle = static_cast<const char*>(handles[t].data());
    for (size_t at = 0; at < sizeof(tensorflow::ResourceHandle); at += kLine)
      __builtin_prefetch(handle + at);
  }
  for (int t = 0; t < handles.size(); ++t) {
    const auto& handle = handles[t].flat<tensorflow::ResourceHandle>()(0);
    __builtin_prefetch(handle.device().data());
    __builtin_prefetch(handle.name().data());
  }
}

// Locks mutexes against writers while it lives: each once, in the order of their addresses, like
// other operations that lock several.
class SharedLocks {
 public:
  explicit SharedLocks(std::vector<tensorflow::mutex*> locks) : locks_(std::move(locks)) {
    std::sort(locks_.begin(), locks_.end());
    locks_.erase(std::unique(locks_.begin(), locks_.end()), locks_.end());
    for (tensorflow::mutex* lock : locks_) lock->lock_shared();
  }
  SharedLocks(const SharedLocks&) = delete;
  ~SharedLocks() {
    for (auto lock = locks_.rbegin(); lock != locks_.rend(); ++lock) (*lock)->unlock_shared();
  }

 private:
  std::vector<tensorflow::mutex*> locks_;
};

// Locks the variables of a list of handles against writers while it lives.
class LockedVariables {
 public:
  tensorflow::Status Lock(tensorflow::OpKernelContext* context,
                          const tensorflow::OpInputList& handles, std::vector<Table>* tables) {
    std::vector<tensorflow::mutex*> locks;
    variables_.resize(handles.size());
    locks.reserve(handles.size());
    PrefetchHandles(handles);
    for (int t = 0; t < handles.size(); ++t) {
      const auto& handle = handles[t].flat<tensorflow::ResourceHandle>()(0);
      if (!LookupResource(context, handle, &variables_[t]).ok()) {
        return tensorflow::errors::FailedPrecondition("the variable ", handle.name(), " of table ",
                                                      t,
                                                      " does not exist: was it "
                                                      "initialized?");
      }
      locks.push_back(variables_[t]->mu());
    }
    locks_ = std::make_unique<SharedLocks>(std::move(locks));
    tables->clear();
    tables->reserve(handles.size());
    for (int t = 0; t < handles.size(); ++t) {
      const tensorflow::Tensor& value = *variables_[t]->tensor();
      if (!value.IsInitialized() || value.dtype() != tensorflow::DT_FLOAT || value.dims() != 2)
        return Refusal(handles[t].flat<tensorflow::ResourceHandle>()(0).name(), t, value);
      tables->push_back(
          {static_cast<const float*>(value.data()), value.dim_size(0), value.dim_size(1)});
    }
    return tensorflow::OkStatus();
  }

 private:
  static tensorflow::Status Refusal(const std::string& name, int t,
                                    const tensorflow::Tensor& value) {
    if (!value.IsInitialized()) {
      return tensorflow::errors::FailedPrecondition("the variable ", name, " of table ", t,
                                                    " is not initialized");
    }
    return tensorflow::errors::InvalidArgument(
        "the variable ", name, " of table ", t, " is no float32 matrix, but ",
        tensorflow::DataTypeString(value.dtype()), value.shape().DebugString());
  }

  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::unique_ptr<SharedLocks> locks_;  // They are released before the variables.
};

// Copies on the operation's device; on a GPU in the order of TensorFlow's stream, like everything
// that is launched after it.
inline tensorflow::Status Copy(tensorflow::OpKernelContext* context, const tensorflow::Tensor& from,
                               tensorflow::Tensor* to) {
  if (tensorflow::DeviceContext* device = context->op_device_context()) {
    absl::Notification launched;
    tensorflow::Status status;
    device->CopyTensorInSameDevice(&from, static_cast<tensorflow::Device*>(context->device()), to,
                                   [&](const tensorflow::Status& outcome) {
                                     status = outcome;
                                     launched.Notify();
                                   });
    launched.WaitForNotification();
    return status;
  }
  std::memcpy(to->data(), from.data(), from.TotalBytes());
  return tensorflow::OkStatus();
}

inline tensorflow::Status CopyToNew(tensorflow::OpKernelContext* context,
                                    const tensorflow::Tensor& from, tensorflow::Tensor* to) {
  TF_RETURN_IF_ERROR(TakeRows(context, from.dtype(), from.shape(), to));
  return Copy(context, from, to);
}

// Gives the variable its own memory, and marks it as updated in place: from now on a read of the
// whole variable gets a copy. TensorFlow's own sparse updates begin the same way.
inline tensorflow::Status EnsureOwned(tensorflow::OpKernelContext* context,
                                      tensorflow::Var* variable) {
  if (variable->copy_on_read_mode.load()) return tensorflow::OkStatus();
  tensorflow::mutex_lock lock(*variable->mu());
  if (!variable->tensor()->RefCountIsOne()) {
    tensorflow::Tensor copy;
    TF_RETURN_IF_ERROR(CopyToNew(context, *variable->tensor(), &copy));
    *variable->tensor() = copy;
  }
  variable->copy_on_read_mode.store(true);
  return tensorflow::OkStatus();
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_VARIABLES_H_
