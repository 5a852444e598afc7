// CollectiveFindRows: the local rows of the keys of several dynamic tables in the host's memory. In
// training new keys get rows, with initial values; elsewhere they have row 0.
// CollectiveAdmitRows: the same of tables with admission, where a new key may be refused.
// CollectiveCountRows: the number of rows of one.
// CollectiveSettleSlots: gives the slots of one their initial values, before it is updated.

#include "parallel.h"
#include "row_store.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace collective {
namespace find_rows_op {

using namespace tensorflow;

constexpr int64_t kCost = 50;  // Nanoseconds of a key, about.

// Keeps the variable that has the memory of a column, so that it can't be freed meanwhile.
Status Keep(OpKernelContext* context, const Tensor& handle, const RowColumn& column,
            core::RefCountPtr<Var>* variable) {
  if (!LookupResource(context, handle.flat<ResourceHandle>()(0), variable).ok())
    return MemoryIsGone();
  tf_shared_lock lock(*(*variable)->mu());
  // Another address is that of memory of another session's table, or made since.
  return (*variable)->tensor()->data() == column.address() ? OkStatus() : MemoryIsGone();
}

class FindRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList numbers, handles, keys;
    const Tensor* insert = nullptr;
    OP_REQUIRES_OK(context, context->input_list("numbers", &numbers));
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("keys", &keys));
    OP_REQUIRES_OK(context, context->input("insert", &insert));
    const int tables = numbers.size();
    std::vector<std::shared_ptr<RowStore>> stores(tables);
    std::vector<core::RefCountPtr<Var>> variables(tables);
    std::vector<int64_t*> rows(tables);
    int64_t all_keys = 0;
    for (int t = 0; t < tables; ++t) {
      stores[t] = FindStore(numbers[t].scalar<int64_t>()());
      OP_REQUIRES(context, stores[t] != nullptr, MemoryIsGone());
      OP_REQUIRES_OK(context, Keep(context, handles[t], *stores[t]->values(), &variables[t]));
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(t, keys[t].shape(), &output));
      rows[t] = output->flat<int64_t>().data();
      all_keys += keys[t].NumElements();
    }
    const bool inserts = insert->scalar<bool>()();
    // All tables get their rows, also if one fails.
    std::vector<Status> outcomes(tables);
    Parallel(context, tables, all_keys * kCost, [&](int64_t t) {
      outcomes[t] =
          stores[t]->Find(keys[t].flat<int64_t>().data(), keys[t].NumElements(), inserts, rows[t]);
    });
    for (const Status& outcome : outcomes) OP_REQUIRES_OK(context, outcome);
  }
};

class AdmitRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList numbers, handles, keys, counts;
    OpOutputList rows, added;
    const Tensor *training = nullptr, *step = nullptr;
    OP_REQUIRES_OK(context, context->input_list("numbers", &numbers));
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("keys", &keys));
    OP_REQUIRES_OK(context, context->input_list("counts", &counts));
    OP_REQUIRES_OK(context, context->input("training", &training));
    OP_REQUIRES_OK(context, context->input("step", &step));
    OP_REQUIRES_OK(context, context->output_list("rows", &rows));
    OP_REQUIRES_OK(context, context->output_list("added", &added));
    const int tables = numbers.size();
    std::vector<std::shared_ptr<RowStore>> stores(tables);
    std::vector<core::RefCountPtr<Var>> variables(tables);
    std::vector<std::pair<int64_t*, int64_t*>> outputs(tables);
    int64_t all_keys = 0;
    for (int t = 0; t < tables; ++t) {
      stores[t] = FindStore(numbers[t].scalar<int64_t>()());
      OP_REQUIRES(context, stores[t] != nullptr && stores[t]->admits(), MemoryIsGone());
      OP_REQUIRES_OK(context, Keep(context, handles[t], *stores[t]->values(), &variables[t]));
      OP_REQUIRES(
          context, counts[t].shape() == keys[t].shape(),
          errors::InvalidArgument("table ", t, " has keys of shape ", keys[t].shape().DebugString(),
                                  ", but counts of shape ", counts[t].shape().DebugString()));
      Tensor *rows_of_table = nullptr, *added_of_table = nullptr;
      OP_REQUIRES_OK(context, rows.allocate(t, keys[t].shape(), &rows_of_table));
      OP_REQUIRES_OK(context, added.allocate(t, keys[t].shape(), &added_of_table));
      outputs[t] = {rows_of_table->flat<int64_t>().data(), added_of_table->flat<int64_t>().data()};
      all_keys += keys[t].NumElements();
    }
    // All tables get their rows, also if one fails.
    std::vector<Status> outcomes(tables);
    Parallel(context, tables, all_keys * kCost, [&](int64_t t) {
      outcomes[t] =
          stores[t]->Admit(keys[t].flat<int64_t>().data(), counts[t].flat<int64_t>().data(),
                           keys[t].NumElements(), training->scalar<bool>()(), context->step_id(),
                           step->scalar<int64_t>()(), outputs[t].first, outputs[t].second);
    });
    for (const Status& outcome : outcomes) OP_REQUIRES_OK(context, outcome);
  }
};

class CountRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const auto store = FindStore(context->input(0).scalar<int64_t>()());
    OP_REQUIRES(context, store != nullptr, MemoryIsGone());
    Tensor* count = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &count));
    count->scalar<int64_t>()() = store->count();
  }
};

class SettleSlotsOp : public OpKernel {
 public:
  explicit SettleSlotsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("refusal", &refusal_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor *training = nullptr, *number = nullptr;
    OpInputList slots, handles;
    OP_REQUIRES_OK(context, context->input("training", &training));
    OP_REQUIRES_OK(context, context->input("number", &number));
    OP_REQUIRES_OK(context, context->input_list("slots", &slots));
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES(context, training->scalar<bool>()(), errors::InvalidArgument(refusal_));
    const auto store = FindStore(number->scalar<int64_t>()());
    OP_REQUIRES(context, store != nullptr, MemoryIsGone());
    const int64_t rows = store->count_in_memory();
    std::vector<std::shared_ptr<RowColumn>> columns(slots.size());
    for (int s = 0; s < slots.size(); ++s) {
      columns[s] = FindColumn(slots[s].scalar<int64_t>()());
      OP_REQUIRES(context, columns[s] != nullptr, MemoryIsGone());
      core::RefCountPtr<Var> variable;
      OP_REQUIRES_OK(context, Keep(context, handles[s], *columns[s], &variable));
      columns[s]->InitializeRows(rows);
    }
    store->NoteSlots(columns);
    Tensor* count = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &count));
    count->scalar<int64_t>()() = rows;
  }

 private:
  string refusal_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveFindRows").Device(DEVICE_CPU), FindRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveAdmitRows").Device(DEVICE_CPU), AdmitRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveCountRows").Device(DEVICE_CPU), CountRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSettleSlots").Device(DEVICE_CPU), SettleSlotsOp);

}  // namespace find_rows_op
}  // namespace collective
