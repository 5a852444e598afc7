// CollectiveSparseAdagrad, CollectiveSparseRowWiseAdagrad, CollectiveSparseMomentum,
// CollectiveSparseFtrl, CollectiveSparseLazyAdam: update rows of a shard and of its slots in place.
// CollectiveSparseAdam: updates all rows; those without a gradient have one of zeros.
//
// Inputs: the table, its slots, the numbers of the rule, the gradient [n, D], the rows [n], each at
// most once; of CollectiveSparseAdam the number of rows that there are, too. A row is updated by
// one thread, and by its own gradient alone: the results don't depend on threads.

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "clones.h"
#include "parallel.h"
#include "row_changes.h"
#include "scans.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "update_rules.h"
#include "variables.h"

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

template <class Rule, bool kAllRows = false>
class SparseUpdateOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    AnnounceWrites(context);
    core::RefCountPtr<Var> variables[kVariables];
    std::vector<mutex*> locks;
    for (int i = 0; i < kVariables; ++i) {
      OP_REQUIRES_OK(context, Prepare(context, i, &variables[i]));
      locks.push_back(variables[i]->mu());
    }
    const SharedLocks locked(std::move(locks));
    const Tensor &gradient = context->input(kGradient), &rows = context->input(kGradient + 1);
    Tensor& value = *variables[0]->tensor();
    const int64_t n = rows.NumElements(), dim = value.dim_size(1);
    Update<Rule> update{gradient.flat<float>().data(), dim, rows.flat<int64_t>().data(), n, dim,
                        value.flat<float>().data()};
    for (int i = 0; i < Rule::kSlots; ++i) {
      Tensor& slot = *variables[1 + i]->tensor();
      OP_REQUIRES(
          context,
          slot.dim_size(0) >= value.dim_size(0) && slot.dim_size(1) == (Rule::kRowWise ? 1 : dim),
          errors::InvalidArgument("a slot is ", slot.shape().DebugString(), ", the table ",
                                  value.shape().DebugString()));
      update.slots[i] = slot.flat<float>().data();
    }
    std::array<float, Rule::kNumbers> numbers;
    for (int i = 0; i < Rule::kNumbers; ++i) {
      const Tensor& number = context->input(kVariables + i);
      OP_REQUIRES(context, number.NumElements() == 1,
                  errors::InvalidArgument("a number of the rule, such as the learning rate, is ",
                                          number.shape().DebugString()));
      numbers[i] = number.flat<float>()(0);
    }
    OP_REQUIRES(context, gradient.shape() == TensorShape({n, dim}),
                errors::InvalidArgument("the gradient of ", n, " rows of dimension ", dim, " is ",
                                        gradient.shape().DebugString()));
    int64_t first = 0, last = value.dim_size(0);
    if (kAllRows) OP_REQUIRES_OK(context, Range(context->input(kGradient + 2), &first, &last));
    OP_REQUIRES(context, AreWithin(update.at, n, last),
                errors::InvalidArgument("a row to be updated is not in [0, ", last, ")"));
    const Rule rule(numbers.data());
    // Both write rows of their own: it doesn't matter which is first.
    if (kAllRows) OP_REQUIRES_OK(context, UpdateOthers(context, rule, update, first, last));
    InPieces(context, 0, n, dim, [&](int64_t begin, int64_t end) {
      Update<Rule> part = update;
      part.gradients += begin * dim;
      part.at += begin;
      part.n = end - begin;
      UpdateRows(rule, part);
    });
  }

 private:
  static constexpr int kVariables = 1 + Rule::kSlots, kGradient = kVariables + Rule::kNumbers;

  // Tells who listens which rows of which variables are about to change.
  static void AnnounceWrites(OpKernelContext* context) {
    if (!AnybodyListens()) return;
    const Tensor& rows = context->input(kGradient + 1);
    RowWrite write;
    if (!kAllRows) write = {RowWrite::kValues, rows.flat<int64_t>().data(), rows.NumElements()};
    for (int i = 0; i < kVariables; ++i) AnnounceWrite(context, HandleFromInput(context, i), write);
  }

  // Finds a variable, and makes its memory its own.
  static Status Prepare(OpKernelContext* context, int input, core::RefCountPtr<Var>* variable) {
    const ResourceHandle& handle = HandleFromInput(context, input);
    if (!LookupResource(context, handle, variable).ok()) {
      return errors::FailedPrecondition("the variable ", handle.name(),
                                        " does not exist: was it initialized?");
    }
    const Tensor& value = *(*variable)->tensor();
    if (value.dtype() != DT_FLOAT || value.dims() != 2) {
      return errors::InvalidArgument("the variable ", handle.name(),
                                     " is no float32 matrix, or not initialized");
    }
    return EnsureOwned(context, variable->get());
  }

  // Reads which rows there are: rows 1 to `used`, or all of them if it is negative.
  static Status Range(const Tensor& used, int64_t* first, int64_t* last) {
    if (used.NumElements() != 1) {
      return errors::InvalidArgument("the number of rows is ", used.shape().DebugString());
    }
    const int64_t count = used.flat<int64_t>()(0);
    if (count < 0) return OkStatus();
    if (count >= *last) {
      return errors::InvalidArgument("there are ", count, " rows beside row 0, but memory for ",
                                     *last, " only");
    }
    *first = 1;
    *last = count + 1;
    return OkStatus();
  }

  // Updates the rows in [first, last) that aren't in `update`, by a gradient of zeros.
  static Status UpdateOthers(OpKernelContext* context, const Rule& rule, const Update<Rule>& update,
                             int64_t first, int64_t last) {
    Tensor marks;
    TF_RETURN_IF_ERROR(context->allocate_temp(DT_BOOL, TensorShape({last}), &marks));
    bool* has_gradient = marks.flat<bool>().data();
    std::fill_n(has_gradient, last, false);
    for (int64_t i = 0; i < update.n; ++i) has_gradient[update.at[i]] = true;
    const std::vector<float> zeros(update.dim);
    InPieces(context, first, last, update.dim, [&](int64_t begin, int64_t end) {
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

  // Calls work(begin, end) for parts of [first, last), on several threads.
  template <class Work>
  static void InPieces(OpKernelContext* context, int64_t first, int64_t last, int64_t dim,
                       const Work& work) {
    const int64_t count = last - first, pieces = std::min(count, kPieces);
    Parallel(context, pieces, count * dim, [&](int64_t p) {
      work(first + count * p / pieces, first + count * (p + 1) / pieces);
    });
  }
};

#define REGISTER(name, ...) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(DEVICE_CPU), SparseUpdateOp<__VA_ARGS__>)
REGISTER("CollectiveSparseAdagrad", Adagrad);
REGISTER("CollectiveSparseRowWiseAdagrad", RowWiseAdagrad);
REGISTER("CollectiveSparseMomentum", Momentum<false>);
REGISTER("CollectiveSparseNesterovMomentum", Momentum<true>);
REGISTER("CollectiveSparseFtrl", Ftrl);
REGISTER("CollectiveSparseLazyAdam", Adam);
REGISTER("CollectiveSparseAdam", Adam, true);
#undef REGISTER

}  // namespace sparse_updates_op
}  // namespace collective
