// Shards that are read in place.

#ifndef COLLECTIVE_NATIVE_VARIABLES_H_
#define COLLECTIVE_NATIVE_VARIABLES_H_

#include <algorithm>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace collective {

// A matrix of floats that somebody else holds.
struct Table {
  const float* values = nullptr;
  int64_t rows = 0, dim = 0;
};

// The variables of a list of handles, locked against writers while this lives. Like other operations that lock several, in the
// order of the locks' addresses, each once.
class LockedVariables {
 public:
  LockedVariables() = default;
  LockedVariables(const LockedVariables&) = delete;
  ~LockedVariables() {
    for (auto lock = locks_.rbegin(); lock != locks_.rend(); ++lock) (*lock)->unlock_shared();
  }

  tensorflow::Status Lock(tensorflow::OpKernelContext* context, const tensorflow::OpInputList& handles,
                          std::vector<Table>* tables) {
    std::vector<tensorflow::mutex*> locks;
    variables_.resize(handles.size());
    for (int t = 0; t < handles.size(); ++t) {
      const auto& handle = handles[t].flat<tensorflow::ResourceHandle>()(0);
      if (!LookupResource(context, handle, &variables_[t]).ok()) {
        return tensorflow::errors::FailedPrecondition("the variable ", handle.name(), " of table ", t, " does not exist: was it "
                                                      "initialized?");
      }
      locks.push_back(variables_[t]->mu());
    }
    std::sort(locks.begin(), locks.end());
    locks.erase(std::unique(locks.begin(), locks.end()), locks.end());
    for (tensorflow::mutex* lock : locks) {
      lock->lock_shared();
      locks_.push_back(lock);
    }
    tables->clear();
    for (int t = 0; t < handles.size(); ++t) {
      const tensorflow::Tensor& value = *variables_[t]->tensor();
      const auto& name = handles[t].flat<tensorflow::ResourceHandle>()(0).name();
      if (!value.IsInitialized()) {
        return tensorflow::errors::FailedPrecondition("the variable ", name, " of table ", t, " is not initialized");
      }
      if (value.dtype() != tensorflow::DT_FLOAT || value.dims() != 2) {
        return tensorflow::errors::InvalidArgument("the variable ", name, " of table ", t, " is no float32 matrix, but ",
                                                   tensorflow::DataTypeString(value.dtype()), value.shape().DebugString());
      }
      tables->push_back({value.matrix<float>().data(), value.dim_size(0), value.dim_size(1)});
    }
    return tensorflow::OkStatus();
  }

 private:
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<tensorflow::mutex*> locks_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_VARIABLES_H_
