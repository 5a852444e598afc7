// Issues collectives to NCCL, in the same order on all ranks of a host.
//
//     any thread      headers of all ranks are here ──Ready(ticket)──▶ calls, by ticket
//     issuing thread  ◀──next ticket── (communicator, at the first) group of sends and receives
//     watching thread each 100 ms: has a rank ended? has NCCL failed? ──▶ Break: abort, errors
//
// Order: NCCL matches collectives only by the order in which ranks issue them, so all ranks must
// use the same order; TensorFlow starts collectives that are ready at the same time in any order.
// Before NCCL moves anything, ranks exchange headers through the mailbox (nccl_carrier.cc), which
// say how much comes from which rank. Rank 0's header also has a ticket: the number of collectives
// that it has started before. Each rank issues in the order of tickets. That needs no further
// messages, and also works for branches, loops and parallel runs. Ranks never wait in a circle:
// what comes before a collective on rank 0 needs nothing that comes after it.
//
// Lost peers: a collective whose headers don't arrive fails as in shared memory. A collective that
// is in progress on the device would wait forever: so the communicator is aborted, which ends its
// kernels. The results of the run are then worthless, so the caller asks for Problem() after it. A
// rank that aborts says so in its page of the mailbox: within a host NCCL doesn't tell its peers,
// which may have issued what this rank hasn't.

#ifndef COLLECTIVE_NATIVE_GPU_NCCL_COMMUNICATOR_H_
#define COLLECTIVE_NATIVE_GPU_NCCL_COMMUNICATOR_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/platform/status.h"

namespace collective {
namespace nccl {

using tensorflow::Status;

struct UniqueId {
  char bytes[128];
};
using Comm = void*;

constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
constexpr int kSum = 0;                       // ncclRedOp_t
constexpr int kBytes = 0;                     // ncclDataType_t: ncclInt8

// NCCL's functions, in the C interface that has been the same since NCCL 2.7, and two of CUDA's
// driver. Python fills it (ops/communication/nccl.py), from the library that CuPy brings, or a
// test.
struct Functions {
  int (*get_unique_id)(UniqueId*);
  int (*comm_init_rank)(Comm*, int ranks, UniqueId id, int rank);
  int (*comm_abort)(Comm);
  int (*comm_get_async_error)(Comm, int*);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, size_t count, int type, int peer, Comm, void* stream);
  int (*recv)(void*, size_t count, int type, int peer, Comm, void* stream);
  int (*all_reduce)(const void*, void*, size_t count, int type, int op, Comm, void* stream);
  int (*broadcast)(const void*, void*, size_t count, int type, int root, Comm, void* stream);
  const char* (*get_error_string)(int);
  const char* (*get_last_error)(Comm);
  // cuStreamGetCtx and cuCtxSetCurrent; null where `on_host` is true.
  int (*stream_context)(void* stream, void** context);
  int (*set_context)(void* context);
};

// What one rank moves in a collective; NCCL sees all of it as one group.
struct Move {
  enum Kind { kSend, kRecv, kAllReduce, kBroadcast } kind;
  const void* from;
  void* to;
  size_t count;
  int type;  // ncclDataType_t
  int peer;  // Or the broadcast's root.
};

// A collective for which all ranks are ready.
struct Call {
  std::string name;
  void* stream;
  std::function<Status(std::vector<Move>*)> plan;  // Makes room for what arrives; none: skip it.
  std::function<void(const Status&)> done;         // Called once, when it was issued or failed.
  bool told = false;                               // That it failed, while it was connecting.
};

class Communicator {
 public:
  // Returns the process's communicator; null before it is open.
  static Communicator* Get();
  // Opens it, once, with all functions. `on_host`: they move host memory, for tests.
  static std::string Open(const Functions& functions, bool on_host, int rank, int ranks);

  bool on_host() const { return on_host_; }

  // Refuses the collective `name` if the communicator was aborted.
  Status Usable(const std::string& name);

  // Returns the next ticket, and at the first one the communicator's id. Rank 0 calls it.
  Status NextTicket(uint64_t* ticket, UniqueId* id);
  // Takes the id, which comes with the first ticket.
  void Know(const UniqueId& id);
  // Issues the call once those of all earlier tickets have been issued.
  void Ready(uint64_t ticket, Call call);
  // Aborts the communicator, tells the peers, and fails all waiting calls; once.
  void Break(const Status& reason);
  // Does the same at the end of the process, but doesn't tell the peers: they have what this
  // rank has sent.
  void Leave();
  // Returns why the communicator was aborted; empty if it wasn't.
  std::string Problem();

 private:
  using Clock = std::chrono::steady_clock;
  Communicator(const Functions& functions, bool on_host, int rank, int ranks)
      : functions_(functions), on_host_(on_host), rank_(rank), ranks_(ranks) {}

  void Abort(const Status& reason, bool tells_peers);
  void IssueAll();
  Status Issue(const Call& call);
  Status Connect(const Call& call);
  Status Checked(int result, const char* function, const std::string& name, int peer = -1);
  Status Refusal(const std::string& name) const;
  void Watch();
  void StartThreads();

  const Functions functions_;
  const bool on_host_;
  const int rank_, ranks_;

  // Held while a group is put together, which waits for nothing: until then the communicator can't
  // be freed. Taken before `mutex_`.
  std::mutex grouping_;

  std::mutex mutex_;  // Of everything below.
  std::condition_variable wake_;
  std::map<uint64_t, Call> calls_;
  uint64_t next_ = 0, tickets_ = 0;
  UniqueId id_{};
  Comm comm_ = nullptr;
  std::shared_ptr<Call> connecting_;  // The call for which the communicator is being made.
  Status broken_;
  bool threads_started_ = false;
};

}  // namespace nccl
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_NCCL_COMMUNICATOR_H_
