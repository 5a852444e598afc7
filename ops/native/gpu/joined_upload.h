// Uploads arrays of the host's memory in one piece, together with the words that kernels read.

#ifndef COLLECTIVE_NATIVE_GPU_JOINED_UPLOAD_H_
#define COLLECTIVE_NATIVE_GPU_JOINED_UPLOAD_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "segments.h"
#include "stream.h"
#include "../parallel.h"

namespace collective {
namespace gpu {

// A copy out of pinned memory is the only one that the driver makes without stopping on the way. So
// the host's threads write there what has to go.
class JoinedUpload {
 public:
  // Returns where the array will be, in words from where all of it is: right behind the one before.
  int64_t Add(const tensorflow::Tensor& array) {
    const int64_t at = words_, bytes = static_cast<int64_t>(array.TotalBytes());
    const char* from = static_cast<const char*>(array.data());
    for (int64_t done = 0; done < bytes; done += kPiece)
      pieces_.push_back({at * kWord + done, from + done, std::min(kPiece, bytes - done)});
    words_ += CeilOfQuotient(bytes, kWord);
    bytes_ += bytes;
    return at;
  }

  // The same, but where a tensor may begin: it can be an output.
  int64_t AddTensor(const tensorflow::Tensor& array) {
    constexpr int64_t kAligned = tensorflow::Allocator::kAllocatorAlignment / kWord;
    words_ = CeilOfQuotient(words_, kAligned) * kAligned;
    return Add(array);
  }

  // Makes `uploaded` of the arrays and, behind them, of the words of `packed`, which `*words` are.
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
    Parallel(
        context, static_cast<int64_t>(pieces_.size()), bytes_ / kBytesPerNanosecond,
        [&](int64_t i) { std::memcpy(to + pieces_[i].to, pieces_[i].from, pieces_[i].bytes); });
    std::copy(packed.words().begin(), packed.words().end(), static_cast<int64_t*>(joined) + words_);
    *words = static_cast<const int64_t*>(uploaded->data()) + words_;
    return stream->CopyToDevice(uploaded->data(), joined, size * kWord);
  }

 private:
  static constexpr int64_t kWord = sizeof(int64_t);
  static constexpr int64_t kPiece = 256 * 1024;

  // What one thread copies.
  struct Piece {
    int64_t to;  // in bytes
    const char* from;
    int64_t bytes;
  };

  std::vector<Piece> pieces_;
  int64_t words_ = 0, bytes_ = 0;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_JOINED_UPLOAD_H_
