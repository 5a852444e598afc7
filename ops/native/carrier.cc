// CollectiveSharedAlltoall, -Allgather, -Allreduce, -Broadcast: collectives through shared memory.
//
// They take and give what Horovod's operations do, and meet their peers under the last part of
// their own name, as those do. They are asynchronous: see mailbox.h for how they wait.

#include <string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "awaited_rows.h"
#include "mailbox.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace carrier {

using namespace tensorflow;
using mailbox::Exchange;
using mailbox::Mailbox;
using mailbox::Message;
using mailbox::Piece;

enum Kind : uint32_t {
  kAlltoall = 1,
  kAllgather,
  kAllreduce,
  kSums,
  kBroadcast,
  kKeys,
  kRowsThere
};
// Added to the kind where the data go by NCCL (gpu/nccl_carrier.cc), and headers by the mailbox.
constexpr uint32_t kByNccl = 32;
// Stands for a collective of which this rank has no part, since it has aborted its communicator.
constexpr uint32_t kAborted = 64;

// Of an allreduce on more than two ranks: up to here each rank sends all to all.
constexpr int64_t kSmallSum = 32 << 10;

std::string Described(uint32_t kind) {
  if (kind & kByNccl) return Described(kind & ~kByNccl) + " by NCCL";
  switch (kind) {
    case kAlltoall:
      return "an all-to-all";
    case kAllgather:
      return "an allgather";
    case kAllreduce:
    case kSums:
      return "an allreduce";
    case kBroadcast:
      return "a broadcast";
    case kKeys:
      return "an all-to-all of keys";
    case kRowsThere:
      return "an all-to-all of rows";
    case kAborted:
      return "given up, like all by NCCL";
    default:
      return "something unknown";
  }
}

// Says that a peer is gone; launch/output/stderr_lines.py knows these words.
Status Lost(const std::string& name, int rank) {
  if (rank == mailbox::kGivenUp) {
    return errors::Cancelled("'", name, "' was given up: its run timed out, or failed elsewhere");
  }
  if (Mailbox::Get()->HasGivenUp(rank)) {
    return errors::Unknown("lost rank ", rank,
                           ", which has given up a run that failed or timed "
                           "out there, while '",
                           name, "' waited for it in shared memory");
  }
  return errors::Unknown("lost rank ", rank, ", which has ended, while '", name,
                         "' waited for it in shared memory");
}

// Compares what the ranks exchange with what this one does.
Status Matches(const Exchange& own, int rank, const Message& other) {
  if (other.kind != own.kind || other.dtype != own.dtype || other.item != own.item) {
    return errors::InvalidArgument(
        "the ranks do not exchange the same in '", own.name, "': here it is ", Described(own.kind),
        " of ", DataTypeString(static_cast<DataType>(own.dtype)), ", ", own.item,
        " bytes a row, on rank ", rank, " it is ", Described(other.kind), " of ",
        DataTypeString(static_cast<DataType>(other.dtype)), ", ", other.item, " bytes a row");
  }
  return OkStatus();
}

int64_t RowBytes(const Tensor& x) {
  int64_t bytes = DataTypeSize(x.dtype());
  for (int d = 1; d < x.dims(); ++d) bytes *= x.dim_size(d);
  return bytes;
}

const char* BytesOf(const Tensor& x) { return x.tensor_data().data(); }
char* BytesOf(Tensor* x) { return const_cast<char*>(x->tensor_data().data()); }

// Refuses splits that don't cut `x` for the ranks.
Status CheckSplits(const std::string& name, const Tensor& x, const Tensor& splits, int ranks) {
  if (x.dims() < 1) {
    return errors::InvalidArgument("'", name, "' exchanges rows, not a scalar");
  }
  if (splits.dims() != 1 || splits.NumElements() != ranks) {
    return errors::InvalidArgument("'", name, "' needs ", ranks, " splits, not ",
                                   splits.NumElements());
  }
  const auto counts = splits.vec<int32>();
  int64_t sum = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (counts(rank) < 0) {
      return errors::InvalidArgument("'", name, "' has the split ", counts(rank), " for rank ",
                                     rank);
    }
    sum += counts(rank);
  }
  if (sum != x.dim_size(0)) {
    return errors::InvalidArgument("'", name, "' has splits of ", sum, " rows, and ", x.dim_size(0),
                                   " rows");
  }
  return OkStatus();
}

// Returns how many rows came from each rank; `own` are this one's.
std::vector<int64_t> RowsFrom(const std::vector<Message>& received, int me, int64_t own) {
  std::vector<int64_t> rows;
  for (const Message& message : received) rows.push_back(message.rows);
  rows[me] = own;
  return rows;
}

// Makes the first output, for so many rows like those of the first input from each rank.
Status MakeRows(OpKernelContext* context, const std::vector<int64_t>& rows, Tensor** out) {
  TensorShape shape = context->input(0).shape();
  shape.set_dim(0, std::accumulate(rows.begin(), rows.end(), int64_t{0}));
  return context->allocate_output(0, shape, out);
}

// Makes what an all-to-all gives: `out` for its rows, and the splits, which it fills.
Status MakeRowsAndSplits(OpKernelContext* context, const std::vector<int64_t>& rows, Tensor** out) {
  Tensor* splits = nullptr;
  TF_RETURN_IF_ERROR(
      context->allocate_output(1, TensorShape({static_cast<int64_t>(rows.size())}), &splits));
  std::copy(rows.begin(), rows.end(), splits->vec<int32>().data());
  return MakeRows(context, rows, out);
}

// Keeps an all-to-all in its place of a run: gradients wait for the rows that are read with them.
class PlaceInRun {
 public:
  using Done = AsyncOpKernel::DoneCallback;

  Status Read(OpKernelConstruction* context) {
    std::string phase;
    TF_RETURN_IF_ERROR(context->GetAttr("phase", &phase));
    brings_rows_ = phase == "rows";
    brings_gradients_ = phase == "gradients";
    return OkStatus();
  }

  // Calls `send`, now or when the rows have come, with what is to be called after it.
  void Begin(OpKernelContext* context, const std::string& name, Done done,
             std::function<void(Done)> send) const {
    AwaitedRows* awaited = AwaitedRows::Get();
    const int64_t step = context->step_id();
    if (brings_rows_) {
      // The run lasts as long as this operation, and so do the gradients held back in it.
      done = [awaited, step, name, done = std::move(done)] {
        awaited->Came(step, name);
        done();
      };
    }
    if (!brings_gradients_ || !awaited->Any()) {
      send(std::move(done));
      return;
    }
    CancellationManager* cancellation = context->cancellation_manager();
    const CancellationToken token = cancellation->get_cancellation_token();
    auto stop = [=] {
      awaited->Drop(step, name);
      context->SetStatus(errors::Cancelled("'", name, "' was not sent: the run has failed"));
      done();
    };
    if (!cancellation->RegisterCallback(token, stop)) {
      stop();
      return;
    }
    auto send_now = [=] {
      // Or else the run has failed, and `stop` is called.
      if (cancellation->DeregisterCallback(token)) send(done);
    };
    if (!awaited->Hold(step, name, send_now)) send_now();
  }

 private:
  bool brings_rows_ = false, brings_gradients_ = false;
};

class SharedOp : public AsyncOpKernel {
 public:
  explicit SharedOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    collective_ = name().substr(name().find_last_of('/') + 1);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) final {
    Mailbox* mailbox = Mailbox::Get();
    OP_REQUIRES_ASYNC(context, mailbox != nullptr,
                      errors::FailedPrecondition("'", collective_,
                                                 "' goes through shared memory, which isn't open"),
                      done);
    Begin(context, mailbox, std::move(done));
  }

 protected:
  virtual void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) = 0;

  std::shared_ptr<Exchange> NewExchange(const Mailbox& mailbox, Kind kind, const Tensor& x,
                                        int64_t item) const {
    auto exchange = std::make_shared<Exchange>();
    exchange->name = collective_;
    exchange->kind = kind;
    exchange->dtype = x.dtype();
    exchange->item = item;
    exchange->awaited.assign(mailbox.ranks(), true);
    exchange->awaited[mailbox.rank()] = false;
    return exchange;
  }

  static void SendToAll(const Mailbox& mailbox, const char* data, int64_t bytes, int64_t rows,
                        Exchange* exchange) {
    exchange->same_data = true;
    for (int rank = 0; rank < mailbox.ranks(); ++rank) {
      if (rank != mailbox.rank()) {
        exchange->parcels.emplace_back(rank, data, bytes, rows);
      }
    }
  }

  // Sends, and calls `take` when all has come; `done` is called in any case.
  static void Run(OpKernelContext* context, Mailbox* mailbox,
                  const std::shared_ptr<Exchange>& exchange, std::function<Status(Exchange*)> take,
                  DoneCallback done) {
    exchange->finish = [context, mailbox, take, done](Exchange* own, int lost) {
      Status status = lost == mailbox::kNobodyLost ? OkStatus() : Lost(own->name, lost);
      for (int rank = 0; status.ok() && rank < mailbox->ranks(); ++rank) {
        if (Came(*own, rank)) status = Matches(*own, rank, own->received[rank]);
      }
      if (status.ok()) status = take(own);
      for (int rank = 0; rank < mailbox->ranks(); ++rank) {
        if (Came(*own, rank)) mailbox->Release(rank, own->received[rank]);
      }
      if (!status.ok()) context->SetStatus(status);
      done();
    };
    const std::string problem = mailbox->Start(exchange);
    if (!problem.empty()) {
      context->SetStatus(errors::ResourceExhausted("'", exchange->name, "': ", problem));
      done();
    }
  }

  // Tells whether a rank's message is there: every name has a hash other than 0.
  static bool Came(const Exchange& own, int rank) { return own.received[rank].name != 0; }

  // Appends the rows that came from all ranks, this one's own among them, to `out`.
  static Status Copy(Mailbox* mailbox, const Exchange& own, const char* own_data, int64_t own_bytes,
                     char* out) {
    for (int rank = 0; rank < mailbox->ranks(); ++rank) {
      const char* data = own_data;
      int64_t bytes = own_bytes;
      if (rank != mailbox->rank()) {
        const Message& message = own.received[rank];
        data = mailbox->Data(rank, message);
        bytes = message.bytes;
        if (data == nullptr) return errors::ResourceExhausted("shared memory can't be mapped");
      }
      if (bytes > 0) memcpy(out, data, bytes);
      out += bytes;
    }
    return OkStatus();
  }

  std::string collective_;
};

class AlltoallOp : public SharedOp {
 public:
  explicit AlltoallOp(OpKernelConstruction* context) : SharedOp(context) {
    OP_REQUIRES_OK(context, place_.Read(context));
  }

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    place_.Begin(context, collective_, std::move(done),
                 [=](DoneCallback after) { Send(context, mailbox, std::move(after)); });
  }

 private:
  PlaceInRun place_;

  void Send(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) {
    const Tensor x = context->input(0), splits = context->input(1);
    const int ranks = mailbox->ranks(), me = mailbox->rank();
    OP_REQUIRES_OK_ASYNC(context, CheckSplits(collective_, x, splits, ranks), done);
    const auto counts = splits.vec<int32>();
    const int64_t item = RowBytes(x);
    auto exchange = NewExchange(*mailbox, kAlltoall, x, item);
    const char* data = BytesOf(x);
    const char* own_data = data;
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t bytes = counts(rank) * item;
      if (rank == me) {
        own_data = data;
      } else {
        exchange->parcels.emplace_back(rank, data, bytes, counts(rank));
      }
      data += bytes;
    }
    const int64_t own_rows = counts(me);
    auto take = [=](Exchange* own) -> Status {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(MakeRowsAndSplits(context, RowsFrom(own->received, me, own_rows), &out));
      return Copy(mailbox, *own, own_data, own_rows * item, BytesOf(out));
    };
    Run(context, mailbox, exchange, take, std::move(done));
  }
};

class AllgatherOp : public SharedOp {
 public:
  using SharedOp::SharedOp;

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    const Tensor x = context->input(0);
    OP_REQUIRES_ASYNC(context, x.dims() >= 1,
                      errors::InvalidArgument("'", collective_, "' gathers rows, not scalars"),
                      done);
    const int64_t item = RowBytes(x), rows = x.dim_size(0);
    auto exchange = NewExchange(*mailbox, kAllgather, x, item);
    SendToAll(*mailbox, BytesOf(x), rows * item, rows, exchange.get());
    auto take = [=](Exchange* own) -> Status {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(MakeRows(context, RowsFrom(own->received, mailbox->rank(), rows), &out));
      return Copy(mailbox, *own, BytesOf(x), rows * item, BytesOf(out));
    };
    Run(context, mailbox, exchange, take, std::move(done));
  }
};

// Rank 0 gives, the others take.
class BroadcastOp : public SharedOp {
 public:
  using SharedOp::SharedOp;

 protected:
  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    const Tensor x = context->input(0);
    const int64_t bytes = x.tensor_data().size();
    auto exchange = NewExchange(*mailbox, kBroadcast, x, bytes);
    const bool gives = mailbox->rank() == 0;
    for (int rank = 0; rank < mailbox->ranks(); ++rank) {
      exchange->awaited[rank] = !gives && rank == 0;
    }
    if (gives) SendToAll(*mailbox, BytesOf(x), bytes, 1, exchange.get());
    auto take = [=](Exchange* own) -> Status {
      if (gives) {
        context->set_output(0, x);
        return OkStatus();
      }
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(0, x.shape(), &out));
      const char* data = mailbox->Data(0, own->received[0]);
      if (data == nullptr) return errors::ResourceExhausted("shared memory can't be mapped");
      if (bytes > 0) memcpy(BytesOf(out), data, bytes);
      return OkStatus();
    };
    Run(context, mailbox, exchange, take, std::move(done));
  }
};

// Adds in the order of the ranks, so that all have the same bits. With two ranks, and where there
// is little to add, each rank adds everything; else each adds a part, and gives the sums to all.
// Parts are of the elements of all tensors, one after the other; nothing is put together but in
// shared memory.
template <class T>
class AllreduceOp : public SharedOp {
 public:
  using SharedOp::SharedOp;

 protected:
  // A tensor, whose sums may be in the place of its values.
  struct Addend {
    const T* values;
    T* sums;
    int64_t size;
  };
  using Addends = std::vector<Addend>;

  void Begin(OpKernelContext* context, Mailbox* mailbox, DoneCallback done) override {
    auto addends = std::make_shared<Addends>();
    int64_t size = 0;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor& x = context->input(i);
      Tensor* out = nullptr;
      OP_REQUIRES_OK_ASYNC(
          context, context->forward_input_or_allocate_output({i}, i, x.shape(), &out), done);
      addends->push_back({x.flat<T>().data(), out->flat<T>().data(), x.NumElements()});
      size += x.NumElements();
    }
    const int64_t ranks = mailbox->ranks();
    // All of it stands for a row: sizes must be the same on all ranks.
    const int64_t bytes = size * sizeof(T);
    auto exchange = NewExchange(*mailbox, kAllreduce, context->input(0), bytes);
    if (ranks == 2 || bytes <= kSmallSum) {
      SendToAll(*mailbox, Pieces(*addends, 0, size, false), exchange.get());
      auto take = [=](Exchange* own) { return Add(mailbox, *own, *addends, 0, size); };
      Run(context, mailbox, exchange, take, std::move(done));
      return;
    }
    const int64_t part = (size + ranks - 1) / ranks;
    auto begin = [=](int64_t rank) { return std::min(size, rank * part); };
    const int64_t first = begin(mailbox->rank()), last = begin(mailbox->rank() + 1);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == mailbox->rank()) continue;
      exchange->parcels.emplace_back(rank, Pieces(*addends, begin(rank), begin(rank + 1), false),
                                     1);
    }
    auto take = [=](Exchange* own) { return Add(mailbox, *own, *addends, first, last); };
    auto then = [=] {
      if (!context->status().ok()) {
        done();
        return;
      }
      auto shared = NewExchange(*mailbox, kSums, context->input(0), bytes);
      shared->name = collective_ + ".sums";
      SendToAll(*mailbox, Pieces(*addends, first, last, true), shared.get());
      auto place = [=](Exchange* own) -> Status {
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank == mailbox->rank()) continue;
          const char* data = mailbox->Data(rank, own->received[rank]);
          if (data == nullptr) return errors::ResourceExhausted("shared memory can't be mapped");
          const T* sums = reinterpret_cast<const T*>(data);
          ForEach(*addends, begin(rank), begin(rank + 1), [&](const Addend& part, int64_t place) {
            memcpy(part.sums, sums + place, part.size * sizeof(T));
          });
        }
        return OkStatus();
      };
      Run(context, mailbox, shared, place, done);
    };
    Run(context, mailbox, exchange, take, then);
  }

 private:
  // Calls `visit` with each part of a tensor in [first, last), and its place after `first`.
  template <class Visit>
  static void ForEach(const Addends& addends, int64_t first, int64_t last, Visit visit) {
    int64_t start = 0;
    for (const Addend& addend : addends) {
      const int64_t from = std::max(first, start), to = std::min(last, start + addend.size);
      if (from < to) {
        visit(Addend{addend.values + (from - start), addend.sums + (from - start), to - from},
              from - first);
      }
      start += addend.size;
    }
  }

  static std::vector<Piece> Pieces(const Addends& addends, int64_t first, int64_t last, bool sums) {
    std::vector<Piece> pieces;
    ForEach(addends, first, last, [&](const Addend& part, int64_t) {
      const T* data = sums ? part.sums : part.values;
      pieces.push_back({reinterpret_cast<const char*>(data), part.size * sizeof(T)});
    });
    return pieces;
  }

  static void SendToAll(const Mailbox& mailbox, const std::vector<Piece>& pieces,
                        Exchange* exchange) {
    exchange->same_data = true;
    for (int rank = 0; rank < mailbox.ranks(); ++rank) {
      if (rank != mailbox.rank()) exchange->parcels.emplace_back(rank, pieces, 1);
    }
  }

  static Status Add(Mailbox* mailbox, const Exchange& own, const Addends& addends, int64_t first,
                    int64_t last) {
    std::vector<const T*> received(mailbox->ranks(), nullptr);
    for (int rank = 0; rank < mailbox->ranks(); ++rank) {
      if (rank == mailbox->rank()) continue;
      const char* data = mailbox->Data(rank, own.received[rank]);
      if (data == nullptr) return errors::ResourceExhausted("shared memory can't be mapped");
      received[rank] = reinterpret_cast<const T*>(data);
    }
    ForEach(addends, first, last, [&](const Addend& part, int64_t place) {
      auto of_rank = [&](size_t rank) {
        return received[rank] == nullptr ? part.values : received[rank] + place;
      };
      // By blocks, since the sums may lie where this rank's values do.
      constexpr int64_t kBlock = 1024;
      T block[kBlock];
      for (int64_t start = 0; start < part.size; start += kBlock) {
        const int64_t size = std::min(kBlock, part.size - start);
        const T *one = of_rank(0) + start, *other = of_rank(1) + start;
        for (int64_t i = 0; i < size; ++i) block[i] = static_cast<T>(one[i] + other[i]);
        for (size_t rank = 2; rank < received.size(); ++rank) {
          other = of_rank(rank) + start;
          for (int64_t i = 0; i < size; ++i) block[i] = static_cast<T>(block[i] + other[i]);
        }
        memcpy(part.sums + start, block, size * sizeof(T));
      }
    });
    return OkStatus();
  }
};

class AwaitRowsOp : public OpKernel {
 public:
  explicit AwaitRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("collectives", &collectives_));
  }

  void Compute(OpKernelContext* context) override {
    AwaitedRows::Get()->Expect(context->step_id(), collectives_);
  }

 private:
  std::vector<std::string> collectives_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveAwaitRows").Device(DEVICE_CPU), AwaitRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSharedAlltoall").Device(DEVICE_CPU), AlltoallOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSharedAllgather").Device(DEVICE_CPU), AllgatherOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSharedBroadcast").Device(DEVICE_CPU), BroadcastOp);
#define REGISTER(type)                                                                \
  REGISTER_KERNEL_BUILDER(                                                            \
      Name("CollectiveSharedAllreduce").Device(DEVICE_CPU).TypeConstraint<type>("T"), \
      AllreduceOp<type>)
REGISTER(float);
REGISTER(double);
REGISTER(Eigen::half);
REGISTER(bfloat16);
REGISTER(int8);
REGISTER(uint8);
REGISTER(int32);
REGISTER(int64_t);
#undef REGISTER

// Python calls these (ops/communication/carrier_choice.py).

#define COLLECTIVE_CARRIER_EXPORT extern "C" __attribute__((used, visibility("default")))

COLLECTIVE_CARRIER_EXPORT const char* collective_mailbox_open(int file, int rank, int ranks) {
  static std::string* problem = new std::string;
  *problem = Mailbox::Open(file, rank, ranks);
  return problem->c_str();
}

COLLECTIVE_CARRIER_EXPORT void collective_mailbox_leave() {
  if (Mailbox* mailbox = Mailbox::Get()) mailbox->Leave();
}

// Ends what waits for other ranks, now and later, and tells them: a run has failed half-way.
COLLECTIVE_CARRIER_EXPORT void collective_mailbox_give_up() {
  if (Mailbox* mailbox = Mailbox::Get()) mailbox->GiveUp();
}

// Returns what had waited for whom when this rank gave up; "" if it hasn't.
COLLECTIVE_CARRIER_EXPORT const char* collective_mailbox_given_up() {
  thread_local std::string waited;
  Mailbox* mailbox = Mailbox::Get();
  waited = mailbox == nullptr ? "" : mailbox->given_up();
  return waited.c_str();
}

// Returns the bytes of this rank's arena.
COLLECTIVE_CARRIER_EXPORT int64_t collective_mailbox_bytes() {
  Mailbox* mailbox = Mailbox::Get();
  return mailbox == nullptr ? 0 : static_cast<int64_t>(mailbox->arena_bytes());
}

}  // namespace carrier
}  // namespace collective
