// CollectivePool: what the members' lookups return, from the rows that came back.

#include <algorithm>

#include "lookups.h"

namespace collective {
namespace {

using namespace tensorflow;

class PoolOp : public OpKernel {
 public:
  explicit PoolOp(OpKernelConstruction* context) : OpKernel(context) { OP_REQUIRES_OK(context, lookups_.Read(context)); }

  void Compute(OpKernelContext* context) override {
    OpInputList positions, samples, weights;
    OP_REQUIRES_OK(context, context->input_list("positions", &positions));
    OP_REQUIRES_OK(context, context->input_list("samples", &samples));
    OP_REQUIRES_OK(context, context->input_list("weights", &weights));
    const Tensor& flat = context->input(0);
    const int count = static_cast<int>(lookups_.members.size());
    std::vector<Opened> opened(count);
    std::vector<typename Kept<LookupScratch>::Loan> scratch;
    std::vector<float*> out(count);
    int64_t cost = 0;
    for (int m = 0; m < count; ++m) {
      const Lookup& member = lookups_.members[m];
      scratch.push_back(scratch_.Take());
      OP_REQUIRES_OK(context, opened[m].Open(member, m, flat, positions, samples, weights, &*scratch[m]));
      Tensor* pooled = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(m, TensorShape({opened[m].out, member.dim}), &pooled));
      out[m] = pooled->flat<float>().data();
      cost += opened[m].ids * member.dim;
    }
    Parallel(context, count, cost, [&](int64_t m) {
      const Lookup& member = lookups_.members[m];
      const float* factors = opened[m].Factors(member, &*scratch[m]);
      if (member.combiner == kRows && factors == nullptr) {
        CopyRows(opened[m].rows, opened[m].ids, member.dim, out[m]);
      } else {
        FillGaps(opened[m], member.dim, out[m]);
        SumRows(opened[m].rows, factors, opened[m].bags, member.dim, out[m]);
      }
    });
  }

 private:
  // Samples without ids are zeros.
  static void FillGaps(const Opened& opened, int64_t dim, float* out) {
    if (opened.out == opened.bags.count) return;
    int64_t next = 0;
    for (int64_t b = 0; b < opened.bags.count; ++b) {
      const int64_t row = opened.bags.Row(b);
      std::fill(out + next * dim, out + row * dim, 0.f);
      next = row + 1;
    }
  }

  Lookups lookups_;
  Kept<LookupScratch> scratch_;
};

REGISTER_KERNEL_BUILDER(Name("CollectivePool").Device(DEVICE_CPU), PoolOp);

}  // namespace
}  // namespace collective
