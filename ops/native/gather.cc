// CollectiveGatherRows: one row for each bag that the ranks requested, from shards that are read in
// place. CollectiveSpreadRows: the same from matrices, which makes it the transpose of
// CollectiveReduceRows.

#include <algorithm>

#include "clip.h"
#include "parallel.h"
#include "scans.h"
#include "variables.h"
#include "vectors.h"
#include "wire.h"

namespace collective {
namespace gather_op {

using namespace tensorflow;

struct Scratch {
  Buffer<int64_t> read;
  Buffer<int32_t> bags;
  Buffer<float> factors;
};

// Writes the rows of `piece`, from `table` by the numbers `rows`, times `scale`.
template <class Index>
Status Answer(const Section& section, const Piece& piece, const Table& table, const Index* rows,
              float scale, Scratch* scratch, float* out) {
  if (piece.keys > 0 && table.dim != section.dim) {
    return errors::InvalidArgument("table ", section.table, " has rows of ", table.dim,
                                   ", but section ", piece.section, " of ", section.dim);
  }
  if (IsDynamic(section.kind) && std::any_of(rows, rows + piece.keys, IsUnseen<Index>)) {
    Index* read = reinterpret_cast<Index*>(scratch->read.At(piece.keys));
    for (int64_t k = 0; k < piece.keys; ++k) read[k] = IsUnseen(rows[k]) ? 0 : rows[k];
    rows = read;
  }
  if (!AreWithin(rows, piece.keys, table.rows)) {
    int64_t k = 0;
    while (rows[k] >= 0 && rows[k] < table.rows) ++k;
    return errors::InvalidArgument("table ", section.table, " has no local row ", rows[k],
                                   ": there are ", table.rows);
  }
  const Rows<Index> from{table.values, rows, section.dim};
  if (!section.pooled) {
    CopyRows(from, piece.bags, section.dim, out);
    if (scale != 1) Scale(out, piece.bags * section.dim, scale);
    return OkStatus();
  }
  const float* factors = piece.weights;
  if (section.max_norm > 0) {
    float* clipped = scratch->factors.At(piece.keys);
    Clip<Index>(from, piece.keys, section.dim, section.max_norm).Factors(piece.weights, clipped);
    factors = clipped;
  }
  const int32_t* bags = BagOfEachKey(piece, &scratch->bags);
  for (int64_t b = 0; b < piece.bags; ++b) {
    if (piece.lengths[b] == 0) std::fill_n(out + b * section.dim, section.dim, 0.f);
  }
  SumRows<First::kRuns>(
      Sums<Index, int32_t>{from, piece.keys, factors, scale, bags, section.dim, out}, section.dim);
  return OkStatus();
}

// Answers requests from tables that a subclass finds.
class AnswerOp : public OpKernel {
 public:
  explicit AnswerOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
  }

 protected:
  // `rows`: for each table the row number of each key.
  template <class Index>
  void AnswerAll(OpKernelContext* context, const std::vector<Table>& tables,
                 const OpInputList& rows, const ReceivedMessage& received, float scale) {
    Tensor* flat = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({received.elements}), &flat));
    float* out = flat->flat<float>().data();
    std::vector<Status> errors(received.pieces.size());
    Parallel(context, static_cast<int64_t>(received.pieces.size()), received.elements,
             [&](int64_t p) {
               const Piece& piece = received.pieces[p];
               const Section& section = layout_.sections[piece.section];
               auto scratch = scratch_.Take();
               errors[p] = Answer(section, piece, tables[section.table],
                                  rows[section.table].template flat<Index>().data() + piece.row,
                                  scale, &*scratch, out + piece.flat);
             });
    for (const Status& error : errors) OP_REQUIRES_OK(context, error);
  }

  Status Parse(OpKernelContext* context, const OpInputList& rows, ReceivedMessage* received) const {
    const Tensor *message = nullptr, *splits = nullptr;
    TF_RETURN_IF_ERROR(context->input("message", &message));
    TF_RETURN_IF_ERROR(context->input("splits", &splits));
    TF_RETURN_IF_ERROR(layout_.Parse(*message, *splits, received));
    for (int t = 0; t < layout_.tables; ++t) {
      if (rows[t].NumElements() != received->rows[t]) {
        return errors::InvalidArgument("the ranks ask for ", received->rows[t], " rows of table ",
                                       t, ", but ", rows[t].NumElements(),
                                       " row numbers are given");
      }
    }
    return OkStatus();
  }

  Layout layout_;
  ObjectPool<Scratch> scratch_;
};

class GatherRowsOp : public AnswerOp {
 public:
  using AnswerOp::AnswerOp;

  void Compute(OpKernelContext* context) override {
    OpInputList handles, rows;
    ReceivedMessage received;
    LockedVariables variables;
    std::vector<Table> tables;
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    // TensorFlow runs this where the variable is, whatever device was requested.
    OP_REQUIRES(
        context, context->num_inputs() == 2 * layout_.tables + 2,
        errors::FailedPrecondition(
            "the variable ", HandleFromInput(context, 0).name(),
            " is on a CPU, but is looked up and updated on a GPU: make its table outside of "
            "tf.device, and use an optimizer that TensorFlow has a kernel of for a GPU; or set "
            "COLLECTIVE_KERNELS=cpu"));
    OP_REQUIRES_OK(context, Parse(context, rows, &received));
    OP_REQUIRES_OK(context, variables.Lock(context, handles, &tables));
    AnswerAll<int64_t>(context, tables, rows, received, 1);
  }
};

class SpreadRowsOp : public AnswerOp {
 public:
  explicit SpreadRowsOp(OpKernelConstruction* context) : AnswerOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    // Rows are numbered here, whatever the table.
    for (Section& section : layout_.sections) {
      section.max_norm = 0;
      section.kind = kStatic;
    }
  }

  void Compute(OpKernelContext* context) override {
    OpInputList values, inverse;
    ReceivedMessage received;
    std::vector<Table> tables;
    std::vector<Tensor> with_zeros(layout_.tables);
    OP_REQUIRES_OK(context, context->input_list("values", &values));
    OP_REQUIRES_OK(context, context->input_list("inverse", &inverse));
    OP_REQUIRES_OK(context, Parse(context, inverse, &received));
    for (int t = 0; t < layout_.tables; ++t) {
      OP_REQUIRES(context, TensorShapeUtils::IsMatrix(values[t].shape()),
                  errors::InvalidArgument("values of table ", t, " are no matrix, but ",
                                          values[t].shape().DebugString()));
      const Tensor* rows = &values[t];
      // Keys without rows, whose gradients were dropped, have one of zeros after the others.
      const int32_t count = static_cast<int32_t>(rows->dim_size(0));
      const auto numbers = inverse[t].flat<int32_t>();
      if (std::find(numbers.data(), numbers.data() + numbers.size(), count) !=
          numbers.data() + numbers.size()) {
        const int64_t elements = rows->NumElements();
        OP_REQUIRES_OK(context,
                       context->allocate_temp(DT_FLOAT, TensorShape({count + 1, rows->dim_size(1)}),
                                              &with_zeros[t]));
        float* copy = with_zeros[t].flat<float>().data();
        std::copy_n(rows->flat<float>().data(), elements, copy);
        std::fill_n(copy + elements, rows->dim_size(1), 0.f);
        rows = &with_zeros[t];
      }
      tables.push_back({rows->matrix<float>().data(), rows->dim_size(0), rows->dim_size(1)});
    }
    AnswerAll<int32_t>(context, tables, inverse, received, scale_);
  }

 private:
  float scale_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveGatherRows").Device(DEVICE_CPU), GatherRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSpreadRows").Device(DEVICE_CPU), SpreadRowsOp);

}  // namespace gather_op
}  // namespace collective
