// CollectiveWatchShard: makes a variable of a session one to which can be listened.
// CollectiveAnnounceWrites: announces a write of a variable's rows; see row_changes.h.

#include "row_changes.h"

#include <algorithm>
#include <unordered_map>

#include "row_store.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace collective {

using namespace tensorflow;

namespace {

std::atomic<int64_t> listening{0};  // Listeners of all shards.
std::atomic<int64_t> last_number{0};

struct Shards {
  std::mutex mutex;
  std::unordered_map<int64_t, std::weak_ptr<WatchedShard>> by_number;
};

// It is never destroyed: threads may still run when the process ends.
Shards& AllShards() {
  static auto* shards = new Shards;
  return *shards;
}

// Keeps a watched shard with its session, under the variable's name.
class WatchedResource : public ResourceBase {
 public:
  explicit WatchedResource(std::shared_ptr<WatchedShard> shard) : shard(std::move(shard)) {}
  std::string DebugString() const override { return "watched shard " + shard->name(); }

  const std::shared_ptr<WatchedShard> shard;
};

}  // namespace

bool AnybodyListens() { return listening.load(std::memory_order_relaxed) > 0; }

WatchedShard::~WatchedShard() {
  listening -= static_cast<int64_t>(listeners_.size());
  Shards& shards = AllShards();
  std::lock_guard<std::mutex> lock(shards.mutex);
  shards.by_number.erase(number_);
}

void WatchedShard::Add(std::shared_ptr<WriteListener> listener) {
  std::lock_guard<std::mutex> lock(mutex_);
  listeners_.push_back(std::move(listener));
  ++listening;
}

void WatchedShard::Remove(const WriteListener* listener) {
  std::shared_ptr<WriteListener> last;  // It is freed without the lock.
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at =
      std::find_if(listeners_.begin(), listeners_.end(),
                   [&](const std::shared_ptr<WriteListener>& x) { return x.get() == listener; });
  if (at == listeners_.end()) return;
  last = std::move(*at);
  listeners_.erase(at);
  --listening;
}

std::vector<std::shared_ptr<WriteListener>> WatchedShard::Listeners() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return listeners_;
}

void WatchedShard::BeforeWrite(const RowWrite& write) const {
  for (const auto& listener : Listeners()) listener->BeforeWrite(*this, write);
}

void WatchedShard::RowsLeave(const int64_t* keys, const int64_t* rows, int64_t n, bool gone) const {
  for (const auto& listener : Listeners()) listener->RowsLeave(keys, rows, n, gone);
}

void WatchedShard::RowsMoved(const int64_t* from, const int64_t* to, int64_t n,
                             int64_t count) const {
  for (const auto& listener : Listeners()) listener->RowsMoved(from, to, n, count);
}

std::shared_ptr<WatchedShard> FindWatchedShard(int64_t number) {
  Shards& shards = AllShards();
  std::lock_guard<std::mutex> lock(shards.mutex);
  const auto found = shards.by_number.find(number);
  return found == shards.by_number.end() ? nullptr : found->second.lock();
}

void AnnounceWrite(OpKernelContext* context, const ResourceHandle& handle, const RowWrite& write) {
  if (!AnybodyListens()) return;
  WatchedResource* found = nullptr;
  if (!context->resource_manager()
           ->Lookup<WatchedResource>(handle.container(), handle.name(), &found)
           .ok()) {
    return;
  }
  const core::RefCountPtr<WatchedResource> resource(found);
  resource->shard->BeforeWrite(write);
}

namespace row_changes_op {

class WatchShardOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const ResourceHandle& handle = HandleFromInput(context, 0);
    const int64_t store_number = context->input(1).scalar<int64_t>()();
    WatchedResource* found = nullptr;
    OP_REQUIRES_OK(context,
                   context->resource_manager()->LookupOrCreate<WatchedResource>(
                       handle.container(), handle.name(), &found, [&](WatchedResource** made) {
                         auto shard = std::make_shared<WatchedShard>(++last_number, handle.name());
                         Shards& shards = AllShards();
                         std::lock_guard<std::mutex> lock(shards.mutex);
                         shards.by_number[shard->number()] = shard;
                         *made = new WatchedResource(std::move(shard));
                         return OkStatus();
                       }));
    const core::RefCountPtr<WatchedResource> resource(found);
    if (store_number != 0) {
      const auto store = FindStore(store_number);
      OP_REQUIRES(context, store != nullptr, MemoryIsGone());
      store->Watch(resource->shard);
    }
    Tensor* number = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &number));
    number->scalar<int64_t>()() = resource->shard->number();
  }
};

class AnnounceWritesOp : public OpKernel {
 public:
  explicit AnnounceWritesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("all", &all_));
  }

  void Compute(OpKernelContext* context) override {
    if (!AnybodyListens()) return;
    const ResourceHandle& handle = HandleFromInput(context, 0);
    const Tensor& rows = context->input(1);
    if (all_) {
      AnnounceWrite(context, handle, {});
    } else if (rows.dtype() == DT_INT64) {
      AnnounceWrite(context, handle,
                    {RowWrite::kValues, rows.flat<int64_t>().data(), rows.NumElements()});
    } else {
      const auto numbers = rows.flat<int32_t>();
      const std::vector<int64_t> wide(numbers.data(), numbers.data() + numbers.size());
      AnnounceWrite(context, handle, {RowWrite::kValues, wide.data(), rows.NumElements()});
    }
  }

 private:
  bool all_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveWatchShard").Device(DEVICE_CPU), WatchShardOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveWatchShard")
                            .Device(DEVICE_GPU)
                            .HostMemory("resource")
                            .HostMemory("store")
                            .HostMemory("shard"),
                        WatchShardOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveAnnounceWrites").Device(DEVICE_CPU), AnnounceWritesOp);
REGISTER_KERNEL_BUILDER(
    Name("CollectiveAnnounceWrites").Device(DEVICE_GPU).HostMemory("resource").HostMemory("rows"),
    AnnounceWritesOp);

}  // namespace row_changes_op
}  // namespace collective

extern "C" {

// Announces a write that Python makes by itself: of `n` rows, or of all if it is -1.
COLLECTIVE_EXPORT void row_changes_announce(int64_t shard, const int64_t* rows, int64_t n) {
  const auto watched = collective::FindWatchedShard(shard);
  if (watched != nullptr) watched->BeforeWrite({collective::RowWrite::kValues, rows, n});
}

}  // extern "C"
