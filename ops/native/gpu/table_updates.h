// Updates rows of tables on a GPU: what all operations that do so have in common. They are checked
// and announced before a kernel changes any.

#ifndef COLLECTIVE_NATIVE_GPU_TABLE_UPDATES_H_
#define COLLECTIVE_NATIVE_GPU_TABLE_UPDATES_H_

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "../updated_tables.h"
#include "rules.h"
#include "stream.h"
#include "update_plan.h"

namespace collective {
namespace gpu {

// What an operation is given of one table.
struct TableUpdate {
  UpdatedTables::Handles handles;  // Of the table, and its slots.
  const int64_t* rows = nullptr;   // [n], on the device
  int64_t n = 0;
  const float* gradients = nullptr;       // [n, D]; null: sums that nobody keeps
  tensorflow::TensorShape gradients_are;  // Their shape.
  int64_t used = -1;
  float bound = std::numeric_limits<float>::infinity();  // Of weights.
};

// The rule of an operation that updates many tables, and what it is given for it.
class RuleOfTables {
 public:
  tensorflow::Status Read(tensorflow::OpKernelConstruction* context, int tables) {
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
    rule_ = FindRule(name.c_str());
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
      update.handles.push_back(&tables[t].flat<tensorflow::ResourceHandle>()(0));
      for (int s = 0; s < rule_->slots; ++s) {
        update.handles.push_back(
            &slots[t * rule_->slots + s].flat<tensorflow::ResourceHandle>()(0));
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

// Tells who listens which rows change.
inline tensorflow::Status Announce(tensorflow::OpKernelContext* context, Stream* stream,
                                   const Rule& rule, const std::vector<TableUpdate>& updates) {
  if (!AnybodyListens()) return tensorflow::OkStatus();
  if (rule.all_rows) {
    for (const TableUpdate& update : updates) AnnounceUpdate(context, update.handles, RowWrite());
    return tensorflow::OkStatus();
  }
  std::vector<int64_t*> rows;
  for (const TableUpdate& update : updates) {
    void* memory = nullptr;
    const size_t bytes = update.n * sizeof(int64_t);
    TF_RETURN_IF_ERROR(stream->HostScratch(bytes, &memory));
    TF_RETURN_IF_ERROR(stream->CopyToHost(memory, update.rows, bytes));
    rows.push_back(static_cast<int64_t*>(memory));
  }
  TF_RETURN_IF_ERROR(stream->WaitForCopies());
  for (size_t t = 0; t < updates.size(); ++t)
    AnnounceUpdate(context, updates[t].handles, {RowWrite::kValues, rows[t], updates[t].n});
  return tensorflow::OkStatus();
}

// Locks and checks the tables, and plans their update.
inline tensorflow::Status Plan(tensorflow::OpKernelContext* context, Stream* stream,
                               const Rule& rule, const std::vector<TableUpdate>& updates,
                               UpdatedTables* tables, UpdatePlan* plan) {
  using tensorflow::errors::InvalidArgument;
  std::vector<UpdatedTables::Handles> handles;
  handles.reserve(updates.size());
  for (const TableUpdate& update : updates) handles.push_back(update.handles);
  TF_RETURN_IF_ERROR(tables->Lock(context, handles));
  std::vector<RowsToUpdate> rows(updates.size());
  int64_t bytes = 0;
  for (size_t t = 0; t < updates.size(); ++t) {
    const TableUpdate& update = updates[t];
    const int64_t n = update.n, dim = tables->dim(t);
    if (update.gradients_are != tensorflow::TensorShape({n, dim})) {
      return InvalidArgument("the gradient of ", n, " rows of dimension ", dim, " is ",
                             update.gradients_are.DebugString());
    }
    RowRange range;
    TF_RETURN_IF_ERROR(tables->Range(t, update.used, &range));
    rows[t] = {update.gradients, update.rows, n, dim, tables->Values(t, 0)};
    for (int s = 0; s < rule.slots; ++s) rows[t].slots[s] = tables->Values(t, 1 + s);
    rows[t].first = range.first;
    rows[t].last = range.last;
    rows[t].bound = update.bound;
    bytes += range.last;
  }
  void* touched = nullptr;
  if (rule.all_rows) TF_RETURN_IF_ERROR(stream->ZeroScratch(bytes, &touched));
  bytes = 0;
  for (RowsToUpdate& of_table : rows) {
    if (rule.all_rows) of_table.touched = static_cast<unsigned char*>(touched) + bytes;
    bytes += of_table.last;
    plan->Add(of_table);
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (plan->updated().rows() <= kMost && plan->decayed().tiles() <= kMost)
    return tensorflow::OkStatus();
  return InvalidArgument(plan->updated().rows(), " rows with a gradient, and ",
                         plan->decayed().rows(),
                         " others, are more than one update can have: use smaller batches, or more "
                         "ranks");
}

// Returns a status that says, if it is an error, what is done already.
inline tensorflow::Status HalfDone(const tensorflow::Status& status, const char* done) {
  if (status.ok()) return status;
  return tensorflow::Status(
      status.code(), tensorflow::strings::StrCat(status.message(), ". ", done,
                                                 ", the others are not: go on from a checkpoint"));
}

// Updates the rows without a gradient, where a rule does so; the others are updated already.
inline tensorflow::Status Decay(Stream* stream, const Rule& rule, const UpdatePlan& plan,
                                const int64_t* uploaded) {
  if (!rule.all_rows) return tensorflow::OkStatus();
  const tensorflow::Status decayed =
      stream->Launch(Kernel::kAdamDecay, plan.decayed().tiles(), plan.decayed(uploaded),
                     plan.decayed().count(), plan.options(uploaded));
  if (plan.updated().tiles() == 0) return decayed;
  return HalfDone(decayed, "Rows with a gradient are updated already");
}

// Updates each row by a gradient of its own, times `scale`, in their order: there are no offsets,
// no counters, no long segments.
inline tensorflow::Status UpdateEach(Stream* stream, const Rule& rule, const float* numbers,
                                     float scale, UpdatePlan* plan) {
  Packed packed;
  const size_t targets_at = packed.Add(plan->updated().tiled());
  const std::vector<RunWords> runs = plan->gradients().entries();
  const size_t runs_at = packed.Add(runs);
  plan->Pack(rule.options(numbers), &packed);
  const int64_t* there = nullptr;
  TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
  const int* offsets = nullptr;
  const uint32_t *counters = nullptr, *order = nullptr;
  const void *longs = nullptr, *terms = nullptr;
  const float *along = nullptr, *partial_along = nullptr;
  TF_RETURN_IF_ERROR(stream->Launch(rule.kernel, plan->updated().tiles(), there + targets_at,
                                    plan->updated().count(), offsets, plan->rows(there), counters,
                                    longs, along, partial_along, int64_t{0}, order, terms,
                                    there + runs_at, static_cast<int32_t>(runs.size()), scale,
                                    plan->options(there), plan->bounds(there)));
  return Decay(stream, rule, *plan, there);
}

// Refuses to update tables in the host's memory: TensorFlow runs an operation where its variable
// is, whatever device was requested.
class ElsewhereOp : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    context->SetStatus(tensorflow::errors::FailedPrecondition(
        "the variable ", tensorflow::HandleFromInput(context, 0).name(), " is on a ",
        context->device()->attributes().device_type(),
        ", but is updated on a GPU: make its table outside of tf.device, or set "
        "COLLECTIVE_KERNELS=cpu"));
  }
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_TABLE_UPDATES_H_
