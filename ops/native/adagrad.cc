// CollectiveSparseAdagrad: updates rows of a shard and of its accumulator in place.

#include <algorithm>
#include <cmath>

#include "clones.h"
#include "parallel.h"
#include "scans.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "variables.h"

namespace collective {
namespace adagrad_op {

using namespace tensorflow;

constexpr int64_t kAhead = 4;  // Rows ahead whose memory is prefetched.

// accum += g * g; var -= rate * g / sqrt(accum), for each row at[i] of both.
CLONES void Update(const float* gradients, const int64_t* at, int64_t n, int64_t dim, float rate,
                   float* values, float* accums) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const int64_t next = at[i + kAhead] * dim;
      for (int64_t c = 0; c < dim; c += 16) {
        __builtin_prefetch(values + next + c, 1);
        __builtin_prefetch(accums + next + c, 1);
      }
    }
    const float* __restrict g = gradients + i * dim;
    float* __restrict value = values + at[i] * dim;
    float* __restrict accum = accums + at[i] * dim;
    for (int64_t c = 0; c < dim; ++c) {
      const float sum = accum[c] + g[c] * g[c];
      accum[c] = sum;
      value[c] -= rate * g[c] / std::sqrt(sum);
    }
  }
}

class SparseAdagradOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &rate = context->input(2), &gradient = context->input(3),
                 &rows = context->input(4);
    core::RefCountPtr<Var> variables[2];
    for (int i = 0; i < 2; ++i) {
      const ResourceHandle& handle = HandleFromInput(context, i);
      OP_REQUIRES(context, LookupResource(context, handle, &variables[i]).ok(),
                  errors::FailedPrecondition("the variable ", handle.name(),
                                             " does not exist: was it initialized?"));
      OP_REQUIRES(
          context,
          variables[i]->tensor()->dtype() == DT_FLOAT && variables[i]->tensor()->dims() == 2,
          errors::InvalidArgument("the variable ", handle.name(),
                                  " is no float32 matrix, or not initialized"));
      OP_REQUIRES_OK(context, EnsureOwned(context, variables[i].get()));
    }
    const bool in_order = variables[0]->mu() < variables[1]->mu();
    tf_shared_lock first(*variables[in_order ? 0 : 1]->mu());
    tf_shared_lock second(*variables[in_order ? 1 : 0]->mu());
    Tensor &value = *variables[0]->tensor(), &accum = *variables[1]->tensor();
    const int64_t n = rows.NumElements(), dim = value.dim_size(1);
    OP_REQUIRES(context, accum.dim_size(0) >= value.dim_size(0) && accum.dim_size(1) == dim,
                errors::InvalidArgument("the accumulator is ", accum.shape().DebugString(),
                                        ", the table ", value.shape().DebugString()));
    OP_REQUIRES(context, rate.NumElements() == 1 && gradient.shape() == TensorShape({n, dim}),
                errors::InvalidArgument("the gradient of ", n, " rows of dimension ", dim, " is ",
                                        gradient.shape().DebugString(), ", the learning rate ",
                                        rate.shape().DebugString()));
    const int64_t* at = rows.flat<int64_t>().data();
    OP_REQUIRES(
        context, AreWithin(at, n, value.dim_size(0)),
        errors::InvalidArgument("a row to be updated is not in [0, ", value.dim_size(0), ")"));
    const float* gradients = gradient.flat<float>().data();
    const int64_t pieces = std::min<int64_t>(n, 64);
    Parallel(context, pieces, n * dim, [&](int64_t p) {
      const int64_t begin = n * p / pieces, end = n * (p + 1) / pieces;
      Update(gradients + begin * dim, at + begin, end - begin, dim, rate.flat<float>()(0),
             value.flat<float>().data(), accum.flat<float>().data());
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("CollectiveSparseAdagrad").Device(DEVICE_CPU), SparseAdagradOp);

}  // namespace adagrad_op
}  // namespace collective
