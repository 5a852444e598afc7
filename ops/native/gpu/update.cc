// CollectiveSparseUpdate on a GPU: updates rows of shards and of their slots in place, each row by
// a gradient of its own. One kernel of update.cu for all tables, and one more for Adam's rows
// without a gradient. The host waits for nothing, unless somebody listens to which rows change. An
// operation that was made for host memory does the same here: its inputs mean the same.
//
// Which rows these are only the device knows: one that isn't in the table is left out.

#include <vector>

#include "stream.h"
#include "table_updates.h"

namespace collective {
namespace gpu {
namespace update_op {

using namespace tensorflow;

class UpdateOp : public OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    int tables = 0;
    OP_REQUIRES_OK(context, context->GetAttr("T", &tables));
    OP_REQUIRES_OK(context, rule_.Read(context, tables, kRules));
  }

  // Nothing is launched that changes a table before all are checked.
  void Compute(OpKernelContext* context) override {
    OpInputList gradients, rows;
    std::vector<float> numbers;
    std::vector<TableUpdate> updates;
    OP_REQUIRES_OK(context, rule_.Start(context, &numbers, &updates));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    for (size_t t = 0; t < updates.size(); ++t) updates[t].Take(gradients[t], rows[t]);
    UpdatedTables tables(rule_->slots, rule_->row_wise);
    UpdatePlan plan(rule_->all_rows);
    Stream stream(context);  // Where its end waits, tables are locked still.
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, Announce(context, &stream, *rule_, updates));
    OP_REQUIRES_OK(context, Plan(context, &stream, *rule_, updates, &tables, &plan));
    if (plan.updated().tiles() == 0 && plan.decayed().tiles() == 0) return;
    OP_REQUIRES_OK(context, UpdateEach(&stream, *rule_, numbers.data(), 1.0f, &plan));
  }

 private:
  RuleOfTables<Rule> rule_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveSparseUpdate")
                            .Device(DEVICE_GPU)
                            .HostMemory("tables")
                            .HostMemory("slots")
                            .HostMemory("numbers")
                            .HostMemory("used"),
                        UpdateOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSparseUpdate").Device(DEVICE_CPU).Label("emulated"),
                        UpdateOp);

}  // namespace update_op
}  // namespace gpu
}  // namespace collective
