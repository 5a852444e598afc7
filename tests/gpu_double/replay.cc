// Stands in for CUDA's driver where the host's time is measured: launches do nothing, and copies to
// the host give what they gave in a step that was recorded. tests/gpu_double/replay.py builds it.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

// The copies of one size, in the order of the step, and how many were replayed.
struct Copies {
  std::vector<std::string> bytes;
  size_t replayed = 0;
};
std::map<size_t, Copies>& copies = *new std::map<size_t, Copies>;
constexpr int kNotRecorded = 1;  // CUDA_ERROR_INVALID_VALUE

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void replay_forget() { copies.clear(); }
EXPORT void replay_remember(const char* bytes, size_t size) {
  copies[size].bytes.emplace_back(bytes, size);
}

// All of the driver's functions that return nothing else.
EXPORT int replay_nothing() { return 0; }
EXPORT int replay_create_event(void** event, unsigned) {
  *event = &copies;
  return 0;
}
EXPORT int replay_copy_to_host(void* to, uint64_t, size_t size, void*) {
  const auto found = copies.find(size);
  if (found == copies.end()) return kNotRecorded;
  Copies& of_size = found->second;
  std::memcpy(to, of_size.bytes[of_size.replayed++ % of_size.bytes.size()].data(), size);
  return 0;
}
