// Tracks how many of the rows that a rank has asked for have arrived, section by section: as owners
// report it (answer.cc), and as operations that wait for rows use it (answered_rows.cc).

#ifndef COLLECTIVE_NATIVE_AWAITED_ANSWERS_H_
#define COLLECTIVE_NATIVE_AWAITED_ANSWERS_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "mailbox.h"
#include "tensorflow/core/framework/variant_encode_decode.h"

namespace collective {
namespace carrier {

// For the rows of another rank: how many rows it writes before it reports how many sections are
// complete. If fewer rows than this are left, it doesn't report.
constexpr int64_t kElementsBetweenParts = 128 << 10;

// Decides when to report how many of a rank's sections are complete.
class Parts {
 public:
  Parts(size_t sections, int64_t elements) : written_(sections, -1), left_(elements) {}

  // Notes that a section is complete. Returns the number of complete sections up to the first
  // incomplete one, if it is to be reported, else 0. Sections may end in any order, in several
  // threads.
  int64_t Written(size_t section, int64_t elements) {
    std::lock_guard<std::mutex> lock(mutex_);
    written_[section] = elements;
    for (; end_ < written_.size() && written_[end_] >= 0; ++end_) {
      unsaid_ += written_[end_];
      left_ -= written_[end_];
    }
    if (unsaid_ < kElementsBetweenParts || left_ < kElementsBetweenParts) return 0;
    unsaid_ = 0;
    return static_cast<int64_t>(end_);
  }

 private:
  std::mutex mutex_;
  std::vector<int64_t> written_;  // The elements of each section; -1: it is missing.
  size_t end_ = 0;
  int64_t unsaid_ = 0, left_;
};

// The exchange of rows, until all have arrived.
class AwaitedAnswers {
 public:
  AwaitedAnswers(int ranks, int own, int64_t sections) : sections_(sections), there_(ranks, 0) {
    there_[own] = sections;  // -Rows begins after -Keys.
  }

  std::shared_ptr<mailbox::Exchange> exchange;

  // Notes that the first `sections` sections of a rank's answer have arrived.
  void Came(int rank, int64_t sections) {
    std::function<void()> changed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (over_ || sections <= there_[rank]) return;
      const int64_t before = Least();
      there_[rank] = sections;
      const int64_t now = Least();
      if (now == before || now == sections_) return;  // When all have arrived, `Finish` reports it.
      changed = changed_;
    }
    if (changed) changed();
  }
  void CameWhole(int rank) { Came(rank, sections_); }

  void Finish(int lost) {
    std::function<void()> changed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
      lost_ = lost;
      changed = std::move(changed_);
    }
    if (changed) changed();
  }

  // Calls `changed` each time that more sections have arrived from all ranks, and at the end, in
  // any thread, several at a time.
  void Watch(std::function<void()> changed) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!over_) changed_ = std::move(changed);
  }

  // Returns how many sections have arrived from all ranks, counted from the first.
  int64_t Sections() {
    std::lock_guard<std::mutex> lock(mutex_);
    return Least();
  }

  // Tells whether all have arrived, or a rank is lost.
  bool IsOver(int* lost) {
    std::lock_guard<std::mutex> lock(mutex_);
    *lost = lost_;
    return over_;
  }

 private:
  int64_t Least() const { return *std::min_element(there_.begin(), there_.end()); }

  const int64_t sections_;
  std::mutex mutex_;
  std::vector<int64_t> there_;  // By rank: how many sections.
  bool over_ = false;
  int lost_ = mailbox::kNobodyLost;
  std::function<void()> changed_;
};

// Carries it from one operation to the other.
struct AnswersHandle {
  std::shared_ptr<AwaitedAnswers> answers;

  std::string TypeName() const { return "collective::AnswersHandle"; }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
  std::string DebugString() const { return TypeName(); }
};

}  // namespace carrier
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_AWAITED_ANSWERS_H_
