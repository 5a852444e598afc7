#include "row_store.h"

#include "wire.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "tensorflow/core/platform/errors.h"

namespace collective {

using namespace tensorflow;

namespace {

// Returns a number as people write it: 12,000.
std::string WithCommas(int64_t number) {
  std::string text = std::to_string(number);
  for (int at = static_cast<int>(text.size()) - 3; at > 0; at -= 3) text.insert(at, ",");
  return text;
}

std::string Counted(int64_t number, const std::string& noun) {
  return WithCommas(number) + " " + noun + (number == 1 ? "" : "s");
}

// Finds objects by number. Python makes them and lets go of them; who uses one meanwhile keeps it.
template <class T>
class Registry {
 public:
  void Add(int64_t number, std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_[number] = std::move(object);
  }

  std::shared_ptr<T> Find(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(number);
    return found == objects_.end() ? nullptr : found->second;
  }

  void Remove(int64_t number) {
    std::shared_ptr<T> last;  // It is freed without the lock.
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(number);
    if (found == objects_.end()) return;
    last = std::move(found->second);
    objects_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
};

// They are never destroyed: threads may still run when the process ends.
Registry<RowStore>& Stores() {
  static auto* stores = new Registry<RowStore>;
  return *stores;
}

Registry<RowColumn>& Columns() {
  static auto* columns = new Registry<RowColumn>;
  return *columns;
}

// Makes private memory zero. Whole pages of it are given back, and taken again when they are
// written.
void MakeZero(char* begin, char* end) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) & -page);
  char* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) & -page);
  if (first >= last || madvise(first, last - first, MADV_DONTNEED) != 0) {
    std::memset(begin, 0, end - begin);
    return;
  }
  std::memset(begin, 0, first - begin);
  std::memset(last, 0, end - last);
}

}  // namespace

std::shared_ptr<RowStore> FindStore(int64_t number) { return Stores().Find(number); }
std::shared_ptr<RowColumn> FindColumn(int64_t number) { return Columns().Find(number); }

Status MemoryIsGone() {
  return errors::Unknown(
      "This memory of a dynamic table is gone: its session was closed or initialized again.");
}

void RowColumn::SetFirst(const char* row) {
  std::lock_guard<std::mutex> lock(mutex_);
  first_.clear();
  if (row != nullptr) first_.assign(row, row + row_bytes_);
}

void RowColumn::InitializeRows(int64_t count) {
  if (count <= filled()) return;
  std::lock_guard<std::mutex> lock(mutex_);  // Updated rows must not be initialized again.
  const int64_t before = filled();
  if (count <= before) return;
  if (!first_.empty()) {
    for (int64_t row = before + 1; row <= count; ++row)
      std::memcpy(at(row), first_.data(), row_bytes_);
  }
  SetFilled(count);
}

void RowColumn::CloseGaps(const int64_t* from, const int64_t* to, int64_t n, int64_t before,
                          int64_t after) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t filled = this->filled();
  for (int64_t i = 0; i < n; ++i) {
    // Rows that start from zeros have values without being announced.
    if (first_.empty() || from[i] <= filled) {
      std::memcpy(at(to[i]), at(from[i]), row_bytes_);
    } else if (to[i] <= filled) {
      std::memcpy(at(to[i]), first_.data(), row_bytes_);
    }
  }
  MakeZero(at(after + 1), at(before + 1));
  SetFilled(std::min(filled, after));
}

const char* RowColumn::Row(int64_t row) const {
  // Rows that start from zeros have values without being announced.
  return first_.empty() || row <= filled() ? at(row) : first_.data();
}

void RowColumn::CopyRows(const int64_t* rows, int64_t n, char* to, int64_t stride) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * stride, Row(rows[i]), row_bytes_);
}

void RowColumn::CopyFirst(char* to) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (first_.empty()) {
    std::memset(to, 0, row_bytes_);
  } else {
    std::memcpy(to, first_.data(), row_bytes_);
  }
}

int64_t RowStore::count_in_memory() const {
  return std::min(static_cast<int64_t>(keys_.count()), values_->filled());
}

void RowStore::Watch(std::shared_ptr<WatchedShard> shard) {
  std::lock_guard<std::mutex> lock(mutex_);
  watched_ = std::move(shard);
}

std::shared_ptr<WatchedShard> RowStore::Watched() {
  if (!AnybodyListens()) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  return watched_;
}

// Announces that rows may move, before the lock is taken: who listens may block.
void RowStore::AnnounceMoves() {
  if (const auto watched = Watched()) watched->BeforeWrite({RowWrite::kMoves});
}

// Announces the rows after `before`, which have keys, but no values yet. The lock is held.
void RowStore::AnnounceNewRows(int64_t before) {
  if (!AnybodyListens() || watched_ == nullptr) return;
  const int64_t count = static_cast<int64_t>(keys_.count());
  if (count == before) return;
  std::vector<int64_t> rows(count - before);
  for (int64_t i = 0; i < count - before; ++i) rows[i] = before + 1 + i;
  watched_->BeforeWrite({RowWrite::kNewRows, rows.data(), count - before});
}

Status RowStore::Find(const int64_t* keys, int64_t n, bool insert, int64_t* rows) {
  if (in_file_ != nullptr) AnnounceMoves();  // Rows come from the file.
  std::lock_guard<std::mutex> lock(mutex_);
  if (in_file_ != nullptr) TF_RETURN_IF_ERROR(TakeFromFile(keys, n));
  Status inserted;
  if (insert) {
    const int64_t before = static_cast<int64_t>(keys_.count());
    inserted = Insert(keys, n, rows);
    AnnounceNewRows(before);  // Also those before a key without a place.
  } else {
    keys_.Find(keys, n, rows);
  }
  const Status drawn = DrawNew();  // Also of keys that came before one without a place.
  if (in_file_ != nullptr) NoteUse(rows, inserted.ok() ? n : 0);
  return Named(inserted.ok() ? drawn : inserted);
}

Status RowStore::Admit(const int64_t* keys, const int64_t* counts, int64_t n, bool training,
                       int64_t run, int64_t step, int64_t* rows, int64_t* added) {
  if (in_file_ != nullptr) AnnounceMoves();
  std::lock_guard<std::mutex> lock(mutex_);
  std::fill_n(added, n, 0);
  if (in_file_ != nullptr) TF_RETURN_IF_ERROR(TakeFromFile(keys, n));
  keys_.Find(keys, n, rows);
  if (!training) {
    if (in_file_ != nullptr) NoteUse(rows, n);
    return Named(DrawNew());
  }
  if (run != run_) {
    run_ = run;
    admitted_in_run_.clear();
  }
  const int64_t before = static_cast<int64_t>(keys_.count());
  const Status admitted = AdmitUnknown(keys, counts, n, step, rows, added);
  NoteAdmitted(before, static_cast<int64_t>(keys_.count()));
  if (in_file_ != nullptr) NoteUse(rows, admitted.ok() ? n : 0);
  const Status drawn = DrawNew();
  // A key that has come often enough is seen by the runs after this one.
  for (int64_t i = 0; admission_->counts() && i < n; ++i)
    if (rows[i] > 0 && WasAdmittedInRun(rows[i])) rows[i] = SeenLater(rows[i]);
  return Named(admitted.ok() ? drawn : admitted);
}

// Notes that the rows after `before`, to `after`, were admitted in the run that trains.
void RowStore::NoteAdmitted(int64_t before, int64_t after) {
  if (after == before) return;
  // Without rows from the file between them, they make one range.
  if (!admitted_in_run_.empty() && admitted_in_run_.back().second == before) {
    admitted_in_run_.back().second = after;
  } else {
    admitted_in_run_.emplace_back(before, after);
  }
}

bool RowStore::WasAdmittedInRun(int64_t row) const {
  // The first range that doesn't end before the row.
  const auto range = std::lower_bound(
      admitted_in_run_.begin(), admitted_in_run_.end(), row,
      [](const std::pair<int64_t, int64_t>& of, int64_t row) { return of.second < row; });
  return range != admitted_in_run_.end() && row > range->first;
}

Status RowStore::AdmitUnknown(const int64_t* keys, const int64_t* counts, int64_t n, int64_t step,
                              int64_t* rows, int64_t* added) {
  std::vector<int64_t> places, unknown, came;
  for (int64_t i = 0; i < n; ++i) {
    added[i] = counts[i];
    if (rows[i] != 0) continue;
    places.push_back(i);
    unknown.push_back(keys[i]);
    came.push_back(counts[i]);
  }
  const int64_t m = static_cast<int64_t>(unknown.size());
  KeyCounter* counter = admission_->counter();
  if (counter != nullptr) {
    // First all are counted: the order in which keys came doesn't matter.
    if (!counter->Add(unknown.data(), came.data(), m))
      return errors::ResourceExhausted("the counts of its keys without rows can not grow");
    counter->Counts(unknown.data(), m, came.data());
  }
  std::vector<int64_t> admitted, admitted_places, admitted_counts;
  for (int64_t u = 0; u < m; ++u) {
    rows[places[u]] = kNoRow;
    added[places[u]] = 0;
    if (!admission_->Admits(unknown[u], came[u], step)) {
      refused_.fetch_add(std::max<int64_t>(1, counts[places[u]]), std::memory_order_relaxed);
      continue;
    }
    admitted.push_back(unknown[u]);
    admitted_places.push_back(places[u]);
    admitted_counts.push_back(came[u]);
  }
  if (admitted.empty()) return OkStatus();
  int64_t next = static_cast<int64_t>(keys_.count()) + 1;
  std::vector<int64_t> new_rows(admitted.size());
  const Status inserted =
      Insert(admitted.data(), static_cast<int64_t>(admitted.size()), new_rows.data());
  AnnounceNewRows(next - 1);
  TF_RETURN_IF_ERROR(inserted);
  for (size_t a = 0; a < admitted.size(); ++a) {
    rows[admitted_places[a]] = new_rows[a];
    if (new_rows[a] != next) continue;
    added[admitted_places[a]] = admitted_counts[a];
    ++next;
  }
  if (counter != nullptr) counter->Forget(admitted.data(), static_cast<int64_t>(admitted.size()));
  return OkStatus();
}

Status RowStore::AddCounts(const int64_t* keys, const int64_t* counts, int64_t n) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!admission_->counter()->Add(keys, counts, n))
    return Named(errors::ResourceExhausted("the counts of its keys without rows can not grow"));
  return OkStatus();
}

void RowStore::Forget(const int64_t* keys, int64_t n) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (admission_ == nullptr || !admission_->counts()) return;
  if (keys == nullptr) return admission_->counter()->ForgetAll();
  admission_->counter()->Forget(keys, n);
}

Status RowStore::Put(const int64_t* keys, int64_t n, const char* values, int64_t* rows) {
  if (const auto watched = Watched()) {
    if (in_file_ != nullptr) AnnounceMoves();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (in_file_ != nullptr) TF_RETURN_IF_ERROR(TakeFromFile(keys, n));
      keys_.Find(keys, n, rows);
    }
    // Those that are new have row 0 here, and are announced as new rows.
    watched->BeforeWrite({RowWrite::kValues, rows, n});
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TF_RETURN_IF_ERROR(Named(DrawNew()));
  if (in_file_ != nullptr) TF_RETURN_IF_ERROR(TakeFromFile(keys, n));
  const int64_t before = static_cast<int64_t>(keys_.count());
  const Status inserted = Insert(keys, n, rows);
  AnnounceNewRows(before);
  if (!inserted.ok()) {
    (void)DrawNew();
    return Named(inserted);
  }
  const int64_t row_bytes = values_->row_bytes();
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(values_->at(rows[i]), values + i * row_bytes, row_bytes);
  values_->SetFilled(std::max(values_->filled(), static_cast<int64_t>(keys_.count())));
  if (admission_ != nullptr && admission_->counts()) admission_->counter()->Forget(keys, n);
  if (in_file_ != nullptr) NoteUse(rows, n);
  return OkStatus();
}

Status RowStore::Remove(const int64_t* rows, int64_t n,
                        const std::vector<std::shared_ptr<RowColumn>>& slots, int64_t* moves) {
  const auto watched = n == 0 ? nullptr : Watched();
  if (watched != nullptr && in_file_ == nullptr) {
    // The rows that go, and the last ones, which take their places or are emptied.
    const int64_t count = static_cast<int64_t>(keys_.count());
    std::vector<int64_t> written(rows, rows + n);
    for (int64_t row = std::max<int64_t>(1, count - n + 1); row <= count; ++row)
      written.push_back(row);
    watched->BeforeWrite({RowWrite::kMoves, written.data(), static_cast<int64_t>(written.size())});
  } else if (watched != nullptr) {
    AnnounceMoves();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TF_RETURN_IF_ERROR(Named(DrawNew()));  // A row without values could take another's place.
  RemoveRows(rows, n, slots, true, moves);
  return OkStatus();
}

Status RowStore::Insert(const int64_t* keys, int64_t n, int64_t* rows) {
  const int64_t inserted = keys_.FindOrInsert(keys, n, rows);
  const int64_t count = static_cast<int64_t>(keys_.count());
  if (inserted == KeyMap::kFull) {
    return errors::ResourceExhausted("it is full: ", Counted(count, "row"), " of ",
                                     WithCommas(static_cast<int64_t>(keys_.capacity())));
  }
  if (inserted == KeyMap::kOutOfMemory)
    return errors::ResourceExhausted("its key map of ", Counted(count, "key"), " can not grow");
  return OkStatus();
}

Status RowStore::DrawNew() {
  const int64_t count = static_cast<int64_t>(keys_.count());
  const int64_t block = std::max<int64_t>(1, generator_.block / dim_);
  for (int64_t first = values_->filled() + 1; first <= count; first += block) {
    const int64_t rows = std::min(block, count - first + 1);
    TF_RETURN_IF_ERROR(
        generator_.Draw(keys_.keys() + first, rows, dtype_, dim_, values_->at(first)));
    values_->SetFilled(first + rows - 1);
  }
  return OkStatus();
}

Status RowStore::Named(const Status& status) const {
  if (errors::IsResourceExhausted(status)) {
    return errors::ResourceExhausted("dynamic table '", name_, "': ", status.message(), ". ",
                                     advice_, ".");
  }
  // The file's, which say what to do.
  if (errors::IsInternal(status))
    return errors::Internal("dynamic table '", name_, "': ", status.message());
  if (errors::IsDataLoss(status))
    return errors::DataLoss("dynamic table '", name_, "': ", status.message());
  return status;
}

}  // namespace collective

// What Python calls, by ctypes, which releases the interpreter before. Numbers are Python's.

#define COLLECTIVE_EXPORT __attribute__((visibility("default")))

extern "C" {

COLLECTIVE_EXPORT void row_column_new(int64_t number, int64_t row_bytes) {
  collective::Columns().Add(number, std::make_shared<collective::RowColumn>(row_bytes));
}

COLLECTIVE_EXPORT void row_column_free(int64_t number) { collective::Columns().Remove(number); }

COLLECTIVE_EXPORT void row_column_move_to(int64_t number, void* address) {
  collective::FindColumn(number)->MoveTo(static_cast<char*>(address));
}

COLLECTIVE_EXPORT void row_column_set_first(int64_t number, const void* row) {
  collective::FindColumn(number)->SetFirst(static_cast<const char*>(row));
}

COLLECTIVE_EXPORT int64_t row_column_filled(int64_t number) {
  return collective::FindColumn(number)->filled();
}

COLLECTIVE_EXPORT void row_column_set_filled(int64_t number, int64_t filled) {
  collective::FindColumn(number)->SetFilled(filled);
}

COLLECTIVE_EXPORT void row_column_initialize(int64_t number, int64_t count) {
  collective::FindColumn(number)->InitializeRows(count);
}

// Describes a store's rows, and how they are drawn. `collective.ops.rows.compiled_row_store` has
// the same fields.
struct RowStoreDescription {
  const char *name, *advice;
  int64_t values;  // The number of the column of its rows.
  uint64_t capacity;
  int64_t dtype, dim;
  int64_t kind;
  uint64_t seed;
  double a, b;
  const char* row;       // For kSameRow.
  const double* cubics;  // [4, 4096]
  collective::RowFunction function;
  int64_t block;
};

// Makes a store. Returns 0, or an error's code.
COLLECTIVE_EXPORT int row_store_new(int64_t number, const RowStoreDescription* of) {
  using namespace collective;
  const auto column = FindColumn(of->values);
  const auto dtype = static_cast<tensorflow::DataType>(of->dtype);
  RowGenerator generator;
  generator.kind = static_cast<int>(of->kind);
  generator.seed = of->seed;
  generator.a = of->a;
  generator.b = of->b;
  generator.function = of->function;
  generator.number = number;
  generator.block = of->block;
  if (of->row != nullptr && column != nullptr)
    generator.row.assign(of->row, of->row + column->row_bytes());
  if (of->cubics != nullptr) {
    // All stores share the first copy: there is one truncated normal.
    static const auto* shared = new std::shared_ptr<const std::vector<QuantileCubic>>([of] {
      auto cubics = std::make_shared<std::vector<QuantileCubic>>(kQuantileCubics);
      const double* c = of->cubics;
      for (int i = 0; i < kQuantileCubics; ++i) {
        (*cubics)[i] = {c[i], c[kQuantileCubics + i], c[2 * kQuantileCubics + i],
                        c[3 * kQuantileCubics + i]};
      }
      return cubics;
    }());
    generator.cubics = *shared;
  }
  if (column == nullptr || !generator.Check(dtype, of->dim).ok())
    return tensorflow::error::INVALID_ARGUMENT;
  auto store = std::make_shared<RowStore>(of->name, of->advice, of->capacity, dtype, of->dim,
                                          column, std::move(generator));
  if (!store->Start()) return tensorflow::error::RESOURCE_EXHAUSTED;
  Stores().Add(number, std::move(store));
  return 0;
}

COLLECTIVE_EXPORT void row_store_free(int64_t number) { collective::Stores().Remove(number); }

COLLECTIVE_EXPORT int64_t row_store_count(int64_t number) {
  return collective::FindStore(number)->count();
}

COLLECTIVE_EXPORT int64_t row_store_key_count(int64_t number) {
  return static_cast<int64_t>(collective::FindStore(number)->keys().count());
}

COLLECTIVE_EXPORT const int64_t* row_store_keys(int64_t number) {
  return collective::FindStore(number)->keys().keys();
}

// Returns 0, or an error's code with its words in `message`, of `size` bytes.
static int Told(const tensorflow::Status& status, char* message, int64_t size) {
  if (status.ok()) return 0;
  const std::string words(status.message());
  const size_t length = std::min<size_t>(words.size(), size - 1);
  std::memcpy(message, words.data(), length);
  message[length] = 0;
  return static_cast<int>(status.code());
}

static std::vector<std::shared_ptr<collective::RowColumn>> ColumnsOf(const int64_t* numbers,
                                                                     int64_t count) {
  std::vector<std::shared_ptr<collective::RowColumn>> columns;
  for (int64_t c = 0; c < count; ++c) columns.push_back(collective::FindColumn(numbers[c]));
  return columns;
}

COLLECTIVE_EXPORT int row_store_find(int64_t number, const int64_t* keys, int64_t n, int insert,
                                     int64_t* rows, char* message, int64_t size) {
  return Told(collective::FindStore(number)->Find(keys, n, insert != 0, rows), message, size);
}

// Describes which keys get rows. `collective.ops.rows.compiled_row_store` has the same fields.
struct AdmissionDescription {
  int64_t frequency;  // 0: keys aren't counted.
  double probability;
  uint64_t seed;
  uint64_t capacity;             // The most keys that are counted exactly.
  collective::BloomShape bloom;  // `hashes` 0: keys are counted exactly.
};

// Returns 0, or an error's code.
COLLECTIVE_EXPORT int row_store_admit_by(int64_t number, const AdmissionDescription* by) {
  using namespace collective;
  std::unique_ptr<KeyCounter> counter;
  if (by->frequency > 0 && by->bloom.hashes > 0) {
    auto bloom = std::make_unique<BloomCounter>(by->bloom);
    if (!bloom->Start()) return tensorflow::error::RESOURCE_EXHAUSTED;
    counter = std::move(bloom);
  } else if (by->frequency > 0) {
    auto exact = std::make_unique<ExactCounter>(by->capacity);
    if (!exact->Start()) return tensorflow::error::RESOURCE_EXHAUSTED;
    counter = std::move(exact);
  }
  FindStore(number)->AdmitBy(
      std::make_unique<Admission>(std::move(counter), by->frequency, by->probability, by->seed));
  return 0;
}

COLLECTIVE_EXPORT int64_t row_store_refused(int64_t number) {
  return collective::FindStore(number)->refused();
}

// Returns how many keys without rows the store can name.
COLLECTIVE_EXPORT int64_t row_store_counted(int64_t number) {
  return collective::FindStore(number)->WithCounter(
      [](collective::KeyCounter* counter) { return counter == nullptr ? 0 : counter->size(); });
}

// Writes at most `n` of them, and how often they came. Returns how many.
COLLECTIVE_EXPORT int64_t row_store_counts(int64_t number, int64_t n, int64_t* keys,
                                           int64_t* counts) {
  return collective::FindStore(number)->WithCounter([&](collective::KeyCounter* counter) {
    if (counter == nullptr || counter->size() != n) return int64_t{-1};
    counter->Copy(keys, counts);
    return n;
  });
}

COLLECTIVE_EXPORT int row_store_add_counts(int64_t number, const int64_t* keys,
                                           const int64_t* counts, int64_t n, char* message,
                                           int64_t size) {
  return Told(collective::FindStore(number)->AddCounts(keys, counts, n), message, size);
}

// Forgets how often keys came that have no rows: `n` keys, or all if `keys` is null.
COLLECTIVE_EXPORT void row_store_forget(int64_t number, const int64_t* keys, int64_t n) {
  collective::FindStore(number)->Forget(keys, n);
}

// Returns the counters of a Bloom filter, which stay there as long as the store.
COLLECTIVE_EXPORT void* row_store_cells(int64_t number) {
  return collective::FindStore(number)->WithCounter([](collective::KeyCounter* counter) {
    return counter == nullptr ? nullptr : counter->cells();
  });
}

COLLECTIVE_EXPORT int row_store_put(int64_t number, const int64_t* keys, int64_t n,
                                    const void* values, int64_t* rows, char* message,
                                    int64_t size) {
  return Told(collective::FindStore(number)->Put(keys, n, static_cast<const char*>(values), rows),
              message, size);
}

COLLECTIVE_EXPORT int row_store_remove(int64_t number, const int64_t* rows, int64_t n,
                                       const int64_t* slots, int64_t slot_count, int64_t* moves,
                                       char* message, int64_t size) {
  const auto columns = ColumnsOf(slots, slot_count);
  return Told(collective::FindStore(number)->Remove(rows, n, columns, moves), message, size);
}

}  // extern "C"
