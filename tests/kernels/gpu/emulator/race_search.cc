// Searches launches for races: accesses of one word, a write among them, that nothing orders, so
// that another order of threads or blocks may give something else.
//
// Kernels are compiled with -fsanitize=thread. It has them call the functions at the end of this
// file, in the place of ThreadSanitizer's own, before each access. Single bytes are words of their
// own. Two writes that leave the same in a word are no race.

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>

#include "race_order.h"

// The bounds of this library, by the linker.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];

namespace races {
namespace {

constexpr unsigned kReads = 6;  // that a word remembers
constexpr uint64_t kWord = 4, kPage = 4096, kBytes = uint64_t{1} << 63;
constexpr size_t kMostPages = 500;  // that are kept from launch to launch, of 220 KB each
constexpr const char* kKinds[] = {"plain", "read-only", "L2", "atomic"};

bool Holds(const Range& range, const void* at) { return at >= range.begin && at < range.end; }

// What happened to a word in a launch.
struct Word {
  uint32_t launch = 0;
  Moment written, told;  // told: by something that isn't plain
  Moment read_only;
  Moment reads[kReads];
};

struct Page {
  Word words[kPage / kWord];
};

// Ordered, so that reports are the same each time.
struct Race {
  const char* what;
  bool shared, of_blocks;
  uint32_t first, second;  // code
  Kind first_kind, second_kind;

  bool operator<(const Race& other) const {
    const auto all = [](const Race& race) {
      return std::make_tuple(race.first, race.second, race.shared, race.of_blocks, race.first_kind,
                             race.second_kind, std::string(race.what));
    };
    return all(*this) < all(other);
  }
};

class Search {
 public:
  Order order;

  void BeginLaunch(Range static_shared, Range dynamic_shared) {
    ++launch_;
    static_shared_ = static_shared;
    dynamic_shared_ = dynamic_shared;
    races_.clear();
    doubtful_.clear();  // of a launch that failed
    report_.clear();
    if (pages_.size() > kMostPages) {
      pages_.clear();
      last_ = nullptr;
    }
    order.BeginLaunch();
  }

  void EndLaunch() {
    Settle();
    for (const auto& [race, count] : races_) {
      char line[256];
      std::snprintf(line, sizeof line, "%s\t%s\t%s\t%s\t%x\t%s\t%x\t%ld\n", race.what,
                    race.shared ? "shared" : "global", race.of_blocks ? "blocks" : "threads",
                    kKinds[race.first_kind], race.first, kKinds[race.second_kind], race.second,
                    count);
      report_ += line;
    }
  }

  const char* report() const { return report_.c_str(); }

  void BeginBlock(unsigned threads, Range of_emulator) {
    order.BeginBlock(threads);
    of_emulator_ = of_emulator;
  }

  void Resume(unsigned thread, Range stack) {
    order.Resume(thread);
    stack_ = stack;
  }

  void Access(const void* address, uint64_t size, bool writes, Kind kind, const void* code) {
    Settle();
    const bool in_shared = Holds(static_shared_, address) || Holds(dynamic_shared_, address);
    if (!in_shared && (Holds(stack_, address) || Holds(of_emulator_, address) ||
                       Holds({__ehdr_start, _end}, address)))
      return;
    const Moment now =
        order.Now(static_cast<uint32_t>(static_cast<const char*>(code) - __ehdr_start), kind);
    const uint64_t first = reinterpret_cast<uint64_t>(address), step = size < kWord ? 1 : kWord;
    if (kind == kAtomic && writes) order.Atomic(first, now);
    for (uint64_t at = first; at < first + size; at += step) {
      Word& word = WordAt(at, step);
      if (writes) {
        Write(word, at, step, now, in_shared);
      } else {
        Read(word, now, in_shared);
      }
    }
  }

 private:
  Word& WordAt(uint64_t at, uint64_t step) {
    const uint64_t number = step == 1 ? at | kBytes : at / kWord, page = number / (kPage / kWord);
    if (page != last_page_ || last_ == nullptr) {
      std::unique_ptr<Page>& found = pages_[page];
      if (found == nullptr) found.reset(new Page);
      last_page_ = page;
      last_ = found.get();
    }
    Word& word = last_->words[number % (kPage / kWord)];
    if (word.launch != launch_) {
      word = Word();
      word.launch = launch_;
    }
    return word;
  }

  bool Conflict(const Moment& earlier, const Moment& now, bool in_shared) const {
    if (!earlier.is_set() || (in_shared && earlier.block != now.block)) return false;
    const Kind least = in_shared ? kAtomic : kThroughL2;
    return (earlier.kind < least || now.kind < least) && !order.Ordered(earlier, now);
  }

  void Report(const char* what, const Moment& earlier, const Moment& now, bool in_shared) {
    ++races_[{what, in_shared, earlier.block != now.block, earlier.code, now.code, earlier.kind,
              now.kind}];
  }

  void Read(Word& word, const Moment& now, bool in_shared) {
    for (const Moment* earlier : {&word.written, &word.told})
      if (Conflict(*earlier, now, in_shared)) Report("read after write", *earlier, now, in_shared);
    if (now.kind == kReadOnly) {
      for (const Moment* earlier : {&word.written, &word.told})
        if (earlier->is_set()) Report("written, read as read-only", *earlier, now, in_shared);
      word.read_only = now;
    }
    Remember(word, now);
  }

  // Replaces reads that come before it for later accesses. If there is no room, any: one of
  // many that are unordered is as good as another.
  void Remember(Word& word, const Moment& now) {
    Moment* to = &word.reads[now.time % kReads];
    for (Moment& read : word.reads) {
      if (!read.is_set() || (read.kind >= now.kind && order.Ordered(read, now))) to = &read;
    }
    *to = now;
  }

  void Write(Word& word, uint64_t at, uint64_t size, const Moment& now, bool in_shared) {
    for (const Moment* earlier : {&word.written, &word.told})
      if (Conflict(*earlier, now, in_shared)) Doubt(at, size, *earlier, now, in_shared);
    for (const Moment& read : word.reads)
      if (Conflict(read, now, in_shared)) Report("write after read", read, now, in_shared);
    if (word.read_only.is_set() && !in_shared)
      Report("read as read-only, written", word.read_only, now, in_shared);
    for (Moment& read : word.reads)
      if (read.kind >= now.kind) read = Moment();
    if (now.kind < kThroughL2) {
      word.written = now;
      word.told = Moment();
    } else {
      word.told = now;
    }
  }

  // Two writes, of which the second is still to come. What it changes is seen at the next access.
  struct Doubtful {
    uint64_t at, size;
    char before[kWord];
    Moment earlier, now;
    bool in_shared;
  };

  void Doubt(uint64_t at, uint64_t size, const Moment& earlier, const Moment& now, bool in_shared) {
    Doubtful doubtful{at, size, {}, earlier, now, in_shared};
    std::memcpy(doubtful.before, reinterpret_cast<const void*>(at), size);
    doubtful_.push_back(doubtful);
  }

  void Settle() {
    if (doubtful_.empty()) return;
    for (const Doubtful& one : doubtful_) {
      if (std::memcmp(one.before, reinterpret_cast<const void*>(one.at), one.size) != 0)
        Report("write after write", one.earlier, one.now, one.in_shared);
    }
    doubtful_.clear();
  }

  uint32_t launch_ = 0;
  Range static_shared_{}, dynamic_shared_{}, of_emulator_{}, stack_{};
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  uint64_t last_page_ = 0;
  Page* last_ = nullptr;
  std::vector<Doubtful> doubtful_;
  std::map<Race, long> races_;
  std::string report_;
};

Search& search = *new Search;
bool is_kernel = false;  // what runs
Kind kind = kPlain;

}  // namespace

void BeginLaunch(Range static_shared, Range dynamic_shared) {
  is_kernel = false;
  search.BeginLaunch(static_shared, dynamic_shared);
}
void EndLaunch() { search.EndLaunch(); }
void BeginBlock(unsigned threads, Range of_emulator) { search.BeginBlock(threads, of_emulator); }
void Resume(unsigned thread, Range stack) { search.Resume(thread, stack); }
void Suspend() { is_kernel = false; }
void Continue() { is_kernel = true; }
void Exchange(unsigned first, unsigned mask) { search.order.Exchange(first, mask); }
void Barrier() { search.order.Barrier(); }
void Fence() { search.order.Fence(); }
void Access(Kind next) { kind = next; }

}  // namespace races

// A line for each race of the last launch: what, where, of whom, the kinds and the places in this
// library of both accesses, how often.
extern "C" __attribute__((visibility("default"))) const char* races_found() {
  return races::search.report();
}

// ---- What kernels call

#define CALLBACK extern "C" __attribute__((visibility("hidden")))
#define RECORD(size, writes, kind) \
  if (races::is_kernel)            \
  races::search.Access(address, size, writes, kind, __builtin_return_address(0))
#define OF_SIZE(size)                                                                            \
  CALLBACK void __tsan_read##size(void* address) { RECORD(size, false, races::kind); }           \
  CALLBACK void __tsan_write##size(void* address) { RECORD(size, true, races::kind); }           \
  CALLBACK void __tsan_unaligned_read##size(void* address) { RECORD(size, false, races::kind); } \
  CALLBACK void __tsan_unaligned_write##size(void* address) { RECORD(size, true, races::kind); } \
  CALLBACK void __tsan_volatile_read##size(void* address) {                                      \
    RECORD(size, false, races::kThroughL2);                                                      \
  }                                                                                              \
  CALLBACK void __tsan_volatile_write##size(void* address) {                                     \
    RECORD(size, true, races::kThroughL2);                                                       \
  }
OF_SIZE(1)
OF_SIZE(2)
OF_SIZE(4)
OF_SIZE(8)
OF_SIZE(16)
CALLBACK void __tsan_read_range(void* address, unsigned long size) {
  RECORD(size, false, races::kind);
}
CALLBACK void __tsan_write_range(void* address, unsigned long size) {
  RECORD(size, true, races::kind);
}
CALLBACK void __tsan_init() {}
CALLBACK void __tsan_func_entry(void*) {}
CALLBACK void __tsan_func_exit() {}
