// CollectivePool on a GPU: computes the members' results from the rows that came back; or, where
// one rank has all rows, straight from the tables, so that nobody gathers them first. The kernels
// of pool.cu; the host waits for nothing.

#include <vector>

#include "pooling.h"

namespace collective {
namespace gpu {
namespace pool_op {

using namespace tensorflow;

class PoolOp : public OpKernel {
 public:
  explicit PoolOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadLookups(context, &members_));
    for (size_t m = 0; m < members_.size(); ++m) all_.push_back(static_cast<int>(m));
    int tables = 0, straight = 0;
    OP_REQUIRES_OK(context, context->GetAttr("H", &tables));
    OP_REQUIRES_OK(context, context->GetAttr("I", &straight));
    is_straight_ = tables > 0;
    OP_REQUIRES(context, straight == (is_straight_ ? static_cast<int>(members_.size()) : 0),
                errors::InvalidArgument("there are ", tables, " tables, but ids of ", straight,
                                        " of ", members_.size(), " members"));
  }

  void Compute(OpKernelContext* context) override {
    Pooling pooling;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, pooling.Open(context, members_, all_, !is_straight_));
    LockedVariables variables;
    if (is_straight_) OP_REQUIRES_OK(context, TakeFromTables(context, &variables, &pooling));
    std::vector<int64_t> out;
    for (const Member& member : pooling.members) {
      Tensor* pooled = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(
                                  member.number,
                                  TensorShape({member.samples, member.attributes.dim}), &pooled));
      out.push_back(AddressOf(pooled->flat<float>().data()));
    }
    if (pooling.samples > 0) OP_REQUIRES_OK(context, Launch(&stream, pooling, out));
  }

 private:
  static Status TakeFromTables(OpKernelContext* context, LockedVariables* variables,
                               Pooling* pooling) {
    OpInputList handles, ids;
    std::vector<Table> tables;
    TF_RETURN_IF_ERROR(context->input_list("handles", &handles));
    TF_RETURN_IF_ERROR(context->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(variables->Lock(context, handles, &tables));
    return pooling->TakeFrom(tables, ids);
  }

  static Status Launch(Stream* stream, const Pooling& pooling, const std::vector<int64_t>& out) {
    const Tiled<BatchWords> batches = pooling.Batches();
    const Tiled<LookupWords> lookups =
        pooling.Lookups(0, SamplesOfGroup(pooling.ids, pooling.samples), out);
    const Tiled<LookupWords> by_id =
        pooling.clips ? pooling.Lookups(0, Samples::kOne, out) : Tiled<LookupWords>();
    Packed packed;
    const size_t batches_at = packed.Add(batches), lookups_at = packed.Add(lookups),
                 by_id_at = packed.Add(by_id), runs_at = packed.Add(pooling.RunsOfRows());
    void *offsets = nullptr, *squares = nullptr;
    TF_RETURN_IF_ERROR(stream->Scratch((pooling.samples + 1) * sizeof(int32_t), &offsets));
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
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
  std::vector<int> all_;  // Their numbers.
  bool is_straight_ = false;
};

REGISTER_KERNEL_BUILDER(
    Name("CollectivePool").Device(DEVICE_GPU).HostMemory("counts").HostMemory("handles"), PoolOp);
REGISTER_KERNEL_BUILDER(Name("CollectivePool").Device(DEVICE_CPU).Label("emulated"), PoolOp);

}  // namespace pool_op
}  // namespace gpu
}  // namespace collective
