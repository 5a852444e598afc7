// Registers the operations that change or watch rows of variables; ops.cc has those of an exchange.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace {

REGISTER_OP("CollectiveWatchShard")
    .Input("resource: resource")
    .Input("store: int64")
    .Output("shard: int64")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

REGISTER_OP("CollectiveHoldRows")
    .Input("resource: resource")
    .Input("snapshot: int64")
    .Input("shard: int64")
    .Input("rows: int64")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

REGISTER_OP("CollectiveRestoreRows")
    .Input("resource: resource")
    .Input("files: string")
    .Input("slices: int64")
    .Input("shape: int64")
    .Input("verifies: bool")
    .Attr("dtype: type")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

REGISTER_OP("CollectiveAnnounceWrites")
    .Input("resource: resource")
    .Input("rows: T")
    .Attr("T: {int32, int64}")
    .Attr("all: bool = false")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

// Updates rows of T tables by one rule. Each row is at most once in `rows`; one that is outside of
// its table is an error, or on a GPU left out. `slots` are those of each table, one table after the
// other; `numbers` are the rule's, such as the learning rate. `used`, for a rule that updates all
// rows, has one number for each table: its last row, if row 0 doesn't exist, or -1 if all rows
// exist. It is empty for other rules; on a GPU also where all rows of all tables exist. `bounds`
// has one for each table, or none: after the update, elements of rows with a gradient are in
// [-bound, bound], or NaN. Only kernels of a GPU, for which an operation is made `on_device`, have
// bounds.
REGISTER_OP("CollectiveSparseUpdate")
    .Input("tables: T * resource")
    .Input("slots: S * resource")
    .Input("numbers: N * float")
    .Input("used: R * int64")
    .Input("gradients: T * float")
    .Input("rows: T * int64")
    .Attr("rule: string")
    .Attr("on_device: bool = false")
    .Attr("bounds: list(float) = []")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("N: int >= 1")
    .Attr("R: int >= 0")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

// Sums gradients as CollectiveReduceRows does, and updates the tables with the numbers `updated`: U
// of T; what belongs to the update is as for CollectiveSparseUpdate.
REGISTER_OP("CollectiveSparseReduceUpdate")
    .Input("tables: U * resource")
    .Input("slots: S * resource")
    .Input("numbers: N * float")
    .Input("used: R * int64")
    .Input("gradient: float")
    .Input("rows: U * int64")
    .Input("message: int64")
    .Input("splits: int32")
    .Input("headers: H * int64")
    .Attr("rule: string")
    .Attr("on_device: bool = false")
    .Attr("bounds: list(float) = []")
    .Attr("U: int >= 1")
    .Attr("S: int >= 0")
    .Attr("N: int >= 1")
    .Attr("R: int >= 0")
    .Attr("T: int >= 1")
    .Attr("H: int >= 0 = 0")
    .Attr("updated: list(int)")
    .Attr("ranks: int >= 1")
    .Attr("section_tables: list(int)")
    .Attr("kinds: list(int)")
    .Attr("dims: list(int)")
    .Attr("pooled: list(bool)")
    .Attr("weighted: list(bool)")
    .Attr("counted: list(bool) = []")
    .Attr("scale: float = 1.0")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

// Sums gradients as CollectivePoolGradient does, and updates by the sums tables whose rows one rank
// has, all of them; the sums are never written. `local_rows`: of each section of the request, which
// rows of its table came back, each at most once. What belongs to the update is as for
// CollectiveSparseUpdate, of the tables of all sections; the rest as for CollectivePoolGradient.
REGISTER_OP("CollectiveSparsePoolUpdate")
    .Input("tables: T * resource")
    .Input("slots: S * resource")
    .Input("numbers: N * float")
    .Input("used: R * int64")
    .Input("local_rows: T * int64")
    .Input("positions: M * int32")
    .Input("samples: P * int64")
    .Input("weights: W * float")
    .Input("gradients: G * float")
    .Input("counts: C * int32")
    .Attr("rule: string")
    .Attr("bounds: list(float) = []")
    .Attr("scale: float = 1.0")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("N: int >= 1")
    .Attr("R: int >= 0")
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
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

// Gives K rows of a variable [V, ...] the values [K, ...], on a GPU. Each row is at most once in
// `indices`, and those outside of the variable are left out.
REGISTER_OP("CollectiveWriteRows")
    .Input("resource: resource")
    .Input("indices: int64")
    .Input("updates: dtype")
    .Attr("dtype: type")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

REGISTER_OP("CollectiveMemory")
    .Input("address: int64")
    .Input("keeper: int64")
    .Output("values: dtype")
    .Attr("dtype: type")
    .Attr("shape: shape")
    .Attr("device: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ExplicitShape);

REGISTER_OP("CollectiveEmptyRows")
    .Output("rows: dtype")
    .Attr("dtype: type")
    .Attr("shape: shape")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ExplicitShape);

REGISTER_OP("CollectiveStream").SetIsStateful().SetShapeFn(shape_inference::NoOutputs);

}  // namespace
}  // namespace tensorflow
