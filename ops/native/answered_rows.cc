// CollectiveSharedAlltoallRows: waits until all owners have answered, and meanwhile pools the
// lookups whose rows are there.

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "awaited_answers.h"
#include "mailbox.h"
#include "parallel.h"
#include "pooling.h"
#include "tensorflow/core/framework/variant.h"

namespace collective {
namespace carrier {

using namespace tensorflow;

// How many lookups this process has pooled while rows still came, for tests.
std::atomic<int64_t> pooled_early{0};

class AlltoallRowsOp : public SharedOp {
 public:
  explicit AlltoallRowsOp(OpKernelConstruction* context) : SharedOp(context) {
    OP_REQUIRES_OK(context, place_.Read(context));
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
    by_section_.resize(members_.size());
    std::iota(by_section_.begin(), by_section_.end(), 0);
    std::stable_sort(by_section_.begin(), by_section_.end(),
                     [&](int a, int b) { return members_[a].section < members_[b].section; });
  }

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    place_.Begin(context, collective_, std::move(done),
                 [=](DoneCallback after) { Take(context, mailbox, std::move(after)); });
  }

 private:
  // One run of the operation.
  class Taking : public std::enable_shared_from_this<Taking> {
   public:
    Taking(AlltoallRowsOp* op, OpKernelContext* context, Mailbox* mailbox,
           std::shared_ptr<AwaitedAnswers> answers, DoneCallback done)
        : op_(op),
          context_(context),
          mailbox_(mailbox),
          answers_(std::move(answers)),
          done_(std::move(done)) {}

    void Start() {
      auto self = shared_from_this();
      answers_->Watch([self] { self->Advance(); });
      Advance();
    }

   private:
    // Does what can be done. A thread that comes meanwhile leaves it to the one that is at it.
    void Advance() {
      if (calls_.fetch_add(1) != 0) return;
      int seen;
      do {
        seen = calls_.load();
        int lost;
        if (answers_->IsOver(&lost)) return Complete(lost);  // Nobody comes in any more.
        PoolEarly(answers_->Sections());
      } while (calls_.fetch_sub(seen) != seen);
    }

    // Pools the members of the first `sections`. Those with bad inputs, and those that it hasn't
    // come to when all rows are there, are left to CollectivePool.
    void PoolEarly(int64_t sections) {
      LookupInputs inputs;
      if (!inputs.Read(context_).ok()) return;
      const std::vector<Lookup>& members = op_->members_;
      const size_t first = next_;
      int64_t cost = 0;
      for (; next_ < members.size(); ++next_) {
        const int m = op_->by_section_[next_];
        if (members[m].section >= sections) break;
        cost += inputs.positions[m].NumElements() * members[m].dim;
      }
      if (next_ == first) return;
      if (early_ == nullptr) early_ = std::make_shared<PooledEarly>();
      early_->results.resize(members.size());
      Parallel(context_, static_cast<int64_t>(next_ - first), cost, [&](int64_t i) {
        int lost;
        if (answers_->IsOver(&lost)) return;
        const int m = op_->by_section_[first + i];
        MemberInputs opened;
        Tensor pooled;
        if (!opened.Open(members[m], m, inputs).ok()) return;
        const TensorShape shape({opened.out, members[m].dim});
        if (!context_->allocate_temp(DT_FLOAT, shape, &pooled).ok()) return;
        auto scratch = op_->scratch_.Take();
        Pool(members[m], opened, &*scratch, pooled.flat<float>().data());
        early_->results[m] = std::move(pooled);
        ++pooled_early;
      });
    }

    void Complete(int lost) {
      const Exchange& exchange = *answers_->exchange;
      Status status = lost == mailbox::kNobodyLost ? OkStatus() : Lost(op_->collective_, lost);
      for (int rank = 0; status.ok() && rank < mailbox_->ranks(); ++rank) {
        if (rank != mailbox_->rank()) status = Matches(exchange, rank, exchange.received[rank]);
      }
      Tensor* early = nullptr;
      if (status.ok()) status = context_->allocate_output(1, TensorShape({}), &early);
      if (status.ok()) {
        context_->set_output(0, context_->input(0));
        early->scalar<Variant>()() = PooledEarlyHandle{std::move(early_)};
      } else {
        context_->SetStatus(status);
      }
      done_();
    }

    AlltoallRowsOp* op_;
    OpKernelContext* context_;
    Mailbox* mailbox_;
    const std::shared_ptr<AwaitedAnswers> answers_;
    DoneCallback done_;
    std::atomic<int> calls_{0};
    size_t next_ = 0;  // Of the members by section: the first that wasn't looked at.
    std::shared_ptr<PooledEarly> early_;
  };

  void Take(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) {
    const auto* handle = context->input(2).scalar<Variant>()().get<AnswersHandle>();
    OP_REQUIRES_ASYNC(
        context, handle != nullptr && handle->answers != nullptr,
        errors::InvalidArgument("'", collective_, "' is given no exchange that has begun"), done);
    const std::shared_ptr<AwaitedAnswers> answers = handle->answers;
    const std::shared_ptr<Exchange> exchange = answers->exchange;
    std::make_shared<Taking>(this, context, mailbox, answers, std::move(done))->Start();
    mailbox->Poll(*exchange);
  }

  PlaceInRun place_;
  std::vector<Lookup> members_;
  std::vector<int> by_section_;  // The members' numbers.
  ObjectPool<LookupScratch> scratch_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveSharedAlltoallRows").Device(DEVICE_CPU), AlltoallRowsOp);

COLLECTIVE_CARRIER_EXPORT int64_t collective_pooled_early() { return pooled_early; }

}  // namespace carrier
}  // namespace collective
