// CollectiveSparseUpdate; CollectiveSparseAdagrad, … on a GPU: update rows of shards and of their
// slots in place, each row by a gradient of its own. One kernel of update.cu for all tables, and
// one more for Adam's rows without a gradient. The host waits for nothing, unless somebody listens
// to which rows change.
//
// Which rows these are only the device knows: one that isn't in the table is left out.

#include <vector>

#include "stream.h"
#include "table_updates.h"

namespace collective {
namespace gpu {
namespace update_op {

using namespace tensorflow;

// Updates tables. Nothing is launched that changes them before all is checked.
void Update(OpKernelContext* context, const Rule& rule, const std::vector<TableUpdate>& updates,
            const float* numbers) {
  UpdatedTables tables(rule.slots, rule.row_wise);
  UpdatePlan plan(rule.all_rows);
  Stream stream(context);  // Where its end waits, tables are locked still.
  OP_REQUIRES_OK(context, stream.Open());
  OP_REQUIRES_OK(context, Announce(context, &stream, rule, updates));
  OP_REQUIRES_OK(context, Plan(context, &stream, rule, updates, &tables, &plan));
  if (plan.updated().tiles() == 0 && plan.decayed().tiles() == 0) return;
  OP_REQUIRES_OK(context, UpdateEach(&stream, rule, numbers, 1.0f, &plan));
}

void TakeGradient(const Tensor& gradients, const Tensor& rows, TableUpdate* update) {
  update->gradients = gradients.flat<float>().data();
  update->gradients_are = gradients.shape();
  update->rows = rows.flat<int64_t>().data();
  update->n = rows.NumElements();
}

// Updates many tables.
class UpdateOp : public OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    int tables = 0;
    OP_REQUIRES_OK(context, context->GetAttr("T", &tables));
    OP_REQUIRES_OK(context, rule_.Read(context, tables));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList gradients, rows;
    std::vector<float> numbers;
    std::vector<TableUpdate> updates;
    OP_REQUIRES_OK(context, rule_.Start(context, &numbers, &updates));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    for (size_t t = 0; t < updates.size(); ++t) TakeGradient(gradients[t], rows[t], &updates[t]);
    Update(context, *rule_, updates, numbers.data());
  }

 private:
  RuleOfTables rule_;
};

// Updates one table: CollectiveSparse and the name of a rule.
class SparseUpdateOp : public OpKernel {
 public:
  explicit SparseUpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    rule_ = FindRule(type_string().c_str() + sizeof("CollectiveSparse") - 1);
    OP_REQUIRES(context, rule_ != nullptr, errors::Internal("no rule for ", type_string()));
  }

  void Compute(OpKernelContext* context) override {
    const int variables = 1 + rule_->slots, gradient = variables + rule_->numbers;
    std::vector<float> values(rule_->numbers);
    OP_REQUIRES_OK(
        context,
        ReadNumbers(
            rule_->numbers, [&](int i) { return context->input(variables + i); }, values.data()));
    TableUpdate update;
    for (int i = 0; i < variables; ++i) update.handles.push_back(&HandleFromInput(context, i));
    TakeGradient(context->input(gradient), context->input(gradient + 1), &update);
    if (rule_->all_rows)
      OP_REQUIRES_OK(context, ReadUsed(context->input(gradient + 2), &update.used));
    Update(context, *rule_, {update}, values.data());
  }

 private:
  const Rule* rule_ = nullptr;
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
REGISTER_KERNEL_BUILDER(Name("CollectiveSparseUpdate").Device(DEVICE_CPU), ElsewhereOp);

#define HOST(name) .HostMemory(name)
#define REGISTER(rule, on_host)                                                               \
  REGISTER_KERNEL_BUILDER(                                                                    \
      Name("CollectiveSparse" rule).Device(DEVICE_GPU) HOST("table") HOST("rate") on_host,    \
      SparseUpdateOp);                                                                        \
  REGISTER_KERNEL_BUILDER(Name("CollectiveSparse" rule).Device(DEVICE_CPU).Label("emulated"), \
                          SparseUpdateOp)
REGISTER("Adagrad", HOST("accumulator"));
REGISTER("RowWiseAdagrad", HOST("accumulator") HOST("epsilon"));
REGISTER("Momentum", HOST("accumulator") HOST("momentum"));
REGISTER("NesterovMomentum", HOST("accumulator") HOST("momentum"));
REGISTER("Ftrl", HOST("accumulator") HOST("linear") HOST("l1") HOST("l2") HOST("l2_shrinkage")
                     HOST("power"));
REGISTER("LazyAdam", HOST("m") HOST("v") HOST("beta1") HOST("beta2") HOST("epsilon"));
REGISTER("Adam", HOST("m") HOST("v") HOST("beta1") HOST("beta2") HOST("epsilon") HOST("used"));
#undef REGISTER
#undef HOST

}  // namespace update_op
}  // namespace gpu
}  // namespace collective
