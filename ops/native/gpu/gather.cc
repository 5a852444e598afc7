// CollectiveGatherRows on a GPU: one row for each key that the ranks requested, from shards that
// are read in place. One kernel, gather_rows of gather.cu; the host waits for the header of the
// message.

#include <algorithm>
#include <vector>

#include "stream.h"
#include "../variables.h"
#include "../wire.h"

namespace collective {
namespace gpu {
namespace gather_op {

using namespace tensorflow;

// As gather.cu reads it.
struct PieceWords {
  int64_t tile;  // its first one
  int64_t rows, count;
  int64_t table, table_rows;
  int64_t dim;
  int64_t out;      // element
  int64_t lanes;    // of a group
  int64_t vectors;  // whether all addresses allow accesses of four elements
};
constexpr int kWordsOfPiece = sizeof(PieceWords) / sizeof(int64_t);
constexpr int kWidth = 4, kFlight = 4, kRounds = 2, kWarp = 32;  // as in gather.cu

// Plans how blocks share the rows of pieces.
class Plan {
 public:
  // Adds `count` rows of `table`, whose numbers are at `rows`; they go to the element `out` on.
  void Add(const int64_t* rows, int64_t count, const Table& table, int64_t out) {
    if (count == 0) return;
    const int64_t address = reinterpret_cast<int64_t>(table.values);
    // The result itself is aligned, as all tensors are.
    const bool vectors =
        table.dim % kWidth == 0 && address % (kWidth * sizeof(float)) == 0 && out % kWidth == 0;
    const int64_t accesses = vectors ? table.dim / kWidth : table.dim;
    int64_t lanes = 1;
    while (lanes < std::min<int64_t>(accesses, kWarp)) lanes *= 2;
    const int64_t rows_of_tile = kThreads / lanes * kFlight * kRounds;
    words_.insert(words_.end(), {tiles_, reinterpret_cast<int64_t>(rows), count, address,
                                 table.rows, table.dim, out, lanes, vectors});
    tiles_ += (count + rows_of_tile - 1) / rows_of_tile;
  }

  const std::vector<int64_t>& words() const { return words_; }
  int32_t pieces() const { return static_cast<int32_t>(words_.size() / kWordsOfPiece); }
  int64_t tiles() const { return tiles_; }

 private:
  std::vector<int64_t> words_;
  int64_t tiles_ = 0;
};

// Reads a received message of unpooled sections, of which the host has nothing but the splits.
Status ReadMessage(Stream* stream, const Layout& layout, const Tensor& message,
                   const Tensor& splits, ReceivedMessage* received) {
  const int64_t each = 2 * static_cast<int64_t>(layout.sections.size());
  void* memory = nullptr;
  TF_RETURN_IF_ERROR(stream->HostScratch(layout.ranks * each * sizeof(int64_t), &memory));
  int64_t* headers = static_cast<int64_t*>(memory);
  const int64_t* words = static_cast<const int64_t*>(message.data());
  int64_t at = 0;
  for (int64_t r = 0; r < std::min<int64_t>(layout.ranks, splits.NumElements()); ++r) {
    // Parse refuses splits that are too long or too short, and then reads no header.
    if (at < 0 || at + each > message.NumElements()) break;
    TF_RETURN_IF_ERROR(stream->CopyToHost(headers + r * each, words + at, each * sizeof(int64_t)));
    at += splits.flat<int32_t>()(r);
  }
  TF_RETURN_IF_ERROR(stream->WaitForCopies());
  return layout.Parse(message, splits, headers, received);
}

class GatherRowsOp : public OpKernel {
 public:
  explicit GatherRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    for (size_t s = 0; s < layout_.sections.size(); ++s) {
      OP_REQUIRES(context, !layout_.sections[s].pooled,
                  errors::Unimplemented("section ", s,
                                        " is pooled, which CollectiveGatherRows "
                                        "does on a CPU only"));
    }
  }

  void Compute(OpKernelContext* context) override {
    OpInputList handles, rows;
    const Tensor *message = nullptr, *splits = nullptr;
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    OP_REQUIRES_OK(context, context->input("message", &message));
    OP_REQUIRES_OK(context, context->input("splits", &splits));
    LockedVariables variables;
    std::vector<Table> tables;
    ReceivedMessage received;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, ReadMessage(&stream, layout_, *message, *splits, &received));
    OP_REQUIRES_OK(context, variables.Lock(context, handles, &tables));
    Tensor* flat = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({received.elements}), &flat));
    Plan plan;
    OP_REQUIRES_OK(context, Fill(&plan, tables, rows, received));
    const int64_t* pieces = nullptr;
    OP_REQUIRES_OK(context, stream.Upload(plan.words(), &pieces));
    OP_REQUIRES_OK(context, stream.Launch(Kernel::kGatherRows, plan.tiles(), pieces, plan.pieces(),
                                          flat->data()));
  }

 private:
  Status Fill(Plan* plan, const std::vector<Table>& tables, const OpInputList& rows,
              const ReceivedMessage& received) const {
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
      const int64_t* numbers = static_cast<const int64_t*>(rows[section.table].data());
      plan->Add(numbers + piece.row, piece.keys, table, piece.flat);
    }
    return OkStatus();
  }

  Layout layout_;
};

REGISTER_KERNEL_BUILDER(
    Name("CollectiveGatherRows").Device(DEVICE_GPU).HostMemory("handles").HostMemory("splits"),
    GatherRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveGatherRows").Device(DEVICE_CPU).Label("emulated"),
                        GatherRowsOp);

}  // namespace gather_op
}  // namespace gpu
}  // namespace collective
