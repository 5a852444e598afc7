// CollectiveReduceRows: sums the gradients of bags, as the ranks sent them, by row of each table.

#include <algorithm>
#include <cstring>

#include "gradient_sums.h"
#include "parallel.h"
#include "scans.h"
#include "variables.h"
#include "wire.h"

namespace collective {
namespace reduce_op {

using namespace tensorflow;

class ReduceRowsOp : public OpKernel {
 public:
  explicit ReduceRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, sums_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList handles, rows;
    OpOutputList values, indices, inverse;
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    OP_REQUIRES_OK(context, context->output_list("values", &values));
    OP_REQUIRES_OK(context, context->output_list("indices", &indices));
    OP_REQUIRES_OK(context, context->output_list("inverse", &inverse));
    // 1. Number the rows of each table.
    GradientSums::Run run;
    OP_REQUIRES_OK(context, sums_.Number(context, &run));
    const int64_t count = sums_.size();
    LockedVariables variables;
    std::vector<Table> tables(count);
    std::vector<const int64_t*> read(count, nullptr);
    auto buffer = buffers_.Take();
    if (sums_.clips()) {
      OP_REQUIRES_OK(context, variables.Lock(context, handles, &tables));
      int64_t all = 0;
      for (const SummedRows& of_table : run.rows) all += of_table.came;
      int64_t* buffer_of_table = buffer->At(all + 1);
      for (int64_t t = 0; t < count; ++t) {
        read[t] = Read(rows[t], buffer_of_table);
        buffer_of_table += run.rows[t].came;
        if (run.rows[t].came > 0)
          OP_REQUIRES_OK(context, Check(tables[t], t, read[t], run.rows[t].came));
      }
    }

    // 2. Allocate the outputs, whose sizes are known now.
    std::vector<float*> out(count);
    for (int t = 0; t < count; ++t) {
      const SummedRows& of_table = run.rows[t];
      const int64_t dim = sums_.dim(t), kept = of_table.kept;
      Tensor *output = nullptr, *index = nullptr, all;
      if (kept < of_table.count) {
        OP_REQUIRES_OK(context,
                       context->allocate_temp(DT_FLOAT, TensorShape({of_table.count, dim}), &all));
        values.set(t, all.Slice(0, kept));
        output = &all;
        std::fill_n(output->flat<float>().data() + kept * dim, dim, 0.f);
      } else {
        OP_REQUIRES_OK(context, values.allocate(t, TensorShape({kept, dim}), &output));
      }
      OP_REQUIRES_OK(context, indices.allocate(t, TensorShape({kept}), &index));
      out[t] = output->flat<float>().data();
      std::copy_n(of_table.distinct, kept, index->flat<int64_t>().data());
      if (!inverse.required(t)) continue;
      OP_REQUIRES_OK(context, inverse.allocate(t, TensorShape({of_table.came}), &index));
      std::copy_n(of_table.numbers, of_table.came, index->flat<int32_t>().data());
    }

    // 3. Sum the gradients of each table.
    Parallel(context, count, run.received.elements,
             [&](int64_t t) { sums_.Sum(run, t, out[t], tables[t], read[t]); });
  }

 private:
  // Returns the rows that a lookup read, in `buffer` if they differ from those to be updated.
  static const int64_t* Read(const Tensor& rows, int64_t* buffer) {
    const int64_t *row = rows.flat<int64_t>().data(), n = rows.NumElements();
    if (std::none_of(row, row + n, IsUnseen<int64_t>)) return row;
    for (int64_t i = 0; i < n; ++i) buffer[i] = IsUnseen(row[i]) ? 0 : row[i];
    return buffer;
  }

  // Checks that all rows are there which max_norm reads.
  Status Check(const Table& table, int64_t t, const int64_t* rows, int64_t n) const {
    if (AreWithin(rows, n, table.rows) && table.dim == sums_.dim(t)) return OkStatus();
    return errors::InvalidArgument("table ", t, " has ", table.rows, " rows of ", table.dim,
                                   ": not all local rows of dimension ", sums_.dim(t),
                                   " that were asked for");
  }

  GradientSums sums_;
  ObjectPool<Buffer<int64_t>> buffers_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveReduceRows").Device(DEVICE_CPU), ReduceRowsOp);

}  // namespace reduce_op
}  // namespace collective
