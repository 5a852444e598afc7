// Stands in for NCCL between processes on CPUs: the same functions, over Unix sockets.
//
// As in NCCL, what ranks exchange is matched by order alone; here each message says what it is, so
// ranks that go out of step get an error instead of each other's data. A group's parts move at the
// same time, and ncclGroupEnd returns when all have. Abort ends all waiting calls.
//
// A test tells it to fail (double_fail) or to hang (double_hang), and reads what was called.

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result { kOk = 0, kSystemError = 2, kInternal = 3, kInvalidUsage = 5, kRemoteError = 6 };

struct UniqueId {
  char bytes[128];
};

struct Header {
  uint32_t kind;
  uint32_t type;
  uint64_t bytes;
};

struct Comm {
  int rank, ranks;
  std::vector<int> sockets;  // By rank; -1 for this one.
  std::atomic<bool> aborted{false};
};

struct Part {
  uint32_t kind;
  const char* from;
  char* to;
  uint64_t bytes;
  int type, peer;
  Comm* comm;
};

std::mutex mutex;
std::map<std::string, int> calls, failing;
std::string hanging, journal, last_error;
std::atomic<int> async_error{0}, live{0};
std::atomic<bool> quiet{false};
std::atomic<int> send_milliseconds{0};
thread_local std::vector<Part> group;
thread_local int depth = 0;

int Called(const char* function, const std::string& detail = "") {
  std::string hangs;
  {
    std::lock_guard<std::mutex> lock(mutex);
    journal += std::string(function) + detail + "\n";
    const int number = ++calls[function];
    auto found = failing.find(function);
    if (found != failing.end() && found->second == number) {
      last_error = "the test says so";
      return kSystemError;
    }
    hangs = hanging;
  }
  while (hangs == function) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return kOk;
}

int Failed(int result, const std::string& words) {
  std::lock_guard<std::mutex> lock(mutex);
  last_error = words;
  return result;
}

size_t SizeOf(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[type];
}

socklen_t AddressOf(const UniqueId& id, int rank, sockaddr_un* address) {
  memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  const int length =
      snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "%s.%d", id.bytes, rank);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// One direction between this rank and another: messages, one after the other.
struct Flow {
  struct Item {
    Header header;
    char* data;
    uint64_t at = 0;  // Of header and data.
  };
  std::deque<Item> items;
};

// Moves what flows hold; `to` and `from` are by rank.
int MoveAll(Comm* comm, std::vector<Flow>* to, std::vector<Flow>* from) {
  while (true) {
    std::vector<pollfd> polled;
    for (int rank = 0; rank < comm->ranks; ++rank) {
      short events = 0;
      if (!(*to)[rank].items.empty()) events |= POLLOUT;
      if (!(*from)[rank].items.empty()) events |= POLLIN;
      if (events != 0) polled.push_back({comm->sockets[rank], events, 0});
    }
    if (polled.empty()) return kOk;
    if (comm->aborted) return Failed(kInternal, "aborted");
    poll(polled.data(), polled.size(), 20);
    for (int rank = 0; rank < comm->ranks; ++rank) {
      for (const bool sends : {true, false}) {
        Flow& flow = (*(sends ? to : from))[rank];
        while (!flow.items.empty()) {
          Flow::Item& item = flow.items.front();
          const Header wanted = item.header;
          char* part;
          uint64_t left;
          static thread_local std::map<int, Header> reading;
          Header* header = sends ? &item.header : &reading[rank];
          if (item.at < sizeof(Header)) {
            part = reinterpret_cast<char*>(header) + item.at;
            left = sizeof(Header) - item.at;
          } else {
            part = item.data + (item.at - sizeof(Header));
            left = sizeof(Header) + wanted.bytes - item.at;
          }
          if (left > 0) {
            const ssize_t n =
                sends ? send(comm->sockets[rank], part, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                      : recv(comm->sockets[rank], part, left, MSG_DONTWAIT);
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
            if (n <= 0) return Failed(kRemoteError, "rank " + std::to_string(rank) + " is gone");
            item.at += n;
          }
          if (!sends && item.at == sizeof(Header) && memcmp(header, &wanted, sizeof(wanted))) {
            return Failed(kInvalidUsage, "out of step: " + std::to_string(header->bytes) +
                                             " bytes from rank " + std::to_string(rank) + ", not " +
                                             std::to_string(wanted.bytes));
          }
          if (item.at == sizeof(Header) + wanted.bytes) flow.items.pop_front();
        }
      }
    }
  }
}

template <class T>
void Add(const std::vector<std::vector<char>>& all, char* out, uint64_t bytes) {
  T* sums = reinterpret_cast<T*>(out);
  for (uint64_t i = 0; i < bytes / sizeof(T); ++i) {
    T sum = 0;
    for (const auto& one : all) sum += reinterpret_cast<const T*>(one.data())[i];
    sums[i] = sum;
  }
}

int Run(std::vector<Part>* parts) {
  if (parts->empty()) return kOk;
  Comm* comm = parts->front().comm;
  std::vector<Flow> to(comm->ranks), from(comm->ranks);
  std::deque<std::pair<const Part*, std::vector<std::vector<char>>>> sums;
  std::deque<const Part*> own_sent;
  auto put = [&](std::vector<Flow>* flows, int rank, const Part& part, const void* data) {
    (*flows)[rank].items.push_back({{part.kind, static_cast<uint32_t>(part.type), part.bytes},
                                    static_cast<char*>(const_cast<void*>(data))});
  };
  for (const Part& part : *parts) {
    if (part.kind == 's' && part.peer == comm->rank) own_sent.push_back(&part);
  }
  for (const Part& part : *parts) {
    Part wire = part;
    switch (part.kind) {
      case 's':
        wire.kind = 'm';
        if (part.peer != comm->rank) put(&to, part.peer, wire, part.from);
        break;
      case 'r':
        wire.kind = 'm';
        if (part.peer != comm->rank) {
          put(&from, part.peer, wire, part.to);
        } else {
          if (own_sent.empty() || own_sent.front()->bytes != part.bytes) {
            return Failed(kInvalidUsage, "nothing is sent to oneself");
          }
          memmove(part.to, own_sent.front()->from, part.bytes);
          own_sent.pop_front();
        }
        break;
      case 'b':
        for (int rank = 0; rank < comm->ranks; ++rank) {
          if (rank == comm->rank) continue;
          if (comm->rank == part.peer) put(&to, rank, part, part.from);
          if (rank == part.peer) put(&from, rank, part, part.to);
        }
        if (comm->rank == part.peer) memmove(part.to, part.from, part.bytes);
        break;
      case 'a':
        sums.emplace_back(&part, std::vector<std::vector<char>>(comm->ranks));
        for (int rank = 0; rank < comm->ranks; ++rank) {
          std::vector<char>& values = sums.back().second[rank];
          values.assign(part.from, part.from + part.bytes);
          if (rank == comm->rank) continue;
          put(&to, rank, part, sums.back().second[comm->rank].data());
          put(&from, rank, part, values.data());
        }
        // This rank's own values come at its number, so their data are known only now.
        for (int rank = 0; rank < comm->ranks; ++rank) {
          if (rank != comm->rank) {
            to[rank].items.back().data = sums.back().second[comm->rank].data();
          }
        }
        break;
    }
  }
  if (!own_sent.empty()) return Failed(kInvalidUsage, "nobody receives what is sent to oneself");
  const int moved = MoveAll(comm, &to, &from);
  if (moved != kOk) return moved;
  for (const auto& [part, all] : sums) {
    if (part->type == 7) {
      Add<float>(all, part->to, part->bytes);
    } else if (part->type == 8) {
      Add<double>(all, part->to, part->bytes);
    } else if (part->type == 4) {
      Add<int64_t>(all, part->to, part->bytes);
    } else if (part->type == 2) {
      Add<int32_t>(all, part->to, part->bytes);
    } else {
      return Failed(kInvalidUsage, "this double doesn't add type " + std::to_string(part->type));
    }
  }
  return kOk;
}

int Begin(const Part& part) {
  // NCCL has freed it by then.
  if (part.comm->aborted) Called("used after its abort");
  if (depth > 0) {
    group.push_back(part);
    return kOk;
  }
  std::vector<Part> alone{part};
  return Run(&alone);
}

}  // namespace

extern "C" {

int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  snprintf(id->bytes, sizeof(id->bytes), "nccl-double-%d-%08x%08x", getpid(), random(), random());
  return Called("ncclGetUniqueId");
}

int ncclCommInitRank(void** made, int ranks, UniqueId id, int rank) {
  const int said = Called("ncclCommInitRank");
  if (said != kOk) return said;
  Comm* comm = new Comm{rank, ranks, std::vector<int>(ranks, -1)};
  sockaddr_un address;
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = AddressOf(id, rank, &address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, ranks) != 0) {
    return Failed(kSystemError, strerror(errno));
  }
  for (int peer = 0; peer < rank; ++peer) {
    const int one = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    length = AddressOf(id, peer, &address);
    while (connect(one, reinterpret_cast<sockaddr*>(&address), length) != 0) usleep(1000);
    if (send(one, &rank, sizeof(rank), MSG_NOSIGNAL) != sizeof(rank)) return kRemoteError;
    comm->sockets[peer] = one;
  }
  for (int peer = rank + 1; peer < ranks; ++peer) {
    const int one = accept(listener, nullptr, nullptr);
    int who = -1;
    if (recv(one, &who, sizeof(who), MSG_WAITALL) != sizeof(who)) return kRemoteError;
    comm->sockets[who] = one;
  }
  close(listener);
  *made = comm;
  ++live;
  return kOk;
}

// The memory stays: another thread may still be in a function.
int ncclCommAbort(void* comm) {
  Called("ncclCommAbort");
  Comm* own = static_cast<Comm*>(comm);
  own->aborted = true;
  for (int one : own->sockets) {
    if (one >= 0 && !quiet) shutdown(one, SHUT_RDWR);
  }
  --live;
  return kOk;
}

int ncclCommGetAsyncError(void*, int* error) {
  *error = async_error;
  return kOk;
}

int ncclGroupStart() {
  ++depth;
  return Called("ncclGroupStart");
}

int ncclGroupEnd() {
  std::vector<Part> parts;
  parts.swap(group);
  --depth;
  std::string hangs;
  {
    std::lock_guard<std::mutex> lock(mutex);
    hangs = hanging;
  }
  if (hangs == "ncclGroupEnd" && !parts.empty()) {
    while (!parts.front().comm->aborted) usleep(1000);
    return Failed(kInternal, "aborted");
  }
  const int said = Called("ncclGroupEnd");
  return said == kOk ? Run(&parts) : said;
}

int ncclSend(const void* from, size_t count, int type, int peer, void* comm, void*) {
  const uint64_t bytes = count * SizeOf(type);
  std::this_thread::sleep_for(std::chrono::milliseconds(send_milliseconds));
  const int said = Called("ncclSend", " " + std::to_string(bytes) + " to " + std::to_string(peer));
  return said != kOk ? said
                     : Begin({'s', static_cast<const char*>(from), nullptr, bytes, type, peer,
                              static_cast<Comm*>(comm)});
}

int ncclRecv(void* to, size_t count, int type, int peer, void* comm, void*) {
  const uint64_t bytes = count * SizeOf(type);
  const int said =
      Called("ncclRecv", " " + std::to_string(bytes) + " from " + std::to_string(peer));
  return said != kOk ? said
                     : Begin({'r', nullptr, static_cast<char*>(to), bytes, type, peer,
                              static_cast<Comm*>(comm)});
}

int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* comm, void*) {
  const uint64_t bytes = count * SizeOf(type);
  const int said = Called("ncclAllReduce", " " + std::to_string(bytes));
  if (op != 0) return Failed(kInvalidUsage, "no sum");
  return said != kOk ? said
                     : Begin({'a', static_cast<const char*>(from), static_cast<char*>(to), bytes,
                              type, -1, static_cast<Comm*>(comm)});
}

int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* comm, void*) {
  const uint64_t bytes = count * SizeOf(type);
  const int said = Called("ncclBroadcast", " " + std::to_string(bytes));
  return said != kOk ? said
                     : Begin({'b', static_cast<const char*>(from), static_cast<char*>(to), bytes,
                              type, root, static_cast<Comm*>(comm)});
}

const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSystemError:
      return "unhandled system error";
    case kInternal:
      return "internal error";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(void*) {
  static thread_local std::string words;
  std::lock_guard<std::mutex> lock(mutex);
  words = last_error;
  return words.c_str();
}

// For tests.

// Lets the n-th call of `function` fail, counted from the process's start.
void double_fail(const char* function, int n) {
  std::lock_guard<std::mutex> lock(mutex);
  failing[function] = n;
}

// Lets calls of `function` hang from now on: ncclGroupEnd until the communicator is aborted.
void double_hang(const char* function) {
  std::lock_guard<std::mutex> lock(mutex);
  hanging = function;
}

void double_async_error(int error) { async_error = error; }

// Lets each send take so long to be issued.
void double_slow_sends(int milliseconds) { send_milliseconds = milliseconds; }

// Lets aborts go unnoticed by peers, as they do where NCCL moves data through a host's memory.
void double_quiet() { quiet = true; }

// Returns how many communicators were made and not aborted.
int double_live() { return live; }

const char* double_journal() {
  static thread_local std::string words;
  std::lock_guard<std::mutex> lock(mutex);
  words = journal;
  return words.c_str();
}
}
