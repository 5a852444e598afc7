// CollectiveGatherRows on a GPU: one row for each bag that the ranks requested, from shards that
// are read in place: keys of unpooled sections by a kernel of gather.cu, bags of pooled ones by
// those of pool.cu; nothing where CollectivePool takes rows straight from the shards.
// CollectiveSpreadRows: the same from matrices. The host waits for nothing.

#include <vector>

#include "bags.h"
#include "distinct.h"
#include "gather_plan.h"
#include "message.h"
#include "stream.h"
#include "../variables.h"
#include "../wire.h"

namespace collective {
namespace gpu {
namespace gather_op {

using namespace tensorflow;

// Answers requests from tables that a subclass finds.
class AnswerOp : public OpKernel {
 public:
  explicit AnswerOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
  }

 protected:
  Status Parse(OpKernelContext* context, ReceivedMessage* received) const {
    OpInputList headers;
    const Tensor *message = nullptr, *splits = nullptr;
    TF_RETURN_IF_ERROR(context->input("message", &message));
    TF_RETURN_IF_ERROR(context->input("splits", &splits));
    TF_RETURN_IF_ERROR(context->input_list("headers", &headers));
    return ParseByHeaders(layout_, *message, *splits, headers, received);
  }

  // `rows`: for each table the row number of each key; `more`: what the kernel takes besides.
  template <class Number, class... More>
  Status Answer(OpKernelContext* context, Stream* stream, Kernel kernel,
                const std::vector<Table>& tables, const OpInputList& rows,
                const ReceivedMessage& received, More... more) const {
    Tensor* flat = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({received.elements}), &flat));
    GatherPlan plan;
    Bags<Number> bags(tables);
    const int64_t out = AddressOf(flat->flat<float>().data());
    TF_RETURN_IF_ERROR(Fill(tables, rows, received, out, &plan, &bags));
    Packed packed;
    const size_t pieces_at = packed.Add(plan.pieces());
    if (bags.count() > 0) bags.Pack(&packed);
    const PackedLookups pooled =
        bags.PackLookups(0, SamplesOfGroup(bags.keys(), bags.count()), &packed);
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
    TF_RETURN_IF_ERROR(stream->Launch(kernel, plan.pieces().tiles(), there + pieces_at,
                                      plan.pieces().count(), flat->data(), more...));
    if (bags.count() == 0) return OkStatus();
    void* nobody_asks = nullptr;
    TF_RETURN_IF_ERROR(bags.FindOffsets(stream, there, nobody_asks));
    TF_RETURN_IF_ERROR(bags.Square(stream, there));
    return bags.Launch(stream, bags.IsPlain() ? Kernel::kPoolRowsPlain : Kernel::kPoolRows, pooled,
                       there, bags.runs(there));
  }

  Layout layout_;

 private:
  template <class Number>
  Status Fill(const std::vector<Table>& tables, const OpInputList& rows,
              const ReceivedMessage& received, int64_t out, GatherPlan* plan,
              Bags<Number>* bags) const {
    for (int t = 0; t < layout_.tables; ++t) {
      if (rows[t].NumElements() == received.rows[t]) continue;
      return errors::InvalidArgument("the ranks ask for ", received.rows[t], " rows of table ", t,
                                     ", but ", rows[t].NumElements(), " row numbers are given");
    }
    for (const Piece& piece : received.pieces) {
      const Section& section = layout_.sections[piece.section];
      const Table& table = tables[section.table];
      if (piece.keys > 0 && table.dim != section.dim) {
        return errors::InvalidArgument("table ", section.table, " has rows of ", table.dim,
                                       ", but section ", piece.section, " of ", section.dim);
      }
      const Number* numbers = static_cast<const Number*>(rows[section.table].data()) + piece.row;
      if (section.pooled) {
        TF_RETURN_IF_ERROR(
            bags->Add(section, piece, numbers, section.table, out + piece.flat * kFloatBytes));
      } else {
        plan->Add(numbers, piece.keys, table, piece.flat);
      }
    }
    return OkStatus();
  }
};

class GatherRowsOp : public AnswerOp {
 public:
  explicit GatherRowsOp(OpKernelConstruction* context) : AnswerOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("unread", &is_unread_));
  }

  void Compute(OpKernelContext* context) override {
    if (is_unread_) {
      Tensor* none = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({0}), &none));
      return;
    }
    OpInputList handles, rows;
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    LockedVariables variables;
    std::vector<Table> tables;
    ReceivedMessage received;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, Parse(context, &received));
    OP_REQUIRES_OK(context, variables.Lock(context, handles, &tables));
    OP_REQUIRES_OK(context,
                   Answer<int64_t>(context, &stream, Kernel::kGatherRows, tables, rows, received));
  }

 private:
  bool is_unread_ = false;
};

class SpreadRowsOp : public AnswerOp {
 public:
  explicit SpreadRowsOp(OpKernelConstruction* context) : AnswerOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    for (Section& section : layout_.sections) {
      section.max_norm = 0;  // A norm limits what the forward pass read.
      is_pooled_ |= section.pooled;
    }
  }

  void Compute(OpKernelContext* context) override {
    OpInputList values, inverse;
    OP_REQUIRES_OK(context, context->input_list("values", &values));
    OP_REQUIRES_OK(context, context->input_list("inverse", &inverse));
    std::vector<Table> tables;
    ReceivedMessage received;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, Parse(context, &received));
    for (int t = 0; t < layout_.tables; ++t) {
      OP_REQUIRES(context, TensorShapeUtils::IsMatrix(values[t].shape()),
                  errors::InvalidArgument("values of table ", t, " are no matrix, but ",
                                          values[t].shape().DebugString()));
      // Keys without rows, whose gradients were dropped, have a number after them: zeros.
      tables.push_back({static_cast<const float*>(values[t].data()), values[t].dim_size(0),
                        values[t].dim_size(1)});
    }
    // Rows of bags are multiplied once they are summed, together with the others.
    OP_REQUIRES_OK(context, Answer<int32_t>(context, &stream, Kernel::kSpreadRows, tables, inverse,
                                            received, is_pooled_ ? 1.f : scale_));
    if (!is_pooled_ || scale_ == 1) return;
    OP_REQUIRES_OK(context, stream.Launch(Kernel::kScaleValues, TilesOf(received.elements),
                                          context->mutable_output(0)->flat<float>().data(),
                                          received.elements, scale_));
  }

 private:
  float scale_ = 1;
  bool is_pooled_ = false;  // A section is.
};

REGISTER_KERNEL_BUILDER(Name("CollectiveGatherRows")
                            .Device(DEVICE_GPU)
                            .HostMemory("handles")
                            .HostMemory("splits")
                            .HostMemory("headers"),
                        GatherRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveGatherRows").Device(DEVICE_CPU).Label("emulated"),
                        GatherRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSpreadRows")
                            .Device(DEVICE_GPU)
                            .HostMemory("handles")
                            .HostMemory("splits")
                            .HostMemory("headers"),
                        SpreadRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSpreadRows").Device(DEVICE_CPU).Label("emulated"),
                        SpreadRowsOp);

}  // namespace gather_op
}  // namespace gpu
}  // namespace collective
