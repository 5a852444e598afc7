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
  const std::vector<RunWords> runs = plan->gradients().entries();
  const size_t targets_at = packed.Add(plan->updated().Of(static_cast<int64_t>(runs.size())));
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

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_TABLE_UPDATES_H_
