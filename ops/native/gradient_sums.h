// Sums the gradients of bags, as the ranks sent them, by row of each table: the results of
// CollectiveReduceRows, and the first step of the operations that update rows by the sums.

#ifndef COLLECTIVE_NATIVE_GRADIENT_SUMS_H_
#define COLLECTIVE_NATIVE_GRADIENT_SUMS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "clip.h"
#include "numbering.h"
#include "parallel.h"
#include "scans.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "variables.h"
#include "vectors.h"
#include "wire.h"

namespace collective {

// The rows of one table for which gradients arrived.
struct SummedRows {
  int64_t came = 0;             // How many arrived, including repetitions.
  int32_t* numbers = nullptr;   // [came], the place of each among the distinct rows.
  int64_t* distinct = nullptr;  // [count], by first appearance.
  int64_t count = 0;
  int64_t kept = 0;  // One less than `count` if the last one isn't a row, and isn't updated.
};

// Sums for U of T tables: all tables, or those numbered in an attribute `updated`.
class GradientSums {
 public:
  struct Memory {
    Buffer<int64_t> distinct;
    Buffer<int32_t> numbers;
  };
  // Holds the sums of one run of an operation.
  struct Run {
    ReceivedMessage received;
    const float* gradient = nullptr;
    std::vector<SummedRows> rows;  // [U]
    std::optional<ObjectPool<Memory>::Loan> memory;
  };

  // Reads the attributes of an operation that sums the gradients of all or some tables.
  tensorflow::Status Read(tensorflow::OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(layout_.Read(context));
    TF_RETURN_IF_ERROR(context->GetAttr("scale", &scale_));
    if (context->HasAttr("updated")) {
      TF_RETURN_IF_ERROR(context->GetAttr("updated", &tables_));
    } else {
      for (int t = 0; t < layout_.tables; ++t) tables_.push_back(t);
    }
    for (const int t : tables_) {
      if (t < 0 || t >= layout_.tables)
        return tensorflow::errors::InvalidArgument("table ", t, " is none of ", layout_.tables);
    }
    int exponent;
    early_ = std::frexp(scale_, &exponent) == 0.5f;
    const int64_t count = size();
    dims_.assign(count, 1);
    of_dynamic_.assign(count, false);
    sections_.resize(count);
    for (int64_t u = 0; u < count; ++u) {
      for (int s = 0; s < static_cast<int>(layout_.sections.size()); ++s) {
        const Section& section = layout_.sections[s];
        if (section.table != tables_[u]) continue;
        if (!sections_[u].empty() && dims_[u] != section.dim) {
          return tensorflow::errors::InvalidArgument(
              "table ", tables_[u], " has sections of dimension ", dims_[u], " and ", section.dim);
        }
        sections_[u].push_back(s);
        dims_[u] = section.dim;
        of_dynamic_[u] = IsDynamic(section.kind);
        clips_ |= section.max_norm > 0;
      }
    }
    return tensorflow::OkStatus();
  }

  int64_t size() const { return static_cast<int64_t>(tables_.size()); }
  int64_t dim(int64_t u) const { return dims_[u]; }
  bool clips() const { return clips_; }

  // Reads the message and numbers the rows of each table: the inputs `gradient`, `rows`, `message`
  // and `splits`.
  tensorflow::Status Number(tensorflow::OpKernelContext* context, Run* run) {
    using tensorflow::errors::InvalidArgument;
    const tensorflow::Tensor *gradient = nullptr, *message = nullptr, *splits = nullptr;
    tensorflow::OpInputList rows;
    TF_RETURN_IF_ERROR(context->input("gradient", &gradient));
    TF_RETURN_IF_ERROR(context->input("message", &message));
    TF_RETURN_IF_ERROR(context->input("splits", &splits));
    TF_RETURN_IF_ERROR(context->input_list("rows", &rows));
    TF_RETURN_IF_ERROR(layout_.Parse(*message, *splits, &run->received));
    const ReceivedMessage& received = run->received;
    if (gradient->NumElements() != received.elements) {
      return InvalidArgument("the gradient has ", gradient->NumElements(),
                             " elements, but the ranks asked for ", received.elements);
    }
    run->gradient = gradient->flat<float>().data();
    const int64_t count = size();
    int64_t all = 0;
    for (int64_t u = 0; u < count; ++u) {
      const int64_t came = received.rows[tables_[u]];
      if (rows[u].NumElements() != came) {
        return InvalidArgument("the ranks asked for ", came, " rows of table ", tables_[u],
                               ", but ", rows[u].NumElements(), " row numbers are given");
      }
      all += came;
    }
    run->memory.emplace(memory_.Take());
    int64_t* distinct = (*run->memory)->distinct.At(all + count);
    int32_t* numbers = (*run->memory)->numbers.At(all + 1);
    run->rows.resize(count);
    for (int64_t u = 0; u < count; ++u) {
      const int64_t came = rows[u].NumElements();
      run->rows[u] = {came, numbers, distinct, 0, 0};
      numbers += came;
      distinct += came + 1;
    }
    Parallel(context, count, 5 * all, [&](int64_t u) {
      SummedRows& of_table = run->rows[u];
      const int64_t* row = rows[u].flat<int64_t>().data();
      auto numbering = numberings_.Take();
      numbering->Start(of_table.came, BitwiseOr(row, of_table.came), of_table.distinct);
      numbering->Add(row, of_table.came, of_table.numbers);
      of_table.count = of_table.kept = numbering->count();
      if (of_dynamic_[u]) of_table.kept -= Decode(of_table);
    });
    return tensorflow::OkStatus();
  }

  // Sums the gradients of one table, in the order in which they came, in `out` [count, D]. For a
  // table with max_norm, `table` has its values and `read` the rows that the lookups read.
  void Sum(const Run& run, int64_t u, float* out, const Table& table = {},
           const int64_t* read = nullptr) {
    const SummedRows& rows = run.rows[u];
    auto scratch = scratch_.Take();
    uint32_t next = 0;
    for (int rank = 0; rank < layout_.ranks; ++rank) {
      for (const int section : sections_[u]) {
        const Piece& piece = run.received.pieces[rank * layout_.sections.size() + section];
        const int32_t* numbers = rows.numbers + piece.row;
        uint32_t* targets = scratch->targets.At(piece.keys);
        for (int64_t k = 0; k < piece.keys; ++k) {
          const uint32_t number = static_cast<uint32_t>(numbers[k]), is_new = number == next;
          targets[k] = number | is_new << 31;
          next += is_new;
        }
        Add(piece, table, read == nullptr ? nullptr : read + piece.row, run.gradient + piece.flat,
            targets, &*scratch, out);
      }
    }
    if (!early_) Scale(out, rows.kept * dims_[u], scale_);
  }

 private:
  struct Scratch {
    Buffer<uint32_t> targets;
    Buffer<int32_t> bags;
    Buffer<float> factors;
  };

  // Maps distinct rows of a dynamic table to the rows to update. If one of them stands for keys
  // without rows, it becomes the last one. Returns whether there is one.
  static bool Decode(const SummedRows& rows) {
    int64_t none = -1;
    for (int64_t d = 0; d < rows.count; ++d) {
      int64_t& row = rows.distinct[d];
      if (row == kNoRow) none = d;
      if (IsUnseen(row)) row = SeenLater(row);
    }
    if (none < 0) return false;
    std::copy(rows.distinct + none + 1, rows.distinct + rows.count, rows.distinct + none);
    const int32_t last = static_cast<int32_t>(rows.count - 1);
    for (int64_t i = 0; i < rows.came; ++i) {
      if (rows.numbers[i] == none) {
        rows.numbers[i] = last;
      } else if (rows.numbers[i] > none) {
        --rows.numbers[i];
      }
    }
    return true;
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
  std::vector<int> tables_;                 // [U]
  std::vector<std::vector<int>> sections_;  // [U], those of each table.
  std::vector<int64_t> dims_;               // [U]
  std::vector<bool> of_dynamic_;
  float scale_ = 1;
  bool early_ = true, clips_ = false;
  ObjectPool<Memory> memory_;
  ObjectPool<Scratch> scratch_;
  ObjectPool<Numbering> numberings_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GRADIENT_SUMS_H_
