// Data files of checkpoints (data_file.h), their index, and what Python calls.

#include "data_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "snapshot.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#include "tensorflow/core/lib/io/table_builder.h"
#include "tensorflow/core/platform/env.h"

namespace collective {

namespace {

constexpr int64_t kPiece = 256 << 10;   // Is in the processor's cache when it is read again.
constexpr int64_t kRowsPerCopy = 1024;  // Rows of a snapshot that are copied at once.

absl::string_view View(const char* data, int64_t size) {
  return absl::string_view(data, static_cast<size_t>(size));
}

#ifdef __x86_64__
// Returns the checksum of 3 * `part` bytes; `part` is a multiple of 8.
__attribute__((target("sse4.2"))) absl::crc32c_t OfThreeParts(const char* data, int64_t part) {
  uint64_t a = ~uint32_t{0}, b = a, c = a;
  for (int64_t i = 0; i < part; i += 8) {
    uint64_t x, y, z;
    std::memcpy(&x, data + i, 8);
    std::memcpy(&y, data + part + i, 8);
    std::memcpy(&z, data + 2 * part + i, 8);
    a = __builtin_ia32_crc32di(a, x);
    b = __builtin_ia32_crc32di(b, y);
    c = __builtin_ia32_crc32di(c, z);
  }
  const auto ended = [](uint64_t sum) { return absl::crc32c_t{~static_cast<uint32_t>(sum)}; };
  return absl::ConcatCrc32c(absl::ConcatCrc32c(ended(a), ended(b), part), ended(c), part);
}
#endif

}  // namespace

absl::crc32c_t Extend(absl::crc32c_t crc, const char* data, int64_t size) {
#ifdef __x86_64__
  constexpr int64_t kWorthwhile = 4 << 10;  // Joining the parts takes some of it.
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction && size >= kWorthwhile) {
    const int64_t part = size / 24 * 8;
    crc = absl::ConcatCrc32c(crc, OfThreeParts(data, part), 3 * part);
    data += 3 * part;
    size -= 3 * part;
  }
#endif
  return absl::crc32c_t{tensorflow::crc32c::Extend(static_cast<uint32_t>(crc), data, size)};
}

DataFile::DataFile() {
  void* memory =
      mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    error_ = ENOMEM;
    return;
  }
  buffer_ = static_cast<char*>(memory);
}

DataFile::~DataFile() {
  if (file_ >= 0) close(file_);
  if (buffer_ != nullptr) munmap(buffer_, kBufferBytes);
}

int DataFile::Open(const char* path) {
  if (error_ != 0) return error_;
  if (file_ >= 0) close(file_);
  filled_ = written_ = 0;
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
#ifdef O_DIRECT
  file_ = open(path, kFlags | O_DIRECT, 0666);
  direct_ = file_ >= 0;
#endif
  // Whether a refusal is of direct writing, an open without it tells.
  if (file_ < 0) file_ = open(path, kFlags, 0666);
  return error_ = file_ < 0 ? errno : 0;
}

void DataFile::LeaveDirect() {
#ifdef O_DIRECT
  const int flags = fcntl(file_, F_GETFL);
  if (direct_ && flags >= 0) fcntl(file_, F_SETFL, flags & ~O_DIRECT);
#endif
  direct_ = false;
}

int DataFile::Write(const char* data, int64_t size) {
  while (size > 0) {
    const ssize_t n = pwrite(file_, data, size, written_);
    if (n > 0) {
      data += n;
      size -= n;
      written_ += n;
      // What is left of a write that was cut short begins anywhere.
      if (n % kPage != 0) LeaveDirect();
    } else if (n == 0) {
      return ENOSPC;
    } else if (direct_ && (errno == EINVAL || errno == EOPNOTSUPP)) {
      LeaveDirect();  // The file system has opened it so, but takes no such writes.
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

int DataFile::Flush() {
  if (error_ == 0) error_ = Write(buffer_, filled_);
  filled_ = 0;
  return error_;
}

int DataFile::Append(const char* data, int64_t size, absl::crc32c_t* crc) {
  while (size > 0 && error_ == 0) {
    const int64_t n = std::min({size, kPiece, kBufferBytes - filled_});
    std::memcpy(buffer_ + filled_, data, n);
    *crc = Extend(*crc, buffer_ + filled_, n);
    filled_ += n;
    data += n;
    size -= n;
    if (filled_ == kBufferBytes) Flush();
  }
  return error_;
}

char* DataFile::Room(int64_t size) {
  // Whole buffers are written, since a direct write begins at a page.
  return error_ == 0 && size <= kBufferBytes - filled_ ? buffer_ + filled_ : nullptr;
}

void DataFile::Take(int64_t size, absl::crc32c_t* crc) {
  *crc = Extend(*crc, buffer_ + filled_, size);
  filled_ += size;
  if (filled_ == kBufferBytes) Flush();
}

int DataFile::Finish() {
  const int64_t size = written_ + filled_;
  if (direct_ && filled_ % kPage != 0) {
    const int64_t padding = kPage - filled_ % kPage;
    std::memset(buffer_ + filled_, 0, padding);
    filled_ += padding;
  }
  if (Flush() == 0 && written_ > size && ftruncate(file_, size) != 0) error_ = errno;
  if (error_ == 0 && close(std::exchange(file_, -1)) != 0) error_ = errno;
  return error_;
}

int ReadSlice(int file, int64_t offset, int64_t size, char* out, absl::crc32c_t* crc,
              const std::function<void(int64_t, const char*, int64_t)>& receive) {
  thread_local std::unique_ptr<char[]> buffer;
  if (out == nullptr && buffer == nullptr) buffer.reset(new char[kPiece]);
  for (int64_t place = 0; place < size;) {
    const int64_t wanted = std::min(kPiece, size - place);
    char* piece = out == nullptr ? buffer.get() : out + place;
    int64_t got = 0;
    while (got < wanted) {
      const ssize_t n = pread(file, piece + got, wanted - got, offset + place + got);
      if (n == 0) return -1;
      if (n < 0 && errno != EINTR) return errno;
      if (n > 0) got += n;
    }
    *crc = Extend(*crc, piece, wanted);
    if (receive) receive(place, piece, wanted);
    place += wanted;
  }
  return 0;
}

namespace {

// Appends rows of a snapshot as they were; returns 0, an errno, or -1 if the save was given up.
int AppendRows(DataFile* file, ColumnSnapshot* column, const int64_t* rows, int64_t n,
               absl::crc32c_t* crc) {
  const int64_t row_bytes = column->row_bytes();
  std::unique_ptr<char[]> between;  // For the rows that lie across the buffer's end.
  for (int64_t first = 0; first < n;) {
    const int64_t at_once =
        std::max<int64_t>(1, std::min({n - first, kRowsPerCopy, kPiece / row_bytes}));
    const int64_t bytes = at_once * row_bytes;
    if (char* out = file->Room(bytes)) {
      if (!column->Read(rows + first, at_once, out)) return -1;
      file->Take(bytes, crc);
    } else {
      if (between == nullptr) between.reset(new char[std::max(kPiece, row_bytes)]);
      if (!column->Read(rows + first, at_once, between.get())) return -1;
      file->Append(between.get(), bytes, crc);
    }
    if (file->error() != 0) return file->error();
    first += at_once;
  }
  return 0;
}

}  // namespace
}  // namespace collective

extern "C" {

COLLECTIVE_EXPORT int64_t data_file_buffer_bytes() { return collective::DataFile::kBufferBytes; }

// The functions of a file return 0, or the errno of what failed.
COLLECTIVE_EXPORT void* data_file_new() { return new collective::DataFile(); }

COLLECTIVE_EXPORT void data_file_free(void* file) {
  delete static_cast<collective::DataFile*>(file);
}

COLLECTIVE_EXPORT int data_file_open(void* file, const char* path) {
  return static_cast<collective::DataFile*>(file)->Open(path);
}

COLLECTIVE_EXPORT int data_file_append(void* file, const char* data, int64_t size, uint32_t* crc) {
  absl::crc32c_t sum{0};
  const int error = static_cast<collective::DataFile*>(file)->Append(data, size, &sum);
  *crc = static_cast<uint32_t>(sum);
  return error;
}

// Appends `n` rows of the variable that is watched as `shard`. Returns -1 if the save was given up.
COLLECTIVE_EXPORT int data_file_append_rows(void* file, int64_t snapshot, int64_t shard,
                                            const int64_t* rows, int64_t n, uint32_t* crc) {
  const auto found = collective::Snapshots().Find(snapshot);
  const auto column = found == nullptr ? nullptr : found->column(shard);
  if (column == nullptr) return -1;
  absl::crc32c_t sum{0};
  const int error =
      collective::AppendRows(static_cast<collective::DataFile*>(file), column.get(), rows, n, &sum);
  *crc = static_cast<uint32_t>(sum);
  return error;
}

COLLECTIVE_EXPORT int data_file_finish(void* file) {
  return static_cast<collective::DataFile*>(file)->Finish();
}

// Reads a slice to `out`, with its checksum. Returns -1 if the file is too short.
COLLECTIVE_EXPORT int data_file_read(const char* path, int64_t offset, int64_t size, char* out,
                                     uint32_t* crc) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno;
  absl::crc32c_t sum{0};
  const int error = collective::ReadSlice(file, offset, size, out, &sum, nullptr);
  close(file);
  *crc = static_cast<uint32_t>(sum);
  return error;
}

// Returns the CRC-32C of `size` bytes.
COLLECTIVE_EXPORT uint32_t data_file_checksum(const char* data, int64_t size) {
  return static_cast<uint32_t>(collective::Extend(absl::crc32c_t{0}, data, size));
}

// Writes the index of a bundle: `n` pairs of (key, value) by ascending keys, whose bytes follow
// each other in `text`; `lengths` [2 n] has the keys' and the values' in turn. Returns the status's
// code, 0 if all is well.
COLLECTIVE_EXPORT int data_file_write_index(const char* path, const char* text,
                                            const int64_t* lengths, int64_t n, char* message,
                                            int64_t message_size) {
  std::unique_ptr<tensorflow::WritableFile> file;
  tensorflow::Status status = tensorflow::Env::Default()->NewWritableFile(path, &file);
  if (status.ok()) {
    tensorflow::table::Options options;
    options.compression = tensorflow::table::kNoCompression;
    tensorflow::table::TableBuilder builder(options, file.get());
    for (int64_t i = 0; i < n; ++i) {
      const absl::string_view key = collective::View(text, lengths[2 * i]);
      const absl::string_view value = collective::View(text + lengths[2 * i], lengths[2 * i + 1]);
      builder.Add(key, value);
      text += lengths[2 * i] + lengths[2 * i + 1];
    }
    status = builder.Finish();
    if (status.ok()) status = file->Close();
  }
  const std::string words = status.ToString();
  std::strncpy(message, words.c_str(), message_size - 1);
  message[message_size - 1] = 0;
  return static_cast<int>(status.code());
}

}  // extern "C"
