// Carries messages through shared memory: see mailbox.h.

#include "mailbox.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace collective {
namespace mailbox {

// ops/communication/shared_memory.py writes it. Another layout of anything here is another version.
struct Header {
  char magic[16];
  uint32_t version, ranks;
};

struct RankPage {
  alignas(64) std::atomic<uint32_t> bell;      // Rung for each message to this rank.
  alignas(64) std::atomic<uint32_t> sleeping;  // Whether it waits for its bell on the futex.
  alignas(64) std::atomic<uint32_t> state;
  std::atomic<uint32_t> nccl_aborted;  // Whether it has aborted what goes past the mailbox.
};

constexpr int kEntries = 63;

struct Ring {
  alignas(64) std::atomic<uint64_t> taken;
  alignas(64) std::atomic<uint64_t> posted;
  std::atomic<uint32_t> was_full;  // Its sender has more, and must hear when there is room.
  alignas(64) Message messages[kEntries];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics are shared between processes");
static_assert(sizeof(Ring) == 64 * 256 - 128, "a ring takes 16 KiB");

namespace {

constexpr char kMagic[16] = {'c', 'o', 'l', 'l', 'e', 'c', 't', 'i',
                             'v', 'e', ' ', 'w', 'i', 'r', 'e', '\n'};
constexpr uint32_t kVersion = 4;
constexpr uint32_t kHere = 1, kLeft = 2, kGaveUp = 3;
constexpr uint64_t kPage = 4096, kRingBytes = 64 * 256;
constexpr uint64_t kHugePage = 2 << 20;
// Between the starts of two arenas in the file, which is sparse.
constexpr uint64_t kArenaStride = uint64_t{1} << 40;
constexpr auto kLook = std::chrono::milliseconds(100);
constexpr auto kPolling = std::chrono::microseconds(60);
constexpr auto kFarewell = std::chrono::seconds(5);

uint64_t RoundUp(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  hash ^= hash >> 32;
  return hash * 0x9e3779b97f4a7c15u;
}

std::string Failed(const std::string& what) { return what + ": " + strerror(errno); }

void FutexWait(std::atomic<uint32_t>* word, uint32_t value, std::chrono::nanoseconds limit) {
  timespec time;
  time.tv_sec = limit.count() / 1000000000;
  time.tv_nsec = limit.count() % 1000000000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &time, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

struct flock LockOf(int rank) {
  struct flock lock;
  memset(&lock, 0, sizeof(lock));
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

Mailbox* instance = nullptr;
std::mutex instance_mutex;

}  // namespace

Mailbox* Mailbox::Get() {
  std::lock_guard<std::mutex> lock(instance_mutex);
  return instance;
}

std::string Mailbox::Open(int file, int rank, int ranks) {
  std::lock_guard<std::mutex> lock(instance_mutex);
  if (instance != nullptr) return "it is open already";
  std::string problem;
  Header header;
  if (pread(file, &header, sizeof(header), 0) != sizeof(header) ||
      memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.version != kVersion ||
      static_cast<int>(header.ranks) != ranks || rank < 0 || rank >= ranks) {
    problem = "it isn't that of this job's ranks";
  } else {
    struct flock mine = LockOf(rank);
    if (fcntl(file, F_SETLK, &mine) != 0) problem = Failed("it can't be locked");
  }
  Mailbox* made = problem.empty() ? new Mailbox(file, rank, ranks) : nullptr;
  if (made != nullptr) problem = made->Map();
  if (!problem.empty()) return problem;
  instance = made;  // It stays until the process ends: a thread waits in it.
  return "";
}

std::string Mailbox::Map() {
  const uint64_t ranks = ranks_;
  const uint64_t control = kPage * (1 + ranks) + kRingBytes * ranks * ranks;
  arena_start_ = RoundUp(control, kHugePage);
  struct stat status;
  const uint64_t whole = arena_start_ + ranks * kArenaStride;
  if (fstat(file_, &status) != 0) return Failed("its size isn't known");
  if (static_cast<uint64_t>(status.st_size) < whole && ftruncate(file_, whole) != 0) {
    return Failed("it can't be enlarged");
  }
  void* base = mmap(nullptr, control, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (base == MAP_FAILED) return Failed("it can't be mapped");
  control_ = static_cast<char*>(base);
  unsent_.resize(ranks_);
  lost_.resize(ranks_);
  mappings_.resize(ranks_);
  cpu_set_t cores;
  const bool known = sched_getaffinity(0, sizeof(cores), &cores) == 0;
  spins_ = known && CPU_COUNT(&cores) < ranks_ ? 0 : 1;
  Page(rank_)->state.store(kHere);
  return "";
}

RankPage* Mailbox::Page(int rank) const {
  return reinterpret_cast<RankPage*>(control_ + kPage * (1 + rank));
}

Ring* Mailbox::RingOf(int from, int to) const {
  const uint64_t number = static_cast<uint64_t>(from) * ranks_ + to;
  return reinterpret_cast<Ring*>(control_ + kPage * (1 + ranks_) + kRingBytes * number);
}

// Sending.

void Parcel::CopyTo(char* out) const {
  for (const Piece& piece : pieces) {
    if (piece.bytes > 0) memcpy(out, piece.data, piece.bytes);
    out += piece.bytes;
  }
}

std::string Mailbox::Start(const std::shared_ptr<Exchange>& exchange) {
  const std::string problem = Send(exchange);
  if (!problem.empty()) return problem;
  if (exchange->meanwhile) exchange->meanwhile();
  Poll(*exchange);
  return "";
}

std::string Mailbox::Begin(const std::shared_ptr<Exchange>& exchange) { return Send(exchange); }

void Mailbox::Send(const Exchange& exchange, int to, int64_t rows, bool more) {
  Message message{};
  message.name = exchange.key;
  message.sequence = exchange.sequence;
  message.rows = rows;
  message.item = exchange.item;
  message.kind = exchange.kind;
  message.dtype = exchange.dtype;
  message.more = more;
  std::lock_guard<std::mutex> lock(mutex_);
  Post(to, message);
}

std::string Mailbox::Send(const std::shared_ptr<Exchange>& exchange) {
  Exchange& own = *exchange;
  own.key = Hash(own.name);
  own.received.resize(ranks_);
  own.missing = static_cast<int>(std::count(own.awaited.begin(), own.awaited.end(), true));
  std::vector<uint64_t> places(own.parcels.size(), 0);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!given_up_.empty()) return "this rank has given up a run before: " + given_up_;
    auto& known = names_.emplace(own.key, std::make_pair(own.name, uint64_t{0})).first->second;
    if (known.first != own.name) {
      return "'" + own.name + "' and '" + known.first + "' are one name to shared memory";
    }
    own.sequence = known.second++;
    for (size_t i = 0; i < places.size(); ++i) {
      if (own.parcels[i].bytes <= kInlineBytes) continue;
      if (own.same_data && i > 0) {
        places[i] = places[0];
        continue;
      }
      const std::string problem = Allocate(sizeof(Block) + own.parcels[i].bytes, &places[i]);
      if (!problem.empty()) {
        for (size_t made = 0; made < i; ++made) {
          if (places[made] != 0) BlockAt(rank_, places[made])->readers.store(0);
        }
        return problem;
      }
      const size_t readers = own.same_data ? own.parcels.size() : 1;
      BlockAt(rank_, places[i])->readers.store(static_cast<uint32_t>(readers));
    }
  }
  if (std::any_of(places.begin(), places.end(), [](uint64_t place) { return place > 0; })) {
    UseHugePages();
  }
  std::vector<Message> messages(own.parcels.size());
  for (size_t i = 0; i < messages.size(); ++i) {
    const Parcel& parcel = own.parcels[i];
    Message& message = messages[i];
    message.name = own.key;
    message.sequence = own.sequence;
    message.place = places[i];
    message.bytes = parcel.bytes;
    message.rows = parcel.rows;
    message.item = own.item;
    message.kind = own.kind;
    message.dtype = own.dtype;
    message.answer = parcel.answer;
    message.answer_start = parcel.answer_start;
    message.answer_bytes = parcel.answer_bytes;
    if (places[i] == 0) {
      parcel.CopyTo(message.text);
    } else if (!own.same_data || i == 0) {
      parcel.CopyTo(At(rank_, places[i], sizeof(Block) + parcel.bytes) + sizeof(Block));
    }
  }
  Events events;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < messages.size(); ++i) Post(own.parcels[i].rank, messages[i]);
    const Key key{own.key, own.sequence};
    if (!given_up_.empty()) {
      own.over = true;
      events.push_back({exchange, kGivenUp, -1});
    } else if (own.missing == 0) {
      own.over = true;
      events.push_back({exchange, kNobodyLost, -1});
    } else {
      waiting_[key] = exchange;
      auto early = early_.find(key);
      if (early != early_.end()) {
        const auto messages_before = std::move(early->second);
        early_.erase(early);
        for (const auto& [from, message] : messages_before) Deliver(from, message, &events);
      }
      Pump(false, &events);
    }
    if (!thread_started_) {
      thread_started_ = true;
      // Signals are for the threads of the program.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      std::thread([this] { Wait(); }).detach();
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
  }
  Tell(&events);
  return "";
}

void Mailbox::Post(int to, const Message& message) {
  if (!unsent_[to].empty() || !Put(to, message)) {
    unsent_[to].push_back(message);
    ++unsent_count_;
    if (idle_) wake_.notify_one();
  }
}

bool Mailbox::Put(int to, const Message& message) {
  Ring* ring = RingOf(rank_, to);
  const uint64_t posted = ring->posted.load(std::memory_order_relaxed);
  auto full = [&] { return posted - ring->taken.load() >= kEntries; };
  if (full()) {
    // Before a second look: either there is room by then, or the receiver, who takes messages first
    // and looks at this next, rings.
    ring->was_full.store(1);
    if (full()) return false;
  }
  memcpy(&ring->messages[posted % kEntries], &message,
         sizeof(Message) - kInlineBytes + (message.place == 0 ? message.bytes : 0));
  ring->posted.store(posted + 1, std::memory_order_release);
  RingBell(to);
  return true;
}

void Mailbox::RingBell(int rank) {
  RankPage* page = Page(rank);
  page->bell.fetch_add(1);
  if (page->sleeping.load() != 0) FutexWake(&page->bell);
}

// Receiving.

void Mailbox::Pump(bool always, Events* events) {
  const uint32_t bell = Page(rank_)->bell.load();
  if (bell == seen_ && !always) return;
  seen_ = bell;
  for (int to = 0; unsent_count_ > 0 && to < ranks_; ++to) {
    size_t sent = 0;
    std::vector<Message>& unsent = unsent_[to];
    while (sent < unsent.size() && (lost_[to] || Put(to, unsent[sent]))) ++sent;
    unsent.erase(unsent.begin(), unsent.begin() + sent);
    unsent_count_ -= static_cast<int>(sent);
  }
  for (int from = 0; from < ranks_; ++from) {
    if (from == rank_) continue;
    Ring* ring = RingOf(from, rank_);
    uint64_t taken = ring->taken.load(std::memory_order_relaxed);
    const uint64_t posted = ring->posted.load(std::memory_order_acquire);
    if (taken == posted) continue;
    for (; taken < posted; ++taken) Deliver(from, ring->messages[taken % kEntries], events);
    ring->taken.store(taken);
    if (ring->was_full.load() != 0 && ring->was_full.exchange(0) != 0) RingBell(from);
  }
}

void Mailbox::Deliver(int from, const Message& message, Events* events) {
  const Key key{message.name, message.sequence};
  auto found = waiting_.find(key);
  if (found == waiting_.end()) {
    early_[key].emplace_back(from, message);
    return;
  }
  Exchange* exchange = found->second.get();
  if (message.more != 0) {
    if (exchange->partly) events->push_back({found->second, kNobodyLost, from, message.rows});
    return;
  }
  exchange->received[from] = message;
  if (!exchange->awaited[from]) return;  // It does something else by that name: an error.
  exchange->awaited[from] = false;
  if (exchange->arrived) events->push_back({found->second, kNobodyLost, from});
  if (--exchange->missing > 0) return;
  events->push_back({found->second, kNobodyLost, -1});
  waiting_.erase(found);
}

void Mailbox::Tell(Events* events) {
  for (auto& [exchange, lost, from, rows] : *events) {
    if (rows >= 0) {
      exchange->partly(from, rows);
    } else if (from >= 0) {
      exchange->arrived(exchange.get(), from);
    } else {
      exchange->finish(exchange.get(), lost);
      exchange->over = true;
    }
  }
  events->clear();
}

void Mailbox::Look() {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  Events events;
  Pump(false, &events);
  lock.unlock();
  Tell(&events);
}

void Mailbox::Poll(const Exchange& exchange) {
  if (!exchange.over && spins_ > 0) {
    const auto until = std::chrono::steady_clock::now() + kPolling;
    do {
      Look();
      for (int i = 0; i < 16 && !exchange.over; ++i) Pause();
    } while (!exchange.over && std::chrono::steady_clock::now() < until);
  }
  if (!exchange.over) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_) wake_.notify_one();
  }
}

void Mailbox::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  RankPage* page = Page(rank_);
  bool timed_out = false;
  while (true) {
    if (waiting_.empty() && unsent_count_ == 0) {
      idle_ = true;
      wake_.wait(lock);
      idle_ = false;
      continue;
    }
    Events events;
    Pump(timed_out, &events);
    timed_out = false;
    const auto now = std::chrono::steady_clock::now();
    if (events.empty() && now - looked_ >= kLook) {
      looked_ = now;
      FindLost(&events);
    }
    if (!events.empty()) {
      lock.unlock();
      Tell(&events);
      lock.lock();
      continue;
    }
    page->sleeping.store(1);
    const uint32_t seen = seen_;
    if (page->bell.load() == seen) {
      lock.unlock();
      FutexWait(&page->bell, seen, kLook);
      lock.lock();
      timed_out = true;
    }
    page->sleeping.store(0);
  }
}

bool Mailbox::IsLost(int rank) {
  const uint32_t state = Page(rank)->state.load();
  if (state == kLeft || state == kGaveUp) return true;
  if (state != kHere) return false;  // It hasn't come yet.
  struct flock lock = LockOf(rank);
  return fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

int Mailbox::Ended() {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_ && IsLost(rank)) return rank;
  }
  return kNobodyLost;
}

void Mailbox::SayNcclAborted() {
  if (getpid() == process_) Page(rank_)->nccl_aborted.store(1);
}

int Mailbox::NcclAborted() {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_ && Page(rank)->nccl_aborted.load() != 0) return rank;
  }
  return kNobodyLost;
}

void Mailbox::FindLost(Events* events) {
  bool any = false;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_ && !lost_[rank]) lost_[rank] = IsLost(rank);
    any = any || lost_[rank];
  }
  if (!any) return;
  Pump(true, events);  // What they have sent before.
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    int lost = kNobodyLost;
    for (int rank = 0; rank < ranks_ && lost == kNobodyLost; ++rank) {
      if (lost_[rank] && it->second->awaited[rank]) lost = rank;
    }
    if (lost == kNobodyLost) {
      ++it;
      continue;
    }
    events->push_back({it->second, lost, -1});
    it = waiting_.erase(it);
  }
}

bool Mailbox::HasGivenUp(int rank) const { return Page(rank)->state.load() == kGaveUp; }

void Mailbox::GiveUp() {
  if (getpid() != process_) return;
  Events events;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!given_up_.empty()) return;
    std::string waited;
    for (const auto& [key, exchange] : waiting_) {
      std::string ranks;
      for (int rank = 0; rank < ranks_; ++rank) {
        if (exchange->awaited[rank]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
      }
      waited += (waited.empty() ? "'" : ", '") + exchange->name + "' waited for rank " + ranks;
    }
    given_up_ = waited.empty() ? "no exchange waited" : waited;
    for (const auto& [key, exchange] : waiting_) events.push_back({exchange, kGivenUp, -1});
    waiting_.clear();
  }
  Page(rank_)->state.store(kGaveUp);
  for (int rank = 0; rank < ranks_; ++rank) RingBell(rank);
  Tell(&events);
}

std::string Mailbox::given_up() {
  std::lock_guard<std::mutex> lock(mutex_);
  return given_up_;
}

void Mailbox::Leave() {
  if (getpid() != process_) return;  // A fork of this process is no rank.
  const auto until = std::chrono::steady_clock::now() + kFarewell;
  while (true) {
    Events events;
    std::unique_lock<std::mutex> lock(mutex_);
    if (unsent_count_ == 0 || !given_up_.empty() || std::chrono::steady_clock::now() > until) break;
    Pump(true, &events);
    FindLost(&events);
    lock.unlock();
    Tell(&events);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  uint32_t here = kHere;  // A rank that has given up has said more.
  Page(rank_)->state.compare_exchange_strong(here, kLeft);
  for (int rank = 0; rank < ranks_; ++rank) RingBell(rank);
}

}  // namespace mailbox
}  // namespace collective
