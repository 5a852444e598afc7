// Issues collectives to NCCL: see nccl_communicator.h.

#include "nccl_communicator.h"

#include <signal.h>

#include <thread>

#include "../mailbox.h"
#include "tensorflow/core/platform/errors.h"

namespace collective {
namespace nccl {

using mailbox::Mailbox;
namespace errors = tensorflow::errors;

namespace {

constexpr auto kLook = std::chrono::milliseconds(100);
// How long a rank may be gone before what is under way is given up: what it has still sent, as it
// left in peace, arrives in much less.
constexpr auto kFarewell = std::chrono::seconds(1);

Communicator* instance = nullptr;
std::mutex instance_mutex;

}  // namespace

Communicator* Communicator::Get() {
  std::lock_guard<std::mutex> lock(instance_mutex);
  return instance;
}

std::string Communicator::Open(const Functions& functions, bool on_host, int rank, int ranks) {
  std::lock_guard<std::mutex> lock(instance_mutex);
  if (instance != nullptr) return "";
  if (!on_host && (functions.stream_context == nullptr || functions.set_context == nullptr)) {
    return "the functions of CUDA's driver are missing";
  }
  instance = new Communicator(functions, on_host, rank, ranks);  // Its threads use it to the end.
  return "";
}

Status Communicator::Usable(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_.ok() ? broken_ : Refusal(name);
}

Status Communicator::NextTicket(uint64_t* ticket, UniqueId* id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.ok()) return broken_;
  if (tickets_ == 0) {
    TF_RETURN_IF_ERROR(
        Checked(functions_.get_unique_id(&id_), "ncclGetUniqueId", "the first collective"));
  }
  *ticket = tickets_++;
  *id = id_;
  return tensorflow::OkStatus();
}

void Communicator::Know(const UniqueId& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  id_ = id;
}

void Communicator::Ready(uint64_t ticket, Call call) {
  Status refusal;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    StartThreads();
    if (broken_.ok()) {
      calls_.emplace(ticket, std::move(call));
      if (ticket == next_) wake_.notify_all();
      return;
    }
    refusal = Refusal(call.name);
  }
  if (call.plan != nullptr) call.done(refusal);
}

void Communicator::StartThreads() {
  if (threads_started_) return;
  threads_started_ = true;
  // Signals are for the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { IssueAll(); }).detach();
  std::thread([this] { Watch(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Status Communicator::Checked(int result, const char* function, const std::string& name, int peer) {
  if (result == kSuccess) return tensorflow::OkStatus();
  const char* words = functions_.get_error_string(result);
  const char* more = functions_.get_last_error == nullptr ? "" : functions_.get_last_error(nullptr);
  return errors::Unknown("'", name, "' failed in NCCL: ", function,
                         peer < 0 ? "" : " with rank " + std::to_string(peer), " says '", words,
                         "'", more == nullptr || *more == 0 ? "" : std::string(" (") + more + ")",
                         "; NCCL_DEBUG=INFO shows more");
}

Status Communicator::Refusal(const std::string& name) const {
  return Status(broken_.code(),
                "'" + name + "' can't go by NCCL any more: " + std::string(broken_.message()));
}

void Communicator::IssueAll() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return !calls_.empty() && calls_.begin()->first == next_; });
    auto call = std::make_shared<Call>(std::move(calls_.begin()->second));
    calls_.erase(calls_.begin());
    if (call->plan != nullptr) {
      const bool connects = comm_ == nullptr;
      if (connects) connecting_ = call;
      lock.unlock();
      Status status = connects ? Connect(*call) : tensorflow::OkStatus();
      if (status.ok()) status = Issue(*call);
      if (!status.ok()) Break(status);
      lock.lock();
      // The thread that has broken the communicator meanwhile knows why NCCL failed.
      if (!broken_.ok() && !status.ok()) status = broken_;
      connecting_ = nullptr;
      const bool told = call->told;
      lock.unlock();
      if (!told) call->done(status);
      call.reset();
      lock.lock();
    }
    ++next_;
  }
}

Status Communicator::Connect(const Call& call) {
  if (!on_host_) {
    void* context = nullptr;
    if (functions_.stream_context(call.stream, &context) != 0 ||
        functions_.set_context(context) != 0) {
      return errors::Internal("'", call.name, "': CUDA's driver doesn't give a stream's context");
    }
  }
  UniqueId id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    id = id_;
  }
  Comm made = nullptr;
  TF_RETURN_IF_ERROR(
      Checked(functions_.comm_init_rank(&made, ranks_, id, rank_), "ncclCommInitRank", call.name));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_.ok()) {
      comm_ = made;
      connecting_ = nullptr;
      return tensorflow::OkStatus();
    }
  }
  functions_.comm_abort(made);
  return errors::Aborted("'", call.name, "' was given up");
}

Status Communicator::Issue(const Call& call) {
  std::vector<Move> moves;
  TF_RETURN_IF_ERROR(call.plan(&moves));
  if (moves.empty()) return tensorflow::OkStatus();
  std::unique_lock<std::mutex> grouping(grouping_);
  Comm comm;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.ok()) return broken_;
    comm = comm_;
  }
  TF_RETURN_IF_ERROR(Checked(functions_.group_start(), "ncclGroupStart", call.name));
  Status status;
  for (const Move& move : moves) {
    switch (move.kind) {
      case Move::kSend:
        status =
            Checked(functions_.send(move.from, move.count, move.type, move.peer, comm, call.stream),
                    "ncclSend", call.name, move.peer);
        break;
      case Move::kRecv:
        status =
            Checked(functions_.recv(move.to, move.count, move.type, move.peer, comm, call.stream),
                    "ncclRecv", call.name, move.peer);
        break;
      case Move::kAllReduce:
        status = Checked(functions_.all_reduce(move.from, move.to, move.count, move.type, kSum,
                                               comm, call.stream),
                         "ncclAllReduce", call.name);
        break;
      case Move::kBroadcast:
        status = Checked(functions_.broadcast(move.from, move.to, move.count, move.type, move.peer,
                                              comm, call.stream),
                         "ncclBroadcast", call.name, move.peer);
        break;
    }
    if (!status.ok()) break;
  }
  grouping.unlock();  // What comes may wait for peers, until the communicator is aborted.
  // A group that was begun must be ended, or the next one were within it.
  const int ended = functions_.group_end();
  return status.ok() ? Checked(ended, "ncclGroupEnd", call.name) : status;
}

void Communicator::Break(const Status& reason) { Abort(reason, true); }

void Communicator::Leave() { Abort(errors::Aborted("the process ends"), false); }

void Communicator::Abort(const Status& reason, bool tells_peers) {
  std::map<uint64_t, Call> given_up;
  std::shared_ptr<Call> connecting;
  Comm comm;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.ok()) return;
    broken_ = reason;  // Before kernels end: threads that have waited for them see it.
    given_up.swap(calls_);
    comm = comm_;
    // A thread may stay in ncclCommInitRank, which nothing aborts, but uses no memory of the call.
    connecting.swap(connecting_);
    if (connecting != nullptr) connecting->told = true;
  }
  if (tells_peers) Mailbox::Get()->SayNcclAborted();
  // Another thread may wait in ncclGroupEnd: it is aborted for that, too.
  if (comm != nullptr) {
    std::lock_guard<std::mutex> grouping(grouping_);
    functions_.comm_abort(comm);
  }
  if (connecting != nullptr) connecting->done(reason);
  for (auto& [_, call] : given_up) {
    if (call.plan != nullptr) call.done(Refusal(call.name));
  }
}

std::string Communicator::Problem() {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_.ok() ? "" : std::string(broken_.message());
}

void Communicator::Watch() {
  Mailbox* mailbox = Mailbox::Get();
  int lost = mailbox::kNobodyLost;
  Clock::time_point lost_since;
  while (true) {
    std::this_thread::sleep_for(kLook);
    int error = kSuccess;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!broken_.ok()) return;
      if (comm_ != nullptr && functions_.comm_get_async_error(comm_, &error) != kSuccess) {
        error = kSuccess;  // It can't tell.
      }
    }
    if (error != kSuccess && error != kInProgress) {
      Break(Checked(error, "ncclCommGetAsyncError", "an exchange that is under way"));
      return;
    }
    if (const int rank = mailbox->NcclAborted(); rank != mailbox::kNobodyLost) {
      Break(errors::Unknown("rank ", rank, " has aborted NCCL's communicator, while 'NCCL' ",
                            "waited for it; its own error says why"));
      return;
    }
    if (lost == mailbox::kNobodyLost) {
      lost = mailbox->Ended();
      lost_since = Clock::now();
    } else if (Clock::now() - lost_since > kFarewell) {
      Break(errors::Unknown("lost rank ", lost, ", which has ended, while 'NCCL' waited for it"));
      return;
    }
  }
}

}  // namespace nccl
}  // namespace collective
