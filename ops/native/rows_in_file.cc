// Moves rows of a store that weren't used for long to a file, and takes them back.
//
//     Find ──► keys without a row ──► in the file? ──► rows at the end, values and slots ──► found
//     after a step ──► too many rows ──► those used longest ago ──► records of the file
//
// A row's last use here is the number of the call that asked for it, of 4 bytes a row, by which
// rows in memory are ordered. It isn't the last use of a table's policy, which is a column.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "row_file.h"
#include "row_store.h"
#include "wire.h"
#include "tensorflow/core/platform/errors.h"

namespace collective {

using namespace tensorflow;

namespace {

constexpr int64_t kLeastSegment = 4 << 10, kMostSegment = 4 << 20;
// The file's segment takes one of so many parts of the memory, and holds so many rows at least.
constexpr int64_t kSegmentShare = 16, kRowsOfSegment = 64;
// The index has room for so many times the rows that memory could hold.
constexpr uint64_t kFileRows = 8;
// One of so many rows goes at once: rows are gone over seldom, and written in large pieces.
constexpr int64_t kMovedShare = 8;
constexpr int64_t kTakenAtOnce = 1 << 14;

std::atomic<int64_t> overfull{0};

}  // namespace

// What a store has in addition to its memory.
struct RowStore::InFile {
  InFile(std::string folder, int64_t segment_bytes, uint64_t capacity)
      : file(std::move(folder), segment_bytes, capacity) {}
  ~InFile() {
    if (is_overfull) --overfull;
  }

  RowFile file;
  std::shared_ptr<const RecordLayout> layout;
  int64_t memory_bytes = 0, most_rows = 0;
  bool is_overfull = false;
  uint32_t clock = 1;
  std::vector<uint32_t> used;  // By row, from 1.
};

int64_t RowStore::CountOverfull() { return overfull; }

bool RowStore::is_overfull() {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_file_ != nullptr && in_file_->is_overfull;
}

Status RowStore::KeepInFile(const std::string& folder, int64_t memory_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t share = memory_bytes / kSegmentShare / kLeastSegment * kLeastSegment;
  const int64_t rows = kRowsOfSegment * (values_->row_bytes() + sizeof(int64_t));
  const int64_t segment = std::max(rows, std::min(std::max(share, kLeastSegment), kMostSegment));
  const uint64_t capacity = std::min(KeyMap::kMostRows / kFileRows, keys_.capacity()) * kFileRows;
  auto in_file = std::make_shared<InFile>(folder, segment, capacity);
  const Status opened = in_file->file.Open();
  if (!opened.ok()) return Named(opened);
  in_file->memory_bytes = memory_bytes;
  in_file->most_rows = std::max<int64_t>(1, memory_bytes / values_->row_bytes());
  in_file_ = std::move(in_file);
  return OkStatus();
}

int64_t RowStore::count() {
  if (in_file_ == nullptr) return count_in_memory();
  std::lock_guard<std::mutex> lock(mutex_);  // No row is on its way.
  return count_in_memory() + in_file_->file.count();
}

const RowFile* RowStore::file() const { return in_file_ == nullptr ? nullptr : &in_file_->file; }

void RowStore::NoteSlots(const std::vector<std::shared_ptr<RowColumn>>& slots) {
  if (in_file_ == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t row_bytes = values_->row_bytes();
  for (const auto& slot : slots) row_bytes += slot->row_bytes();
  in_file_->most_rows = std::max<int64_t>(1, in_file_->memory_bytes / row_bytes);
  CompareWithLimit();
}

void RowStore::CompareWithLimit() {
  const bool is_overfull = static_cast<int64_t>(keys_.count()) > in_file_->most_rows;
  if (is_overfull != in_file_->is_overfull) overfull += is_overfull ? 1 : -1;
  in_file_->is_overfull = is_overfull;
}

void RowStore::NoteUse(const int64_t* rows, int64_t n) {
  InFile& in_file = *in_file_;
  in_file.used.resize(keys_.count() + 1, in_file.clock);
  // A row that the lookup doesn't see is used, too.
  for (int64_t i = 0; i < n; ++i)
    in_file.used[IsUnseen(rows[i]) ? SeenLater(rows[i]) : rows[i]] = in_file.clock;
  ++in_file.clock;
  CompareWithLimit();
}

void RowStore::RemoveRows(const int64_t* rows, int64_t n,
                          const std::vector<std::shared_ptr<RowColumn>>& slots, bool gone,
                          int64_t* moves) {
  const int64_t before = static_cast<int64_t>(keys_.count());
  const bool is_watched = AnybodyListens() && watched_ != nullptr;
  if (is_watched) {
    std::vector<int64_t> keys(n);
    for (int64_t i = 0; i < n; ++i) keys[i] = keys_.keys()[rows[i]];
    watched_->RowsLeave(keys.data(), rows, n, gone);
  }
  int64_t *from = moves, *to = moves + n;
  const int64_t moved = keys_.Remove(rows, n, from, to);
  if (is_watched) watched_->RowsMoved(from, to, moved, before - n);
  values_->CloseGaps(from, to, moved, before, before - n);
  for (const auto& slot : slots) slot->CloseGaps(from, to, moved, before, before - n);
  if (in_file_ == nullptr) return;
  std::vector<uint32_t>& used = in_file_->used;
  used.resize(before + 1, in_file_->clock);
  for (int64_t i = 0; i < moved; ++i) used[to[i]] = used[from[i]];
  used.resize(before - n + 1);
  CompareWithLimit();
}

// Gives those of `keys` that are in the file rows in memory.
Status RowStore::TakeFromFile(const int64_t* keys, int64_t n) {
  TF_RETURN_IF_ERROR(Named(DrawNew()));  // The rows that follow have their values.
  if (in_file_->file.count() == 0) return OkStatus();
  std::vector<int64_t> rows(n), missing;
  keys_.Find(keys, n, rows.data());
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] == 0) missing.push_back(keys[i]);
  }
  const int64_t count = static_cast<int64_t>(missing.size());
  for (int64_t first = 0; first < count; first += kTakenAtOnce) {
    TF_RETURN_IF_ERROR(
        Named(TakeSome(missing.data() + first, std::min(kTakenAtOnce, count - first))));
  }
  return OkStatus();
}

Status RowStore::TakeSome(const int64_t* keys, int64_t n) {
  RowFile& file = in_file_->file;
  std::vector<int64_t> entries(n);
  file.keys().Find(keys, n, entries.data());
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  if (!entries.empty() && entries[0] == 0) entries.erase(entries.begin());  // Unknown keys.
  const int64_t taken = static_cast<int64_t>(entries.size());
  if (taken == 0) return OkStatus();

  // All is read before anything changes.
  const int64_t record_bytes = file.record_bytes();
  std::vector<char> records(taken * record_bytes);
  std::vector<const RecordLayout*> layouts(taken);
  TF_RETURN_IF_ERROR(file.Read(
      entries.data(), taken, [&](int64_t i, const char* record, const RecordLayout& layout) {
        std::memcpy(records.data() + i * record_bytes, record, layout.bytes());
        layouts[i] = &layout;
      }));

  std::vector<int64_t> taken_keys(taken), rows(taken);
  for (int64_t i = 0; i < taken; ++i) taken_keys[i] = file.keys().keys()[entries[i]];
  const int64_t before = static_cast<int64_t>(keys_.count());
  const Status inserted = Insert(taken_keys.data(), taken, rows.data());
  // Keys before one without a place have rows.
  const int64_t after = static_cast<int64_t>(keys_.count());
  const RecordLayout* settled = nullptr;
  for (int64_t i = 0; i < after - before; ++i) {
    const char* record = records.data() + i * record_bytes;
    const RecordLayout* layout = layouts[i];
    layout->ForEach([&](RowColumn* column, int64_t offset) {
      // Rows before may not have their initial values.
      if (layout != settled && column != values_.get()) column->InitializeRows(after);
      std::memcpy(column->at(before + 1 + i), record + offset, column->row_bytes());
    });
    settled = layout;
  }
  values_->SetFilled(after);
  in_file_->used.resize(after + 1, in_file_->clock);
  file.Remove(entries.data(), after - before);
  return inserted;
}

// Returns `n` rows of those in memory that were used longest ago, of the same age the first ones,
// ascending.
std::vector<int64_t> RowStore::LeastRecent(int64_t n) const {
  const std::vector<uint32_t>& used = in_file_->used;
  std::vector<uint32_t> ages(used.size() - 1);
  for (size_t row = 1; row < used.size(); ++row) ages[row - 1] = in_file_->clock - used[row];
  std::nth_element(ages.begin(), ages.begin() + (n - 1), ages.end(), std::greater<uint32_t>());
  const uint32_t youngest = ages[n - 1];
  int64_t of_that_age = n;
  for (int64_t i = 0; i < n; ++i) of_that_age -= ages[i] > youngest;
  std::vector<int64_t> rows;
  for (size_t row = 1; row < used.size(); ++row) {
    const uint32_t age = in_file_->clock - used[row];
    if (age > youngest || (age == youngest && of_that_age-- > 0))
      rows.push_back(static_cast<int64_t>(row));
  }
  return rows;
}

Status RowStore::MoveToFile(const std::vector<std::shared_ptr<RowColumn>>& slots,
                            RowColumn* noted) {
  if (in_file_ == nullptr) return OkStatus();
  NoteSlots(slots);
  AnnounceMoves();
  std::lock_guard<std::mutex> lock(mutex_);
  TF_RETURN_IF_ERROR(Named(DrawNew()));
  InFile& in_file = *in_file_;
  const int64_t count = static_cast<int64_t>(keys_.count());
  if (count <= in_file.most_rows) return OkStatus();
  std::vector<std::shared_ptr<RowColumn>> columns{values_};
  columns.insert(columns.end(), slots.begin(), slots.end());
  if (in_file.layout == nullptr || !in_file.layout->IsOf(columns))
    in_file.layout = std::make_shared<const RecordLayout>(columns);
  const auto layout = in_file.layout;
  in_file.used.resize(count + 1, in_file.clock);
  const std::vector<int64_t> rows =
      LeastRecent(count - (in_file.most_rows - in_file.most_rows / kMovedShare));
  const int64_t n = static_cast<int64_t>(rows.size());
  std::vector<int64_t> keys(n), notes(noted == nullptr ? 0 : n);
  for (int64_t i = 0; i < n; ++i) keys[i] = keys_.keys()[rows[i]];
  if (noted != nullptr) {
    noted->CopyRows(rows.data(), n, reinterpret_cast<char*>(notes.data()), sizeof(int64_t));
  }
  Status written;
  int64_t moved = 0;
  while (moved < n) {
    char* records = nullptr;
    int64_t taken = 0;
    written =
        in_file.file.Append(keys.data() + moved, noted == nullptr ? nullptr : notes.data() + moved,
                            n - moved, layout, &records, &taken);
    if (!written.ok()) break;
    for (const auto& column : columns) {
      column->CopyRows(rows.data() + moved, taken, records + layout->OffsetOf(*column),
                       layout->bytes());
    }
    moved += taken;
  }
  std::vector<int64_t> moves(2 * moved);
  RemoveRows(rows.data(), moved, slots, false, moves.data());
  if (written.ok()) written = in_file.file.Compact(layout);
  return Named(written);
}

void RowStore::Locate(const int64_t* keys, int64_t n, int64_t* rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  keys_.Find(keys, n, rows);
  if (in_file_ == nullptr) return;
  std::vector<int64_t> entries(n);
  in_file_->file.keys().Find(keys, n, entries.data());
  for (int64_t i = 0; i < n; ++i) {
    if (entries[i] != 0) rows[i] = kInFile;
  }
}

void RowStore::Notes(const int64_t* keys, int64_t n, int64_t* notes) {
  std::fill_n(notes, n, 0);
  if (in_file_ == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  in_file_->file.keys().Find(keys, n, notes);
  for (int64_t i = 0; i < n; ++i)
    if (notes[i] != 0) notes[i] = in_file_->file.note(notes[i]);
}

Status RowStore::Read(const int64_t* keys, int64_t n,
                      const std::vector<std::shared_ptr<RowColumn>>& columns, char* const* to) {
  std::lock_guard<std::mutex> lock(mutex_);
  TF_RETURN_IF_ERROR(Named(DrawNew()));
  std::vector<int64_t> rows(n), entries(n), in_file, at;
  keys_.Find(keys, n, rows.data());
  for (size_t c = 0; c < columns.size(); ++c) {
    const int64_t row_bytes = columns[c]->row_bytes();
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] > 0) {
        columns[c]->CopyRows(&rows[i], 1, to[c] + i * row_bytes, row_bytes);
      } else {
        std::memset(to[c] + i * row_bytes, 0, row_bytes);
      }
    }
  }
  if (in_file_ == nullptr) return OkStatus();
  in_file_->file.keys().Find(keys, n, entries.data());
  for (int64_t i = 0; i < n; ++i) {
    if (entries[i] == 0) continue;
    in_file.push_back(entries[i]);
    at.push_back(i);
  }
  const auto receive = [&](int64_t i, const char* record, const RecordLayout& layout) {
    for (size_t c = 0; c < columns.size(); ++c) {
      char* out = to[c] + at[i] * columns[c]->row_bytes();
      const int64_t offset = layout.OffsetOf(*columns[c]);
      if (offset > 0) {
        std::memcpy(out, record + offset, columns[c]->row_bytes());
      } else {
        columns[c]->CopyFirst(out);
      }
    }
  };
  return Named(in_file_->file.Read(in_file.data(), static_cast<int64_t>(in_file.size()), receive));
}

int64_t RowStore::RemoveInFile(const int64_t* keys, int64_t n) {
  if (in_file_ == nullptr) return 0;
  AnnounceMoves();
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> entries(n);
  in_file_->file.keys().Find(keys, n, entries.data());
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  if (!entries.empty() && entries[0] == 0) entries.erase(entries.begin());
  if (AnybodyListens() && watched_ != nullptr) watched_->RowsLeave(keys, nullptr, n, true);
  in_file_->file.Remove(entries.data(), static_cast<int64_t>(entries.size()));
  return static_cast<int64_t>(entries.size());
}

void RowStore::ClearFile() {
  if (in_file_ == nullptr) return;
  AnnounceMoves();
  std::lock_guard<std::mutex> lock(mutex_);
  const RowFile& file = in_file_->file;
  if (AnybodyListens() && watched_ != nullptr)
    watched_->RowsLeave(file.keys().keys() + 1, nullptr, file.count(), true);
  in_file_->file.Clear();
}

}  // namespace collective

// What Python calls, as in row_store.cc.

extern "C" {

COLLECTIVE_EXPORT int row_store_keep_in_file(int64_t number, const char* folder,
                                             int64_t memory_bytes, char* message, int64_t size) {
  return Told(collective::FindStore(number)->KeepInFile(folder, memory_bytes), message, size);
}

COLLECTIVE_EXPORT int64_t row_stores_overfull() { return collective::RowStore::CountOverfull(); }

COLLECTIVE_EXPORT int row_store_is_overfull(int64_t number) {
  return collective::FindStore(number)->is_overfull();
}

COLLECTIVE_EXPORT int64_t row_store_count_in_memory(int64_t number) {
  return collective::FindStore(number)->count_in_memory();
}

COLLECTIVE_EXPORT int64_t row_store_file_count(int64_t number) {
  const collective::RowFile* file = collective::FindStore(number)->file();
  return file == nullptr ? 0 : file->count();
}

COLLECTIVE_EXPORT int64_t row_store_file_bytes(int64_t number) {
  const collective::RowFile* file = collective::FindStore(number)->file();
  return file == nullptr ? 0 : file->bytes();
}

COLLECTIVE_EXPORT const int64_t* row_store_file_keys(int64_t number) {
  return collective::FindStore(number)->file()->keys().keys();
}

// `noted` is the number of one of the slots, or 0.
COLLECTIVE_EXPORT int row_store_move_to_file(int64_t number, const int64_t* slots,
                                             int64_t slot_count, int64_t noted, char* message,
                                             int64_t size) {
  return Told(collective::FindStore(number)->MoveToFile(ColumnsOf(slots, slot_count),
                                                        collective::FindColumn(noted).get()),
              message, size);
}

COLLECTIVE_EXPORT void row_store_file_notes(int64_t number, const int64_t* keys, int64_t n,
                                            int64_t* notes) {
  collective::FindStore(number)->Notes(keys, n, notes);
}

COLLECTIVE_EXPORT void row_store_locate(int64_t number, const int64_t* keys, int64_t n,
                                        int64_t* rows) {
  collective::FindStore(number)->Locate(keys, n, rows);
}

COLLECTIVE_EXPORT int row_store_read(int64_t number, const int64_t* keys, int64_t n,
                                     const int64_t* columns, int64_t column_count, char* const* to,
                                     char* message, int64_t size) {
  return Told(collective::FindStore(number)->Read(keys, n, ColumnsOf(columns, column_count), to),
              message, size);
}

COLLECTIVE_EXPORT int64_t row_store_remove_in_file(int64_t number, const int64_t* keys, int64_t n) {
  return collective::FindStore(number)->RemoveInFile(keys, n);
}

COLLECTIVE_EXPORT void row_store_clear_file(int64_t number) {
  collective::FindStore(number)->ClearFile();
}

}  // extern "C"
