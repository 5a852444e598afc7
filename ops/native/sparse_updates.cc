// CollectiveSparseUpdate: updates rows of shards and of their slots in place, each by a gradient of
// its own; by a rule that updates all rows, those without a gradient by one of zeros.
//
// CollectiveSparseReduceUpdate: sums the gradients of bags by row of each table, as
// CollectiveReduceRows does, and updates many tables by the sums, which never leave the cache:
//
//     gradients, as the ranks sent them ──► sums of one table ──► its rows and slots
//
// A row is updated by one thread, and by its own gradient alone: the results don't depend on
// threads, and both ways give the same.

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "clones.h"
#include "gradient_sums.h"
#include "parallel.h"
#include "scans.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "update_rules.h"
#include "updated_tables.h"

namespace collective {
namespace sparse_updates_op {

using namespace tensorflow;

constexpr int64_t kAhead = 4;     // Rows ahead whose memory is prefetched.
constexpr int64_t kPieces = 64;   // Into how many the rows are shared out.
constexpr int64_t kBlock = 1024;  // Rows without a gradient that are updated at once.

// Rows that are updated: row at[i] of `values` and of each slot by the gradient at i * stride.
template <class Rule>
struct Update {
  const float* gradients;
  int64_t stride;
  const int64_t* at;
  int64_t n, dim;
  float* values;
  std::array<float*, Rule::kSlots> slots;
};

INLINE void Announce(const float* row, int64_t dim) {
  for (int64_t c = 0; c < dim; c += 16) __builtin_prefetch(row + c, 1);
}

template <class Rule, size_t... kSlot>
INLINE void UpdateBody(Rule rule, Update<Rule> update, std::index_sequence<kSlot...>) {
  const int64_t dim = update.dim, slot_dim = Rule::kRowWise ? 1 : dim;
  for (int64_t i = 0; i < update.n; ++i) {
    const int64_t ahead = update.at[std::min(i + kAhead, update.n - 1)], row = update.at[i];
    Announce(update.values + ahead * dim, dim);
    (Announce(update.slots[kSlot] + ahead * slot_dim, slot_dim), ...);
    rule(dim, update.gradients + i * update.stride, update.values + row * dim,
         (update.slots[kSlot] + row * slot_dim)...);
  }
}

template <class Rule>
void UpdateRows(Rule rule, const Update<Rule>& update);

#define UPDATE_ROWS(Rule)                                               \
  template <>                                                           \
  CLONES void UpdateRows<Rule>(Rule rule, const Update<Rule>& update) { \
    UpdateBody(rule, update, std::make_index_sequence<Rule::kSlots>()); \
  }
FOR_EACH_UPDATE_RULE(UPDATE_ROWS)
#undef UPDATE_ROWS

// Calls work(begin, end) for parts of [first, last), on several threads.
template <class Work>
void InPieces(OpKernelContext* context, int64_t first, int64_t last, int64_t dim,
              const Work& work) {
  const int64_t count = last - first, pieces = std::min(count, kPieces);
  Parallel(context, pieces, count * dim,
           [&](int64_t p) { work(first + count * p / pieces, first + count * (p + 1) / pieces); });
}

// Updates rows, on several threads.
template <class Rule>
void UpdateInPieces(OpKernelContext* context, const Rule& rule, const Update<Rule>& update) {
  InPieces(context, 0, update.n, update.dim, [&](int64_t begin, int64_t end) {
    Update<Rule> part = update;
    part.gradients += begin * update.stride;
    part.at += begin;
    part.n = end - begin;
    UpdateRows(rule, part);
  });
}

// Updates the rows in `range` that aren't in `update`, by a gradient of zeros.
template <class Rule>
Status UpdateOthers(OpKernelContext* context, const Rule& rule, const Update<Rule>& update,
                    RowRange range) {
  Tensor marks;
  TF_RETURN_IF_ERROR(context->allocate_temp(DT_BOOL, TensorShape({range.last}), &marks));
  bool* has_gradient = marks.flat<bool>().data();
  std::fill_n(has_gradient, range.last, false);
  for (int64_t i = 0; i < update.n; ++i) has_gradient[update.at[i]] = true;
  const std::vector<float> zeros(update.dim);
  InPieces(context, range.first, range.last, update.dim, [&](int64_t begin, int64_t end) {
    int64_t others[kBlock];
    Update<Rule> part = update;
    part.gradients = zeros.data();
    part.stride = 0;
    part.at = others;
    for (int64_t row = begin; row < end;) {
      part.n = 0;
      for (; row < end && part.n < kBlock; ++row) {
        others[part.n] = row;
        part.n += !has_gradient[row];
      }
      UpdateRows(rule, part);
    }
  });
  return OkStatus();
}

// Makes the update of table t, and finds the rows that there are.
template <class Rule>
Status UpdateOf(const UpdatedTables& tables, int64_t t, const TableUpdate& given,
                Update<Rule>* update, RowRange* range) {
  TF_RETURN_IF_ERROR(tables.Range(t, given.used, range));
  if (!AreWithin(given.rows, given.n, range->last)) {
    return errors::InvalidArgument("a row to be updated is not in [0, ", range->last, ")");
  }
  const int64_t dim = tables.dim(t);
  *update = {given.gradients, dim, given.rows, given.n, dim, tables.Values(t, 0)};
  for (int i = 0; i < Rule::kSlots; ++i) update->slots[i] = tables.Values(t, 1 + i);
  return OkStatus();
}

// A run of an operation that sums gradients.
struct SumRun {
  GradientSums& sums;
  const GradientSums::Run& run;
  ObjectPool<Buffer<float>>& buffers;
};

// The updates of tables by one rule.
struct HostRule : RuleInputs {
  // Updates tables; nothing is updated before all is checked.
  //
  // Args:
  //   summed: sums the gradients; null if `given` has them.
  Status (*update)(OpKernelContext* context, const std::vector<TableUpdate>& given,
                   const float* numbers, const SumRun* summed);
};

// Updates rows by gradients of their own.
template <class Rule>
Status UpdateByGradients(OpKernelContext* context, const Rule& rule,
                         const std::vector<Update<Rule>>& updates,
                         const std::vector<RowRange>& ranges) {
  for (size_t t = 0; t < updates.size(); ++t) {
    // Both write rows of their own: it doesn't matter which is first.
    if (Rule::kAllRows) TF_RETURN_IF_ERROR(UpdateOthers(context, rule, updates[t], ranges[t]));
    UpdateInPieces(context, rule, updates[t]);
  }
  return OkStatus();
}

// Sums and updates table by table, in a buffer that stays in the cache. Where one table is too much
// for one thread, keeps the sums of all, and shares out their rows.
template <class Rule>
Status UpdateBySums(OpKernelContext* context, const Rule& rule, const SumRun& summed,
                    std::vector<Update<Rule>>* updates, const std::vector<RowRange>& ranges) {
  GradientSums& sums = summed.sums;
  const GradientSums::Run& run = summed.run;
  const int64_t count = sums.size();
  int64_t total = 0, largest = 0;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t elements = run.rows[t].count * sums.dim(t);
    total += elements;
    largest = std::max(largest, elements);
  }
  const int threads = context->device()->tensorflow_cpu_worker_threads()->num_threads;
  const bool by_table = threads == 1 || largest <= total / threads;
  auto kept = summed.buffers.Take();
  float* of_table = by_table ? nullptr : kept->At(total);
  for (int64_t t = 0; t < count && !by_table; ++t) {
    (*updates)[t].gradients = of_table;
    of_table += run.rows[t].count * sums.dim(t);
  }
  Parallel(context, count, 2 * run.received.elements, [&](int64_t t) {
    auto buffer = summed.buffers.Take();
    Update<Rule> update = (*updates)[t];
    float* of_rows = by_table ? buffer->At(run.rows[t].count * sums.dim(t))
                              : const_cast<float*>(update.gradients);
    sums.Sum(run, t, of_rows);
    update.gradients = of_rows;
    if (by_table) UpdateRows(rule, update);
  });
  for (int64_t t = 0; t < count; ++t) {
    if (!by_table) UpdateInPieces(context, rule, (*updates)[t]);
    if (Rule::kAllRows) TF_RETURN_IF_ERROR(UpdateOthers(context, rule, (*updates)[t], ranges[t]));
  }
  return OkStatus();
}

template <class Rule>
Status UpdateTables(OpKernelContext* context, const std::vector<TableUpdate>& given,
                    const float* numbers, const SumRun* summed) {
  std::vector<UpdatedTables::Handles> variables;
  variables.reserve(given.size());
  for (const TableUpdate& update : given) {
    variables.push_back(update.handles);
    if (!AnybodyListens()) continue;
    AnnounceUpdate(
        context, update.handles,
        Rule::kAllRows ? RowWrite() : RowWrite{RowWrite::kValues, update.rows, update.n});
  }
  UpdatedTables tables(Rule::kSlots, Rule::kRowWise);
  TF_RETURN_IF_ERROR(tables.Lock(context, variables));
  std::vector<Update<Rule>> updates(given.size());
  std::vector<RowRange> ranges(given.size());
  for (size_t t = 0; t < given.size(); ++t) {
    const int64_t n = given[t].n, dim = tables.dim(t);
    if (given[t].gradients_are != TensorShape({n, dim})) {
      return errors::InvalidArgument("the gradient of ", n, " rows of dimension ", dim, " is ",
                                     given[t].gradients_are.DebugString());
    }
    TF_RETURN_IF_ERROR(UpdateOf(tables, t, given[t], &updates[t], &ranges[t]));
  }
  const Rule rule(numbers);
  return summed == nullptr ? UpdateByGradients(context, rule, updates, ranges)
                           : UpdateBySums(context, rule, *summed, &updates, ranges);
}

#define HOST_RULE(Rule) \
  {{#Rule, Rule::kSlots, Rule::kNumbers, Rule::kRowWise, Rule::kAllRows}, UpdateTables<Rule>},
const HostRule kRules[] = {FOR_EACH_UPDATE_RULE(HOST_RULE)};
#undef HOST_RULE

// Refuses what only kernels of a GPU do.
Status CheckForHost(OpKernelConstruction* context, const HostRule& rule, int tables) {
  int used = 0;
  std::vector<float> bounds;
  TF_RETURN_IF_ERROR(context->GetAttr("R", &used));
  TF_RETURN_IF_ERROR(context->GetAttr("bounds", &bounds));
  if (!bounds.empty()) return errors::InvalidArgument("updates on a CPU have no bounds");
  if (used == (rule.all_rows ? tables : 0)) return OkStatus();
  return errors::InvalidArgument(rule.name, " of ", tables, " tables has ", used,
                                 " numbers of rows, not ", rule.all_rows ? tables : 0);
}

class SparseUpdateOp : public OpKernel {
 public:
  explicit SparseUpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    int tables = 0;
    OP_REQUIRES_OK(context, context->GetAttr("on_device", &on_device_));
    if (on_device_) return;  // It is refused when it runs, by the name of a variable.
    OP_REQUIRES_OK(context, context->GetAttr("T", &tables));
    OP_REQUIRES_OK(context, rule_.Read(context, tables, kRules));
    OP_REQUIRES_OK(context, CheckForHost(context, *rule_, tables));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES(context, !on_device_, IsElsewhere(context, kOnGpu));
    OpInputList gradients, rows;
    std::vector<float> numbers;
    std::vector<TableUpdate> updates;
    OP_REQUIRES_OK(context, rule_.Start(context, &numbers, &updates));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    for (size_t t = 0; t < updates.size(); ++t) updates[t].Take(gradients[t], rows[t]);
    OP_REQUIRES_OK(context, rule_->update(context, updates, numbers.data(), nullptr));
  }

 private:
  RuleOfTables<HostRule> rule_;
  bool on_device_ = false;
};

class ReduceUpdateOp : public OpKernel {
 public:
  explicit ReduceUpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    int tables = 0;
    OP_REQUIRES_OK(context, context->GetAttr("on_device", &on_device_));
    if (on_device_) return;  // It is refused when it runs, by the name of a variable.
    OP_REQUIRES_OK(context, context->GetAttr("U", &tables));
    OP_REQUIRES_OK(context, sums_.Read(context));
    OP_REQUIRES_OK(context, rule_.Read(context, tables, kRules));
    OP_REQUIRES_OK(context, CheckForHost(context, *rule_, tables));
    OP_REQUIRES(context, tables == sums_.size(),
                errors::InvalidArgument(sums_.size(), " tables are updated, but there are ", tables,
                                        " handles"));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES(context, !on_device_, IsElsewhere(context, kOnGpu));
    std::vector<float> numbers;
    std::vector<TableUpdate> updates;
    OP_REQUIRES_OK(context, rule_.Start(context, &numbers, &updates));
    GradientSums::Run run;
    OP_REQUIRES_OK(context, sums_.Number(context, &run));
    for (size_t t = 0; t < updates.size(); ++t) {
      updates[t].rows = run.rows[t].distinct;
      updates[t].n = run.rows[t].kept;
      updates[t].gradients_are = TensorShape({updates[t].n, sums_.dim(t)});
    }
    const SumRun summed{sums_, run, buffers_};
    OP_REQUIRES_OK(context, rule_->update(context, updates, numbers.data(), &summed));
  }

 private:
  GradientSums sums_;
  RuleOfTables<HostRule> rule_;
  bool on_device_ = false;
  ObjectPool<Buffer<float>> buffers_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveSparseUpdate").Device(DEVICE_CPU), SparseUpdateOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSparseReduceUpdate").Device(DEVICE_CPU), ReduceUpdateOp);

}  // namespace sparse_updates_op
}  // namespace collective
