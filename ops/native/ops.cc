// Registers the operations of an exchange with TensorFlow: inputs, outputs, attributes, shapes.
// ops/exchange/embedding_bag.py describes them. update_ops.cc and carrier_ops.cc register the
// others.
//
// TensorFlow has a CollectiveGather and a CollectiveReduce of its own: the operations here, on
// rows, have other names.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace {

using shape_inference::InferenceContext;

// Sets outputs from the `first` on: [?, D] for each of `dims`.
Status SetMatrices(InferenceContext* c, int first, const std::vector<int64_t>& dims) {
  for (size_t i = 0; i < dims.size(); ++i) {
    c->set_output(first + static_cast<int>(i), c->Matrix(InferenceContext::kUnknownDim, dims[i]));
  }
  return OkStatus();
}

void SetVectors(InferenceContext* c, int first, int count) {
  for (int i = 0; i < count; ++i)
    c->set_output(first + i, c->Vector(InferenceContext::kUnknownDim));
}

// Finds the D of each table from the sections that it has (unknown if it has none).
Status TableDims(InferenceContext* c, int tables, std::vector<int64_t>* table_dims) {
  std::vector<int> of;
  std::vector<int64_t> dims;
  TF_RETURN_IF_ERROR(c->GetAttr("section_tables", &of));
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  table_dims->assign(tables, InferenceContext::kUnknownDim);
  for (size_t s = 0; s < of.size() && s < dims.size(); ++s) {
    if (of[s] >= 0 && of[s] < tables) (*table_dims)[of[s]] = dims[s];
  }
  return OkStatus();
}

Status AskShapes(InferenceContext* c) {
  int ranks;
  std::vector<int> sections;
  std::vector<bool> pooled;
  TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
  TF_RETURN_IF_ERROR(c->GetAttr("member_sections", &sections));
  TF_RETURN_IF_ERROR(c->GetAttr("pooled", &pooled));
  SetVectors(c, 0, c->num_outputs());
  c->set_output(1, c->Vector(ranks));
  c->set_output(2, c->Vector(ranks));
  for (size_t m = 0; m < sections.size(); ++m) {
    const int s = sections[m];
    if (s >= 0 && s < static_cast<int>(pooled.size()) && !pooled[s])
      c->set_output(3 + static_cast<int>(m), c->input(static_cast<int>(m)));
  }
  return OkStatus();
}

Status HearShapes(InferenceContext* c) {
  int ranks;
  TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
  SetVectors(c, 0, c->num_outputs());
  int tables;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
  c->set_output(tables, c->Vector(ranks));
  int headers;
  std::vector<int> sections;
  TF_RETURN_IF_ERROR(c->GetAttr("H", &headers));
  TF_RETURN_IF_ERROR(c->GetAttr("section_tables", &sections));
  if (headers == 1) {
    c->set_output(c->num_outputs() - 1,
                  c->Vector(2 * ranks * static_cast<int64_t>(sections.size())));
  }
  return OkStatus();
}

Status FindRowsShapes(InferenceContext* c) {
  int tables;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
  for (int t = 0; t < tables; ++t) c->set_output(t, c->input(2 * tables + t));
  return OkStatus();
}

Status AdmitRowsShapes(InferenceContext* c) {
  int tables;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
  for (int t = 0; t < 2 * tables; ++t) c->set_output(t, c->input(2 * tables + t % tables));
  return OkStatus();
}

Status ReduceShapes(InferenceContext* c) {
  int tables;
  std::vector<int64_t> dims;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
  TF_RETURN_IF_ERROR(TableDims(c, tables, &dims));
  TF_RETURN_IF_ERROR(SetMatrices(c, 0, dims));
  SetVectors(c, tables, 2 * tables);
  return OkStatus();
}

Status PoolShapes(InferenceContext* c) {
  std::vector<int64_t> dims;
  std::vector<int> combiners;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
  TF_RETURN_IF_ERROR(SetMatrices(c, 0, dims));
  for (size_t m = 0; m < dims.size() && m < combiners.size(); ++m) {
    const auto positions = c->input(1 + static_cast<int>(m));
    if (combiners[m] == 0 && c->RankKnown(positions) && c->Rank(positions) == 1) {
      c->set_output(static_cast<int>(m), c->Matrix(c->Dim(positions, 0), dims[m]));
    }
  }
  return OkStatus();
}

Status PoolGradientShapes(InferenceContext* c) {
  int members, pooled, weights;
  TF_RETURN_IF_ERROR(c->GetAttr("M", &members));
  TF_RETURN_IF_ERROR(c->GetAttr("P", &pooled));
  TF_RETURN_IF_ERROR(c->GetAttr("W", &weights));
  bool without_rows;
  TF_RETURN_IF_ERROR(c->GetAttr("without_rows", &without_rows));
  c->set_output(0, without_rows ? c->Vector(c->UnknownDim()) : c->input(0));
  for (int w = 0; w < weights; ++w) c->set_output(1 + w, c->input(1 + members + pooled + w));
  return OkStatus();
}

Status Flat(InferenceContext* c) {
  SetVectors(c, 0, 1);
  return OkStatus();
}

REGISTER_OP("CollectiveRefuse")
    .Input("bounds: int64")
    .Attr("ends: list(int)")
    .Attr("messages: list(string)")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

REGISTER_OP("CollectiveBounds")
    .Input("ids: M * int64")
    .Output("bounds: int64")
    .Attr("M: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->num_inputs(), 2));
      return OkStatus();
    });

REGISTER_OP("CollectiveMismatches")
    .Input("ids: P * int64")
    .Input("samples: P * int64")
    .Input("weights: W * float")
    .Output("found: int64")
    .Attr("P: int >= 1")
    .Attr("W: int >= 0")
    .Attr("weighted: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs()));
      return OkStatus();
    });

REGISTER_OP("CollectiveAsk")
    .Input("ids: M * int64")
    .Input("samples: P * int64")
    .Input("weights: W * float")
    .Input("own_samples: L * int64")  // Of members that the rank that asks pools itself: `own`.
    .Input("own_weights: V * float")  // Of some of them.
    .Output("message: int64")
    .Output("splits: int32")
    .Output("row_splits: int32")
    .Output("positions: M * int32")
    .Output("bag_samples: P * int64")
    .Output("bag_scales: P * float")
    .Output("uploaded_samples: L * int64")  // The same as own_samples, in the memory of rows.
    .Output("uploaded_weights: V * float")
    .Output("uploaded_ids: I * int64")  // All of them, in the memory of rows; or none.
    .Output("counts: C * int32")
    .Attr("M: int >= 1")
    .Attr("P: int >= 0")
    .Attr("W: int >= 0")
    .Attr("L: int >= 0 = 0")
    .Attr("V: int >= 0 = 0")
    .Attr("I: int >= 0 = 0")
    // 1: also the counts, by which positions are numbers of rows; 2: and how many samples each
    // member has.
    .Attr("C: int >= 0 = 0")
    .Attr("own: list(int) = []")
    .Attr("ranks: int >= 1")
    .Attr("hosts: int >= 1 = 1")
    .Attr("member_sections: list(int)")
    .Attr("combiners: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .SetShapeFn(AskShapes);

REGISTER_OP("CollectiveMergeRequests")
    .Input("message: int64")
    .Output("merged: int64")
    .Output("splits: int32")
    .Output("row_splits: int32")
    .Output("positions: int32")
    .Output("bags: int64")
    .Attr("T: int >= 1")
    .Attr("owners: int >= 1")
    .Attr("ranks: int >= 1")  // Messages: of each asker to each owner.
    .Attr("section_tables: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .Attr("by_owner: bool = false")  // Messages: of all askers to owner 0, then to owner 1, …
    .SetShapeFn([](InferenceContext* c) {
      int owners, messages;
      TF_RETURN_IF_ERROR(c->GetAttr("owners", &owners));
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &messages));
      SetVectors(c, 0, c->num_outputs());
      c->set_output(1, c->Vector(owners));
      c->set_output(2, c->Vector(messages / owners));
      return OkStatus();
    });

REGISTER_OP("CollectiveSpreadMerged")
    .Input("rows: float")
    .Input("positions: int32")
    .Input("bags: int64")
    .Output("flat: float")
    .Attr("owners: int >= 1")
    .Attr("dims: list(int)")
    .SetShapeFn(Flat);

REGISTER_OP("CollectiveFirstMerged")
    .Input("rows: float")
    .Input("positions: int32")
    .Input("bags: int64")
    .Output("flat: float")
    .Output("splits: int32")
    .Attr("owners: int >= 1")
    .Attr("dims: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      int owners;
      TF_RETURN_IF_ERROR(c->GetAttr("owners", &owners));
      SetVectors(c, 0, 1);
      c->set_output(1, c->Vector(owners));
      return OkStatus();
    });

REGISTER_OP("CollectiveSumMerged")
    .Input("gradient: float")
    .Input("positions: int32")
    .Input("bags: int64")
    .Input("rows: float")  // Of the same size as the sum.
    .Output("flat: float")
    .Attr("owners: int >= 1")
    .Attr("dims: list(int)")
    .SetShapeFn(Flat);

REGISTER_OP("CollectiveHear")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("keys: T * int64")
    .Output("row_splits: int32")
    .Output("counts: C * int64")
    .Output("headers: H * int64")
    .Attr("T: int >= 1")
    .Attr("C: int >= 0 = 0")
    .Attr("H: int >= 0 = 0")  // 1: also the headers, for operations that find them nowhere else.
    .Attr("ranks: int >= 1")
    .Attr("section_tables: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .SetShapeFn(HearShapes);

REGISTER_OP("CollectiveFindRows")
    .Input("numbers: T * int64")
    .Input("handles: T * resource")
    .Input("keys: T * int64")
    .Input("insert: bool")
    .Input("steps: S * int64")  // On a GPU: to which an insertion leads; 0 for none that counts.
    .Output("rows: T * int64")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0 = 0")
    .Attr("finder: int = 0")  // On a GPU: which function of Python finds them.
    .SetIsStateful()
    .SetShapeFn(FindRowsShapes);

REGISTER_OP("CollectiveAdmitRows")
    .Input("numbers: T * int64")
    .Input("handles: T * resource")
    .Input("keys: T * int64")
    .Input("counts: T * int64")
    .Input("training: bool")
    .Input("step: int64")
    .Output("rows: T * int64")
    .Output("added: T * int64")
    .Attr("T: int >= 1")
    .SetIsStateful()
    .SetShapeFn(AdmitRowsShapes);

REGISTER_OP("CollectiveCountRows")
    .Input("number: int64")
    .Output("count: int64")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

REGISTER_OP("CollectiveSettleSlots")
    .Input("training: bool")
    .Input("rows: Index")  // It waits for the keys of these.
    .Input("number: int64")
    .Input("slots: S * int64")
    .Input("handles: S * resource")
    .Output("count: int64")
    .Attr("Index: {int32, int64}")
    .Attr("S: int >= 0")
    .Attr("refusal: string")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

REGISTER_OP("CollectiveGatherRows")
    .Input("handles: T * resource")
    .Input("rows: T * int64")
    .Input("message: int64")
    .Input("splits: int32")
    .Input("headers: H * int64")
    .Output("flat: float")
    .Attr("T: int >= 1")
    .Attr("H: int >= 0 = 0")
    .Attr("ranks: int >= 1")
    .Attr("section_tables: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .Attr("max_norms: list(float)")
    .Attr("shapes: list(shape)")
    .Attr("unread: bool = false")  // Nobody reads the rows: there are none.
    .SetIsStateful()               // it reads variables: never folded, never merged with another
    .SetShapeFn(Flat);

REGISTER_OP("CollectiveReduceRows")
    .Input("gradient: float")
    .Input("handles: T * resource")
    .Input("rows: T * int64")
    .Input("message: int64")
    .Input("splits: int32")
    .Input("headers: H * int64")
    .Output("values: T * float")
    .Output("indices: T * int64")
    .Output("inverse: T * int32")
    .Attr("T: int >= 1")
    .Attr("H: int >= 0 = 0")
    .Attr("ranks: int >= 1")
    .Attr("section_tables: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .Attr("max_norms: list(float)")
    .Attr("shapes: list(shape)")
    .Attr("scale: float = 1.0")
    .SetIsStateful()
    .SetShapeFn(ReduceShapes);

// Transposes CollectiveReduceRows, for gradients of gradients: the last inputs, from the handles
// on, are those of the reduction.
REGISTER_OP("CollectiveSpreadRows")
    .Input("values: T * float")
    .Input("inverse: T * int32")
    .Input("handles: T * resource")
    .Input("rows: T * int64")
    .Input("message: int64")
    .Input("splits: int32")
    .Input("headers: H * int64")
    .Output("flat: float")
    .Attr("T: int >= 1")
    .Attr("H: int >= 0 = 0")
    .Attr("ranks: int >= 1")
    .Attr("section_tables: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .Attr("max_norms: list(float)")
    .Attr("shapes: list(shape)")
    .Attr("scale: float = 1.0")
    .SetShapeFn(Flat);

// On a CPU, positions are elements of `rows`. On a GPU they are numbers of rows, and `counts` has
// one tensor, on the host: [N · S], how many rows came from each rank for each section. `early` has
// what CollectiveSharedAlltoallRows has pooled already, of the same members. `handles`, on a GPU of
// a single rank: rows are those of the tables of the sections with these handles, each member's
// with the numbers `ids`; `rows` is not read.
REGISTER_OP("CollectivePool")
    .Input("rows: float")
    .Input("positions: M * int32")
    .Input("samples: P * int64")
    .Input("weights: W * float")
    .Input("counts: C * int32")
    .Input("early: E * variant")
    .Input("handles: H * resource")
    .Input("ids: I * int64")
    .Output("pooled: M * float")
    .Attr("M: int >= 1")
    .Attr("P: int >= 0")
    .Attr("W: int >= 0")
    .Attr("C: int >= 0 = 0")
    .Attr("E: int >= 0 = 0")
    .Attr("H: int >= 0 = 0")
    .Attr("I: int >= 0 = 0")
    .Attr("sections: list(int)")
    .Attr("dims: list(int)")
    .Attr("combiners: list(int)")
    .Attr("weighted: list(bool)")
    .Attr("max_norms: list(float)")
    .SetShapeFn(PoolShapes);

REGISTER_OP("CollectivePoolGradient")
    .Input("rows: float")
    .Input("positions: M * int32")
    .Input("samples: P * int64")
    .Input("weights: W * float")
    .Input("gradients: G * float")
    .Input("counts: C * int32")
    .Output("flat: float")
    .Output("weight_gradients: W * float")
    .Attr("M: int >= 1")
    .Attr("P: int >= 0")
    .Attr("W: int >= 0")
    .Attr("G: int >= 1")
    .Attr("C: int >= 0 = 0")
    .Attr("sections: list(int)")
    .Attr("dims: list(int)")
    .Attr("combiners: list(int)")
    .Attr("weighted: list(bool)")
    .Attr("max_norms: list(float)")
    .Attr("members: list(int)")
    .Attr("without_rows: bool = false")  // `rows` is not read, and may be empty.
    .SetShapeFn(PoolGradientShapes);

}  // namespace
}  // namespace tensorflow
