// Keeps what a session knows about a dynamic table in host memory: its keys, and how many of its
// rows and slots have values. Operations and Python work on the same objects, and find them by the
// number that the table's variable holds.
//
//     keys ──► KeyMap ──► rows, found or numbered ──► initial values of new rows ──► their numbers
//
// The memory itself belongs to the variables: a `RowColumn` knows its address. Code that writes
// into it keeps the variable alive meanwhile.
//
// Every function of a store takes the store's lock, and every function of a column the column's.
// The locks are held only inside this library, and released by every return. A store that has
// Python draw initial values waits for the interpreter while it holds its lock: so no thread may
// wait for a lock of this file while it holds the interpreter (ctypes releases it before it calls;
// operations don't have it). No lock is taken while another store's lock is held; a store's lock is
// taken before that of a column.
//
// What is recorded around `RowStore::Find`, and when:
//   - admission: `Admit` counts keys without rows, after it has found keys and before it inserts
//     those that get a row. Rows that a lookup doesn't see are negative (see wire.h);
//   - last use: a separate RowColumn, written after the insertion for all found rows;
//   - bounded capacity: after a step, by `Remove`;
//   - rows in a file: before keys are found, those in the file come back, and have rows as others;
//     after a step, `MoveToFile` (rows_in_file.cc).
//
// `Remove` and `MoveToFile` keep rows dense: in all columns, the last rows move to where rows were
// removed. So they must not run between a lookup and its update, which know rows by their numbers.

#ifndef COLLECTIVE_NATIVE_ROW_STORE_H_
#define COLLECTIVE_NATIVE_ROW_STORE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "keymap.h"
#include "admission.h"
#include "row_changes.h"
#include "row_file.h"
#include "row_generator.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/status.h"

namespace collective {

// Knows the memory that holds one row for each row of a table: its values, or a slot.
class RowColumn {
 public:
  explicit RowColumn(int64_t row_bytes) : row_bytes_(row_bytes) {}

  // The memory may move until TensorFlow has taken it.
  char* address() const { return address_.load(std::memory_order_acquire); }
  void MoveTo(char* address) { address_.store(address, std::memory_order_release); }

  // Rows 1 to `filled` have their initial value or a later one.
  int64_t filled() const { return filled_.load(std::memory_order_acquire); }
  void SetFilled(int64_t filled) { filled_.store(filled, std::memory_order_release); }

  // Sets the values with which rows start. Otherwise they start with zeros, like fresh memory.
  void SetFirst(const char* row);

  // Gives rows up to `count` their initial value, unless they have it.
  void InitializeRows(int64_t count);

  // Moves `n` rows, and resets the rows after `after`, up to `before`, to rows without values.
  void CloseGaps(const int64_t* from, const int64_t* to, int64_t n, int64_t before, int64_t after);

  // Copies `n` rows to places that are `stride` bytes apart. Rows without values are copied with
  // their initial values.
  void CopyRows(const int64_t* rows, int64_t n, char* to, int64_t stride);

  // Copies the initial values of a row.
  void CopyFirst(char* to);

  char* at(int64_t row) const { return address() + row * row_bytes_; }
  int64_t row_bytes() const { return row_bytes_; }

 private:
  const char* Row(int64_t row) const;

  const int64_t row_bytes_;
  std::atomic<char*> address_{nullptr};
  std::atomic<int64_t> filled_{0};
  std::mutex mutex_;
  std::vector<char> first_;
};

class RowStore {
 public:
  // The row that `Locate` returns for a key in the file.
  static constexpr int64_t kInFile = int64_t{1} << 62;

  RowStore(std::string name, std::string advice, uint64_t capacity, tensorflow::DataType dtype,
           int64_t dim, std::shared_ptr<RowColumn> values, RowGenerator generator)
      : name_(std::move(name)),
        advice_(std::move(advice)),
        dtype_(dtype),
        dim_(dim),
        keys_(capacity),
        values_(std::move(values)),
        generator_(std::move(generator)) {}

  // Reserves memory; it must succeed before anything else is called.
  bool Start() { return keys_.Start(); }

  // Finds the rows of keys. New keys are inserted, and their rows drawn; or they have row 0. Rows
  // that could not be drawn earlier are drawn now.
  tensorflow::Status Find(const int64_t* keys, int64_t n, bool insert, int64_t* rows);

  // Finds the rows of keys like `Find`, in a store with an admission.
  //
  // Args:
  //   counts: how often each key occurred.
  //   run: a number of the session's run, the same in all calls of the run.
  //   step: the global step to which the run leads.
  //   added: by how much each row's count grows: 0 for a key without a row. For a new row it is
  //     how often its key has occurred so far.
  tensorflow::Status Admit(const int64_t* keys, const int64_t* counts, int64_t n, bool training,
                           int64_t run, int64_t step, int64_t* rows, int64_t* added);

  // Sets which keys get rows, once, before any key is looked up.
  void AdmitBy(std::unique_ptr<Admission> admission) { admission_ = std::move(admission); }
  bool admits() const { return admission_ != nullptr; }

  // Returns how often a key was refused a row.
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }

  // Adds to the counts of keys that have no rows.
  tensorflow::Status AddCounts(const int64_t* keys, const int64_t* counts, int64_t n);

  // Forgets the counts of keys; of all keys if `keys` is null. They keep their rows.
  void Forget(const int64_t* keys, int64_t n);

  // Calls `use` with the counter of keys without rows, which is null if nothing counts them.
  template <class Use>
  auto WithCounter(Use use) {
    std::lock_guard<std::mutex> lock(mutex_);
    return use(admission_ == nullptr ? nullptr : admission_->counter());
  }

  // Gives keys, new or not, these values. If a key is given twice, the last values count.
  tensorflow::Status Put(const int64_t* keys, int64_t n, const char* values, int64_t* rows);

  // Removes `n` rows, given in ascending order and each once, from the keys, the values, and
  // `slots`. `moves` has room for 2 n numbers.
  tensorflow::Status Remove(const int64_t* rows, int64_t n,
                            const std::vector<std::shared_ptr<RowColumn>>& slots, int64_t* moves);

  // Returns the number of rows, including those in the file. A key whose row has no values yet
  // doesn't count.
  int64_t count();

  // Returns the number of rows in memory.
  int64_t count_in_memory() const;

  const KeyMap& keys() const { return keys_; }
  const std::shared_ptr<RowColumn>& values() const { return values_; }

  // Makes `MoveToFile` keep this many bytes of rows and slots in memory; the others go to a
  // separate file in a folder. Call it before there are rows.
  tensorflow::Status KeepInFile(const std::string& folder, int64_t memory_bytes);

  // Notes the slots whose rows count as memory of the table.
  void NoteSlots(const std::vector<std::shared_ptr<RowColumn>>& slots);

  // Moves the least recently used rows to the file, with their values in `slots`, if there are more
  // than memory is meant for. After an error all rows still exist.
  //
  // Args:
  //   noted: one of `slots`, of int64, which is also noted in memory: `Notes` has it. Or null.
  tensorflow::Status MoveToFile(const std::vector<std::shared_ptr<RowColumn>>& slots,
                                RowColumn* noted);

  // Writes the notes of keys that are in the file, and 0 for others.
  void Notes(const int64_t* keys, int64_t n, int64_t* notes);

  // Finds where keys are: their rows in memory, 0 for unknown ones, or kInFile.
  void Locate(const int64_t* keys, int64_t n, int64_t* rows);

  // Copies the values of keys in some columns, wherever they are, and zeros for unknown keys:
  // to[c] has room for `n` rows of columns[c]. Nothing moves.
  tensorflow::Status Read(const int64_t* keys, int64_t n,
                          const std::vector<std::shared_ptr<RowColumn>>& columns, char* const* to);

  // Removes those of `keys` that are in the file. Returns how many.
  int64_t RemoveInFile(const int64_t* keys, int64_t n);

  // Removes all keys that are in the file.
  void ClearFile();

  // The keys in the file; null if there is no file. They are read between steps.
  const RowFile* file() const;

  // Announces from now on changes of keys and rows to the listeners of a shard, that of the values;
  // see row_changes.h.
  void Watch(std::shared_ptr<WatchedShard> shard);

  // Tells whether more rows are in memory than should be; returns the number of such stores.
  bool is_overfull();
  static int64_t CountOverfull();

 private:
  struct InFile;

  std::shared_ptr<WatchedShard> Watched();
  void AnnounceMoves();
  void AnnounceNewRows(int64_t before);
  tensorflow::Status Insert(const int64_t* keys, int64_t n, int64_t* rows);
  tensorflow::Status AdmitUnknown(const int64_t* keys, const int64_t* counts, int64_t n,
                                  int64_t step, int64_t* rows, int64_t* added);
  void NoteAdmitted(int64_t before, int64_t after);
  bool WasAdmittedInRun(int64_t row) const;
  tensorflow::Status DrawNew();
  tensorflow::Status Named(const tensorflow::Status& status) const;
  void RemoveRows(const int64_t* rows, int64_t n,
                  const std::vector<std::shared_ptr<RowColumn>>& slots, bool gone, int64_t* moves);
  tensorflow::Status TakeFromFile(const int64_t* keys, int64_t n);
  tensorflow::Status TakeSome(const int64_t* keys, int64_t n);
  std::vector<int64_t> LeastRecent(int64_t n) const;
  void NoteUse(const int64_t* rows, int64_t n);
  void CompareWithLimit();

  const std::string name_, advice_;
  const tensorflow::DataType dtype_;
  const int64_t dim_;
  std::mutex mutex_;
  KeyMap keys_;
  const std::shared_ptr<RowColumn> values_;
  const RowGenerator generator_;
  std::unique_ptr<Admission> admission_;  // Null: every key gets a row.
  // For the last training run: its number, and the rows that it admitted, ascending. A range holds
  // the rows after its first number, up to its second.
  int64_t run_ = -1;
  std::vector<std::pair<int64_t, int64_t>> admitted_in_run_;
  std::atomic<int64_t> refused_{0};
  std::shared_ptr<WatchedShard> watched_;  // Null: there was never a listener.
  std::shared_ptr<InFile> in_file_;        // Null: all rows are in memory.
};

// Return the store or column with this number; null if it is gone. The pointer keeps it alive.
std::shared_ptr<RowStore> FindStore(int64_t number);
std::shared_ptr<RowColumn> FindColumn(int64_t number);

// Says that there is no such store or column.
tensorflow::Status MemoryIsGone();

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ROW_STORE_H_
