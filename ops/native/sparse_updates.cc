// CollectiveSparseAdagrad, CollectiveSparseRowWiseAdagrad, CollectiveSparseMomentum,
// CollectiveSparseFtrl, CollectiveSparseLazyAdam: update rows of a shard and of its slots in place.
// CollectiveSparseAdam: updates all rows; those without a gradient have one of zeros.
// Inputs: the table, its slots, the numbers of the rule, the gradient [n, D], the rows [n], each at
// most once; of CollectiveSparseAdam the number of rows that there are, too.
//
// CollectiveSparseReduceAdagrad, …: sum the gradients of bags by row of each table, as
// CollectiveReduceRows does, and update many tables by the sums, which never leave the cache:
//
//     gradients, as the ranks sent them ──► sums of one table ──► its rows and slots
//
// A row is updated by one thread, and by its own gradient alone: the results don't depend on
// threads, and both ways give the same.

#include <algorithm>
#include <array>
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

#define UPDATE(Rule)                                                    \
  template <>                                                           \
  CLONES void UpdateRows<Rule>(Rule rule, const Update<Rule>& update) { \
    UpdateBody(rule, update, std::make_index_sequence<Rule::kSlots>()); \
  }
UPDATE(Adagrad)
UPDATE(RowWiseAdagrad)
UPDATE(Momentum<false>)
UPDATE(Momentum<true>)
UPDATE(Adam)
UPDATE(Ftrl)
#undef UPDATE

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

// Makes the update of rows of table t, each at most once, by gradients [n, D]; and finds the rows
// that there are, as `used` says.
template <class Rule>
Status UpdateOf(const UpdatedTables& tables, int64_t t, const float* gradients, const int64_t* rows,
                int64_t n, int64_t used, Update<Rule>* update, RowRange* range) {
  TF_RETURN_IF_ERROR(tables.Range(t, used, range));
  if (!AreWithin(rows, n, range->last)) {
    return errors::InvalidArgument("a row to be updated is not in [0, ", range->last, ")");
  }
  const int64_t dim = tables.dim(t);
  *update = {gradients, dim, rows, n, dim, tables.Values(t, 0)};
  for (int i = 0; i < Rule::kSlots; ++i) update->slots[i] = tables.Values(t, 1 + i);
  return OkStatus();
}

// Updates rows of one table, by a gradient for each.
template <class Rule, bool kAllRows = false>
class SparseUpdateOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &gradient = context->input(kGradient), &rows = context->input(kGradient + 1);
    const int64_t n = rows.NumElements(), *row = rows.flat<int64_t>().data();
    UpdatedTables::Handles handles;
    for (int i = 0; i < kVariables; ++i) handles.push_back(&HandleFromInput(context, i));
    if (AnybodyListens())
      AnnounceUpdate(context, handles, kAllRows ? RowWrite() : RowWrite{RowWrite::kValues, row, n});
    UpdatedTables tables(Rule::kSlots, Rule::kRowWise);
    OP_REQUIRES_OK(context, tables.Lock(context, {handles}));
    std::array<float, Rule::kNumbers> numbers{};
    OP_REQUIRES_OK(
        context,
        ReadNumbers(
            Rule::kNumbers, [&](int i) { return context->input(kVariables + i); }, numbers.data()));
    OP_REQUIRES(context, gradient.shape() == TensorShape({n, tables.dim(0)}),
                errors::InvalidArgument("the gradient of ", n, " rows of dimension ", tables.dim(0),
                                        " is ", gradient.shape().DebugString()));
    int64_t used = -1;
    if (kAllRows) OP_REQUIRES_OK(context, ReadUsed(context->input(kGradient + 2), &used));
    Update<Rule> update;
    RowRange range;
    OP_REQUIRES_OK(
        context, UpdateOf(tables, 0, gradient.flat<float>().data(), row, n, used, &update, &range));
    const Rule rule(numbers.data());
    // Both write rows of their own: it doesn't matter which is first.
    if (kAllRows) OP_REQUIRES_OK(context, UpdateOthers(context, rule, update, range));
    UpdateInPieces(context, rule, update);
  }

 private:
  static constexpr int kVariables = 1 + Rule::kSlots, kGradient = kVariables + Rule::kNumbers;
};

// Sums gradients, and updates rows of many tables by them.
template <class Rule, bool kAllRows = false>
class ReduceAndUpdateOp : public OpKernel {
 public:
  explicit ReduceAndUpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, sums_.Read(context));
    int handles = 0, slots = 0, used = 0;
    OP_REQUIRES_OK(context, context->GetAttr("U", &handles));
    OP_REQUIRES_OK(context, context->GetAttr("S", &slots));
    OP_REQUIRES_OK(context, context->GetAttr("R", &used));
    OP_REQUIRES(
        context,
        handles == sums_.size() && slots == handles * Rule::kSlots &&
            used == (kAllRows ? handles : 0),
        errors::InvalidArgument(sums_.size(), " tables are updated, but there are ", handles,
                                " handles, ", slots, " slots and ", used, " numbers of rows"));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList handles, slots, numbers, used;
    OP_REQUIRES_OK(context, context->input_list("tables", &handles));
    OP_REQUIRES_OK(context, context->input_list("slots", &slots));
    OP_REQUIRES_OK(context, context->input_list("numbers", &numbers));
    OP_REQUIRES_OK(context, context->input_list("used", &used));
    GradientSums::Run run;
    OP_REQUIRES_OK(context, sums_.Number(context, &run));
    const int64_t count = sums_.size();
    std::vector<UpdatedTables::Handles> variables(count);
    for (int64_t t = 0; t < count; ++t) {
      variables[t].push_back(&handles[t].template flat<ResourceHandle>()(0));
      for (int s = 0; s < Rule::kSlots; ++s)
        variables[t].push_back(&slots[t * Rule::kSlots + s].template flat<ResourceHandle>()(0));
      if (!AnybodyListens()) continue;
      const SummedRows& rows = run.rows[t];
      AnnounceUpdate(context, variables[t],
                     kAllRows ? RowWrite() : RowWrite{RowWrite::kValues, rows.distinct, rows.kept});
    }
    UpdatedTables tables(Rule::kSlots, Rule::kRowWise);
    OP_REQUIRES_OK(context, tables.Lock(context, variables));
    std::array<float, Rule::kNumbers> of_rule{};
    OP_REQUIRES_OK(context,
                   ReadNumbers(Rule::kNumbers, [&](int i) { return numbers[i]; }, of_rule.data()));
    const Rule rule(of_rule.data());

    // 1. Check everything before anything is updated.
    std::vector<Update<Rule>> updates(count);
    std::vector<RowRange> ranges(count);
    int64_t total = 0, largest = 0;
    for (int64_t t = 0; t < count; ++t) {
      const SummedRows& rows = run.rows[t];
      OP_REQUIRES(
          context, tables.dim(t) == sums_.dim(t),
          errors::InvalidArgument("rows of dimension ", sums_.dim(t),
                                  " were asked for, but the table has rows of ", tables.dim(t)));
      int64_t last = -1;
      if (kAllRows) OP_REQUIRES_OK(context, ReadUsed(used[t], &last));
      OP_REQUIRES_OK(context, UpdateOf(tables, t, nullptr, rows.distinct, rows.kept, last,
                                       &updates[t], &ranges[t]));
      const int64_t elements = rows.count * sums_.dim(t);
      total += elements;
      largest = std::max(largest, elements);
    }

    // 2. Sum and update table by table, in a buffer that stays in the cache. Where one table is too
    // much for one thread, keep the sums of all, and share out their rows.
    const int threads = context->device()->tensorflow_cpu_worker_threads()->num_threads;
    const bool by_table = threads == 1 || largest <= total / threads;
    auto kept = buffers_.Take();
    float* of_table = by_table ? nullptr : kept->At(total);
    for (int64_t t = 0; t < count && !by_table; ++t) {
      updates[t].gradients = of_table;
      of_table += run.rows[t].count * sums_.dim(t);
    }
    Parallel(context, count, 2 * run.received.elements, [&](int64_t t) {
      auto buffer = buffers_.Take();
      Update<Rule> update = updates[t];
      float* sums = by_table ? buffer->At(run.rows[t].count * sums_.dim(t))
                             : const_cast<float*>(update.gradients);
      sums_.Sum(run, t, sums);
      update.gradients = sums;
      if (by_table) UpdateRows(rule, update);
    });
    for (int64_t t = 0; t < count; ++t) {
      if (!by_table) UpdateInPieces(context, rule, updates[t]);
      if (kAllRows) OP_REQUIRES_OK(context, UpdateOthers(context, rule, updates[t], ranges[t]));
    }
  }

 private:
  GradientSums sums_;
  ObjectPool<Buffer<float>> buffers_;
};

#define REGISTER(rule, ...)                                                       \
  REGISTER_KERNEL_BUILDER(Name("CollectiveSparse" rule).Device(DEVICE_CPU),       \
                          SparseUpdateOp<__VA_ARGS__>);                           \
  REGISTER_KERNEL_BUILDER(Name("CollectiveSparseReduce" rule).Device(DEVICE_CPU), \
                          ReduceAndUpdateOp<__VA_ARGS__>)
REGISTER("Adagrad", Adagrad);
REGISTER("RowWiseAdagrad", RowWiseAdagrad);
REGISTER("Momentum", Momentum<false>);
REGISTER("NesterovMomentum", Momentum<true>);
REGISTER("Ftrl", Ftrl);
REGISTER("LazyAdam", Adam);
REGISTER("Adam", Adam, true);
#undef REGISTER

}  // namespace sparse_updates_op
}  // namespace collective
