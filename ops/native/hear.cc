// CollectiveHear: reads the keys in a received message, and how often they were asked for.

#include <algorithm>

#include "parallel.h"
#include "wire.h"

namespace collective {
namespace hear_op {

using namespace tensorflow;

class HearOp : public OpKernel {
 public:
  explicit HearOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    int counted = 0;
    OP_REQUIRES_OK(context, context->GetAttr("C", &counted));
    const auto wanted = std::count(layout_.counted.begin(), layout_.counted.end(), true);
    OP_REQUIRES(context, counted == wanted,
                errors::InvalidArgument("of the tables ", wanted, " are counted, but there are ",
                                        counted, " outputs of counts"));
    OP_REQUIRES_OK(context, context->GetAttr("H", &headers_));
    OP_REQUIRES(
        context, headers_ <= 1,
        errors::InvalidArgument("there are headers once or not at all, not ", headers_, " times"));
  }

  void Compute(OpKernelContext* context) override {
    ReceivedMessage received;
    OP_REQUIRES_OK(context, layout_.Parse(context->input(0), context->input(1), &received));
    std::vector<int64_t*> keys(layout_.tables);
    for (int t = 0; t < layout_.tables; ++t) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(t, TensorShape({received.rows[t]}), &out));
      keys[t] = out->flat<int64_t>().data();
    }
    std::vector<int64_t*> counts(layout_.tables, nullptr);
    for (int t = 0, c = 0; t < layout_.tables; ++t) {
      if (!layout_.counted[t]) continue;
      Tensor* out = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(layout_.tables + 1 + c++,
                                                       TensorShape({received.rows[t]}), &out));
      counts[t] = out->flat<int64_t>().data();
    }
    int64_t all = 0;
    for (int64_t rows : received.rows) all += rows;
    Parallel(context, static_cast<int64_t>(received.pieces.size()), all, [&](int64_t p) {
      const Piece& piece = received.pieces[p];
      const Section& section = layout_.sections[piece.section];
      const Placement placement(section.kind, layout_.ranks);
      int64_t* out = keys[section.table] + piece.row;
      for (int64_t k = 0; k < piece.keys; ++k) out[k] = placement.Row(piece.key[k]);
      if (counts[section.table] == nullptr) return;
      int64_t* count = counts[section.table] + piece.row;
      // The keys of a pooled section come as often as they were asked for.
      for (int64_t k = 0; k < piece.keys; ++k)
        count[k] = piece.counts == nullptr ? 1 : piece.counts[k];
    });
    Tensor* row_splits = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(layout_.tables, TensorShape({layout_.ranks}),
                                                     &row_splits));
    std::copy(received.row_splits.begin(), received.row_splits.end(),
              row_splits->flat<int32_t>().data());
    if (headers_ == 0) return;
    Tensor* headers = nullptr;
    const int64_t size = 2 * static_cast<int64_t>(received.pieces.size());
    OP_REQUIRES_OK(context, context->allocate_output(context->num_outputs() - 1,
                                                     TensorShape({size}), &headers));
    received.WriteHeaders(headers->flat<int64_t>().data());
  }

 private:
  Layout layout_;
  int headers_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveHear").Device(DEVICE_CPU), HearOp);

}  // namespace hear_op
}  // namespace collective
