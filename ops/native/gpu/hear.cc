// CollectiveHear on a GPU: the local rows of the keys in a received message. One kernel, local_rows
// of partition.cu; the host waits for the headers, which it hands on.

#include <algorithm>
#include <vector>

#include "distinct.h"
#include "segments.h"
#include "stream.h"
#include "../wire.h"

namespace collective {
namespace gpu {
namespace hear_op {

using namespace tensorflow;

// As partition.cu reads it.
struct KeysWords {
  int64_t tile;  // its first one
  int64_t keys, rows;
  int64_t count, kind;
};

class HearOp : public OpKernel {
 public:
  explicit HearOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    int counted = 0, headers = 0;
    OP_REQUIRES_OK(context, context->GetAttr("C", &counted));
    OP_REQUIRES_OK(context, context->GetAttr("H", &headers));
    OP_REQUIRES(context, counted == 0,
                errors::Unimplemented("on a GPU no table counts how often keys are asked for"));
    OP_REQUIRES(context, headers == 1,
                errors::InvalidArgument("on a GPU, CollectiveHear gives headers: H must be 1"));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &message = context->input(0), &splits = context->input(1);
    Tensor *headers = nullptr, *row_splits = nullptr;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    const int64_t size = layout_.ranks * WordsOfHeader();
    OP_REQUIRES_OK(context, stream.HostOutput(layout_.tables + 1, TensorShape({size}), &headers));
    int64_t* header = headers->flat<int64_t>().data();
    OP_REQUIRES_OK(context, CopyHeaders(&stream, message, splits, header));
    ReceivedMessage received;
    OP_REQUIRES_OK(context, layout_.Parse(message, splits, header, &received));
    received.WriteHeaders(header);  // Those of a rank without words are other words.
    std::vector<int64_t*> rows(layout_.tables);
    for (int t = 0; t < layout_.tables; ++t) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(t, TensorShape({received.rows[t]}), &out));
      rows[t] = static_cast<int64_t*>(out->data());
    }
    OP_REQUIRES_OK(context, context->allocate_output(layout_.tables, TensorShape({layout_.ranks}),
                                                     &row_splits));
    std::copy(received.row_splits.begin(), received.row_splits.end(),
              row_splits->flat<int32_t>().data());
    Tiled<KeysWords> plan;
    for (const Piece& piece : received.pieces) {
      const Section& section = layout_.sections[piece.section];
      plan.Add({0, AddressOf(piece.key), AddressOf(rows[section.table] + piece.row), piece.keys,
                section.kind},
               TilesOf(piece.keys));
    }
    Packed packed;
    packed.Add(plan);
    const int64_t* pieces = nullptr;
    OP_REQUIRES_OK(context, stream.Upload(packed.words(), &pieces));
    OP_REQUIRES_OK(context, stream.Launch(Kernel::kLocalRows, plan.tiles(), pieces, plan.count(),
                                          static_cast<uint32_t>(layout_.ranks)));
  }

 private:
  int64_t WordsOfHeader() const { return 2 * static_cast<int64_t>(layout_.sections.size()); }

  // Copies the header of each rank's part of a message to the host.
  Status CopyHeaders(Stream* stream, const Tensor& message, const Tensor& splits,
                     int64_t* headers) const {
    const int64_t each = WordsOfHeader();
    const int64_t* words = static_cast<const int64_t*>(message.data());
    int64_t at = 0;
    std::fill_n(headers, layout_.ranks * each, int64_t{0});
    for (int64_t r = 0; r < std::min<int64_t>(layout_.ranks, splits.NumElements()); ++r) {
      // Parse refuses splits that are too long or too short, and then reads no header.
      if (at < 0 || at + each > message.NumElements()) break;
      TF_RETURN_IF_ERROR(
          stream->CopyToHost(headers + r * each, words + at, each * sizeof(int64_t)));
      at += splits.flat<int32_t>()(r);
    }
    return stream->WaitForCopies();
  }

  Layout layout_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveHear")
                            .Device(DEVICE_GPU)
                            .HostMemory("splits")
                            .HostMemory("row_splits")
                            .HostMemory("headers"),
                        HearOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveHear").Device(DEVICE_CPU).Label("emulated"), HearOp);

}  // namespace hear_op
}  // namespace gpu
}  // namespace collective
