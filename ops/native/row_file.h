// Keeps rows of a dynamic table in a file: a log of records, whose places are known in memory.
//
//     records ──► a segment in memory, until it is full ──► its place in the file, by one write
//
// A record has a key, and the values of its row in the table's columns. It doesn't change: a row
// that comes back leaves its record there, dead. A segment of dead records is overwritten. When
// more than half of the file is dead, the live records of the emptiest segments move to the end of
// the log: the file is at most about twice as large as the rows in it.
//
// The file has no name: it is gone when the process ends, for whatever reason, and two jobs have
// two files in the same folder.
//
// Each key takes 8 bytes for itself, about 6 for its bucket, and 8 for its record's place; and 8
// for a note, if the caller gives one: a number that is known without reading the record.
//
// It is not thread-safe: the caller holds a lock. An error leaves every row where it was.

#ifndef COLLECTIVE_NATIVE_ROW_FILE_H_
#define COLLECTIVE_NATIVE_ROW_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "keymap.h"
#include "tensorflow/core/platform/status.h"

namespace collective {

class RowColumn;

// Says where in a record the values of a column are.
class RecordLayout {
 public:
  explicit RecordLayout(const std::vector<std::shared_ptr<RowColumn>>& columns);

  // The bytes of a record.
  int64_t bytes() const { return bytes_; }

  bool IsOf(const std::vector<std::shared_ptr<RowColumn>>& columns) const;

  // Returns a column's offset in a record; 0 if a record doesn't have the column.
  int64_t OffsetOf(const RowColumn& column) const;

  // Calls visit(column, offset) for each column that still exists.
  void ForEach(const std::function<void(RowColumn*, int64_t)>& visit) const;

 private:
  std::vector<std::weak_ptr<RowColumn>> columns_;
  std::vector<int64_t> offsets_;
  int64_t bytes_;
};

class RowFile {
 public:
  // Called with the number of an entry among the requested ones, and its record.
  using Receive = std::function<void(int64_t i, const char* record, const RecordLayout& layout)>;

  // At most `capacity` keys; records of at most `segment_bytes`.
  RowFile(std::string folder, int64_t segment_bytes, uint64_t capacity)
      : folder_(std::move(folder)), segment_bytes_(segment_bytes), map_(capacity) {}
  RowFile(const RowFile&) = delete;
  ~RowFile();

  // Makes the file; it must succeed before anything else is called.
  tensorflow::Status Open();

  // The keys, which have entries 1 to their count. Entries change by `Remove`.
  const KeyMap& keys() const { return map_; }
  int64_t count() const { return static_cast<int64_t>(map_.count()); }

  // The bytes of the file.
  int64_t bytes() const { return static_cast<int64_t>(segments_.size()) * segment_bytes_; }

  // The bytes of the largest record.
  int64_t record_bytes() const { return record_bytes_; }

  // Returns the note of an entry; 0 if it was given none.
  int64_t note(int64_t entry) const {
    return entry < static_cast<int64_t>(notes_.size()) ? notes_[entry] : 0;
  }

  // Makes records of new keys, as many as there is room for: `taken`, at least one. The caller
  // fills them, from *records on; their keys are written already. `notes` may be null.
  tensorflow::Status Append(const int64_t* keys, const int64_t* notes, int64_t n,
                            const std::shared_ptr<const RecordLayout>& layout, char** records,
                            int64_t* taken);

  // Reads the records of `n` entries, in the order of their places.
  tensorflow::Status Read(const int64_t* entries, int64_t n, const Receive& receive);

  // Removes `n` entries, given in ascending order and each once.
  void Remove(const int64_t* entries, int64_t n);

  // Moves records until no more than about half of the file is dead. They get the given layout.
  tensorflow::Status Compact(const std::shared_ptr<const RecordLayout>& layout);

  // Removes all entries, and makes the file empty.
  void Clear();

 private:
  struct Segment {
    std::shared_ptr<const RecordLayout> layout;  // Null: the segment is empty.
    int64_t records = 0, live = 0;
  };

  static uint64_t PlaceOf(int64_t segment, int64_t record) {
    return static_cast<uint64_t>(segment) << kRecordBits | static_cast<uint64_t>(record);
  }
  static int64_t SegmentOf(uint64_t place) { return static_cast<int64_t>(place >> kRecordBits); }
  static int64_t RecordOf(uint64_t place) {
    return static_cast<int64_t>(place & ((uint64_t{1} << kRecordBits) - 1));
  }

  tensorflow::Status Reserve(int64_t n, const std::shared_ptr<const RecordLayout>& layout,
                             char** records, uint64_t* place, int64_t* taken);
  tensorflow::Status Seal();
  tensorflow::Status MoveRecords(int64_t segment,
                                 const std::shared_ptr<const RecordLayout>& layout);
  int64_t Emptiest() const;
  void Enliven(int64_t segment, int64_t records);
  void Drop(int64_t segment);
  void Free(int64_t segment);
  tensorflow::Status ReadAt(char* to, int64_t bytes, int64_t offset) const;
  tensorflow::Status WriteAt(const char* from, int64_t bytes, int64_t offset) const;

  static constexpr int kRecordBits = 24;

  const std::string folder_;
  const int64_t segment_bytes_;
  int file_ = -1;
  KeyMap map_;
  std::vector<uint64_t> places_;  // By entry, from 1.
  std::vector<int64_t> notes_;    // By entry, from 1; empty until one is given.
  std::vector<Segment> segments_;
  std::vector<int64_t> free_;       // Segments with nothing in them.
  int64_t open_ = -1;               // The segment that is still in memory.
  std::vector<char> open_records_;  // What is in it.
  int64_t sealed_ = 0;              // The number of segments in the file.
  int64_t live_bytes_ = 0, record_bytes_ = 0;
  std::vector<char> buffer_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ROW_FILE_H_
