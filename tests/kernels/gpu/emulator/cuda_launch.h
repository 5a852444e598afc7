// One launch of a kernel. Included by cuda_on_cpu.h.
#pragma once

namespace cuda_on_cpu {

struct Launch {
  unsigned blocks, threads;
  uint64_t shared;  // bytes
  uint64_t seed;    // 0: in order
  double seconds;
};

template <class... Parameters, size_t... I>
void Call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[I])...);
}

// Null if all is well.
template <class... Parameters>
const char* Start(void (*kernel)(Parameters...), const Launch& launch, void** arguments,
                  int given) {
  failure[0] = 0;
  current = nullptr;
  if (given != sizeof...(Parameters)) {
    std::snprintf(failure, sizeof failure, "%d arguments for %zu parameters", given,
                  sizeof...(Parameters));
    return failure;
  }
  grid_size = {launch.blocks, 1, 1};
  block_size = {launch.threads, 1, 1};
  shared_memory.resize(launch.shared + 256);
  dynamic_shared = reinterpret_cast<char*>(
      (reinterpret_cast<uintptr_t>(shared_memory.data()) + 255) / 256 * 256);
  races::BeginLaunch({__start_cuda_shared, __stop_cuda_shared},
                     {shared_memory.data(), shared_memory.data() + shared_memory.size()});
  body = [&] { Call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
  shuffled = launch.seed != 0;
  random_numbers.seed(launch.seed);
  deadline = std::chrono::steady_clock::now() +
             std::chrono::microseconds(static_cast<int64_t>(launch.seconds * 1e6));
  std::vector<unsigned> order(launch.blocks);
  for (unsigned b = 0; b < launch.blocks; ++b) order[b] = b;
  if (shuffled) std::shuffle(order.begin(), order.end(), random_numbers);
  for (unsigned b : order) {
    block_index = {b, 0, 0};
    RunBlock();
    if (failure[0] != 0) {
      for (const Thread& thread : threads) {
        if (thread.started && thread.state != kDone) delete thread.fibre;
      }
      return failure;
    }
  }
  races::EndLaunch();
  return nullptr;
}

// The size of each parameter in bytes, then 0.
template <class... Parameters>
const int* Sizes(void (*)(Parameters...)) {
  static const int sizes[] = {static_cast<int>(sizeof(Parameters))..., 0};
  return sizes;
}

}  // namespace cuda_on_cpu
