// CollectiveSparsePoolUpdate on a GPU: sums the gradients of pooled lookups by row (pooled_sums.h),
// and updates rows and slots by the sums, which are never written: one kernel of update.cu for all
// tables, in addition to those for rows of which much occurs. Where one rank has all rows, and each
// row that came back is another one: of static tables. The host waits for nothing, unless somebody
// listens to which rows change.

#include <algorithm>
#include <vector>

#include "pooled_sums.h"
#include "table_updates.h"

namespace collective {
namespace gpu {
namespace pool_update_op {

using namespace tensorflow;

class PoolUpdateOp : public OpKernel {
 public:
  explicit PoolUpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    int tables = 0;
    OP_REQUIRES_OK(context, context->GetAttr("T", &tables));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
    OP_REQUIRES_OK(context, ReadMembersOfGradients(context, members_.size(), &of_));
    OP_REQUIRES_OK(context, rule_.Read(context, tables, kRules));
    for (const Lookup& member : members_) {
      OP_REQUIRES(context, member.max_norm == 0,
                  errors::InvalidArgument("a member clips rows to the norm ", member.max_norm,
                                          ": the gradients of its rows are no sums of gradients"));
    }
    // A row that came back only for a member without a gradient has a gradient of 0.
    OP_REQUIRES(context, of_.size() == members_.size(),
                errors::InvalidArgument("there are ", of_.size(), " gradients of ", members_.size(),
                                        " members: all must have one"));
  }

  // Nothing is launched that changes a table before all are checked.
  void Compute(OpKernelContext* context) override {
    std::vector<float> numbers;
    std::vector<TableUpdate> updates;
    OpInputList gradients;
    Pooling pooling;
    UpdatedTables tables(rule_->slots, rule_->row_wise);
    UpdatePlan plan(rule_->all_rows);
    Stream stream(context);  // Where its end waits, tables are locked still.
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, rule_.Start(context, &numbers, &updates));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, pooling.Open(context, members_, of_, false));
    PooledSums sums(pooling, std::vector<int64_t>(of_.size(), 0));
    OP_REQUIRES_OK(context, sums.Take(gradients));
    OP_REQUIRES_OK(context, Describe(context, pooling, &updates));
    OP_REQUIRES_OK(context, Announce(context, &stream, *rule_, updates));
    OP_REQUIRES_OK(context, Plan(context, &stream, *rule_, updates, &tables, &plan));
    if (plan.updated().tiles() == 0 && plan.decayed().tiles() == 0) return;
    OP_REQUIRES_OK(context, Launch(&stream, numbers.data(), &plan, &sums));
  }

 private:
  // Says which rows are updated: those that came back, section by section.
  static Status Describe(OpKernelContext* context, const Pooling& pooling,
                         std::vector<TableUpdate>* updates) {
    OpInputList rows;
    TF_RETURN_IF_ERROR(context->input_list("local_rows", &rows));
    if (pooling.run_counts.size() != updates->size()) {
      return errors::InvalidArgument("rows of ", pooling.run_counts.size(),
                                     " sections came back, but there are ", updates->size(),
                                     " tables: one rank has all rows, a section a table");
    }
    for (size_t t = 0; t < updates->size(); ++t) {
      TableUpdate& update = (*updates)[t];
      if (rows[t].NumElements() != pooling.run_counts[t]) {
        return errors::InvalidArgument("of table ", t, " ", pooling.run_counts[t],
                                       " rows came back, but ", rows[t].NumElements(),
                                       " row numbers are given");
      }
      update.rows = rows[t].flat<int64_t>().data();
      update.n = rows[t].NumElements();
      update.gradients_are = TensorShape({update.n, pooling.run_dims[t]});
    }
    return OkStatus();
  }

  Status Launch(Stream* stream, const float* numbers, UpdatePlan* plan, PooledSums* pooled) const {
    const bool has_rows = plan->updated().tiles() > 0;
    Packed packed;
    if (has_rows) TF_RETURN_IF_ERROR(pooled->Pack(stream, plan->updated(), &packed));
    plan->Pack(rule_->options(numbers), &packed);
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
    if (has_rows) {
      const float *of_rule = plan->options(there), *bounds = plan->bounds(there);
      TF_RETURN_IF_ERROR(pooled->Start(stream, plan->rows(there), there));
      TF_RETURN_IF_ERROR(pooled->sums.Launch(stream, rule_->kernel, scale_, of_rule, bounds));
      TF_RETURN_IF_ERROR(
          HalfDone(pooled->sums.LaunchLong(stream, rule_->long_kernel, scale_, of_rule, bounds),
                   "Rows that few ids have are updated already"));
    }
    return Decay(stream, *rule_, *plan, there);
  }

  std::vector<Lookup> members_;
  std::vector<int> of_;  // [G], which member each gradient is of
  RuleOfTables<Rule> rule_;
  float scale_ = 1;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveSparsePoolUpdate")
                            .Device(DEVICE_GPU)
                            .HostMemory("tables")
                            .HostMemory("slots")
                            .HostMemory("numbers")
                            .HostMemory("used")
                            .HostMemory("counts"),
                        PoolUpdateOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSparsePoolUpdate").Device(DEVICE_CPU).Label("emulated"),
                        PoolUpdateOp);

}  // namespace pool_update_op
}  // namespace gpu
}  // namespace collective
