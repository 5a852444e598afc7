// CollectiveSparseReduceUpdate on a GPU: sums the gradients of bags by row of each table
// (gradient_sums.h), and updates rows and slots by the sums, which are never written: one kernel of
// update.cu for all tables, in addition to those for rows of which much occurs. Where no other rank
// has asked for the rows of any table, as on a single one, each has one gradient, and the host
// waits for nothing.

#include <vector>

#include "gradient_sums.h"
#include "table_updates.h"

namespace collective {
namespace gpu {
namespace reduce_update_op {

using namespace tensorflow;

class ReduceUpdateOp : public OpKernel {
 public:
  explicit ReduceUpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    int tables = 0;
    OP_REQUIRES_OK(context, context->GetAttr("on_device", &on_device_));
    OP_REQUIRES_OK(context, context->GetAttr("U", &tables));
    OP_REQUIRES_OK(context, sums_.Read(context));
    OP_REQUIRES_OK(context, rule_.Read(context, tables, kRules));
    OP_REQUIRES(context, tables == sums_.size(),
                errors::InvalidArgument(sums_.size(), " tables are updated, but there are ", tables,
                                        " handles"));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES(context, on_device_,
                IsElsewhere(context, "in host memory: make its table outside of tf.device"));
    std::vector<float> numbers;
    std::vector<TableUpdate> updates;
    OP_REQUIRES_OK(context, rule_.Start(context, &numbers, &updates));
    UpdatedTables tables(rule_->slots, rule_->row_wise);
    UpdatePlan plan(rule_->all_rows);
    GradientSums::Run run;
    Stream stream(context);  // Where its end waits, tables are locked still.
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, sums_.Open(context, &run));
    const bool distinct = sums_.AreDistinct(run);
    if (!distinct) OP_REQUIRES_OK(context, sums_.Number(&stream, &run));
    Describe(run, distinct, &updates);
    OP_REQUIRES_OK(context, Announce(context, &stream, *rule_, updates));
    OP_REQUIRES_OK(context, Plan(context, &stream, *rule_, updates, &tables, &plan));
    if (plan.updated().tiles() == 0 && plan.decayed().tiles() == 0) return;
    if (distinct) {
      OP_REQUIRES_OK(context, UpdateEach(&stream, *rule_, numbers.data(), sums_.scale(), &plan));
    } else {
      OP_REQUIRES_OK(context, Launch(&stream, numbers.data(), &run, &plan));
    }
  }

 private:
  // Says which rows are updated: those that came, if they are `distinct`, or what is distinct of
  // them, by sums that nobody keeps.
  void Describe(const GradientSums::Run& run, bool distinct,
                std::vector<TableUpdate>* updates) const {
    int64_t first = 0;
    for (int64_t t = 0; t < sums_.size(); ++t) {
      TableUpdate& update = (*updates)[t];
      update.n = distinct ? run.came[t] : run.count[t];
      update.rows = distinct ? run.rows[t].flat<int64_t>().data() : run.distinct + first;
      if (distinct) update.gradients = run.alone[t];
      update.gradients_are = TensorShape({update.n, sums_.dim(t)});
      first += update.n;
    }
  }

  Status Launch(Stream* stream, const float* numbers, GradientSums::Run* run,
                UpdatePlan* plan) const {
    Packed packed;
    std::vector<float> options = rule_->options(numbers);
    if (run->keys > 0) TF_RETURN_IF_ERROR(sums_.Pack(stream, plan->updated(), run, &packed));
    plan->Pack(options, &packed);
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
    if (run->keys > 0) {
      const float *of_rule = plan->options(there), *bounds = plan->bounds(there);
      TF_RETURN_IF_ERROR(sums_.Start(stream, plan->rows(there), there, run));
      TF_RETURN_IF_ERROR(run->sums.Launch(stream, rule_->kernel, sums_.scale(), of_rule, bounds));
      TF_RETURN_IF_ERROR(
          HalfDone(run->sums.LaunchLong(stream, rule_->long_kernel, sums_.scale(), of_rule, bounds),
                   "Rows that few keys have are updated already"));
    }
    return Decay(stream, *rule_, *plan, there);
  }

  GradientSums sums_;
  RuleOfTables<Rule> rule_;
  bool on_device_ = false;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveSparseReduceUpdate")
                            .Device(DEVICE_GPU)
                            .HostMemory("tables")
                            .HostMemory("slots")
                            .HostMemory("numbers")
                            .HostMemory("used")
                            .HostMemory("splits")
                            .HostMemory("headers"),
                        ReduceUpdateOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSparseReduceUpdate").Device(DEVICE_CPU).Label("emulated"),
                        ReduceUpdateOp);

}  // namespace reduce_update_op
}  // namespace gpu
}  // namespace collective
