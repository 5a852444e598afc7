// Holds a run's gradients back until other rows that the run reads have arrived.
//
// A lookup that is fetched together with an update of its table returns the rows as they were
// before. If the gradients depend on these rows, that holds anyway. Python names the other rows of
// a run (CollectiveAwaitRows, which is executed before the run's collectives may start): this
// rank sends no gradients before those rows have arrived. An owner updates its rows once it has all
// ranks' gradients; by then every rank has the rows that it asked for.

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

  // Notes the names of a run's exchanges of rows.
  void Expect(int64_t step, const std::vector<std::string>& names) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Runs that failed before they reached their gradients.
    for (auto run = runs_.begin(); run != runs_.end();) {
      run = run->second.held.empty() ? runs_.erase(run) : std::next(run);
    }
    runs_[step].names.insert(names.begin(), names.end());
    count_ = static_cast<int>(runs_.size());
  }

  bool Any() const { return count_ > 0; }

  // Notes that rows have arrived, or that their exchange has failed.
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

  // Keeps `send` until the rows of the run have arrived, and returns true; false: they have.
  bool Hold(int64_t step, const std::string& name, std::function<void()> send) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto run = runs_.find(step);
    if (run == runs_.end()) return false;
    run->second.held[name] = std::move(send);
    return true;
  }

  // Forgets gradients that are held back because their run has failed.
  void Drop(int64_t step, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto run = runs_.find(step);
    if (run != runs_.end()) run->second.held.erase(name);
  }

 private:
  struct Run {
    std::set<std::string> names;                        // Those that have not arrived.
    std::map<std::string, std::function<void()>> held;  // By the name of the gradients' exchange.
  };

  std::mutex mutex_;
  std::map<int64_t, Run> runs_;  // By the step's number.
  std::atomic<int> count_{0};
};

}  // namespace carrier
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_AWAITED_ROWS_H_
