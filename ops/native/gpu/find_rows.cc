// CollectiveFindRows on a GPU: the local rows of the keys of several dynamic tables in its memory.
//
// A function of Python finds them, by kernels that it launches on the operation's stream
// (ops/gpu/row_finders.py): tables may have to grow, and the host draws the initial values of new
// rows.
//
// CollectiveStream: tells on which stream all operations of its device launch.

#include <atomic>
#include <vector>

#include "stream.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace collective {
namespace gpu {
namespace find_rows_op {

using namespace tensorflow;

// What Python is asked to do, as row_finders.py reads it.
struct Request {
  void* stream;
  int64_t finder, tables, inserts;
  const int64_t *numbers, *steps, *sizes;  // [tables]
  const int64_t *keys, *rows;              // [tables], addresses on the device
  char message[4096];                      // what went wrong
};

// Finds rows; returns 0, or the code of an error.
using Finder = int (*)(Request* request);
std::atomic<Finder> python_finder{nullptr};
std::atomic<void*> stream_of_device{nullptr};

class FindRowsOp : public OpKernel {
 public:
  explicit FindRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    int tables = 0, steps = 0;
    OP_REQUIRES_OK(context, context->GetAttr("T", &tables));
    OP_REQUIRES_OK(context, context->GetAttr("S", &steps));
    OP_REQUIRES_OK(context, context->GetAttr("finder", &finder_));
    OP_REQUIRES(context, steps == tables,
                errors::InvalidArgument("on a GPU, CollectiveFindRows is given a step for each of ",
                                        tables, " tables, not ", steps));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList numbers, handles, keys, steps;
    const Tensor* insert = nullptr;
    OP_REQUIRES_OK(context, context->input_list("numbers", &numbers));
    OP_REQUIRES_OK(context, context->input_list("handles", &handles));
    OP_REQUIRES_OK(context, context->input_list("keys", &keys));
    OP_REQUIRES_OK(context, context->input("insert", &insert));
    OP_REQUIRES_OK(context, context->input_list("steps", &steps));
    const Finder finder = python_finder.load();
    OP_REQUIRES(context, finder != nullptr,
                errors::FailedPrecondition("nothing finds rows: this process made no lookup of a "
                                           "dynamic table on a GPU"));
    const int tables = keys.size();
    std::vector<core::RefCountPtr<Var>> variables(tables);  // stay while their rows are written
    std::vector<int64_t> words[5];
    for (int t = 0; t < tables; ++t) {
      OP_REQUIRES_OK(context,
                     LookupResource(context, handles[t].flat<ResourceHandle>()(0), &variables[t]));
      Tensor* rows = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(t, keys[t].shape(), &rows));
      words[0].push_back(numbers[t].scalar<int64_t>()());
      words[1].push_back(steps[t].scalar<int64_t>()());
      words[2].push_back(keys[t].NumElements());
      words[3].push_back(reinterpret_cast<int64_t>(keys[t].data()));
      words[4].push_back(reinterpret_cast<int64_t>(rows->data()));
    }
    Request request{};
    request.stream = StreamOf(context);
    request.finder = finder_;
    request.tables = tables;
    request.inserts = insert->scalar<bool>()();
    request.numbers = words[0].data();
    request.steps = words[1].data();
    request.sizes = words[2].data();
    request.keys = words[3].data();
    request.rows = words[4].data();
    const int code = finder(&request);
    OP_REQUIRES(context, code == 0, Status(static_cast<absl::StatusCode>(code), request.message));
  }

 private:
  int64_t finder_ = 0;
};

class StreamOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override { stream_of_device.store(StreamOf(context)); }
};

REGISTER_KERNEL_BUILDER(Name("CollectiveFindRows")
                            .Device(DEVICE_GPU)
                            .HostMemory("numbers")
                            .HostMemory("handles")
                            .HostMemory("insert")
                            .HostMemory("steps"),
                        FindRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveFindRows").Device(DEVICE_CPU).Label("emulated"),
                        FindRowsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveStream").Device(DEVICE_GPU), StreamOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveStream").Device(DEVICE_CPU), StreamOp);

#define COLLECTIVE_GPU_EXPORT extern "C" __attribute__((used, visibility("default")))

// Has operations find rows by this function from now on.
COLLECTIVE_GPU_EXPORT void collective_gpu_finder(Finder finder) { python_finder.store(finder); }

// Returns the stream of the last CollectiveStream.
COLLECTIVE_GPU_EXPORT void* collective_gpu_stream() { return stream_of_device.load(); }

#undef COLLECTIVE_GPU_EXPORT

}  // namespace find_rows_op
}  // namespace gpu
}  // namespace collective
