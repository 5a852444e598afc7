// Writes the data files of checkpoints past the page cache, and reads slices of them back.
//
//     rows ──► a buffer of whole pages, with their checksum ──► the disk (O_DIRECT)
//
// The page cache costs more than the disk: taking its pages, copying into them and writing them
// back takes about ten times as much processor time as writing from a buffer. A part of that is
// work of the kernel's own threads, which our priorities don't hold back. If a file system doesn't
// support direct writes (tmpfs, some network file systems), the same buffer goes through the cache.
//
// Checksums are those of TensorFlow's bundles: CRC-32C.

#ifndef COLLECTIVE_NATIVE_DATA_FILE_H_
#define COLLECTIVE_NATIVE_DATA_FILE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/crc/crc32c.h"

namespace collective {

// Adds bytes to a checksum. It uses the processor's own instruction if there is one, for three
// parts at a time: each instruction waits for the one before it, and three chains run in parallel.
absl::crc32c_t Extend(absl::crc32c_t crc, const char* data, int64_t size);

// Writes one file from its beginning to its end. Its functions return 0, or the system's error
// number (errno), after which it can only be closed.
class DataFile {
 public:
  // How much is written at once.
  static constexpr int64_t kBufferBytes = 4 << 20;

  DataFile();
  ~DataFile();
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  int Open(const char* path);

  // Writes `size` bytes, and adds them to a checksum.
  int Append(const char* data, int64_t size, absl::crc32c_t* crc);

  // Returns `size` bytes of the buffer to fill; null if the buffer has fewer or if writing
  // failed (`error`). `Take` then writes them, and adds them to a checksum.
  char* Room(int64_t size);
  void Take(int64_t size, absl::crc32c_t* crc);

  // Writes what is left. The file is as long as what was appended.
  int Finish();

  int error() const { return error_; }

 private:
  static constexpr int64_t kPage = 4096;  // The blocks of all disks divide it.

  int Flush();
  int Write(const char* data, int64_t size);
  void LeaveDirect();

  char* buffer_ = nullptr;
  int file_ = -1, error_ = 0;
  int64_t filled_ = 0, written_ = 0;
  bool direct_ = false;
};

// Reads `size` bytes at `offset` of an open file, a piece at a time, into `out` or, if that is
// null, into its own buffer; calls receive(place, piece, bytes) after each piece. Returns 0, an
// errno, or -1 if the file is too short, and the checksum of all bytes.
int ReadSlice(int file, int64_t offset, int64_t size, char* out, absl::crc32c_t* crc,
              const std::function<void(int64_t place, const char* piece, int64_t bytes)>& receive);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_DATA_FILE_H_
