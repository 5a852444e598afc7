// Finds, locks and checks tables with their slots, whose rows a rule updates in place; and reads
// the inputs that all such operations have in host memory.

#ifndef COLLECTIVE_NATIVE_UPDATED_TABLES_H_
#define COLLECTIVE_NATIVE_UPDATED_TABLES_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "row_changes.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "variables.h"

namespace collective {

// Rows of a table, [first, last).
struct RowRange {
  int64_t first, last;
};

// Holds tables with their slots, locked against writers of whole variables.
class UpdatedTables {
 public:
  // The variable of a table or of a slot.
  using Handles = absl::InlinedVector<const tensorflow::ResourceHandle*, 4>;

  // Args:
  //   slots: how many each table has.
  //   row_wise: whether a slot has one number per row instead of the table's dimension.
  UpdatedTables(int slots, bool row_wise) : slots_(slots), row_wise_(row_wise) {}

  tensorflow::Status Lock(tensorflow::OpKernelContext* context,
                          const std::vector<Handles>& handles) {
    variables_.resize(handles.size() * (1 + slots_));
    std::vector<tensorflow::mutex*> locks;
    locks.reserve(variables_.size());
    for (size_t t = 0; t < handles.size(); ++t) {
      for (int i = 0; i <= slots_; ++i) {
        Variable& variable = variables_[t * (1 + slots_) + i];
        TF_RETURN_IF_ERROR(Prepare(context, *handles[t][i], &variable));
        locks.push_back(variable->mu());
      }
    }
    locks_ = std::make_unique<SharedLocks>(std::move(locks));
    for (size_t t = 0; t < handles.size(); ++t) {
      const tensorflow::Tensor& value = Of(t, 0);
      for (int i = 1; i <= slots_; ++i) {
        const tensorflow::Tensor& slot = Of(t, i);
        if (slot.dim_size(0) < value.dim_size(0) ||
            slot.dim_size(1) != (row_wise_ ? 1 : value.dim_size(1))) {
          return tensorflow::errors::InvalidArgument("a slot is ", slot.shape().DebugString(),
                                                     ", the table ", value.shape().DebugString());
        }
      }
    }
    return tensorflow::OkStatus();
  }

  int64_t dim(int64_t t) const { return Of(t, 0).dim_size(1); }

  // Finds the existing rows: all of them, or rows 1 to `used` if that isn't negative.
  tensorflow::Status Range(int64_t t, int64_t used, RowRange* range) const {
    const int64_t last = Of(t, 0).dim_size(0);
    *range = {0, last};
    if (used >= last) {
      return tensorflow::errors::InvalidArgument(
          "there are ", used, " rows beside row 0, but memory for ", last, " only");
    }
    if (used >= 0) *range = {1, used + 1};
    return tensorflow::OkStatus();
  }

  // Returns the memory of a table (0), or of a slot (1, …).
  float* Values(int64_t t, int i) const { return static_cast<float*>(Of(t, i).data()); }

 private:
  using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

  const tensorflow::Tensor& Of(int64_t t, int i) const {
    return *variables_[t * (1 + slots_) + i]->tensor();
  }

  // Finds a variable, and gives it its own memory.
  static tensorflow::Status Prepare(tensorflow::OpKernelContext* context,
                                    const tensorflow::ResourceHandle& handle, Variable* variable) {
    if (!LookupResource(context, handle, variable).ok()) {
      return tensorflow::errors::FailedPrecondition("the variable ", handle.name(),
                                                    " does not exist: was it initialized?");
    }
    const tensorflow::Tensor& value = *(*variable)->tensor();
    if (value.dtype() != tensorflow::DT_FLOAT || value.dims() != 2) {
      return tensorflow::errors::InvalidArgument("the variable ", handle.name(),
                                                 " is no float32 matrix, or not initialized");
    }
    return EnsureOwned(context, variable->get());
  }

  const int slots_;
  const bool row_wise_;
  std::vector<Variable> variables_;     // Of each table it, and its slots.
  std::unique_ptr<SharedLocks> locks_;  // They are released before the variables.
};

// Tells listeners which rows of a table and its slots are about to change.
inline void AnnounceUpdate(tensorflow::OpKernelContext* context,
                           const UpdatedTables::Handles& handles, const RowWrite& write) {
  for (const tensorflow::ResourceHandle* handle : handles) AnnounceWrite(context, *handle, write);
}

// Reads the numbers of a rule: number_of(i) is the i-th.
template <class NumberOf>
tensorflow::Status ReadNumbers(int count, const NumberOf& number_of, float* numbers) {
  for (int i = 0; i < count; ++i) {
    const tensorflow::Tensor& number = number_of(i);
    if (number.NumElements() != 1) {
      return tensorflow::errors::InvalidArgument(
          "a number of the rule, such as the learning rate, is ", number.shape().DebugString());
    }
    numbers[i] = number.flat<float>()(0);
  }
  return tensorflow::OkStatus();
}

inline tensorflow::Status ReadUsed(const tensorflow::Tensor& used, int64_t* count) {
  if (used.NumElements() != 1) {
    return tensorflow::errors::InvalidArgument("the number of rows is ",
                                               used.shape().DebugString());
  }
  *count = used.flat<int64_t>()(0);
  return tensorflow::OkStatus();
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_UPDATED_TABLES_H_
