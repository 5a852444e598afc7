// CollectivePool: computes the members' results from the rows that came back.

#include <algorithm>

#include "clip.h"
#include "lookups.h"

namespace collective {
namespace pool_op {

using namespace tensorflow;

class PoolOp : public OpKernel {
 public:
  explicit PoolOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
  }

  void Compute(OpKernelContext* context) override {
    LookupInputs inputs;
    OP_REQUIRES_OK(context, inputs.Read(context));
    const int64_t count = static_cast<int64_t>(members_.size());
    std::vector<MemberInputs> opened(count);
    std::vector<float*> out(count);
    int64_t cost = 0;
    for (int m = 0; m < count; ++m) {
      OP_REQUIRES_OK(context, opened[m].Open(members_[m], m, inputs));
      Tensor* pooled = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(
                                  m, TensorShape({opened[m].out, members_[m].dim}), &pooled));
      out[m] = pooled->flat<float>().data();
      cost += opened[m].ids * members_[m].dim;
    }
    Parallel(context, count, cost, [&](int64_t m) {
      auto scratch = scratch_.Take();
      Pool(members_[m], opened[m], &*scratch, out[m]);
    });
  }

 private:
  static void Pool(const Lookup& member, const MemberInputs& opened, LookupScratch* scratch,
                   float* out) {
    if (member.combiner == kRows && member.max_norm == 0)
      return CopyRows(opened.rows, opened.ids, member.dim, out);
    const float* factors = opened.weights;
    if (member.max_norm > 0) {
      float* clipped = scratch->factors.At(opened.ids);
      Clip<int32_t>(opened.rows, opened.ids, member.dim, member.max_norm)
          .Factors(opened.weights, clipped);
      factors = clipped;
    }
    const int64_t* samples = opened.Samples(scratch);
    if (opened.bags < opened.out) FillGaps(samples, opened.ids, member.dim, out);
    SumRows<First::kRuns>(
        Sums<int32_t, int64_t>{opened.rows, opened.ids, factors, 1, samples, member.dim, out},
        member.dim);
    if (member.combiner != kMean && member.combiner != kSqrtN) return;
    const BagDivisors divisors = opened.Divisors(member, scratch);
    DivideRows(out, divisors.samples, divisors.of, opened.bags, member.dim);
  }

  // Fills samples without ids with zeros.
  static void FillGaps(const int64_t* samples, int64_t ids, int64_t dim, float* out) {
    int64_t next = 0;
    for (int64_t k = 0; k < ids; ++k) {
      if (samples[k] > next) std::fill(out + next * dim, out + samples[k] * dim, 0.f);
      next = samples[k] + 1;
    }
  }

  std::vector<Lookup> members_;
  ObjectPool<LookupScratch> scratch_;
};

REGISTER_KERNEL_BUILDER(Name("CollectivePool").Device(DEVICE_CPU), PoolOp);

}  // namespace pool_op
}  // namespace collective
