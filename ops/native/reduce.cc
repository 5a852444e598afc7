// CollectiveReduceRows: sums the gradients of bags, as the ranks sent them, by row of each table.

#include <cmath>
#include <cstring>

#include "clip.h"
#include "numbering.h"
#include "parallel.h"
#include "scans.h"
#include "variables.h"
#include "vectors.h"
#include "wire.h"

namespace collective {
namespace reduce_op {

using namespace tensorflow;

struct Shared {
  Buffer<int64_t> distinct, read;
  Buffer<int32_t> numbers;
};

struct Scratch {
  Buffer<uint32_t> targets;
  Buffer<int32_t> bags;
  Buffer<float> factors;
};

class ReduceRowsOp : public OpKernel {
 public:
  explicit ReduceRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    int exponent;
    early_ = std::frexp(scale_, &exponent) == 0.5f;
    dims_.assign(layout_.tables, 1);
    of_dynamic_.assign(layout_.tables, false);
    for (const Section& section : layout_.sections) {
      OP_REQUIRES(context, dims_[section.table] == 1 || dims_[section.table] == section.dim,
                  errors::InvalidArgument("table ", section.table, " has sections of dimension ",
                                          dims_[section.table], " and ", section.dim));
      dims_[section.table] = section.dim;
      of_dynamic_[section.table] = section.kind == kDynamic;
      clips_ |= section.max_norm > 0;
    }
  }

  void Compute(OpKernelContext* context) override {
    const Tensor *gradient = nullptr, *message = nullptr, *splits = nullptr;
    OpInputList handles, rows;
    OpOutputList values, indices, inverse;
    ReceivedMessage received;
    OP_REQUIRES_OK(context, context->input("gradient", &gradient));
    OP_REQUIRES_OK(context, context->input("message", &message));
    OP_REQUIRES_OK(context, context->input("splits", &splits));
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    OP_REQUIRES_OK(context, context->output_list("values", &values));
    OP_REQUIRES_OK(context, context->output_list("indices", &indices));
    OP_REQUIRES_OK(context, context->output_list("inverse", &inverse));
    OP_REQUIRES_OK(context, layout_.Parse(*message, *splits, &received));
    OP_REQUIRES(context, gradient->NumElements() == received.elements,
                errors::InvalidArgument("the gradient has ", gradient->NumElements(),
                                        " elements, but the ranks asked for ", received.elements));
    LockedVariables variables;
    std::vector<Table> tables(layout_.tables);
    std::vector<const int64_t*> read(layout_.tables);
    if (clips_) OP_REQUIRES_OK(context, variables.Lock(context, handles, &tables));

    // 1. Number the rows of each table.
    const int64_t count = layout_.tables;
    std::vector<int64_t> first(1, 0), distinct(count);
    std::vector<char> drops(count, 0);  // Whether the last of the distinct rows is none.
    for (int64_t t = 0; t < count; ++t) {
      OP_REQUIRES(
          context, rows[t].NumElements() == received.rows[t],
          errors::InvalidArgument("the ranks asked for ", received.rows[t], " rows of table ", t,
                                  ", but ", rows[t].NumElements(), " row numbers are given"));
      first.push_back(first.back() + received.rows[t]);
    }
    auto shared = shared_.Take();
    for (int64_t t = 0; clips_ && t < count; ++t) {
      read[t] = Read(rows[t], shared->read.At(first[count] + 1) + first[t]);
      if (received.rows[t] > 0)
        OP_REQUIRES_OK(context, Check(tables[t], t, read[t], received.rows[t]));
    }
    int64_t* all_distinct = shared->distinct.At(first[count] + count);
    int32_t* all_numbers = shared->numbers.At(first[count] + 1);
    Parallel(context, count, 5 * first[count], [&](int64_t t) {
      const int64_t* row = rows[t].flat<int64_t>().data();
      auto numbering = numberings_.Take();
      numbering->Start(received.rows[t], BitwiseOr(row, received.rows[t]),
                       all_distinct + first[t] + t);
      numbering->Add(row, received.rows[t], all_numbers + first[t]);
      distinct[t] = numbering->count();
      if (of_dynamic_[t])
        drops[t] = Decode(all_distinct + first[t] + t, distinct[t], all_numbers + first[t],
                          received.rows[t]);
    });

    // 2. Allocate the outputs, whose sizes are known now.
    std::vector<float*> out(count);
    for (int t = 0; t < count; ++t) {
      const int64_t kept = distinct[t] - drops[t];
      Tensor *output = nullptr, *index = nullptr, all;
      if (drops[t]) {
        OP_REQUIRES_OK(
            context, context->allocate_temp(DT_FLOAT, TensorShape({distinct[t], dims_[t]}), &all));
        values.set(t, all.Slice(0, kept));
        output = &all;
        std::fill_n(output->flat<float>().data() + kept * dims_[t], dims_[t], 0.f);
      } else {
        OP_REQUIRES_OK(context, values.allocate(t, TensorShape({kept, dims_[t]}), &output));
      }
      OP_REQUIRES_OK(context, indices.allocate(t, TensorShape({kept}), &index));
      out[t] = output->flat<float>().data();
      std::memcpy(index->flat<int64_t>().data(), all_distinct + first[t] + t,
                  kept * sizeof(int64_t));
      if (!inverse.required(t)) continue;
      OP_REQUIRES_OK(context, inverse.allocate(t, TensorShape({received.rows[t]}), &index));
      std::memcpy(index->flat<int32_t>().data(), all_numbers + first[t],
                  received.rows[t] * sizeof(int32_t));
    }

    // 3. Sum the gradients of each table, in the order in which they came.
    const float* flat = gradient->flat<float>().data();
    Parallel(context, count, received.elements, [&](int64_t t) {
      auto scratch = scratch_.Take();
      uint32_t next = 0;
      for (const Piece& piece : received.pieces) {
        if (layout_.sections[piece.section].table != t) continue;
        const int32_t* numbers = all_numbers + first[t] + piece.row;
        uint32_t* targets = scratch->targets.At(piece.keys);
        for (int64_t k = 0; k < piece.keys; ++k) {
          const uint32_t number = static_cast<uint32_t>(numbers[k]), is_new = number == next;
          targets[k] = number | is_new << 31;
          next += is_new;
        }
        Add(piece, tables[t], clips_ ? read[t] + piece.row : nullptr, flat + piece.flat, targets,
            &*scratch, out[t]);
      }
      if (!early_) Scale(out[t], (distinct[t] - drops[t]) * dims_[t], scale_);
    });
  }

 private:
  // Returns the rows that a lookup read, in `buffer` if they differ from those to be updated.
  static const int64_t* Read(const Tensor& rows, int64_t* buffer) {
    const int64_t *row = rows.flat<int64_t>().data(), n = rows.NumElements();
    if (std::none_of(row, row + n, IsUnseen<int64_t>)) return row;
    for (int64_t i = 0; i < n; ++i) buffer[i] = IsUnseen(row[i]) ? 0 : row[i];
    return buffer;
  }

  // Makes distinct rows of a dynamic table the ones to be updated. If there is one for keys without
  // rows, it becomes the last one. Returns whether there is.
  static bool Decode(int64_t* distinct, int64_t count, int32_t* numbers, int64_t n) {
    int64_t none = -1;
    for (int64_t u = 0; u < count; ++u) {
      if (distinct[u] == kNoRow) none = u;
      if (IsUnseen(distinct[u])) distinct[u] = SeenLater(distinct[u]);
    }
    if (none < 0) return false;
    std::copy(distinct + none + 1, distinct + count, distinct + none);
    const int32_t last = static_cast<int32_t>(count - 1);
    for (int64_t i = 0; i < n; ++i) {
      if (numbers[i] == none) {
        numbers[i] = last;
      } else if (numbers[i] > none) {
        --numbers[i];
      }
    }
    return true;
  }

  // Checks that all rows are there which max_norm reads.
  Status Check(const Table& table, int64_t t, const int64_t* rows, int64_t n) const {
    if (AreWithin(rows, n, table.rows) && table.dim == dims_[t]) return OkStatus();
    return errors::InvalidArgument("table ", t, " has ", table.rows, " rows of ", table.dim,
                                   ": not all local rows of dimension ", dims_[t],
                                   " that were asked for");
  }

  void Add(const Piece& piece, const Table& table, const int64_t* rows, const float* gradients,
           uint32_t* targets, Scratch* scratch, float* out) const {
    const Section& section = layout_.sections[piece.section];
    const int64_t dim = section.dim;
    // The scale may come before the sum if it is a power of two: the result is the same.
    const float scale = early_ ? scale_ : 1;
    if (!section.pooled)
      return AddRows<First::kFlags>(gradients, piece.bags, scale, targets, dim, dim, out);
    const Rows<int32_t> of_bags{gradients, BagOfEachKey(piece, &scratch->bags), dim};
    if (section.max_norm == 0) {
      return SumRows<First::kFlags>(
          Sums<int32_t, uint32_t>{of_bags, piece.keys, piece.weights, scale, targets, dim, out},
          dim);
    }
    const Rows<int64_t> of_table{table.values, rows, dim};
    const Clip<int64_t> clip(of_table, piece.keys, dim, section.max_norm);
    float* factors = scratch->factors.At(piece.keys);
    clip.Factors(piece.weights, factors);
    SumRows<First::kFlags>(
        Sums<int32_t, uint32_t>{of_bags, piece.keys, factors, scale, targets, dim, out}, dim);
    for (int64_t k = 0; k < piece.keys; ++k) targets[k] &= ~kNew;
    const std::vector<float> back = clip.Backward(of_bags, factors);
    SumRows<First::kFlags>(
        Sums<int64_t, uint32_t>{of_table, piece.keys, back.data(), scale, targets, dim, out}, dim);
  }

  Layout layout_;
  float scale_ = 1;
  bool early_ = true, clips_ = false;
  std::vector<int64_t> dims_;  // [T]
  std::vector<bool> of_dynamic_;
  ObjectPool<Shared> shared_;
  ObjectPool<Scratch> scratch_;
  ObjectPool<Numbering> numberings_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveReduceRows").Device(DEVICE_CPU), ReduceRowsOp);

}  // namespace reduce_op
}  // namespace collective
