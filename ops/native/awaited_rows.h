// Holds a run's gradients back until rows that it reads in addition have come.
//
// A lookup that is fetched together with an update of its table reads the rows as they were before.
// Where the gradients depend on the rows this is so by itself. Of other rows of a run Python gives
// the names (CollectiveAwaitRows, which is executed before the run's collectives may start): this
// rank sends no gradients before these rows have come. An owner updates its rows when it has all
// ranks' gradients, and then every rank has the rows that it asked for.

#ifndef COLLECTIVE_NATIVE_AWAITED_ROWS_H_
#define COLLECTIVE_NATIVE_AWAITED_ROWS_H_

#include <atomic>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace collective {
namespace carrier {

class AwaitedRows {
 public:
  static AwaitedRows* Get() {
    static AwaitedRows* instance = new AwaitedRows;
    return instance;
  }

  // Takes note of the names of a run's exchanges of rows.
  void Expect(int64_t step, const std::vector<std::string>& names) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Runs that have failed before they came to their gradients.
    for (auto run = runs_.begin(); run != runs_.end();) {
      run = run->second.held.empty() ? runs_.erase(run) : std::next(run);
    }
    runs_[step].names.insert(names.begin(), names.end());
    count_ = static_cast<int>(runs_.size());
  }

  bool Any() const { return count_ > 0; }

  // Takes note that rows have come, or that their exchange has failed.
  void Came(int64_t step, const std::string& name) {
    if (count_ == 0) return;
    std::vector<std::function<void()>> ready;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto run = runs_.find(step);
      if (run == runs_.end()) return;
      run->second.names.erase(name);
      if (!run->second.names.empty()) return;
      for (auto& [_, send] : run->second.held) ready.push_back(std::move(send));
      runs_.erase(run);
      count_ = static_cast<int>(runs_.size());
    }
    for (auto& send : ready) send();
  }

  // Keeps `send` until the rows of the run have come, and returns true; false: they have.
  bool Hold(int64_t step, const std::string& name, std::function<void()> send) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto run = runs_.find(step);
    if (run == runs_.end()) return false;
    run->second.held[name] = std::move(send);
    return true;
  }

  // Forgets gradients that are held back: their run has failed.
  void Drop(int64_t step, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto run = runs_.find(step);
    if (run != runs_.end()) run->second.held.erase(name);
  }

 private:
  struct Run {
    std::set<std::string> names;                        // That have not come.
    std::map<std::string, std::function<void()>> held;  // By the name of the gradients' exchange.
  };

  std::mutex mutex_;
  std::map<int64_t, Run> runs_;  // By the step's number.
  std::atomic<int> count_{0};
};

}  // namespace carrier
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_AWAITED_ROWS_H_
