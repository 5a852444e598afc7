// Snapshots of rows (snapshot.h), the operation CollectiveHoldRows, by which a variable's memory
// becomes a part of one, and what Python calls.

#include "snapshot.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "variables.h"

namespace collective {

namespace {

constexpr int64_t kSlabBytes = 64 << 10;  // Copies take their room in slabs.
constexpr int64_t kEntryBytes = 12;       // By which a copy is found, and known to be free.
constexpr int64_t kAhead = 8;             // Rows ahead whose memory is prefetched.
constexpr int64_t kRowsAtOnce = 1024;     // Rows that are read between two looks at the copies.
constexpr auto kLook = std::chrono::milliseconds(5);  // Between two looks for room.

}  // namespace

bool CopyRoom::Take(int64_t bytes) {
  int64_t used = used_;
  do {
    if (used + bytes > bytes_) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  int64_t peak = peak_;
  while (used + bytes > peak && !peak_.compare_exchange_weak(peak, used + bytes)) {
  }
  return true;
}

ColumnSnapshot::ColumnSnapshot(tensorflow::Tensor memory, int64_t rows,
                               std::shared_ptr<CopyRoom> room, bool changes)
    : memory_(std::move(memory)),
      base_(static_cast<const char*>(memory_.data())),
      rows_(rows),
      row_bytes_(std::max<int64_t>(1, memory_.dim_size(1) * DataTypeSize(memory_.dtype()))),
      room_(std::move(room)),
      changes_(changes),
      neighbours_(changes ? (rows + 63) / 64 : 0) {
  const int64_t most = std::max<int64_t>(1, room_->bytes() / (16 * (row_bytes_ + kEntryBytes)));
  slab_rows_ = std::min(most, std::max<int64_t>(1, kSlabBytes / (row_bytes_ + kEntryBytes)));
}

ColumnSnapshot::~ColumnSnapshot() { room_->Give(taken_); }

int32_t ColumnSnapshot::FreeCopy() {
  if (free_.empty()) {
    const int64_t bytes = slab_rows_ * (row_bytes_ + kEntryBytes);
    const int64_t first = static_cast<int64_t>(copies_.size());
    if (first + slab_rows_ > INT32_MAX || !room_->Take(bytes)) return -1;
    taken_ += bytes;
    slabs_.emplace_back(new char[slab_rows_ * row_bytes_]);
    copies_.resize(first + slab_rows_);
    for (int64_t i = slab_rows_; i-- > 0;) free_.push_back(static_cast<int32_t>(first + i));
  }
  const int32_t copy = free_.back();
  free_.pop_back();
  return copy;
}

int32_t ColumnSnapshot::TakeCopy(int64_t row) {
  int32_t* link = &neighbours_[row >> 6].first;
  while (*link >= 0 && copies_[*link].place != (row & 63)) link = &copies_[*link].next;
  const int32_t copy = *link;
  if (copy < 0) return -1;
  *link = copies_[copy].next;
  free_.push_back(copy);
  return copy;
}

bool ColumnSnapshot::KeepRow(int64_t row, std::unique_lock<std::mutex>* lock) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point began, changed;
  bool waits = false, goes_on = true;
  int64_t progress = 0;
  while (!IsDone(row)) {
    if (room_->given_up()) {
      goes_on = false;
      break;
    }
    const int32_t copy = FreeCopy();
    if (copy >= 0) {
      std::memcpy(At(copy), base_ + row * row_bytes_, row_bytes_);
      Neighbours& neighbours = neighbours_[row >> 6];
      copies_[copy] = {neighbours.first, static_cast<int32_t>(row & 63)};
      neighbours.first = copy;
      if (SetDone(row)) {  // It was read in the meantime.
        neighbours.first = copies_[copy].next;
        free_.push_back(copy);
      }
      break;
    }
    const auto now = Clock::now();
    if (!waits) began = now;
    if (!waits || room_->progress() != progress) changed = now;
    waits = true;
    progress = room_->progress();
    if (std::chrono::duration<double>(now - changed).count() > room_->patience()) room_->GiveUp();
    freed_.wait_for(*lock, kLook);
  }
  if (waits) room_->NoteWait(std::chrono::nanoseconds(Clock::now() - began).count());
  return goes_on;
}

void ColumnSnapshot::Keep(const int64_t* rows, int64_t n) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (rows != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = rows[i], ahead = rows[std::min(i + kAhead, n - 1)];
      if (ahead >= 0 && ahead < rows_) __builtin_prefetch(base_ + ahead * row_bytes_);
      if (row >= 0 && row < rows_ && !IsDone(row) && !KeepRow(row, &lock)) return;
    }
    return;
  }
  for (int64_t row = 0; row < rows_;) {
    if (neighbours_[row >> 6].done == ~uint64_t{0}) {
      row = (row | 63) + 1;
      continue;
    }
    if (!IsDone(row) && !KeepRow(row, &lock)) return;
    ++row;
  }
}

bool ColumnSnapshot::TakeCopies(const int64_t* rows, int64_t first, int64_t last, char* out) {
  // A row that nobody has marked before has been read as it was: who changes it marks it first.
  int64_t changed[kRowsAtOnce];
  int64_t n = 0;
  for (int64_t i = first; i < last; ++i)
    if (SetDone(rows[i])) changed[n++] = i;
  if (n == 0) return false;
  bool has_freed = false;
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t c = 0; c < n; ++c) {
    const int32_t copy = TakeCopy(rows[changed[c]]);
    if (copy < 0) continue;
    std::memcpy(out + changed[c] * row_bytes_, At(copy), row_bytes_);
    has_freed = true;
  }
  return has_freed;
}

bool ColumnSnapshot::Read(const int64_t* rows, int64_t n, char* out) {
  for (int64_t first = 0; first < n; first += kRowsAtOnce) {
    const int64_t last = std::min(n, first + kRowsAtOnce);
    for (int64_t i = first; i < last;) {
      int64_t end = i + 1;  // Neighbours are copied at once.
      while (end < last && rows[end] == rows[end - 1] + 1) ++end;
      std::memcpy(out + i * row_bytes_, base_ + rows[i] * row_bytes_, (end - i) * row_bytes_);
      i = end;
    }
    if (changes_ && TakeCopies(rows, first, last, out)) freed_.notify_all();
    room_->NoteProgress();
    if (room_->given_up()) return false;
  }
  return !room_->given_up();
}

void Snapshot::Add(int64_t number, std::shared_ptr<WatchedShard> shard, tensorflow::Tensor memory,
                   int64_t rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool changes = shard != nullptr;
  columns_.push_back(std::make_shared<ColumnSnapshot>(std::move(memory), rows, room_, changes));
  numbers_.push_back(number);
  shards_.push_back(std::move(shard));
}

void Snapshot::Listen(const std::shared_ptr<Snapshot>& snapshot) {
  for (const auto& shard : snapshot->shards_)
    if (shard != nullptr) shard->Add(snapshot);
}

void Snapshot::End() {
  std::vector<std::shared_ptr<WatchedShard>> shards;
  std::vector<std::shared_ptr<ColumnSnapshot>> columns;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    numbers_.clear();
    shards.swap(shards_);
    columns.swap(columns_);
  }
  for (const auto& shard : shards)
    if (shard != nullptr) shard->Remove(this);
}

std::vector<std::shared_ptr<ColumnSnapshot>> Snapshot::ColumnsOf(int64_t shard, bool all) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<ColumnSnapshot>> columns;
  for (size_t c = 0; c < columns_.size(); ++c)
    if (all || numbers_[c] == shard) columns.push_back(columns_[c]);
  return columns;
}

void Snapshot::BeforeWrite(const WatchedShard& shard, const RowWrite& write) {
  // New rows lie after those of the snapshot, or where others went, which announced it.
  if (write.kind == RowWrite::kNewRows) return;
  for (const auto& column : ColumnsOf(shard.number(), write.kind == RowWrite::kMoves))
    column->Keep(write.rows, write.n);
}

std::shared_ptr<ColumnSnapshot> Snapshot::column(int64_t shard) {
  const auto columns = ColumnsOf(shard, false);
  return columns.empty() ? nullptr : columns[0];
}

namespace {

// Finds what Python has made, by numbers.
template <class T>
class Numbered {
 public:
  int64_t Add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_[++last_] = std::move(object);
    return last_;
  }
  std::shared_ptr<T> Find(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(number);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> Remove(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(number);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
};

Numbered<CopyRoom>& Rooms() {
  static auto* rooms = new Numbered<CopyRoom>();
  return *rooms;
}

Numbered<Snapshot>& Snapshots() {
  static auto* snapshots = new Numbered<Snapshot>();
  return *snapshots;
}

}  // namespace

namespace snapshot_op {

using namespace tensorflow;

// Makes a variable's memory a part of a snapshot: rows [0, rows), all if `rows` is negative.
// `shard` is the number by which it is watched. A negative one is of a variable that nobody writes
// as long as the snapshot is there.
class HoldRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const int64_t number = context->input(1).scalar<int64_t>()();
    const int64_t shard = context->input(2).scalar<int64_t>()();
    int64_t rows = context->input(3).scalar<int64_t>()();
    const auto snapshot = Snapshots().Find(number);
    const auto watched = FindWatchedShard(shard);
    const ResourceHandle& handle = HandleFromInput(context, 0);
    OP_REQUIRES(context, snapshot != nullptr && (watched != nullptr || shard < 0),
                errors::FailedPrecondition("nobody watches the variable ", handle.name()));
    core::RefCountPtr<Var> variable;
    OP_REQUIRES(context, LookupResource(context, handle, &variable).ok(),
                errors::FailedPrecondition("the variable ", handle.name(),
                                           " does not exist: was it initialized?"));
    // From now on another holds its memory, too: else the next update would copy all of it.
    if (shard >= 0) OP_REQUIRES_OK(context, EnsureOwned(context, variable.get()));
    tf_shared_lock lock(*variable->mu());
    const Tensor& memory = *variable->tensor();
    if (rows < 0 && memory.dims() == 2) rows = memory.dim_size(0);
    OP_REQUIRES(
        context,
        memory.IsInitialized() && memory.dims() == 2 && memory.dim_size(0) >= rows &&
            DataTypeCanUseMemcpy(memory.dtype()),
        errors::InvalidArgument("the variable ", handle.name(), " has no ", rows, " rows: it is ",
                                DataTypeString(memory.dtype()), memory.shape().DebugString()));
    snapshot->Add(shard, watched, memory, rows);
  }
};

REGISTER_KERNEL_BUILDER(Name("CollectiveHoldRows").Device(DEVICE_CPU), HoldRowsOp);

}  // namespace snapshot_op
}  // namespace collective

extern "C" {

COLLECTIVE_EXPORT int64_t snapshot_room_new(int64_t bytes, double patience) {
  return collective::Rooms().Add(std::make_shared<collective::CopyRoom>(bytes, patience));
}

COLLECTIVE_EXPORT void snapshot_room_free(int64_t number) { collective::Rooms().Remove(number); }

COLLECTIVE_EXPORT void snapshot_room_give_up(int64_t number) {
  if (const auto room = collective::Rooms().Find(number)) room->GiveUp();
}

COLLECTIVE_EXPORT void snapshot_room_note_progress(int64_t number) {
  if (const auto room = collective::Rooms().Find(number)) room->NoteProgress();
}

COLLECTIVE_EXPORT int64_t snapshot_room_peak(int64_t number) {
  const auto room = collective::Rooms().Find(number);
  return room == nullptr ? 0 : room->peak();
}

COLLECTIVE_EXPORT int64_t snapshot_room_waited_ns(int64_t number) {
  const auto room = collective::Rooms().Find(number);
  return room == nullptr ? 0 : room->waited_ns();
}

COLLECTIVE_EXPORT int64_t snapshot_new(int64_t room) {
  return collective::Snapshots().Add(
      std::make_shared<collective::Snapshot>(collective::Rooms().Find(room)));
}

COLLECTIVE_EXPORT void snapshot_listen(int64_t number) {
  if (const auto snapshot = collective::Snapshots().Find(number))
    collective::Snapshot::Listen(snapshot);
}

// Writes `n` rows of the variable that is watched as `shard`. Returns 0, or 1 if the save was given
// up.
COLLECTIVE_EXPORT int snapshot_read(int64_t number, int64_t shard, const int64_t* rows, int64_t n,
                                    char* out) {
  const auto snapshot = collective::Snapshots().Find(number);
  const auto column = snapshot == nullptr ? nullptr : snapshot->column(shard);
  return column == nullptr || !column->Read(rows, n, out);
}

COLLECTIVE_EXPORT void snapshot_end(int64_t number) {
  if (const auto snapshot = collective::Snapshots().Remove(number)) snapshot->End();
}

}  // extern "C"
