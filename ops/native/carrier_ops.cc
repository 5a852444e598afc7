// Registers the collectives of carriers as operations; ops.cc has those of an exchange.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace {

using shape_inference::InferenceContext;

// The rows of the other ranks have the shape of this one's.
Status RowsShape(InferenceContext* c) {
  shape_inference::ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &shape));
  if (c->RankKnown(shape)) TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
  c->set_output(0, shape);
  if (c->num_outputs() > 1) c->set_output(1, c->input(1));
  return OkStatus();
}

// Collectives through shared memory (carrier.cc). To TensorFlow they are stateless, as Horovod's
// are: inside a function, stateful operations would wait for each other.

#define COLLECTIVE_WIRE_TYPES                                                                   \
  "T: {bool, int8, uint8, int16, uint16, int32, uint32, int64, uint64, half, bfloat16, float, " \
  "double, complex64, complex128}"

REGISTER_OP("CollectiveSharedAlltoall")
    .Input("tensor: T")
    .Input("splits: int32")
    .Output("output: T")
    .Output("received_splits: int32")
    .Attr("phase: {'other', 'rows', 'gradients'} = 'other'")
    .Attr(COLLECTIVE_WIRE_TYPES)
    .SetShapeFn(RowsShape);

// Exchanges keys, and looks up rows for each rank as its keys come (answer.cc). `rows` are there
// when CollectiveSharedAlltoallRows has them; `row_splits` says how many of them come from each
// rank.
REGISTER_OP("CollectiveSharedAlltoallKeys")
    .Input("message: int64")
    .Input("splits: int32")
    .Input("handles: T * resource")
    .Output("output: int64")
    .Output("received_splits: int32")
    .Output("rows: float")
    .Output("row_splits: int32")
    .Output("answers: variant")
    .Output("local_rows: T * int64")
    .Attr("rows_name: string")
    .Attr("T: int >= 1")
    .Attr("ranks: int >= 1")
    .Attr("section_tables: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .Attr("max_norms: list(float)")
    .Attr("shapes: list(shape)")
    .SetIsStateful()  // as CollectiveGatherRows
    .SetShapeFn([](InferenceContext* c) {
      SetVectors(c, 0, c->num_outputs());
      c->set_output(1, c->input(1));
      c->set_output(3, c->input(1));
      c->set_output(4, c->Scalar());
      return OkStatus();
    });

// While rows still come, it pools members whose rows have come already, into `early`: from
// `positions` on, inputs and attributes are those of CollectivePool.
REGISTER_OP("CollectiveSharedAlltoallRows")
    .Input("rows: float")
    .Input("row_splits: int32")
    .Input("answers: variant")
    .Input("positions: M * int32")
    .Input("samples: P * int64")
    .Input("weights: W * float")
    .Output("output: float")
    .Output("early: variant")
    .Attr("phase: {'other', 'rows', 'gradients'} = 'rows'")
    .Attr("M: int >= 1")
    .Attr("P: int >= 0")
    .Attr("W: int >= 0")
    .Attr("sections: list(int)")
    .Attr("dims: list(int)")
    .Attr("combiners: list(int)")
    .Attr("weighted: list(bool)")
    .Attr("max_norms: list(float)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      c->set_output(1, c->Scalar());
      return OkStatus();
    });

REGISTER_OP("CollectiveAwaitRows")
    .Attr("collectives: list(string)")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

REGISTER_OP("CollectiveSharedAllgather")
    .Input("tensor: T")
    .Output("output: T")
    .Attr(COLLECTIVE_WIRE_TYPES)
    .SetShapeFn(RowsShape);

REGISTER_OP("CollectiveSharedAllreduce")
    .Input("tensors: N * T")
    .Output("sums: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {int8, uint8, int32, int64, half, bfloat16, float, double}")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return OkStatus();
    });

REGISTER_OP("CollectiveSharedBroadcast")
    .Input("tensor: T")
    .Output("output: T")
    .Attr(COLLECTIVE_WIRE_TYPES)
    .SetShapeFn(shape_inference::UnchangedShape);

// By NCCL, as those through shared memory; `gate` is on the host.

REGISTER_OP("CollectiveNcclAlltoall")
    .Input("tensor: T")
    .Input("splits: int32")
    .Output("output: T")
    .Output("received_splits: int32")
    .Attr("phase: {'other', 'rows', 'gradients'} = 'other'")
    .Attr(COLLECTIVE_WIRE_TYPES)
    .SetShapeFn(RowsShape);

REGISTER_OP("CollectiveNcclAllgather")
    .Input("tensor: T")
    .Input("gate: int32")
    .Output("output: T")
    .Attr(COLLECTIVE_WIRE_TYPES)
    .SetShapeFn(RowsShape);

REGISTER_OP("CollectiveNcclAllreduce")
    .Input("tensors: N * T")
    .Input("gate: int32")
    .Output("sums: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {int8, uint8, int32, int64, half, bfloat16, float, double}")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return OkStatus();
    });

REGISTER_OP("CollectiveNcclBroadcast")
    .Input("tensor: T")
    .Output("output: T")
    .Attr(COLLECTIVE_WIRE_TYPES)
    .SetShapeFn(shape_inference::UnchangedShape);

}  // namespace
}  // namespace tensorflow
