// Uploads arrays of host memory in one piece, together with the words that kernels read.

#ifndef COLLECTIVE_NATIVE_GPU_JOINED_UPLOAD_H_
#define COLLECTIVE_NATIVE_GPU_JOINED_UPLOAD_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "segments.h"
#include "stream.h"
#include "../parallel.h"

namespace collective {
namespace gpu {

// Only a copy from pinned memory doesn't make the driver wait. So the host's threads write the data
// there first.
class JoinedUpload {
 public:
  // Returns where the array will be, in words from the start of the upload: after the one before.
  int64_t Add(const tensorflow::Tensor& array) {
    const int64_t at = words_, bytes = static_cast<int64_t>(array.TotalBytes());
    const char* from = static_cast<const char*>(array.data());
    for (int64_t done = 0; done < bytes; done += kPiece)
      pieces_.push_back({at * kWord + done, from + done, std::min(kPiece, bytes - done), 0, 0, -1});
    words_ += CeilOfQuotient(bytes, kWord);
    bytes_ += bytes;
    return at;
  }

  // The same, but aligned so that a tensor may begin there: it can be an output.
  int64_t AddTensor(const tensorflow::Tensor& array) {
    words_ = Aligned(words_);
    return Add(array);
  }

  // Adds 32-bit numbers instead of the `ids` samples [K] int64, which ascend from 0 to
  // `count` - 1: the id with which each sample begins, and K. That is fewer bytes to copy.
  int64_t AddOffsets(const tensorflow::Tensor& ids, int64_t count) {
    const int64_t at = words_, size = ids.NumElements();
    const char* from = static_cast<const char*>(ids.data());
    for (int64_t first = 0; first < size; first += kPiece / kWord) {
      pieces_.push_back(
          {at * kWord, from, std::min(kPiece / kWord, size - first), first, size, count});
    }
    words_ += CeilOfQuotient(count + 1, 2);
    bytes_ += size * kWord;
    return at;
  }

  // Returns the next word at which a tensor may begin.
  static int64_t Aligned(int64_t word) {
    constexpr int64_t kAligned = tensorflow::Allocator::kAllocatorAlignment / kWord;
    return CeilOfQuotient(word, kAligned) * kAligned;
  }

  // Makes `uploaded` from the arrays and, after them, the words of `packed`, which are `*words`.
  tensorflow::Status Launch(tensorflow::OpKernelContext* context, Stream* stream,
                            const Packed& packed, tensorflow::Tensor* uploaded,
                            const int64_t** words) const {
    const int64_t size = words_ + static_cast<int64_t>(packed.words().size());
    void* joined = nullptr;
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, tensorflow::TensorShape({size}), uploaded));
    TF_RETURN_IF_ERROR(stream->HostScratch(size * kWord, &joined));
    char* to = static_cast<char*>(joined);
    constexpr int64_t kBytesPerNanosecond = 4;
    std::atomic<bool> ascend{true};
    Parallel(context, static_cast<int64_t>(pieces_.size()), bytes_ / kBytesPerNanosecond,
             [&](int64_t i) {
               const Piece& piece = pieces_[i];
               if (piece.samples < 0) {
                 std::memcpy(to + piece.to, piece.from, piece.size);
               } else if (!WriteOffsets(piece, reinterpret_cast<int32_t*>(to + piece.to))) {
                 ascend = false;
               }
             });
    if (!ascend) {
      return tensorflow::errors::InvalidArgument(
          "samples must ascend from 0 on, but those of a lookup don't");
    }
    std::copy(packed.words().begin(), packed.words().end(), static_cast<int64_t*>(joined) + words_);
    *words = static_cast<const int64_t*>(uploaded->data()) + words_;
    return stream->CopyToDevice(uploaded->data(), joined, size * kWord);
  }

 private:
  static constexpr int64_t kWord = sizeof(int64_t);
  static constexpr int64_t kPiece = 256 * 1024;

  // The work of one thread: some bytes of an array, or the beginnings of samples among some ids.
  struct Piece {
    int64_t to;  // in bytes
    const char* from;
    int64_t size;          // of bytes, or of ids
    int64_t first = 0;     // of the ids
    int64_t ids = 0;       // in all
    int64_t samples = -1;  // of these; -1: an array
  };

  // Writes the offsets of the samples that begin with a piece's ids; after the last id, those of
  // the remaining samples. Returns whether its samples ascend.
  static bool WriteOffsets(const Piece& piece, int32_t* offsets) {
    const int64_t* samples = reinterpret_cast<const int64_t*>(piece.from);
    const int64_t end = piece.first + piece.size;
    int64_t before = piece.first == 0 ? -1 : samples[piece.first - 1];
    for (int64_t id = piece.first; id < end; ++id) {
      const int64_t sample = samples[id];
      if (sample < before || sample < 0 || sample >= piece.samples) return false;
      while (before < sample) offsets[++before] = static_cast<int32_t>(id);
    }
    if (end == piece.ids) offsets[piece.samples] = static_cast<int32_t>(end);
    return true;
  }

  std::vector<Piece> pieces_;
  int64_t words_ = 0, bytes_ = 0;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_JOINED_UPLOAD_H_
