// CollectivePool: computes the members' results from the rows that came back.

#include <algorithm>
#include <optional>
#include <vector>

#include "clip.h"
#include "lookups.h"
#include "pooling.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"

namespace collective {

using namespace tensorflow;

namespace {

// Fills samples without ids with zeros.
void FillGaps(const int64_t* samples, int64_t ids, int64_t dim, float* out) {
  int64_t next = 0;
  for (int64_t k = 0; k < ids; ++k) {
    if (samples[k] > next) std::fill(out + next * dim, out + samples[k] * dim, 0.f);
    next = samples[k] + 1;
  }
}

}  // namespace

void Pool(const Lookup& member, const MemberInputs& opened, LookupScratch* scratch, float* out) {
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

namespace pool_op {

class PoolOp : public OpKernel {
 public:
  explicit PoolOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
  }

  void Compute(OpKernelContext* context) override {
    LookupInputs inputs;
    std::vector<std::optional<Tensor>> early;
    OP_REQUIRES_OK(context, inputs.Read(context));
    OP_REQUIRES_OK(context, ReadEarly(context, &early));
    const int64_t count = static_cast<int64_t>(members_.size());
    std::vector<MemberInputs> opened(count);
    std::vector<float*> out(count);
    std::vector<int64_t> rest;
    int64_t cost = 0;
    for (int m = 0; m < count; ++m) {
      if (early[m]) {
        context->set_output(m, *early[m]);
        continue;
      }
      OP_REQUIRES_OK(context, opened[m].Open(members_[m], m, inputs));
      Tensor* pooled = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(
                                  m, TensorShape({opened[m].out, members_[m].dim}), &pooled));
      out[m] = pooled->flat<float>().data();
      cost += opened[m].ids * members_[m].dim;
      rest.push_back(m);
    }
    Parallel(context, static_cast<int64_t>(rest.size()), cost, [&](int64_t i) {
      auto scratch = scratch_.Take();
      const int64_t m = rest[i];
      Pool(members_[m], opened[m], &*scratch, out[m]);
    });
  }

 private:
  // Reads what was pooled before all rows had come, by member.
  Status ReadEarly(OpKernelContext* context, std::vector<std::optional<Tensor>>* early) const {
    OpInputList handles;
    early->resize(members_.size());
    TF_RETURN_IF_ERROR(context->input_list("early", &handles));
    for (const Tensor& tensor : handles) {
      const auto* handle = tensor.scalar<Variant>()().get<PooledEarlyHandle>();
      if (handle == nullptr) return errors::InvalidArgument("early holds no pooled lookups");
      if (handle->pooled == nullptr) continue;
      if (handle->pooled->results.size() != members_.size()) {
        return errors::InvalidArgument("early is of ", handle->pooled->results.size(),
                                       " members, not of ", members_.size());
      }
      *early = handle->pooled->results;
    }
    return OkStatus();
  }

  std::vector<Lookup> members_;
  ObjectPool<LookupScratch> scratch_;
};

REGISTER_UNARY_VARIANT_DECODE_FUNCTION(PooledEarlyHandle, "collective::PooledEarlyHandle");
REGISTER_KERNEL_BUILDER(Name("CollectivePool").Device(DEVICE_CPU), PoolOp);

}  // namespace pool_op
}  // namespace collective
