// Decides which keys of a dynamic table get rows: by number of occurrences, by chance, or by both.
//
//     unknown keys ──► counted ──► often enough? ──► drawn? ──► a row
//
// A `KeyCounter` knows how often keys without rows occurred. The exact one remembers each key. The
// counting Bloom filter takes a fixed amount of memory, and may count a key too high, but never too
// low. Nothing here is thread-safe: the caller holds the store's lock.

#ifndef COLLECTIVE_NATIVE_ADMISSION_H_
#define COLLECTIVE_NATIVE_ADMISSION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "keymap.h"
#include "placement.h"

namespace collective {

class KeyCounter {
 public:
  virtual ~KeyCounter() = default;

  // Adds to the counts of keys, some of which may be equal. Returns false if memory is missing.
  virtual bool Add(const int64_t* keys, const int64_t* counts, int64_t n) = 0;

  // Writes how often keys have occurred.
  virtual void Counts(const int64_t* keys, int64_t n, int64_t* counts) const = 0;

  // Forgets the counts of keys, as far as it can.
  virtual void Forget(const int64_t* keys, int64_t n) = 0;
  virtual void ForgetAll() = 0;

  // Returns how many keys it can name, and writes them and their counts, in any order.
  virtual int64_t size() const { return 0; }
  virtual void Copy(int64_t* keys, int64_t* counts) const {}

  // Returns the counters of a filter; null if it has none.
  virtual void* cells() const { return nullptr; }
};

class ExactCounter : public KeyCounter {
 public:
  explicit ExactCounter(uint64_t capacity) : capacity_(capacity) {}
  bool Start();

  bool Add(const int64_t* keys, const int64_t* counts, int64_t n) override;
  void Counts(const int64_t* keys, int64_t n, int64_t* counts) const override;
  void Forget(const int64_t* keys, int64_t n) override;
  void ForgetAll() override;
  int64_t size() const override { return static_cast<int64_t>(map_->count()); }
  void Copy(int64_t* keys, int64_t* counts) const override;

 private:
  const uint64_t capacity_;
  std::unique_ptr<KeyMap> map_;
  std::vector<int64_t> counts_;  // By the map's row; the first belongs to no key.
};

// Describes a counting Bloom filter. `collective.tables.policies.bloom_filter` has the same fields.
struct BloomShape {
  int64_t hashes;      // How many counters a key has.
  int64_t cells;       // How many counters a partition has.
  int64_t width;       // Bytes of a counter: 1, 2, 4 or 8, unsigned.
  int64_t partitions;  // In all; keys are placed on them as on ranks.
  int64_t step;        // This rank has every step-th partition.
  uint64_t most;       // The value at which a counter stays.
};

// The counters of a key are in one partition, whose place doesn't depend on the number of ranks; so
// the counts don't, either. Counts are added, so the order of keys doesn't matter.
class BloomCounter : public KeyCounter {
 public:
  explicit BloomCounter(const BloomShape& shape)
      : shape_(shape), partitions_(kDynamic, static_cast<int>(shape.partitions)) {}
  ~BloomCounter() override;
  bool Start();

  bool Add(const int64_t* keys, const int64_t* counts, int64_t n) override;
  void Counts(const int64_t* keys, int64_t n, int64_t* counts) const override;
  void Forget(const int64_t* keys, int64_t n) override {}  // They share counters with other keys.
  void ForgetAll() override;
  void* cells() const override { return cells_; }

 private:
  template <class Cell>
  void AddTo(const int64_t* keys, const int64_t* counts, int64_t n);
  template <class Cell>
  void Read(const int64_t* keys, int64_t n, int64_t* counts) const;
  uint64_t Bytes() const { return shape_.partitions / shape_.step * shape_.cells * shape_.width; }
  // Writes the places of a key's counters, each once. Returns their number.
  int Places(int64_t key, uint64_t* places) const;

  const BloomShape shape_;
  const Placement partitions_;  // A key's partition is its owner.
  char* cells_ = nullptr;
};

class Admission {
 public:
  // `counter`: counts keys without rows; null if every key that is drawn gets a row.
  Admission(std::unique_ptr<KeyCounter> counter, int64_t frequency, double probability,
            uint64_t seed)
      : counter_(std::move(counter)),
        frequency_(frequency),
        probability_(probability),
        seed_(seed) {}

  bool counts() const { return counter_ != nullptr; }
  KeyCounter* counter() const { return counter_.get(); }

  // Tells whether a key with this count gets a row in a run that leads to this global step.
  bool Admits(int64_t key, int64_t count, int64_t step) const;

 private:
  const std::unique_ptr<KeyCounter> counter_;
  const int64_t frequency_;
  const double probability_;
  const uint64_t seed_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ADMISSION_H_
