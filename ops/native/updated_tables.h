// Finds, locks and checks tables with their slots, whose rows a rule updates in place; and reads
// what all such operations are given in host memory.

#ifndef COLLECTIVE_NATIVE_UPDATED_TABLES_H_
#define COLLECTIVE_NATIVE_UPDATED_TABLES_H_

#include <limits>
#include <memory>
#include <string>
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
          "there are ", used, " rows in addition to row 0, but memory for ", last, " only");
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

// What a rule takes; see update_rules.h.
struct RuleInputs {
  const char* name;
  int slots, numbers;
  bool row_wise, all_rows;
};

// What an update is given of one table.
struct TableUpdate {
  UpdatedTables::Handles handles;  // Of the table, and its slots.
  const int64_t* rows = nullptr;   // [n], in the memory of the device that updates
  int64_t n = 0;
  const float* gradients = nullptr;       // [n, D]; null: sums that nobody keeps
  tensorflow::TensorShape gradients_are;  // Their shape.
  int64_t used = -1;
  float bound = std::numeric_limits<float>::infinity();  // Of weights.

  void Take(const tensorflow::Tensor& gradient, const tensorflow::Tensor& row) {
    gradients = gradient.flat<float>().data();
    gradients_are = gradient.shape();
    rows = row.flat<int64_t>().data();
    n = row.NumElements();
  }
};

// The rule of an operation that updates tables, and what it is given for it.
template <class Rule>
class RuleOfTables {
 public:
  // Args:
  //   tables: how many are updated.
  //   rules: those that there are.
  template <size_t kRules>
  tensorflow::Status Read(tensorflow::OpKernelConstruction* context, int tables,
                          const Rule (&rules)[kRules]) {
    using tensorflow::errors::InvalidArgument;
    std::string name;
    int slots = 0, numbers = 0, used = 0;
    TF_RETURN_IF_ERROR(context->GetAttr("rule", &name));
    TF_RETURN_IF_ERROR(context->GetAttr("S", &slots));
    TF_RETURN_IF_ERROR(context->GetAttr("N", &numbers));
    TF_RETURN_IF_ERROR(context->GetAttr("R", &used));
    TF_RETURN_IF_ERROR(context->GetAttr("bounds", &bounds_));
    if (!bounds_.empty() && bounds_.size() != static_cast<size_t>(tables))
      return InvalidArgument("there are ", tables, " tables, but ", bounds_.size(), " bounds");
    for (const Rule& rule : rules) {
      if (name == rule.name) rule_ = &rule;
    }
    if (rule_ == nullptr) return InvalidArgument("there is no rule '", name, "'");
    if (slots == tables * rule_->slots && numbers == rule_->numbers &&
        (used == 0 || used == tables))
      return tensorflow::OkStatus();
    return InvalidArgument(name, " has ", rule_->slots, " slots and ", rule_->numbers,
                           " numbers, but there are ", slots, " slots of ", tables, " tables, ",
                           numbers, " numbers, and ", used, " numbers of rows");
  }

  // Reads the inputs `tables`, `slots`, `numbers` and `used`.
  tensorflow::Status Start(tensorflow::OpKernelContext* context, std::vector<float>* values,
                           std::vector<TableUpdate>* updates) const {
    tensorflow::OpInputList tables, slots, numbers, used;
    TF_RETURN_IF_ERROR(context->input_list("tables", &tables));
    TF_RETURN_IF_ERROR(context->input_list("slots", &slots));
    TF_RETURN_IF_ERROR(context->input_list("numbers", &numbers));
    TF_RETURN_IF_ERROR(context->input_list("used", &used));
    values->resize(rule_->numbers);
    TF_RETURN_IF_ERROR(
        ReadNumbers(rule_->numbers, [&](int i) { return numbers[i]; }, values->data()));
    updates->resize(tables.size());
    PrefetchHandles(tables);
    PrefetchHandles(slots);
    for (int t = 0; t < tables.size(); ++t) {
      TableUpdate& update = (*updates)[t];
      update.handles.push_back(&tables[t].template flat<tensorflow::ResourceHandle>()(0));
      for (int s = 0; s < rule_->slots; ++s) {
        update.handles.push_back(
            &slots[t * rule_->slots + s].template flat<tensorflow::ResourceHandle>()(0));
      }
      if (!bounds_.empty()) update.bound = bounds_[t];
      if (used.size() > 0) TF_RETURN_IF_ERROR(ReadUsed(used[t], &update.used));
    }
    return tensorflow::OkStatus();
  }

  const Rule& operator*() const { return *rule_; }
  const Rule* operator->() const { return rule_; }

 private:
  const Rule* rule_ = nullptr;
  std::vector<float> bounds_;
};

inline constexpr char kOnGpu[] =
    "on a GPU: make its table outside of tf.device, or set COLLECTIVE_KERNELS=cpu";

// Says that an operation was made for tables elsewhere: TensorFlow runs it where its variables are,
// whatever device was requested.
inline tensorflow::Status IsElsewhere(tensorflow::OpKernelContext* context, const char* made_for) {
  return tensorflow::errors::FailedPrecondition(
      "the variable ", tensorflow::HandleFromInput(context, 0).name(), " is on a ",
      context->device()->attributes().device_type(), ", but is updated ", made_for);
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_UPDATED_TABLES_H_
