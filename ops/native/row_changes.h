// Announces writes of the rows of shards (tables' and slots' memory on this rank) before they
// happen, to all listeners: change sets (increments of checkpoints), and guards that copy rows
// before they change (saves in the background).
//
//     whatever writes rows ──► AnnounceWrite(handle, rows) ──► WriteListener::BeforeWrite, each
//     a row store          ──► keys that leave, rows that move ──► WriteListener::RowsLeave, …
//
// Who announces:
//   - compiled updates (sparse_updates.cc, gpu/table_updates.h), by themselves;
//   - every other operation of a graph that takes a shard's handle and may write: TensorFlow's
//     updates, scatters, assignments, initializers, restores. The pass
//     `announce_writes` (collective.interception.graph_passes) puts a CollectiveAnnounceWrites
//     before each, as a control input. What isn't known to write only some rows is announced as a
//     write of all. The pass adds operations only for variables that somebody wants to watch, and
//     has to be asked before a session sees the graph (`collective.ops.rows.row_changes.want`);
//   - row stores of dynamic tables: new rows, removals, rows that go to a file and come back;
//   - Python that writes into memory itself (`collective.ops.rows.row_changes.announce`).
// Dynamic tables on a GPU announce no inserts and removals (their keys are on the device):
// listeners treat them as changed as a whole. An update there may announce rows that there aren't.
//
// How to listen, from another file of this library: derive from WriteListener, have Python watch
// the variable in a session (`collective.ops.rows.row_changes.watch(session, variables)` gives the
// numbers of the WatchedShards, which live as long as the session), then
// `FindWatchedShard(number)->Add(listener)`, and `Remove` it at the end. One listener may listen to
// several shards. Listeners don't know of each other, and each gets every announcement.
//
// A listener is added and removed between runs: what is announced at that moment may or may not
// reach it. Where nobody listens, an announcement costs the reading of one number.

#ifndef COLLECTIVE_NATIVE_ROW_CHANGES_H_
#define COLLECTIVE_NATIVE_ROW_CHANGES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"

namespace collective {

class WatchedShard;

// Describes a write that is about to happen.
struct RowWrite {
  enum Kind {
    // Rows get other values.
    kValues,
    // Rows of a dynamic table that had no key get one, and initial values. It is announced while
    // the store's lock is held: a listener must not block, nor call the store.
    kNewRows,
    // Rows of a dynamic table are about to move to other places in memory, or to and from its file,
    // or to go: any of them. The values that keys have don't change by it. `RowsLeave` and
    // `RowsMoved` say which, once that is known.
    kMoves,
  };

  Kind kind = kValues;
  // Local rows, in any order and often.
  const int64_t* rows = nullptr;
  int64_t n = kAll;  // How many; or any of all rows.

  static constexpr int64_t kAll = -1;
  bool all() const { return n == kAll; }
};

class WriteListener {
 public:
  virtual ~WriteListener() = default;

  // Is called before a write, by the thread that writes, which holds no lock of a shard or store
  // (but see kNewRows). It may block: the write waits. Writes of several threads come at once. The
  // write may fail after it, or never come.
  virtual void BeforeWrite(const WatchedShard& shard, const RowWrite& write) = 0;

  // Keys of a dynamic table are leaving the rows where they are, with all slots. The store's lock
  // is held: these two must not block, nor call the store.
  //
  // Args:
  //   rows: [n] their local rows, ascending; null if they are in the file.
  //   gone: they are removed. Else they go to the file.
  virtual void RowsLeave(const int64_t* keys, const int64_t* rows, int64_t n, bool gone) {}

  // After it rows moved into the gaps: `from`[i] to `to`[i], [n]. There are rows 1 to `count` now.
  virtual void RowsMoved(const int64_t* from, const int64_t* to, int64_t n, int64_t count) {}
};

// Is the memory of a table or a slot in one session, to which somebody listens.
class WatchedShard {
 public:
  WatchedShard(int64_t number, std::string name) : number_(number), name_(std::move(name)) {}
  ~WatchedShard();

  int64_t number() const { return number_; }
  const std::string& name() const { return name_; }  // The variable's.

  void Add(std::shared_ptr<WriteListener> listener);
  void Remove(const WriteListener* listener);

  // Calls all listeners. No lock is held meanwhile.
  void BeforeWrite(const RowWrite& write) const;
  void RowsLeave(const int64_t* keys, const int64_t* rows, int64_t n, bool gone) const;
  void RowsMoved(const int64_t* from, const int64_t* to, int64_t n, int64_t count) const;

 private:
  std::vector<std::shared_ptr<WriteListener>> Listeners() const;

  const int64_t number_;
  const std::string name_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<WriteListener>> listeners_;
};

// Tells whether anybody listens to any shard of the process.
bool AnybodyListens();

// Returns the shard with this number; null if its session is closed.
std::shared_ptr<WatchedShard> FindWatchedShard(int64_t number);

// Announces a write of the variable that `handle` names in the session of `context`. Call it before
// the variable is locked.
void AnnounceWrite(tensorflow::OpKernelContext* context, const tensorflow::ResourceHandle& handle,
                   const RowWrite& write);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ROW_CHANGES_H_
