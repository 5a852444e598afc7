// CollectiveSharedAlltoallKeys, -Rows: an exchange of keys and rows through shared memory, in which
// each owner writes rows right to where the rank wants them that asked.
//
//     asker                                         owner
//     reserves a block of its arena for all rows
//     keys, and the block's place  ── message ──►   as soon as this rank's keys are there:
//                                                   looks its rows up, into the block
//                                  ◄── message ──   "they are there"
//     the block is the tensor of the rows
//
// So each row is written once, and no rank's rows wait for the keys of another. -Keys ends when it
// has answered all ranks, and gives the keys for the way back of gradients; -Rows ends when all
// have answered this one. Both collectives begin with -Keys, so that a run may leave -Rows out.
//
// An owner answers section by section, and of many rows it says in between how many sections are
// there. While -Rows waits, it pools members whose sections are there from all ranks;
// CollectivePool pools the rest. A member is pooled at one time, so numbers don't depend on when.
// Before -Keys ends there is nothing to pool: a rank whose keys are missing hasn't answered either.
//
// The collectives' numbers are taken one after the other: a rank runs one such operation of a name
// at a time, as the coordinator sees to.
//
// A rank that fails answers nobody any more, and who waits for it is told when it ends. A block is
// free again when its tensor is gone and each owner has written: an owner that still writes for a
// run that has failed here writes to nobody else's memory.

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "awaited_answers.h"
#include "mailbox.h"
#include "parallel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "variables.h"
#include "wire.h"

namespace collective {
namespace carrier {

using namespace tensorflow;

// Of a rank's own rows: so many it writes before it looks who else asks.
constexpr int64_t kElementsBetweenLooks = 64 << 10;

// For tests: how many ranks this process has answered, and what is called when it has told a rank
// of a part of its answer.
std::atomic<int64_t> answered{0};
std::atomic<void (*)(int rank, int64_t sections)> part_observer{nullptr};

// A block of this rank's arena.
class BlockBuffer : public TensorBuffer {
 public:
  BlockBuffer(Mailbox* mailbox, uint64_t place, uint64_t bytes)
      : TensorBuffer(mailbox->Part(mailbox->rank(), place, 0, bytes)),
        mailbox_(mailbox),
        place_(place),
        bytes_(bytes) {}
  ~BlockBuffer() override { mailbox_->Release(mailbox_->rank(), place_); }
  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(AllocationDescription*) const override {}
  bool OwnsMemory() const override { return true; }

 private:
  Mailbox* mailbox_;
  uint64_t place_, bytes_;
};

struct AnswerScratch {
  Buffer<int64_t> rows;
  gather_op::Scratch gather;
};

class AlltoallKeysOp : public SharedOp {
 public:
  explicit AlltoallKeysOp(OpKernelConstruction* context) : SharedOp(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("rows_name", &rows_name_));
    for (const Section& section : layout_.sections) {
      OP_REQUIRES(context, !IsDynamic(section.kind) && !section.counted,
                  errors::InvalidArgument("'", collective_, "' finds rows of static tables only, ",
                                          "but table ", section.table, " is dynamic"));
    }
  }

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    auto run = std::make_shared<Answering>(this, context, mailbox, std::move(done));
    const Status status = run->Start();
    if (!status.ok()) run->Refuse(status);
  }

 private:
  // One run of the operation. Its parts (this rank's own rows, the rows for each other rank, the
  // end of the exchange of keys) may be done in several threads; the last one calls Complete.
  class Answering : public std::enable_shared_from_this<Answering> {
    using Pieces = const collective::Piece*;

   public:
    Answering(AlltoallKeysOp* op, OpKernelContext* context, Mailbox* mailbox, DoneCallback done)
        : op_(op), context_(context), mailbox_(mailbox), done_(std::move(done)) {}

    Status Start() {
      const int ranks = mailbox_->ranks(), me = mailbox_->rank();
      const Tensor &message = context_->input(0), &splits = context_->input(1);
      TF_RETURN_IF_ERROR(context_->input_list("handles", &handles_));
      if (op_->layout_.ranks != ranks) {
        return errors::InvalidArgument("'", op_->collective_, "' is for ", op_->layout_.ranks,
                                       " ranks, not ", ranks);
      }
      TF_RETURN_IF_ERROR(CheckSplits(op_->collective_, message, splits, ranks));
      TF_RETURN_IF_ERROR(op_->layout_.Parse(message, splits, &request_));
      TF_RETURN_IF_ERROR(Reserve());
      auto self = shared_from_this();

      auto answers = std::make_shared<AwaitedAnswers>(ranks, me, op_->layout_.sections.size());
      rows_ = op_->NewExchange(*mailbox_, kRowsThere, flat_, sizeof(float));
      rows_->name = op_->rows_name_;
      std::weak_ptr<AwaitedAnswers> awaiting = answers;  // They have the exchange.
      rows_->partly = [awaiting](int from, int64_t sections) {
        if (auto answers = awaiting.lock()) answers->Came(from, sections);
      };
      rows_->arrived = [awaiting](Exchange*, int from) {
        if (auto answers = awaiting.lock()) answers->CameWhole(from);
      };
      rows_->finish = [awaiting](Exchange*, int lost) {
        if (auto answers = awaiting.lock()) answers->Finish(lost);
      };
      answers->exchange = rows_;
      handle_.answers = std::move(answers);
      std::string problem = mailbox_->Begin(rows_);

      keys_ = op_->NewExchange(*mailbox_, kKeys, message, sizeof(int64_t));
      const auto counts = splits.vec<int32>();
      const char* data = BytesOf(message);
      uint64_t start = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const int64_t bytes = counts(rank) * sizeof(int64_t);
        const uint64_t answer = request_.row_splits[rank] * sizeof(float);
        if (rank != me) {
          keys_->parcels.emplace_back(rank, data, bytes, counts(rank));
          keys_->parcels.back().answer = block_;
          keys_->parcels.back().answer_start = start;
          keys_->parcels.back().answer_bytes = answer;
        }
        data += bytes;
        start += answer;
      }
      keys_->arrived = [self](Exchange*, int from) { self->AnswerRank(from); };
      keys_->meanwhile = [self] { self->AnswerOwn(); };
      keys_->finish = [self](Exchange*, int lost) { self->KeysAreOver(lost); };
      const std::shared_ptr<Exchange> keys = keys_;  // `Complete` forgets it.
      if (problem.empty()) problem = mailbox_->Start(keys);
      if (problem.empty()) return OkStatus();
      return errors::ResourceExhausted("'", op_->collective_, "': ", problem);
    }

    // Nothing has been sent.
    void Refuse(const Status& status) {
      for (int rank = 1; rank < mailbox_->ranks(); ++rank) {
        mailbox_->Release(mailbox_->rank(), block_);
      }
      keys_.reset();
      context_->SetStatus(status);
      done_();
    }

   private:
    // Makes room for all rows that this rank asks for.
    Status Reserve() {
      const TensorShape shape({request_.elements});
      if (request_.elements == 0) {
        flat_ = Tensor(DT_FLOAT, shape);
        return OkStatus();
      }
      const uint64_t bytes = request_.elements * sizeof(float);
      // Each other rank writes, and the tensor is this rank's.
      const std::string problem = mailbox_->Reserve(bytes, mailbox_->ranks(), &block_);
      if (!problem.empty()) {
        return errors::ResourceExhausted("'", op_->collective_, "': ", problem);
      }
      core::RefCountPtr<TensorBuffer> buffer(new BlockBuffer(mailbox_, block_, bytes));
      flat_ = Tensor(DT_FLOAT, shape, buffer.get());
      return OkStatus();
    }

    // Between parts of it this rank looks for what others ask for: they wait, this rank doesn't
    // yet.
    void AnswerOwn() {
      const size_t count = op_->layout_.sections.size();
      const Pieces own = request_.pieces.data() + mailbox_->rank() * count;
      const int64_t threads = context_->device()->tensorflow_cpu_worker_threads()->num_threads;
      const int64_t enough = kElementsBetweenLooks * std::max<int64_t>(threads, 1);
      Status status;
      for (size_t first = 0; first < count && status.ok();) {
        size_t end = first;
        for (int64_t elements = 0; end < count && elements < enough; ++end) {
          elements += Elements(own[end]);
        }
        status = Answer(own + first, end - first, flat_.flat<float>().data());
        first = end;
        mailbox_->Look();
      }
      Done(status);
    }

    void AnswerRank(int rank) {
      Status status = Matches(*keys_, rank, keys_->received[rank]);
      if (status.ok()) status = WriteRows(rank, keys_->received[rank]);
      Done(status);
    }

    Status WriteRows(int rank, const Message& message) {
      const char* words = mailbox_->Data(rank, message);
      if (words == nullptr) return errors::ResourceExhausted("shared memory can't be mapped");
      ReceivedMessage asked;
      TF_RETURN_IF_ERROR(op_->layout_.ParseOne(rank, reinterpret_cast<const int64_t*>(words),
                                               message.bytes / sizeof(int64_t), &asked));
      if (message.answer_bytes != asked.elements * sizeof(float)) {
        return errors::InvalidArgument("rank ", rank, " asks for ", asked.elements * sizeof(float),
                                       " bytes of rows in '", op_->collective_,
                                       "', and has room for ", message.answer_bytes);
      }
      if (asked.elements > 0) {
        char* out =
            mailbox_->Part(rank, message.answer, message.answer_start, message.answer_bytes);
        if (out == nullptr) return errors::ResourceExhausted("shared memory can't be mapped");
        Parts parts(asked.pieces.size(), asked.elements);
        TF_RETURN_IF_ERROR(Answer(asked.pieces.data(), asked.pieces.size(),
                                  reinterpret_cast<float*>(out), [&](size_t section) {
                                    const int64_t elements = Elements(asked.pieces[section]);
                                    const int64_t there = parts.Written(section, elements);
                                    if (there > 0) SayPart(rank, there);
                                  }));
      }
      mailbox_->Release(rank, message.answer);
      mailbox_->Send(*rows_, rank, asked.elements);
      ++answered;
      return OkStatus();
    }

    int64_t Elements(const collective::Piece& piece) const {
      return piece.bags * op_->layout_.sections[piece.section].dim;
    }

    // Tells a rank that the first `sections` of its answer are there.
    void SayPart(int rank, int64_t sections) {
      mailbox_->Send(*rows_, rank, sections, true);
      if (auto* observe = part_observer.load()) observe(rank, sections);
    }

    // Calls `written` for each piece that is there, in any thread, several at a time.
    Status Answer(Pieces pieces, size_t count, float* out,
                  const std::function<void(size_t)>& written = nullptr) {
      LockedVariables variables;
      std::vector<Table> tables;
      std::vector<Status> errors(count);
      int64_t elements = 0;
      TF_RETURN_IF_ERROR(variables.Lock(context_, handles_, &tables));
      for (size_t p = 0; p < count; ++p) elements += Elements(pieces[p]);
      Parallel(context_, static_cast<int64_t>(count), elements, [&](int64_t p) {
        const collective::Piece& piece = pieces[p];
        const Section& section = op_->layout_.sections[piece.section];
        const Placement placement(section.kind, op_->layout_.ranks);
        auto scratch = op_->scratch_.Take();
        int64_t* rows = scratch->rows.At(piece.keys);
        for (int64_t k = 0; k < piece.keys; ++k) rows[k] = placement.Row(piece.key[k]);
        errors[p] = gather_op::Answer(section, piece, tables[section.table], rows, 1.f,
                                      &scratch->gather, out + piece.flat);
        if (written && errors[p].ok()) written(p);
      });
      for (const Status& error : errors) TF_RETURN_IF_ERROR(error);
      return OkStatus();
    }

    void KeysAreOver(int lost) {
      int came = 0;
      for (int rank = 0; rank < mailbox_->ranks(); ++rank) came += Came(*keys_, rank);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        parts_ = came + 2;  // This is a part, too, and so are this rank's own rows.
      }
      Done(lost == mailbox::kNobodyLost ? OkStatus() : Lost(keys_->name, lost));
    }

    void Done(const Status& status) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (status_.ok()) status_ = status;
        if (++done_parts_ != parts_) return;
      }
      Complete();
    }

    void Complete() {
      if (status_.ok()) status_ = SetOutputs();
      if (!status_.ok()) context_->SetStatus(status_);
      for (int rank = 0; rank < mailbox_->ranks(); ++rank) {
        if (Came(*keys_, rank)) mailbox_->Release(rank, keys_->received[rank]);
      }
      flat_ = Tensor();
      keys_.reset();  // It calls this, and so would keep itself.
      done_();
    }

    Status SetOutputs() {
      const int ranks = mailbox_->ranks(), me = mailbox_->rank();
      Tensor *message = nullptr, *row_splits = nullptr, *answers = nullptr;
      const int32* own_splits = context_->input(1).vec<int32>().data();
      TF_RETURN_IF_ERROR(
          MakeRowsAndSplits(context_, RowsFrom(keys_->received, me, own_splits[me]), &message));
      const char* own = BytesOf(context_->input(0)) +
                        std::accumulate(own_splits, own_splits + me, int64_t{0}) * sizeof(int64_t);
      TF_RETURN_IF_ERROR(
          Copy(mailbox_, *keys_, own, own_splits[me] * sizeof(int64_t), BytesOf(message)));
      context_->set_output(2, flat_);
      TF_RETURN_IF_ERROR(context_->allocate_output(3, TensorShape({ranks}), &row_splits));
      std::copy(request_.row_splits.begin(), request_.row_splits.end(),
                row_splits->vec<int32>().data());
      TF_RETURN_IF_ERROR(SetLocalRows(*message, *context_->mutable_output(1)));
      TF_RETURN_IF_ERROR(context_->allocate_output(4, TensorShape({}), &answers));
      answers->scalar<Variant>()() = std::move(handle_);
      return OkStatus();
    }

    // Sets what CollectiveHear would read in the message.
    Status SetLocalRows(const Tensor& message, const Tensor& splits) {
      const Layout& layout = op_->layout_;
      ReceivedMessage received;
      TF_RETURN_IF_ERROR(layout.Parse(message, splits, &received));
      std::vector<int64_t*> rows(layout.tables);
      for (int t = 0; t < layout.tables; ++t) {
        Tensor* out = nullptr;
        const TensorShape shape({received.rows[t]});
        TF_RETURN_IF_ERROR(context_->allocate_output(5 + t, shape, &out));
        rows[t] = out->flat<int64_t>().data();
      }
      for (const collective::Piece& piece : received.pieces) {
        const Placement placement(layout.sections[piece.section].kind, layout.ranks);
        int64_t* out = rows[layout.sections[piece.section].table] + piece.row;
        for (int64_t k = 0; k < piece.keys; ++k) out[k] = placement.Row(piece.key[k]);
      }
      return OkStatus();
    }

    AlltoallKeysOp* op_;
    OpKernelContext* context_;
    Mailbox* mailbox_;
    DoneCallback done_;
    OpInputList handles_;
    ReceivedMessage request_;
    Tensor flat_;
    uint64_t block_ = 0;
    AnswersHandle handle_;
    std::shared_ptr<Exchange> keys_, rows_;

    std::mutex mutex_;
    Status status_;
    int done_parts_ = 0, parts_ = -1;
  };

  Layout layout_;
  std::string rows_name_;
  ObjectPool<AnswerScratch> scratch_;
};

REGISTER_UNARY_VARIANT_DECODE_FUNCTION(AnswersHandle, "collective::AnswersHandle");
REGISTER_KERNEL_BUILDER(Name("CollectiveSharedAlltoallKeys").Device(DEVICE_CPU), AlltoallKeysOp);

// Returns how many ranks this process has answered, for tests.
COLLECTIVE_CARRIER_EXPORT int64_t collective_answers() { return answered; }
// Has `observe` called, between the parts of an answer, for tests.
COLLECTIVE_CARRIER_EXPORT void collective_observe_parts(void (*observe)(int, int64_t)) {
  part_observer = observe;
}

}  // namespace carrier
}  // namespace collective
