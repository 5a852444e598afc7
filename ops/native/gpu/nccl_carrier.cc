// CollectiveNcclAlltoall, -Allgather, -Allreduce, -Broadcast: collectives by NCCL.
//
// They take and give what those through shared memory do, and use their mailbox for headers: when
// all ranks of a collective are there, how much comes from whom, and its ticket
// (nccl_communicator.h). The data go from device to device, as one group of NCCL on the operation's
// own stream; an operation is over when its group is on the stream, as any of a GPU.
//
// The same classes are there for the CPU, for a test's functions, which move the host's memory.

#include <string.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../mailbox.h"
#include "nccl_communicator.h"
#include "stream.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace carrier {

using nccl::Communicator;
using nccl::Move;

// What rank 0's headers carry.
struct Ticket {
  uint64_t number;
  nccl::UniqueId communicator;  // With number 0.
};
static_assert(sizeof(Ticket) <= mailbox::kInlineBytes, "headers are in the ring whole");

const void* DataOf(const Tensor& x) { return x.tensor_data().data(); }
void* DataOf(Tensor* x) { return const_cast<char*>(x->tensor_data().data()); }

class NcclOp : public AsyncOpKernel {
 public:
  explicit NcclOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    collective_ = name().substr(name().find_last_of('/') + 1);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) final {
    Mailbox* mailbox = Mailbox::Get();
    Communicator* communicator = Communicator::Get();
    OP_REQUIRES_ASYNC(
        context, mailbox != nullptr && communicator != nullptr,
        errors::FailedPrecondition("'", collective_, "' goes by NCCL, which isn't open"), done);
    const bool on_host = context->device()->attributes().device_type() == DEVICE_CPU;
    OP_REQUIRES_ASYNC(
        context, on_host == communicator->on_host(),
        errors::InvalidArgument("'", collective_, "' goes by NCCL, which moves the memory of ",
                                on_host ? "GPUs, but it was placed on the CPU" : "hosts",
                                ": leave GPUs visible to the session, or build it with "
                                "scope(carrier='horovod')"),
        done);
    Begin(context, mailbox, std::move(done));
  }

 protected:
  // Makes room for what comes, and says what is to be moved.
  using Headers = std::vector<Message>;  // By rank.
  using Plan = std::function<Status(const Headers&, std::vector<Move>*)>;

  virtual void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) = 0;

  // Meets the peers, and moves what `plan` says in its turn; `done` is called in any case.
  //
  // Of headers, `kind`, the type of `x` and `item` must be the same on all ranks; `rows` are of
  // the rows for each rank.
  void Meet(OpKernelContext* context, Mailbox* mailbox, Kind kind, const Tensor& x, int64_t item,
            const std::vector<int64_t>& rows, Plan plan, DoneCallback done) const {
    Communicator* communicator = Communicator::Get();
    const int me = mailbox->rank(), ranks = mailbox->ranks();
    auto exchange = std::make_shared<Exchange>();
    exchange->name = collective_;
    exchange->kind = kind | kByNccl;
    exchange->dtype = x.dtype();
    exchange->item = item;
    exchange->awaited.assign(ranks, true);
    exchange->awaited[me] = false;
    Ticket own_ticket{};
    Status usable = communicator->Usable(collective_);
    if (usable.ok() && me == 0) {
      usable = communicator->NextTicket(&own_ticket.number, &own_ticket.communicator);
    }
    if (!usable.ok()) {
      // The peers must not wait for this rank, which may not end for that.
      exchange->kind = kAborted;
      exchange->awaited.assign(ranks, false);
      exchange->finish = [](Exchange*, int) {};
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank != me) exchange->parcels.emplace_back(rank, nullptr, 0, 0);
      }
      mailbox->Start(exchange);
      context->SetStatus(usable);
      done();
      return;
    }
    const uint64_t bytes = me > 0                   ? 0
                           : own_ticket.number == 0 ? sizeof(Ticket)
                                                    : sizeof(own_ticket.number);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == me) continue;
      exchange->parcels.emplace_back(rank, reinterpret_cast<const char*>(&own_ticket), bytes,
                                     rows[rank]);
    }
    // Without the ticket that the others may have there is no order any more.
    auto give_up = [=](const Status& status) {
      communicator->Break(status);
      context->SetStatus(status);
      done();
    };
    exchange->finish = [=](Exchange* headers, int lost) {
      Status status;
      if (lost == mailbox::kGivenUp || (lost >= 0 && mailbox->HasGivenUp(lost))) {
        give_up(Lost(headers->name, lost));
        return;
      }
      if (lost != mailbox::kNobodyLost) {
        give_up(errors::Unknown("lost rank ", lost, ", which has ended, while '", headers->name,
                                "' waited for it before NCCL"));
        return;
      }
      for (int rank = 0; rank < ranks; ++rank) {
        if (headers->received[rank].kind != kAborted) continue;
        give_up(errors::Unknown("rank ", rank, " has aborted NCCL's communicator, while '",
                                headers->name, "' waited for it; its own error says why"));
        return;
      }
      for (int rank = 0; status.ok() && rank < ranks; ++rank) {
        if (rank != me) status = Matches(*headers, rank, headers->received[rank]);
      }
      Ticket ticket = own_ticket;
      if (me > 0) {
        const Message& first = headers->received[0];
        memcpy(&ticket, first.text, std::min<size_t>(first.bytes, sizeof(ticket)));
        if ((first.kind & kByNccl) == 0) {  // There is no ticket: it is an error on all ranks.
          give_up(status);
          return;
        }
        if (ticket.number == 0) communicator->Know(ticket.communicator);
      }
      if (!status.ok()) {
        // All ranks see that not all are alike, so all leave it out.
        communicator->Ready(ticket.number, {headers->name, nullptr, nullptr, nullptr});
        context->SetStatus(status);
        done();
        return;
      }
      // The call outlives this exchange, whose headers it needs.
      auto came = std::make_shared<Headers>(headers->received);
      nccl::Call call;
      call.name = headers->name;
      call.stream = gpu::StreamOf(context);
      call.plan = [=](std::vector<Move>* moves) { return plan(*came, moves); };
      call.done = [context, done](const Status& issued) {
        if (!issued.ok()) context->SetStatus(issued);
        done();
      };
      communicator->Ready(ticket.number, std::move(call));
    };
    const std::string problem = mailbox->Start(exchange);
    if (!problem.empty()) give_up(errors::ResourceExhausted("'", collective_, "': ", problem));
  }

  // Sends rows of `x` and takes others into `out`, by rank, one's own among them. Both sides know
  // where there is nothing to move.
  static void Exchanged(const Tensor& x, const std::vector<int64_t>& from,
                        const std::vector<int64_t>& sent, Tensor* out,
                        const std::vector<int64_t>& received, int64_t item,
                        std::vector<Move>* moves) {
    const char* data = static_cast<const char*>(DataOf(x));
    char* place = static_cast<char*>(DataOf(out));
    for (int rank = 0; rank < static_cast<int>(sent.size()); ++rank) {
      const size_t bytes = sent[rank] * item, coming = received[rank] * item;
      if (bytes > 0) {
        moves->push_back(
            {Move::kSend, data + from[rank] * item, nullptr, bytes, nccl::kBytes, rank});
      }
      if (coming > 0) {
        moves->push_back({Move::kRecv, nullptr, place, coming, nccl::kBytes, rank});
      }
      place += coming;
    }
  }

  std::string collective_;
};

class NcclAlltoallOp : public NcclOp {
 public:
  explicit NcclAlltoallOp(OpKernelConstruction* context) : NcclOp(context) {
    OP_REQUIRES_OK(context, place_.Read(context));
  }

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    place_.Begin(context, collective_, std::move(done),
                 [=](DoneCallback after) { Send(context, mailbox, std::move(after)); });
  }

 private:
  PlaceInRun place_;

  void Send(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) const {
    const Tensor x = context->input(0), splits = context->input(1);
    const int ranks = mailbox->ranks(), me = mailbox->rank();
    OP_REQUIRES_OK_ASYNC(context, CheckSplits(collective_, x, splits, ranks), done);
    std::vector<int64_t> rows, from;
    int64_t sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      from.push_back(sum);
      rows.push_back(splits.vec<int32>()(rank));
      sum += rows.back();
    }
    const int64_t item = RowBytes(x);
    auto plan = [=](const Headers& headers, std::vector<Move>* moves) -> Status {
      const std::vector<int64_t> received = RowsFrom(headers, me, rows[me]);
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(MakeRowsAndSplits(context, received, &out));
      Exchanged(x, from, rows, out, received, item, moves);
      return OkStatus();
    };
    Meet(context, mailbox, kAlltoall, x, item, rows, plan, std::move(done));
  }
};

class NcclAllgatherOp : public NcclOp {
 public:
  using NcclOp::NcclOp;

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    const Tensor x = context->input(0);
    OP_REQUIRES_ASYNC(context, x.dims() >= 1,
                      errors::InvalidArgument("'", collective_, "' gathers rows, not scalars"),
                      done);
    const int ranks = mailbox->ranks(), me = mailbox->rank();
    const int64_t item = RowBytes(x);
    const std::vector<int64_t> from(ranks, 0), rows(ranks, x.dim_size(0));
    auto plan = [=](const Headers& headers, std::vector<Move>* moves) -> Status {
      const std::vector<int64_t> received = RowsFrom(headers, me, rows[me]);
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(MakeRows(context, received, &out));
      Exchanged(x, from, rows, out, received, item, moves);
      return OkStatus();
    };
    Meet(context, mailbox, kAllgather, x, item, rows, plan, std::move(done));
  }
};

// Rank 0 gives, the others take.
class NcclBroadcastOp : public NcclOp {
 public:
  using NcclOp::NcclOp;

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    const Tensor x = context->input(0);
    const int64_t bytes = x.tensor_data().size();
    const bool gives = mailbox->rank() == 0;
    auto plan = [=](const Headers&, std::vector<Move>* moves) -> Status {
      void* to = const_cast<void*>(DataOf(x));
      if (gives) {
        context->set_output(0, x);
      } else {
        Tensor* out = nullptr;
        TF_RETURN_IF_ERROR(context->allocate_output(0, x.shape(), &out));
        to = DataOf(out);
      }
      if (bytes > 0) {
        moves->push_back(
            {Move::kBroadcast, DataOf(x), to, static_cast<size_t>(bytes), nccl::kBytes, 0});
      }
      return OkStatus();
    };
    const std::vector<int64_t> rows(mailbox->ranks(), 1);
    Meet(context, mailbox, kBroadcast, x, bytes, rows, plan, std::move(done));
  }
};

// Adds tensors, all in one group. In what order NCCL adds those of more than two ranks is its own.
class NcclAllreduceOp : public NcclOp {
 public:
  using NcclOp::NcclOp;

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    int64_t bytes = 0;
    for (int i = 0; i < context->num_outputs(); ++i) {
      bytes += context->input(i).tensor_data().size();
    }
    // Room is made once all ranks are there, so that none waits for one that has found no memory.
    auto plan = [=](const Headers&, std::vector<Move>* moves) -> Status {
      for (int i = 0; i < context->num_outputs(); ++i) {
        const Tensor& x = context->input(i);
        const void* values = DataOf(x);
        const int64_t size = x.NumElements();
        const int type = TypeOf(x.dtype());
        Tensor* out = nullptr;
        TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({i}, i, x.shape(), &out));
        if (size > 0) {
          moves->push_back(
              {Move::kAllReduce, values, DataOf(out), static_cast<size_t>(size), type, 0});
        }
      }
      return OkStatus();
    };
    const std::vector<int64_t> rows(mailbox->ranks(), 1);
    Meet(context, mailbox, kAllreduce, context->input(0), bytes, rows, plan, std::move(done));
  }

 private:
  // Returns the ncclDataType_t; the operation has these types only.
  static int TypeOf(DataType type) {
    switch (type) {
      case DT_INT8:
        return 0;
      case DT_UINT8:
        return 1;
      case DT_INT32:
        return 2;
      case DT_INT64:
        return 4;
      case DT_HALF:
        return 6;
      case DT_FLOAT:
        return 7;
      case DT_DOUBLE:
        return 8;
      default:  // bfloat16
        return 9;
    }
  }
};

#define REGISTER(device)                                                                     \
  REGISTER_KERNEL_BUILDER(Name("CollectiveNcclAlltoall")                                     \
                              .Device(device)                                                \
                              .HostMemory("splits")                                          \
                              .HostMemory("received_splits"),                                \
                          NcclAlltoallOp);                                                   \
  REGISTER_KERNEL_BUILDER(Name("CollectiveNcclAllgather").Device(device).HostMemory("gate"), \
                          NcclAllgatherOp);                                                  \
  REGISTER_KERNEL_BUILDER(Name("CollectiveNcclAllreduce").Device(device).HostMemory("gate"), \
                          NcclAllreduceOp);                                                  \
  REGISTER_KERNEL_BUILDER(Name("CollectiveNcclBroadcast").Device(device), NcclBroadcastOp)
REGISTER(DEVICE_CPU);
REGISTER(DEVICE_GPU);
#undef REGISTER

// Python calls these (ops/communication/nccl.py).

// Returns why it can't be used; empty if it can.
COLLECTIVE_CARRIER_EXPORT const char* collective_nccl_open(const nccl::Functions* functions,
                                                           int on_host, int rank, int ranks) {
  static std::string* problem = new std::string;
  *problem = Communicator::Open(*functions, on_host != 0, rank, ranks);
  return problem->c_str();
}

// Returns why the communicator was aborted; empty if it wasn't.
COLLECTIVE_CARRIER_EXPORT const char* collective_nccl_problem() {
  static thread_local std::string* problem = new std::string;
  Communicator* communicator = Communicator::Get();
  *problem = communicator == nullptr ? "" : communicator->Problem();
  return problem->c_str();
}

COLLECTIVE_CARRIER_EXPORT void collective_nccl_leave() {
  Communicator* communicator = Communicator::Get();
  if (communicator != nullptr) communicator->Leave();
}

}  // namespace carrier
}  // namespace collective
