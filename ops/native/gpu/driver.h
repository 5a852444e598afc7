// Calls CUDA's driver, and holds the kernels that it launches.
//
// CuPy compiles kernels, caches them and keeps them loaded; it passes their handles on once
// (`collective_gpu_kernel`). Operations launch them on TensorFlow's own stream through a table of
// functions: those of libcuda, or replacements on a machine without a GPU
// (`collective_gpu_driver`).

#ifndef COLLECTIVE_NATIVE_GPU_DRIVER_H_
#define COLLECTIVE_NATIVE_GPU_DRIVER_H_

#include <cstddef>
#include <cstdint>

#include "tensorflow/core/framework/op_kernel.h"

namespace collective {
namespace gpu {

// Functions of CUDA's driver, with its types; all return 0, or the number of an error.
struct Driver {
  int (*launch)(void* kernel, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared,
                void* stream, void** arguments, void** extra);
  // Pinned memory on the host stays as it is until the copies have been made.
  int (*copy_to_device)(uint64_t to, const void* from, size_t bytes, void* stream);
  int (*copy_to_host)(void* to, uint64_t from, size_t bytes, void* stream);
  int (*create_event)(void** event, unsigned flags);
  int (*record_event)(void* event, void* stream);
  int (*wait_for_event)(void* event);
  int (*destroy_event)(void* event);
  int (*wait_for_stream)(void* stream);
  int (*set_memory)(uint64_t at, unsigned char value, size_t bytes, void* stream);
  int (*query_event)(void* event);  // 0 if it has come
};

constexpr unsigned kWithoutTiming = 2;  // the flag of an event

// Returns an error that names the driver's function, and what it was called for.
inline tensorflow::Status Checked(int error, const char* function, const char* of = "") {
  if (error == 0) return tensorflow::OkStatus();
  return tensorflow::errors::Internal("CUDA's driver returned error ", error, " from ", function,
                                      of);
}

// Finds the functions to call.
tensorflow::Status FindDriver(const Driver** driver);

// The structs of rules.cuh that have kernels in update.cu, and the kernels' names.
#define FOR_EACH_UPDATE_KERNEL(KERNELS)     \
  KERNELS(SGD, sgd)                         \
  KERNELS(Momentum, momentum)               \
  KERNELS(Adagrad, adagrad)                 \
  KERNELS(RowWiseAdagrad, row_wise_adagrad) \
  KERNELS(Adam, adam)                       \
  KERNELS(Ftrl, ftrl)                       \
  KERNELS(RMSProp, rmsprop)                 \
  KERNELS(CenteredRMSProp, centered_rmsprop)

// In the order of their names in driver.cc.
enum class Kernel {
  kBeginBags,
  kCountBags,
  kGatherRows,
  kBagOffsets,
  kCopyKeys,
  kCopyNumbers,
  kDistinctCount,
  kDistinctInsert,
  kDistinctInverse,
  kDistinctNumber,
  kFillSamples,
  kListBags,
  kLocalRows,
  kNumberBags,
  kOccurrencesCount,
  kOccurrencesOffsets,
  kOccurrencesPlace,
  kOccurrencesSplit,
  kOrderBags,
  kPartitionScan,
  kPlaceRuns,
  kPoolProducts,
  kPoolRows,
  kPoolRowsPlain,
  kPoolTerms,
  kPoolWeights,
  kRunStarts,
  kSampleOffsets,
  kScaleValues,
  kSpreadRows,
  kSumPieces,
  kSumRows,
  kSumRowsLong,
  kWriteBags,
  kWritePositions,
  kWriteRequest,
  kWriteRows,
#define UPDATE_KERNELS(Rule, name) kUpdate##Rule, kUpdate##Rule##Long,
  FOR_EACH_UPDATE_KERNEL(UPDATE_KERNELS)
#undef UPDATE_KERNELS
      kAdamDecay,
  kCount
};

// Finds the handle of a kernel.
tensorflow::Status FindKernel(Kernel kernel, void** handle);

const char* NameOf(Kernel kernel);

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_DRIVER_H_
