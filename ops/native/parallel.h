// Shares work among TensorFlow's threads, and keeps memory of a kernel between runs.

#ifndef COLLECTIVE_NATIVE_PARALLEL_H_
#define COLLECTIVE_NATIVE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace collective {

// Calls task(i) for each i in [0, count), on several threads if that is worth it: `cost` is the
// nanoseconds of all tasks. Tasks are taken in order, and must not depend on each other.
template <class Task>
void Parallel(tensorflow::OpKernelContext* context, int64_t count, int64_t cost, const Task& task) {
  constexpr int64_t kWorthwhile = 50000;  // Waking a thread takes some of it.
  const auto& threads = *context->device()->tensorflow_cpu_worker_threads();
  const int64_t wanted = std::min<int64_t>({threads.num_threads, count, cost / kWorthwhile + 1});
  if (wanted <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  tensorflow::Shard(static_cast<int>(wanted), threads.workers, wanted, cost / wanted + 1,
                    [&](int64_t, int64_t) {
                      for (int64_t i = next++; i < count; i = next++) task(i);
                    });
}

// Lends objects to one run at a time, in the state in which earlier runs left them.
template <class T>
class ObjectPool {
 public:
  class Loan {
   public:
    Loan(Loan&&) = default;
    T& operator*() { return *object_; }
    T* operator->() { return object_.get(); }
    ~Loan() {
      if (object_ == nullptr) return;
      std::lock_guard<std::mutex> lock(from_->mutex_);
      from_->free_.push_back(std::move(object_));
    }

   private:
    friend class ObjectPool;
    Loan(ObjectPool* from, std::unique_ptr<T> object) : from_(from), object_(std::move(object)) {}
    ObjectPool* from_;
    std::unique_ptr<T> object_;
  };

  Loan Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return Loan(this, std::make_unique<T>());
    std::unique_ptr<T> object = std::move(free_.back());
    free_.pop_back();
    return Loan(this, std::move(object));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> free_;
};

// An array of uninitialized values, whose content is lost when it grows.
template <class T>
class Buffer {
 public:
  T* At(size_t size) {
    if (size > size_) {
      size_ = size + size / 4;
      memory_.reset(new T[size_]);
    }
    return memory_.get();
  }
  T* data() { return memory_.get(); }

 private:
  size_t size_ = 0;
  std::unique_ptr<T[]> memory_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_PARALLEL_H_
