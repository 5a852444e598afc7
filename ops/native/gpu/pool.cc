// CollectivePool on a GPU: computes the members' results from the rows that came back; or, where
// one rank has all rows, straight from the tables, so that nobody gathers them first. There the
// rows of lookups without a combiner are gathered. The kernels of pool.cu and gather.cu; the host
// waits for nothing.

#include <vector>

#include "gather_plan.h"
#include "pooling.h"

namespace collective {
namespace gpu {
namespace pool_op {

using namespace tensorflow;

class PoolOp : public OpKernel {
 public:
  explicit PoolOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
    int tables = 0, straight = 0;
    OP_REQUIRES_OK(context, context->GetAttr("H", &tables));
    OP_REQUIRES_OK(context, context->GetAttr("I", &straight));
    is_straight_ = tables > 0;
    OP_REQUIRES(context, straight == (is_straight_ ? static_cast<int>(members_.size()) : 0),
                errors::InvalidArgument("there are ", tables, " tables, but ids of ", straight,
                                        " of ", members_.size(), " members"));
    for (size_t m = 0; m < members_.size(); ++m) {
      const bool is_gathered =
          is_straight_ && members_[m].combiner == kRows && members_[m].max_norm == 0;
      (is_gathered ? gathered_ : pooled_).push_back(static_cast<int>(m));
    }
  }

  void Compute(OpKernelContext* context) override {
    Pooling pooled, gathered;
    std::vector<int64_t> of_pooled, of_gathered;
    LockedVariables variables;
    std::vector<Table> tables;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    if (is_straight_) {
      OpInputList handles;
      OP_REQUIRES_OK(context, context->input_list("handles", &handles));
      OP_REQUIRES_OK(context, variables.Lock(context, handles, &tables));
    }
    OP_REQUIRES_OK(context, Open(context, tables, pooled_, &pooled, &of_pooled));
    OP_REQUIRES_OK(context, Open(context, tables, gathered_, &gathered, &of_gathered));
    if (pooled.samples + gathered.samples > 0) {
      OP_REQUIRES_OK(context, Launch(&stream, pooled, of_pooled, gathered, of_gathered));
    }
  }

 private:
  // Reads the members of these numbers, and makes their results, whose addresses are `out`.
  Status Open(OpKernelContext* context, const std::vector<Table>& tables,
              const std::vector<int>& numbers, Pooling* pooling, std::vector<int64_t>* out) const {
    TF_RETURN_IF_ERROR(pooling->Open(context, members_, numbers, !is_straight_));
    if (is_straight_) {
      OpInputList ids;
      TF_RETURN_IF_ERROR(context->input_list("ids", &ids));
      TF_RETURN_IF_ERROR(pooling->TakeFrom(tables, ids));
    }
    for (const Member& member : pooling->members) {
      Tensor* result = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(
          member.number, TensorShape({member.samples, member.attributes.dim}), &result));
      out->push_back(AddressOf(result->flat<float>().data()));
    }
    return OkStatus();
  }

  // Gathers the rows of members one after the other, each from its table; elements are counted from
  // the first result.
  static GatherPlan PlanGather(const Pooling& gathered, const std::vector<int64_t>& out) {
    GatherPlan plan;
    for (size_t m = 0; m < gathered.members.size(); ++m) {
      const Member& member = gathered.members[m];
      plan.Add(member.rows, member.ids, gathered.TableOf(member), (out[m] - out[0]) / kFloatBytes);
    }
    return plan;
  }

  static Status Launch(Stream* stream, const Pooling& pooling, const std::vector<int64_t>& out,
                       const Pooling& gathered, const std::vector<int64_t>& of_gathered) {
    const GatherPlan gather = PlanGather(gathered, of_gathered);
    const Tiled<BatchWords> batches = pooling.Batches();
    const Tiled<LookupWords> lookups =
        pooling.Lookups(0, SamplesOfGroup(pooling.ids, pooling.samples), out);
    const Tiled<LookupWords> by_id =
        pooling.clips ? pooling.Lookups(0, Samples::kOne, out) : Tiled<LookupWords>();
    Packed packed;
    const size_t batches_at = packed.Add(batches), lookups_at = packed.Add(lookups),
                 by_id_at = packed.Add(by_id), runs_at = packed.Add(pooling.RunsOfRows()),
                 pieces_at = packed.Add(gather.pieces());
    void *offsets = nullptr, *squares = nullptr;
    TF_RETURN_IF_ERROR(stream->Scratch((pooling.samples + 1) * sizeof(int32_t), &offsets));
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
    if (gather.pieces().tiles() > 0) {
      TF_RETURN_IF_ERROR(stream->Launch(Kernel::kGatherRows, gather.pieces().tiles(),
                                        there + pieces_at, gather.pieces().count(),
                                        reinterpret_cast<void*>(of_gathered[0])));
    }
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kSampleOffsets, batches.tiles(), there + batches_at,
                                      batches.count(), offsets));
    const int32_t wide = pooling.IsWide();
    const int64_t* runs = there + runs_at;
    if (pooling.clips) {
      const void* none = nullptr;
      TF_RETURN_IF_ERROR(stream->Scratch(pooling.ids * sizeof(float), &squares));
      TF_RETURN_IF_ERROR(stream->Launch(Kernel::kPoolProducts, by_id.tiles(), there + by_id_at,
                                        by_id.count(), wide, offsets, none, runs, none, int32_t{0},
                                        squares));
    }
    return stream->Launch(pooling.IsPlain(out) ? Kernel::kPoolRowsPlain : Kernel::kPoolRows,
                          lookups.tiles(), there + lookups_at, lookups.count(), wide, offsets,
                          squares, runs);
  }

  std::vector<Lookup> members_;
  std::vector<int> pooled_, gathered_;  // Their numbers.
  bool is_straight_ = false;
};

REGISTER_KERNEL_BUILDER(
    Name("CollectivePool").Device(DEVICE_GPU).HostMemory("counts").HostMemory("handles"), PoolOp);
REGISTER_KERNEL_BUILDER(Name("CollectivePool").Device(DEVICE_CPU).Label("emulated"), PoolOp);

}  // namespace pool_op
}  // namespace gpu
}  // namespace collective
