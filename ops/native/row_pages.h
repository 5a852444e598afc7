// Takes exactly as much memory for the rows of a variable from the system as they need.
//
// TensorFlow's allocator takes a region of the next power of two, and fills a table with an entry
// for each 256 bytes of that: 1/32 of the region, up to 1/16 of the rows.

#ifndef COLLECTIVE_NATIVE_ROW_PAGES_H_
#define COLLECTIVE_NATIVE_ROW_PAGES_H_

#include <sys/mman.h>

#include <cstdint>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace collective {

constexpr size_t kHugePage = 2 << 20;

class RowPages : public tensorflow::TensorBuffer {
 public:
  // Takes over mapped memory.
  RowPages(void* address, size_t size) : TensorBuffer(address), size_(size) {}
  ~RowPages() override { munmap(data(), size_); }
  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription*) const override {}
  bool OwnsMemory() const override { return true; }

 private:
  size_t size_;
};

// Taking memory in small pages takes longer than reading the rows that go into it.
inline void AskForHugePages(void* memory, size_t size) {
#ifdef MADV_HUGEPAGE
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + size) / kHugePage * kHugePage;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

// Gives memory for rows where the operation's device computes; little of it is TensorFlow's.
inline tensorflow::Status TakeRows(tensorflow::OpKernelContext* context, tensorflow::DataType dtype,
                                   const tensorflow::TensorShape& shape, tensorflow::Tensor* rows) {
  const size_t size = shape.num_elements() * tensorflow::DataTypeSize(dtype);
  if (context->op_device_context() != nullptr || size < kHugePage) {
    tensorflow::AllocatorAttributes attributes;
    attributes.set_nic_compatible(true);
    return context->allocate_temp(dtype, shape, rows, attributes);
  }
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return tensorflow::errors::ResourceExhausted("there is no memory for ", shape.DebugString(),
                                                 " of ", tensorflow::DataTypeString(dtype), ", ",
                                                 size, " bytes");
  }
  AskForHugePages(memory, size);
  tensorflow::core::RefCountPtr<tensorflow::TensorBuffer> pages(new RowPages(memory, size));
  *rows = tensorflow::Tensor(dtype, shape, pages.get());
  return tensorflow::OkStatus();
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ROW_PAGES_H_
