// Keeps the rows of a table as they are at one moment, while training changes them and a thread
// writes them to a file.
//
//     training ──► BeforeWrite ──► rows that haven't been read yet are copied (copy on write)
//     the file's thread ──► Read ──► rows from where they are, or from their copies, each once
//
// Nothing is copied at the moment itself. A row is copied only if it changes before it is read, and
// each copy's room is free again once the row has been read. Copies have bounded room, which the
// tables of a save share; if none is left, training waits until the thread has read more.
//
// Copies are of single rows: training touches rows all over a table, so with larger pieces the
// first step would copy nearly all of it.
//
// `Read` copies rows without a lock, and then checks which of them were copied before they changed:
// it takes these from their copies. Only that step takes the lock, which a thread that is about to
// change rows also holds: such a thread hardly ever waits for one that isn't running, however low
// the priority of the file's thread.

#ifndef COLLECTIVE_NATIVE_SNAPSHOT_H_
#define COLLECTIVE_NATIVE_SNAPSHOT_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "row_changes.h"
#include "tensorflow/core/framework/tensor.h"

namespace collective {

// The room that the copies of one save may take.
class CopyRoom {
 public:
  // A thread that waits for room gives the save up if nothing was read for `patience` seconds.
  CopyRoom(int64_t bytes, double patience) : bytes_(bytes), patience_(patience) {}

  bool Take(int64_t bytes);
  void Give(int64_t bytes) { used_ -= bytes; }

  // Notes that the reading thread makes progress.
  void NoteProgress() { ++progress_; }

  // Ends all waiting: copies from now on are of no use.
  void GiveUp() { given_up_ = true; }
  bool given_up() const { return given_up_; }

  int64_t bytes() const { return bytes_; }
  int64_t peak() const { return peak_; }
  int64_t waited_ns() const { return waited_ns_; }
  int64_t progress() const { return progress_; }
  double patience() const { return patience_; }
  void NoteWait(int64_t ns) { waited_ns_ += ns; }

 private:
  const int64_t bytes_;
  const double patience_;
  std::atomic<int64_t> used_{0}, peak_{0}, progress_{0}, waited_ns_{0};
  std::atomic<bool> given_up_{false};
};

// One variable's part of a snapshot: the memory of a table's rows, or of a slot's.
class ColumnSnapshot {
 public:
  // Takes rows [0, rows) of `memory`, which it keeps. `changes`: whether they may change before
  // they are read. If not, nothing calls `Keep`.
  ColumnSnapshot(tensorflow::Tensor memory, int64_t rows, std::shared_ptr<CopyRoom> room,
                 bool changes);
  ~ColumnSnapshot();

  // Copies the rows that were neither read nor copied: `n` of them, or all if `rows` is null.
  void Keep(const int64_t* rows, int64_t n);

  // Writes `n` rows as they were to `out`. Rows that may change are read only once. Returns false
  // if the save was given up.
  bool Read(const int64_t* rows, int64_t n, char* out);

  int64_t row_bytes() const { return row_bytes_; }

 private:
  // 64 consecutive rows.
  struct Neighbours {
    std::atomic<uint64_t> done{0};  // A bit for each row that was read or copied.
    int32_t first = -1;             // The first of their copies, which are a list.
  };
  struct Copy {
    int32_t next;
    int32_t place;  // The place of its row among its neighbours.
  };

  // Marks rows[first] to rows[last - 1] as read, and takes those that have changed from their
  // copies. Returns whether that has freed room.
  bool TakeCopies(const int64_t* rows, int64_t first, int64_t last, char* out);
  bool KeepRow(int64_t row, std::unique_lock<std::mutex>* lock);
  int32_t FreeCopy();             // -1 if there is no room.
  int32_t TakeCopy(int64_t row);  // -1 if there is none; it is free from now on.
  char* At(int32_t copy) const {
    return slabs_[copy / slab_rows_].get() + copy % slab_rows_ * row_bytes_;
  }
  bool IsDone(int64_t row) const { return neighbours_[row >> 6].done >> (row & 63) & 1; }
  // Returns whether it was done already.
  bool SetDone(int64_t row) {
    const uint64_t bit = uint64_t{1} << (row & 63);
    return neighbours_[row >> 6].done.fetch_or(bit) & bit;
  }

  const tensorflow::Tensor memory_;
  const char* const base_;
  const int64_t rows_, row_bytes_;
  const std::shared_ptr<CopyRoom> room_;
  const bool changes_;
  int64_t slab_rows_, taken_ = 0;
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<Neighbours> neighbours_;
  std::vector<Copy> copies_;
  std::vector<std::unique_ptr<char[]>> slabs_;
  std::vector<int32_t> free_;
};

// A snapshot of variables whose rows move together: a dynamic table with its slots. For a static
// table, the table and each slot have their own snapshots.
class Snapshot : public WriteListener {
 public:
  explicit Snapshot(std::shared_ptr<CopyRoom> room) : room_(std::move(room)) {}

  const std::shared_ptr<CopyRoom>& room() const { return room_; }

  // Adds a variable, before `Listen`: one that is watched, or null, and by which number it is read.
  void Add(int64_t number, std::shared_ptr<WatchedShard> shard, tensorflow::Tensor memory,
           int64_t rows);

  static void Listen(const std::shared_ptr<Snapshot>& snapshot);

  // Ends it: nothing is copied any more, and all memory is released.
  void End();

  void BeforeWrite(const WatchedShard& shard, const RowWrite& write) override;

  std::shared_ptr<ColumnSnapshot> column(int64_t shard);

 private:
  std::vector<std::shared_ptr<ColumnSnapshot>> ColumnsOf(int64_t shard, bool all);

  const std::shared_ptr<CopyRoom> room_;
  std::mutex mutex_;  // Protects the lists, not their elements.
  std::vector<int64_t> numbers_;
  std::vector<std::shared_ptr<WatchedShard>> shards_;
  std::vector<std::shared_ptr<ColumnSnapshot>> columns_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_SNAPSHOT_H_
