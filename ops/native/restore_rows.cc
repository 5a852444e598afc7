// CollectiveRestoreRows: reads rows from the data files of a checkpoint right into a variable.
//
// Each slice is read by one thread, a piece at a time, which is checked while it is in the cache.
// Where the variable has the slice's rows one after the other, as with the number of ranks that
// saved it, the system copies them to where they belong, and nothing else does.

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "data_file.h"
#include "parallel.h"
#include "row_pages.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/lib/hash/crc32c.h"
#include "variables.h"

namespace collective {
namespace restore_rows_op {

using namespace tensorflow;

// Says where a slice lies, and which of its rows go where: rows `skip`, `skip` + `step`, … to the
// variable's rows `first`, `first` + `stride`, …
struct Slice {
  int64_t file, offset, size, checksum, skip, step, first, stride;
};
static_assert(sizeof(Slice) == 8 * sizeof(int64_t), "a row of the input is a slice");

// Is a set of files that are open for reading while it lives.
class OpenFiles {
 public:
  ~OpenFiles() {
    for (int file : files_) close(file);
  }
  Status Open(const tstring& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return errors::IOError(path, errno);
    files_.push_back(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_SEQUENTIAL);
    return OkStatus();
  }
  int operator[](int64_t i) const { return files_[i]; }

 private:
  std::vector<int> files_;
};

// Copies those rows of a piece that belong to the variable, whole or in part.
void CopyRows(const Slice& slice, int64_t row_bytes, int64_t place, const char* piece,
              int64_t bytes, char* rows) {
  const int64_t before = std::max<int64_t>(0, place / row_bytes - slice.skip);
  int64_t i = (before + slice.step - 1) / slice.step;
  for (int64_t row = slice.skip + i * slice.step; row * row_bytes < place + bytes;
       row += slice.step, ++i) {
    const int64_t begin = std::max(row * row_bytes, place);
    const int64_t end = std::min((row + 1) * row_bytes, place + bytes);
    if (begin >= end) continue;
    std::memcpy(rows + (slice.first + i * slice.stride) * row_bytes + (begin - row * row_bytes),
                piece + (begin - place), end - begin);
  }
}

class RestoreRowsOp : public OpKernel {
 public:
  explicit RestoreRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES(context, DataTypeCanUseMemcpy(dtype_),
                errors::InvalidArgument(DataTypeString(dtype_), " is no type of numbers"));
  }

  void Compute(OpKernelContext* context) override {
    const auto paths = context->input(1).vec<tstring>();
    const Tensor& numbers = context->input(2);
    const auto shape = context->input(3).vec<int64_t>();
    const bool verifies = context->input(4).scalar<bool>()();
    OP_REQUIRES(
        context, numbers.dims() == 2 && numbers.dim_size(1) == 8 && shape.size() == 2,
        errors::InvalidArgument("slices are [S, 8] and the shape [2], not ",
                                numbers.shape().DebugString(), " and [", shape.size(), "]"));
    const auto* slices = reinterpret_cast<const Slice*>(numbers.flat<int64_t>().data());
    const int64_t count = numbers.dim_size(0), row_bytes = shape(1) * DataTypeSize(dtype_);
    int64_t total = 0;
    for (int64_t s = 0; s < count; ++s) {
      total += slices[s].size;
      OP_REQUIRES(context, IsWithin(slices[s], paths.size(), shape(0), row_bytes),
                  errors::InvalidArgument("slice ", s, " has rows outside of the variable's ",
                                          shape(0), ", or is of no file"));
    }
    OpenFiles files;
    for (int64_t f = 0; f < paths.size(); ++f) OP_REQUIRES_OK(context, files.Open(paths(f)));
    core::RefCountPtr<Var> variable;
    char* rows = nullptr;
    std::unique_ptr<mutex_lock> lock;
    if (!verifies) {
      OP_REQUIRES_OK(context, Prepare(context, TensorShape({shape(0), shape(1)}), &variable));
      lock = std::make_unique<mutex_lock>(*variable->mu());
      rows = static_cast<char*>(variable->tensor()->data());
    }
    mutex of_status;
    Status status;
    Parallel(context, count, total, [&](int64_t s) {
      const Status done = Read(slices[s], files[slices[s].file], row_bytes, rows);
      if (done.ok()) return;
      mutex_lock held(of_status);
      status = errors::CreateWithUpdatedMessage(
          done, strings::StrCat(done.message(), " of ", paths(slices[s].file), ", at ",
                                slices[s].offset));
    });
    OP_REQUIRES_OK(context, status);
  }

 private:
  static bool IsWithin(const Slice& slice, int64_t files, int64_t rows, int64_t row_bytes) {
    if (slice.file < 0 || slice.file >= files || slice.size < 0 || slice.skip < 0 ||
        slice.step < 1 || slice.stride < 1 || slice.first < 0 || row_bytes < 1 ||
        slice.size % row_bytes != 0)
      return false;
    const int64_t last = slice.size / row_bytes - 1 - slice.skip;
    return last < 0 || slice.first + last / slice.step * slice.stride < rows;
  }

  // Gives the variable memory if it has none of this shape, and looks that it is its own.
  Status Prepare(OpKernelContext* context, const TensorShape& shape,
                 core::RefCountPtr<Var>* variable) {
    TF_RETURN_IF_ERROR(LookupOrCreateResource<Var>(context, HandleFromInput(context, 0), variable,
                                                   [this](Var** made) {
                                                     *made = new Var(dtype_);
                                                     return OkStatus();
                                                   }));
    Var* var = variable->get();
    {
      mutex_lock lock(*var->mu());
      if (!var->is_initialized || !var->tensor()->IsInitialized() ||
          var->tensor()->shape() != shape || var->tensor()->dtype() != dtype_) {
        Tensor fresh;
        TF_RETURN_IF_ERROR(TakeRows(context, dtype_, shape, &fresh));
        *var->tensor() = fresh;
        var->is_initialized = true;
        return OkStatus();
      }
    }
    return EnsureOwned(context, var);
  }

  static Status Read(const Slice& slice, int file, int64_t row_bytes, char* rows) {
    absl::crc32c_t sum{0};
    int error;
    if (rows == nullptr) {
      error = ReadSlice(file, slice.offset, slice.size, nullptr, &sum, nullptr);
    } else if (slice.skip == 0 && slice.step == 1 && slice.stride == 1) {
      char* out = rows + slice.first * row_bytes;
      error = ReadSlice(file, slice.offset, slice.size, out, &sum, nullptr);
    } else {
      error = ReadSlice(file, slice.offset, slice.size, nullptr, &sum,
                        [&](int64_t place, const char* piece, int64_t bytes) {
                          CopyRows(slice, row_bytes, place, piece, bytes, rows);
                        });
    }
    if (error < 0) return errors::DataLoss("there are not the ", slice.size, " bytes of a slice");
    if (error > 0) return errors::IOError("reading a slice", error);
    const uint32_t masked = crc32c::Mask(static_cast<uint32_t>(sum));
    if (masked != static_cast<uint32_t>(slice.checksum))
      return errors::DataLoss("the checksum is wrong of a slice");
    return OkStatus();
  }

  DataType dtype_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveRestoreRows").Device(DEVICE_CPU), RestoreRowsOp);

}  // namespace restore_rows_op
}  // namespace collective
