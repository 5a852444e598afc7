// Reads received messages that are on the device, by copies of their headers.

#ifndef COLLECTIVE_NATIVE_GPU_MESSAGE_H_
#define COLLECTIVE_NATIVE_GPU_MESSAGE_H_

#include "../wire.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace gpu {

// Parses a message by the headers that CollectiveHear gave. Its pieces are on the device.
inline tensorflow::Status ParseByHeaders(const Layout& layout, const tensorflow::Tensor& message,
                                         const tensorflow::Tensor& splits,
                                         const tensorflow::OpInputList& headers,
                                         ReceivedMessage* received) {
  const int64_t wanted = 2 * layout.ranks * static_cast<int64_t>(layout.sections.size());
  if (headers.size() != 1 || headers[0].NumElements() != wanted) {
    return tensorflow::errors::InvalidArgument(
        "on a GPU, the headers of a message come from CollectiveHear: ", wanted, " words, not ",
        headers.size() == 1 ? headers[0].NumElements() : 0);
  }
  return layout.Parse(message, splits, headers[0].flat<int64_t>().data(), received);
}

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_MESSAGE_H_
