#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <string>

namespace collective {
namespace gpu {

using tensorflow::OkStatus;
using tensorflow::Status;
using tensorflow::errors::FailedPrecondition;

namespace {

constexpr const char* kKernelNames[] = {
    "begin_bags",
    "count_bags",
    "gather_rows",
    "bag_offsets",
    "copy_keys",
    "copy_numbers",
    "distinct_count",
    "distinct_insert",
    "distinct_inverse",
    "distinct_number",
    "fill_samples",
    "list_bags",
    "local_rows",
    "number_bags",
    "occurrences_count",
    "occurrences_offsets",
    "occurrences_place",
    "occurrences_split",
    "order_bags",
    "partition_scan",
    "place_runs",
    "pool_products",
    "pool_rows",
    "pool_rows_plain",
    "pool_terms",
    "pool_weights",
    "run_starts",
    "sample_offsets",
    "scale_values",
    "spread_rows",
    "sum_pieces",
    "sum_rows",
    "sum_rows_long",
    "write_bags",
    "write_positions",
    "write_request",
    "write_rows",
#define UPDATE_KERNELS(Rule, name) "update_" #name, "update_" #name "_long",
    FOR_EACH_UPDATE_KERNEL(UPDATE_KERNELS)
#undef UPDATE_KERNELS
        "adam_decay",
};
constexpr int kKernels = static_cast<int>(Kernel::kCount);
static_assert(sizeof(kKernelNames) / sizeof(kKernelNames[0]) == kKernels, "one name for each");

std::atomic<void*> kernel_handles[kKernels];
std::atomic<const Driver*> stand_in{nullptr};

// Holds libcuda's functions; without one of them, what is missing.
struct Cuda {
  Driver driver{};
  std::string missing;

  Cuda() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = dlerror();
      return;
    }
    Find(library, "cuLaunchKernel", &driver.launch);
    Find(library, "cuMemcpyHtoDAsync_v2", &driver.copy_to_device);
    Find(library, "cuMemcpyDtoHAsync_v2", &driver.copy_to_host);
    Find(library, "cuEventCreate", &driver.create_event);
    Find(library, "cuEventRecord", &driver.record_event);
    Find(library, "cuEventSynchronize", &driver.wait_for_event);
    Find(library, "cuEventDestroy_v2", &driver.destroy_event);
    Find(library, "cuStreamSynchronize", &driver.wait_for_stream);
    Find(library, "cuMemsetD8Async", &driver.set_memory);
    Find(library, "cuEventQuery", &driver.query_event);
  }

  template <class Function>
  void Find(void* library, const char* name, Function* function) {
    void* found = dlsym(library, name);
    if (found == nullptr) missing = std::string("it has no ") + name;
    *function = reinterpret_cast<Function>(found);
  }
};

}  // namespace

Status FindDriver(const Driver** driver) {
  *driver = stand_in.load();
  if (*driver != nullptr) return OkStatus();
  static const Cuda* const cuda = new Cuda;
  if (!cuda->missing.empty())
    return FailedPrecondition("CUDA's driver, libcuda.so.1, can not be used: ", cuda->missing);
  *driver = &cuda->driver;
  return OkStatus();
}

Status FindKernel(Kernel kernel, void** handle) {
  *handle = kernel_handles[static_cast<int>(kernel)].load();
  if (*handle != nullptr) return OkStatus();
  return FailedPrecondition("the kernel ", NameOf(kernel),
                            " was not handed over: this process made no lookup on a GPU");
}

const char* NameOf(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }

#define COLLECTIVE_GPU_EXPORT extern "C" __attribute__((used, visibility("default")))

// Has operations call these functions, which live on; null: CUDA's.
COLLECTIVE_GPU_EXPORT void collective_gpu_driver(const Driver* driver) { stand_in.store(driver); }

// Takes the handle of the kernel `name`. Returns 0 if operations launch none of this name.
COLLECTIVE_GPU_EXPORT int collective_gpu_kernel(const char* name, void* handle) {
  for (int kernel = 0; kernel < kKernels; ++kernel) {
    if (std::strcmp(kKernelNames[kernel], name) != 0) continue;
    kernel_handles[kernel].store(handle);
    return 1;
  }
  return 0;
}

#undef COLLECTIVE_GPU_EXPORT

}  // namespace gpu
}  // namespace collective
