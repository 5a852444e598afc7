#include "row_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "row_store.h"
#include "tensorflow/core/platform/errors.h"

namespace collective {

using namespace tensorflow;

namespace {

constexpr int64_t kKeyBytes = sizeof(int64_t);
// Records that are so close are read at once, up to so many bytes.
constexpr int64_t kGap = 2048, kReadBytes = 64 << 10;
// So many segments may be dead in addition to half of the file.
constexpr int64_t kSpareSegments = 4;

}  // namespace

RecordLayout::RecordLayout(const std::vector<std::shared_ptr<RowColumn>>& columns)
    : columns_(columns.begin(), columns.end()), bytes_(kKeyBytes) {
  for (const auto& column : columns) {
    offsets_.push_back(bytes_);
    bytes_ += column->row_bytes();
  }
}

bool RecordLayout::IsOf(const std::vector<std::shared_ptr<RowColumn>>& columns) const {
  if (columns.size() != columns_.size()) return false;
  for (size_t c = 0; c < columns.size(); ++c) {
    if (columns_[c].lock() != columns[c]) return false;
  }
  return true;
}

int64_t RecordLayout::OffsetOf(const RowColumn& column) const {
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (columns_[c].lock().get() == &column) return offsets_[c];
  }
  return 0;
}

void RecordLayout::ForEach(const std::function<void(RowColumn*, int64_t)>& visit) const {
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (const auto column = columns_[c].lock()) visit(column.get(), offsets_[c]);
  }
}

RowFile::~RowFile() {
  if (file_ >= 0) close(file_);
}

Status RowFile::Open() {
  if (!map_.Start())
    return errors::ResourceExhausted("the index of its file can not be reserved: see ulimit -v");
  file_ = open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    // A file system that has no files without a name.
    std::string path = folder_ + "/collective-rows-XXXXXX";
    file_ = mkostemp(&path[0], O_CLOEXEC);
    if (file_ >= 0) unlink(path.c_str());
  }
  if (file_ < 0) {
    return errors::Internal("a file for its rows can not be made in '", folder_,
                            "': ", std::strerror(errno),
                            ". storage_path is a folder of this machine that can be written.");
  }
  return OkStatus();
}

Status RowFile::Append(const int64_t* keys, const int64_t* notes, int64_t n,
                       const std::shared_ptr<const RecordLayout>& layout, char** records,
                       int64_t* taken) {
  uint64_t place = 0;
  TF_RETURN_IF_ERROR(Reserve(n, layout, records, &place, taken));
  std::vector<int64_t> entries(*taken);
  const int64_t before = count();
  map_.FindOrInsert(keys, *taken, entries.data());
  // A record whose key has no place in the index is dead from the start.
  *taken = count() - before;
  if (*taken == 0) return errors::ResourceExhausted("the index of its file can not grow");
  places_.resize(count() + 1);
  if (notes != nullptr || !notes_.empty()) notes_.resize(count() + 1);
  for (int64_t i = 0; i < *taken; ++i) {
    places_[before + 1 + i] = place + i;
    if (notes != nullptr) notes_[before + 1 + i] = notes[i];
    std::memcpy(*records + i * layout->bytes(), keys + i, kKeyBytes);
  }
  Enliven(SegmentOf(place), *taken);
  return OkStatus();
}

// Gives room for up to `n` records in the segment that is in memory.
Status RowFile::Reserve(int64_t n, const std::shared_ptr<const RecordLayout>& layout,
                        char** records, uint64_t* place, int64_t* taken) {
  const int64_t most = std::min(segment_bytes_ / layout->bytes(), int64_t{1} << kRecordBits);
  if (most == 0) {
    return errors::Internal("a row with its slots takes ", layout->bytes(),
                            " bytes, too much for a record of its file. Keep the table in memory.");
  }
  if (open_ >= 0) {
    const Segment& segment = segments_[open_];
    if (segment.records >= most || segment.layout != layout) TF_RETURN_IF_ERROR(Seal());
  }
  if (open_ < 0) {
    if (free_.empty()) {
      free_.push_back(static_cast<int64_t>(segments_.size()));
      segments_.emplace_back();
    }
    open_ = free_.back();
    free_.pop_back();
    segments_[open_] = Segment{layout};
    open_records_.resize(segment_bytes_);
    record_bytes_ = std::max(record_bytes_, layout->bytes());
  }
  Segment& segment = segments_[open_];
  *taken = std::min(n, most - segment.records);
  *records = open_records_.data() + segment.records * layout->bytes();
  *place = PlaceOf(open_, segment.records);
  segment.records += *taken;
  return OkStatus();
}

// Writes the segment that is in memory to its place.
Status RowFile::Seal() {
  const int64_t segment = open_;
  const Segment& sealed = segments_[segment];
  if (sealed.live > 0) {
    TF_RETURN_IF_ERROR(WriteAt(open_records_.data(), sealed.records * sealed.layout->bytes(),
                               segment * segment_bytes_));
  }
  open_ = -1;
  ++sealed_;
  if (sealed.live == 0) Free(segment);
  return OkStatus();
}

Status RowFile::Read(const int64_t* entries, int64_t n, const Receive& receive) {
  struct Record {
    int64_t offset, i, segment;
  };
  std::vector<Record> records;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t segment = SegmentOf(places_[entries[i]]);
    const RecordLayout& layout = *segments_[segment].layout;
    const int64_t offset = RecordOf(places_[entries[i]]) * layout.bytes();
    if (segment == open_) {
      receive(i, open_records_.data() + offset, layout);
    } else {
      records.push_back({segment * segment_bytes_ + offset, i, segment});
    }
  }
  std::sort(records.begin(), records.end(),
            [](const Record& a, const Record& b) { return a.offset < b.offset; });
  // A stretch is read at once: the records from its first one to before the next stretch's.
  struct Stretch {
    int64_t first, offset, bytes;
  };
  std::vector<Stretch> stretches;
  for (size_t r = 0; r < records.size(); ++r) {
    const int64_t offset = records[r].offset;
    const int64_t end = offset + segments_[records[r].segment].layout->bytes();
    Stretch* last = stretches.empty() ? nullptr : &stretches.back();
    if (last != nullptr && offset - (last->offset + last->bytes) <= kGap &&
        end - last->offset <= kReadBytes) {
      last->bytes = end - last->offset;
    } else {
      stretches.push_back({static_cast<int64_t>(r), offset, end - offset});
    }
  }
  if (stretches.size() > 1) {
    // The disk reads them in parallel.
    for (const Stretch& stretch : stretches)
      posix_fadvise(file_, stretch.offset, stretch.bytes, POSIX_FADV_WILLNEED);
  }
  for (size_t s = 0; s < stretches.size(); ++s) {
    const Stretch& stretch = stretches[s];
    if (static_cast<int64_t>(buffer_.size()) < stretch.bytes) buffer_.resize(stretch.bytes);
    TF_RETURN_IF_ERROR(ReadAt(buffer_.data(), stretch.bytes, stretch.offset));
    const size_t end = s + 1 < stretches.size() ? stretches[s + 1].first : records.size();
    for (size_t r = stretch.first; r < end; ++r) {
      receive(records[r].i, buffer_.data() + (records[r].offset - stretch.offset),
              *segments_[records[r].segment].layout);
    }
  }
  return OkStatus();
}

void RowFile::Remove(const int64_t* entries, int64_t n) {
  for (int64_t i = 0; i < n; ++i) Drop(SegmentOf(places_[entries[i]]));
  std::vector<int64_t> from(n), to(n);
  const int64_t moved = map_.Remove(entries, n, from.data(), to.data());
  for (int64_t i = 0; i < moved; ++i) places_[to[i]] = places_[from[i]];
  places_.resize(count() + 1);
  if (notes_.empty()) return;
  for (int64_t i = 0; i < moved; ++i) notes_[to[i]] = notes_[from[i]];
  notes_.resize(count() + 1);
}

Status RowFile::Compact(const std::shared_ptr<const RecordLayout>& layout) {
  while (sealed_ * segment_bytes_ > 2 * live_bytes_ + kSpareSegments * segment_bytes_)
    TF_RETURN_IF_ERROR(MoveRecords(Emptiest(), layout));
  return OkStatus();
}

// Returns the segment in the file that has the fewest bytes of live records.
int64_t RowFile::Emptiest() const {
  int64_t emptiest = -1, least = 0;
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.layout == nullptr || static_cast<int64_t>(s) == open_) continue;
    const int64_t bytes = segment.live * segment.layout->bytes();
    if (emptiest < 0 || bytes < least) {
      emptiest = static_cast<int64_t>(s);
      least = bytes;
    }
  }
  return emptiest;
}

// Moves the live records of a segment to the end of the log, which frees it.
Status RowFile::MoveRecords(int64_t segment, const std::shared_ptr<const RecordLayout>& layout) {
  const std::shared_ptr<const RecordLayout> before = segments_[segment].layout;
  const int64_t records = segments_[segment].records;
  std::vector<char> raw(records * before->bytes());
  TF_RETURN_IF_ERROR(ReadAt(raw.data(), raw.size(), segment * segment_bytes_));
  int64_t left = segments_[segment].live;
  for (int64_t i = 0; i < records && left > 0; ++i) {
    const char* old = raw.data() + i * before->bytes();
    int64_t key, entry;
    std::memcpy(&key, old, kKeyBytes);
    map_.Find(&key, 1, &entry);
    if (entry == 0 || places_[entry] != PlaceOf(segment, i)) continue;
    char* record = nullptr;
    uint64_t place = 0;
    int64_t taken = 0;
    TF_RETURN_IF_ERROR(Reserve(1, layout, &record, &place, &taken));
    if (layout == before) {
      std::memcpy(record, old, layout->bytes());
    } else {
      std::memcpy(record, &key, kKeyBytes);
      layout->ForEach([&](RowColumn* column, int64_t offset) {
        const int64_t old_offset = before->OffsetOf(*column);
        if (old_offset > 0) {
          std::memcpy(record + offset, old + old_offset, column->row_bytes());
        } else {
          column->CopyFirst(record + offset);
        }
      });
    }
    places_[entry] = place;
    Enliven(SegmentOf(place), 1);
    Drop(segment);
    --left;
  }
  return OkStatus();
}

void RowFile::Clear() {
  std::vector<int64_t> entries(count());
  std::iota(entries.begin(), entries.end(), 1);
  Remove(entries.data(), static_cast<int64_t>(entries.size()));
  segments_.clear();
  free_.clear();
  open_ = -1;
  sealed_ = live_bytes_ = 0;
  // Records would be written over otherwise: nothing depends on it.
  if (ftruncate(file_, 0) != 0) return;
}

void RowFile::Enliven(int64_t segment, int64_t records) {
  segments_[segment].live += records;
  live_bytes_ += records * segments_[segment].layout->bytes();
}

void RowFile::Drop(int64_t segment) {
  Segment& of = segments_[segment];
  --of.live;
  live_bytes_ -= of.layout->bytes();
  if (of.live == 0 && segment != open_) Free(segment);
}

void RowFile::Free(int64_t segment) {
  segments_[segment] = Segment{};
  free_.push_back(segment);
  --sealed_;
}

Status RowFile::ReadAt(char* to, int64_t bytes, int64_t offset) const {
  while (bytes > 0) {
    const ssize_t done = pread(file_, to, bytes, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      return errors::DataLoss("its file in '", folder_, "' can not be read: ",
                              done < 0 ? std::strerror(errno) : "it is shorter than it was",
                              ". Start again from the last checkpoint, with storage_path on a disk "
                              "that is well.");
    }
    to += done;
    offset += done;
    bytes -= done;
  }
  return OkStatus();
}

Status RowFile::WriteAt(const char* from, int64_t bytes, int64_t offset) const {
  while (bytes > 0) {
    const ssize_t done = pwrite(file_, from, bytes, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      return errors::Internal("its file in '", folder_,
                              "' can not be written: ", std::strerror(done < 0 ? errno : ENOSPC),
                              ". The rows stay in memory. Make room there, or give the table more "
                              "memory (storage_size), and start again from the last checkpoint.");
    }
    from += done;
    offset += done;
    bytes -= done;
  }
  return OkStatus();
}

}  // namespace collective
