// Which accesses of a launch come after each other however threads and blocks take turns.
//
// Within a block: those of a thread, those on two sides of a barrier, and within a warp those on
// two sides of an exchange that both lanes took part in. Between blocks: those before a fence and
// an atomic operation, and those after an atomic operation on the same word and a fence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "race_hooks.h"

namespace races {

constexpr unsigned kWarp = 32;

struct Moment {
  uint32_t time = 0;   // 0: never
  uint32_t block = 0;  // in the order in which they ran
  uint32_t barriers = 0;
  uint32_t exchanges = 0;  // of the thread
  uint32_t code = 0;       // where in the library
  uint16_t thread = 0;
  Kind kind = kPlain;

  bool is_set() const { return time != 0; }
  unsigned lane() const { return thread % kWarp; }
};

class Order {
 public:
  void BeginLaunch() {
    now_ = {};
    released_.clear();
    BeginBlock(0);
  }

  void BeginBlock(unsigned threads) {
    ++now_.block;
    now_.barriers = 0;
    known_.assign(threads, Known{});
    fences_.assign(threads, Moment{});
    acquired_.clear();
    fenced_ = false;
  }

  void Resume(unsigned thread) { now_.thread = static_cast<uint16_t>(thread); }

  void Barrier() { ++now_.barriers; }

  // From now on, each lane has seen what the others did before they met.
  void Exchange(unsigned first, unsigned mask) {
    Known met;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      Known& known = known_[first + lane];
      ++known.exchanges[lane];
      for (unsigned of = 0; of < kWarp; ++of)
        met.exchanges[of] = std::max(met.exchanges[of], known.exchanges[of]);
    }
    for (unsigned lane = 0; lane < kWarp; ++lane)
      if (mask >> lane & 1) known_[first + lane] = met;
  }

  void Fence() {
    fences_[now_.thread] = Now(0, kPlain);
    fenced_ = true;
  }

  Moment Now(uint32_t code, Kind kind) {
    ++now_.time;
    now_.exchanges = known_[now_.thread].exchanges[now_.lane()];
    now_.code = code;
    now_.kind = kind;
    return now_;
  }

  // Takes note of an atomic operation, by which blocks are ordered.
  void Atomic(uint64_t word, const Moment& now) {
    if (!fenced_ && released_.empty()) return;
    std::vector<Release>& releases = released_[word];
    for (const Release& release : releases)
      if (release->atomic.block != now.block) acquired_.push_back({release, now});
    if (fenced_) {
      releases.push_back(
          std::make_shared<const Released>(Released{now, known_[now.thread], fences_}));
    }
  }

  bool Ordered(const Moment& earlier, const Moment& now) const {
    if (earlier.block == now.block) return InBlock(earlier, now, known_[now.thread]);
    for (const Acquired& one : acquired_) {
      if (one.from->atomic.block == earlier.block && one.from->Covers(earlier) && Covers(one, now))
        return true;
    }
    return false;
  }

 private:
  // How many exchanges of each lane of its warp a thread knows of.
  struct Known {
    uint32_t exchanges[kWarp] = {};
  };

  static bool InBlock(const Moment& earlier, const Moment& now, const Known& known) {
    return earlier.thread == now.thread || earlier.barriers < now.barriers ||
           (earlier.thread / kWarp == now.thread / kWarp &&
            earlier.exchanges < known.exchanges[earlier.lane()]);
  }

  // An atomic operation, and the last fence of each thread before it.
  struct Released {
    Moment atomic;
    Known known;
    std::vector<Moment> fences;

    // The fence of the thread itself, or that of the thread which releases, after a barrier.
    bool Covers(const Moment& earlier) const {
      const Moment &own = fences[earlier.thread], &last = fences[atomic.thread];
      return (own.time > earlier.time && InBlock(own, atomic, known)) ||
             (last.is_set() && earlier.barriers < last.barriers);
    }
  };
  typedef std::shared_ptr<const Released> Release;

  struct Acquired {
    Release from;
    Moment atomic;
  };

  bool Covers(const Acquired& one, const Moment& now) const {
    const Moment &own = fences_[now.thread], &first = fences_[one.atomic.thread];
    return (own.time > one.atomic.time && InBlock(one.atomic, own, known_[now.thread])) ||
           (first.time > one.atomic.time && first.barriers < now.barriers);
  }

  Moment now_;
  std::vector<Known> known_;  // of each thread
  std::vector<Moment> fences_;
  bool fenced_ = false;
  std::map<uint64_t, std::vector<Release>> released_;  // of each word
  std::vector<Acquired> acquired_;
};

}  // namespace races
