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
//     write of all rows. The pass adds operations only for variables that are to be watched, and
//     has to be asked before a session sees the graph (`collective.ops.rows.row_changes.want`);
//   - row stores of dynamic tables: new rows, removals, rows that go to a file and come back;
//   - Python that writes into memory itself (`collective.ops.rows.row_changes.announce`).
// Dynamic tables on a GPU announce no inserts and removals (their keys are on the device):
// listeners treat them as changed completely. An update there may announce rows that don't exist.
//
// How to listen, from another file of this library: derive from WriteListener, have Python watch
// the variable in a session (`collective.ops.rows.row_changes.watch(session, variables)` gives the
// numbers of the WatchedShards, which live as long as the session), then
// `FindWatchedShard(number)->Add(listener)`, and `Remove` it at the end. One listener may listen to
// several shards. Listeners don't know of each other, and each gets every announcement.
//
// A listener is added and removed between runs: what is announced at that moment may or may not
// reach it. Without listeners, an announcement costs the reading of one number.

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
    // Rows of a dynamic table are about to move to other places in memory, or to or from its file,
    // or to be removed: any rows. The values of keys don't change by it. `RowsLeave` and
    // `RowsMoved` say which rows, once that is known.
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

  // Called before a write, by the writing thread, which holds no lock of a shard or store (but see
  // kNewRows). It may block: the write waits. Several threads may call it at once. The write may
  // fail afterwards, or not happen at all.
  virtual void BeforeWrite(const WatchedShard& shard, const RowWrite& write) = 0;

  // Keys of a dynamic table leave the places where their rows and all slots are. The store's lock
  // is held: these two functions must not block, nor call the store.
  //
  // Args:
  //   rows: [n] their local rows, ascending; null if they are in the file.
  //   gone: whether they are removed. Else they go to the file.
  virtual void RowsLeave(const int64_t* keys, const int64_t* rows, int64_t n, bool gone) {}

  // Afterwards rows moved into the gaps: `from`[i] to `to`[i], [n]. Now rows 1 to `count` exist.
  virtual void RowsMoved(const int64_t* from, const int64_t* to, int64_t n, int64_t count) {}
};

// The memory of a table or a slot in one session, which has listeners.
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

// Tells whether any shard of the process has a listener.
bool AnybodyListens();

// Returns the shard with this number; null if its session is closed.
std::shared_ptr<WatchedShard> FindWatchedShard(int64_t number);

// Announces a write of the variable that `handle` names in the session of `context`. Call it before
// the variable is locked.
void AnnounceWrite(tensorflow::OpKernelContext* context, const tensorflow::ResourceHandle& handle,
                   const RowWrite& write);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ROW_CHANGES_H_
