// Maps the int64 keys of a dynamic table to local rows. Rows are numbered 1, 2, 3, ... in the order
// of arrival; row 0 belongs to no key.
//
// Every key is stored once, in an array by row, which is reserved as address space and takes memory
// as rows are used. The hash table uses open addressing with linear probing over 32-bit buckets
// that hold a row number, 0 for an empty one. The bits that row numbers don't need yet hold part of
// the hash, so that a probe seldom reads another key than the one it looks for. The table grows by
// half at a load of 4/5, and is rebuilt from the array of keys: the old one is released first.
//
// The hash has nothing in common with the mix that chooses a key's owner: under that mix all keys
// of a rank have the same residue. Work is done in batches with prefetched memory accesses: the
// time of a lookup is that of cache misses in parallel, not one after the other.
//
// Removal keeps the rows dense: the last rows take the places of the removed ones. A few keys are
// removed from the buckets one by one, by moving back what follows in the probe sequence (backward
// shift); for many keys the buckets are filled again.
//
// It is not thread-safe: the caller holds a lock, except for the count and the keys of existing
// rows. Errors are returned; nothing throws.

#ifndef COLLECTIVE_KEYMAP_H_
#define COLLECTIVE_KEYMAP_H_

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

namespace collective {

class KeyMap {
 public:
  static constexpr int64_t kFull = -1;  // No row number is left.
  static constexpr int64_t kOutOfMemory = -2;
  static constexpr uint64_t kMostRows = 0xFFFFFFFE;

  KeyMap(const KeyMap&) = delete;
  explicit KeyMap(uint64_t capacity) : capacity_(capacity) {}

  ~KeyMap() {
    if (keys_ != nullptr) munmap(keys_, KeyBytes());
    if (buckets_ != nullptr) munmap(buckets_, size_ * sizeof(uint32_t));
  }

  // Reserves memory; it must succeed before anything else is called.
  bool Start() {
    if (capacity_ == 0 || capacity_ > kMostRows) return false;
    keys_ = static_cast<int64_t*>(Reserve(KeyBytes()));
    return keys_ != nullptr && Allocate(kFirstBuckets);
  }

  // Another thread may call these while keys are inserted: the keys of rows 1 to count are valid.
  uint64_t count() const { return count_.load(std::memory_order_acquire); }
  uint64_t capacity() const { return capacity_; }
  uint64_t bytes() const { return size_ * sizeof(uint32_t) + (count() + 1) * sizeof(int64_t); }
  const int64_t* keys() const { return keys_; }  // By row, from 1.

  void Find(const int64_t* keys, int64_t n, int64_t* rows) const {
    for (int64_t first = 0; first < n; first += kBatch) {
      FindBatch(keys + first, n - first < kBatch ? n - first : kBatch, rows + first);
    }
  }

  // Returns the number of new keys, or an error; then the keys before the failed one have got their
  // rows.
  int64_t FindOrInsert(const int64_t* keys, int64_t n, int64_t* rows) {
    const uint64_t before = count();
    for (int64_t first = 0; first < n; first += kBatch) {
      const int64_t m = n - first < kBatch ? n - first : kBatch;
      const int64_t* batch = keys + first;
      FindBatch(batch, m, rows + first);
      for (int64_t i = 0; i < m; ++i) {
        if (rows[first + i] != 0) continue;
        if ((count() + 1) * 5 > size_ * 4 && !Grow()) return kOutOfMemory;
        int64_t row = Insert(batch[i]);
        if (row < 0) return row;
        rows[first + i] = row;
      }
    }
    return static_cast<int64_t>(count() - before);
  }

  // Removes the keys of `n` rows, given in ascending order and each once. Rows after the new count
  // move to free places before it. Writes the moved rows into `from`, and their new places into
  // `to`, at most n each, both ascending. Returns their number.
  int64_t Remove(const int64_t* rows, int64_t n, int64_t* from, int64_t* to) {
    const int64_t before = static_cast<int64_t>(count()), after = before - n;
    int64_t moved = 0;
    while (moved < n && rows[moved] <= after) {
      to[moved] = rows[moved];
      ++moved;
    }
    int64_t next = moved;  // The first of the rows after the new count that is removed.
    for (int64_t row = after + 1, i = 0; i < moved; ++row) {
      if (next < n && rows[next] == row) {
        ++next;
      } else {
        from[i++] = row;
      }
    }
    const bool refills = n > before / kFewest;
    if (!refills) {
      for (int64_t i = 0; i < n; ++i) Erase(BucketOf(rows[i]));
      for (int64_t i = 0; i < moved; ++i) {
        uint32_t& bucket = buckets_[BucketOf(from[i])];
        bucket = (bucket & ~row_mask_) | static_cast<uint32_t>(to[i]);
      }
    }
    for (int64_t i = 0; i < moved; ++i) keys_[to[i]] = keys_[from[i]];
    count_.store(static_cast<uint64_t>(after), std::memory_order_release);
    if (refills) {
      const uint64_t enough = static_cast<uint64_t>(after) * 2;
      const uint64_t size = enough < kFirstBuckets ? kFirstBuckets : enough;
      if (size >= size_ / 2 || !Allocate(size)) std::memset(buckets_, 0, size_ * sizeof(uint32_t));
      Fill();
    }
    return moved;
  }

 private:
  static constexpr uint64_t kFirstBuckets = 1 << 10;
  static constexpr int64_t kBatch = 64;
  // If less than one in this many rows is removed, they are removed from the buckets one by one.
  static constexpr int64_t kFewest = 16;

  // MurmurHash3's finalizer (Appleby, public domain): a bijection of 64 bits.
  static uint64_t Hash(uint64_t x) {
    x ^= x >> 33;
    x *= 0xFF51AFD7ED558CCDull;
    x ^= x >> 33;
    x *= 0xC4CEB9FE1A85EC53ull;
    return x ^ (x >> 33);
  }

  static void* Reserve(uint64_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
  }

  uint64_t KeyBytes() const { return (capacity_ + 1) * sizeof(int64_t); }
  uint64_t Home(uint64_t hash) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * size_) >> 64);
  }
  uint32_t Tag(uint64_t hash) const { return static_cast<uint32_t>(hash) & ~row_mask_; }
  uint64_t Next(uint64_t at) const { return at + 1 == size_ ? 0 : at + 1; }

  // Reserves the new buckets before it releases the old ones, which costs no memory yet: a failure
  // leaves everything unchanged.
  bool Allocate(uint64_t size) {
    uint32_t* buckets = static_cast<uint32_t*>(Reserve(size * sizeof(uint32_t)));
    if (buckets == nullptr) return false;
    if (buckets_ != nullptr) munmap(buckets_, size_ * sizeof(uint32_t));
    // Large pages save a miss in the translation tables at every probe; and the array is filled all
    // over from the start.
    if (size * sizeof(uint32_t) >= (uint64_t{8} << 20))
      madvise(buckets, size * sizeof(uint32_t), MADV_HUGEPAGE);
    buckets_ = buckets;
    size_ = size;
    row_mask_ = 1;
    while (row_mask_ < size && row_mask_ != 0xFFFFFFFFu) row_mask_ = row_mask_ * 2 + 1;
    return true;
  }

  void FindBatch(const int64_t* keys, int64_t n, int64_t* rows) const {
    uint64_t hashes[kBatch], places[kBatch];
    uint32_t candidates[kBatch];
    for (int64_t i = 0; i < n; ++i) {
      hashes[i] = Hash(static_cast<uint64_t>(keys[i]));
      places[i] = Home(hashes[i]);
      __builtin_prefetch(buckets_ + places[i]);
    }
    for (int64_t i = 0; i < n; ++i) {
      candidates[i] = Candidate(hashes[i], &places[i]);
      __builtin_prefetch(keys_ + candidates[i]);
    }
    for (int64_t i = 0; i < n; ++i) {
      uint32_t row = candidates[i];
      while (row != 0 && keys_[row] != keys[i]) {
        places[i] = Next(places[i]);
        row = Candidate(hashes[i], &places[i]);
      }
      rows[i] = row;
    }
  }

  // Returns the row in the first bucket from *place on whose tag equals that of `hash`; 0 if an
  // empty bucket comes first.
  uint32_t Candidate(uint64_t hash, uint64_t* place) const {
    const uint32_t tag = Tag(hash);
    uint64_t at = *place;
    uint32_t bucket;
    while ((bucket = buckets_[at]) != 0 && (bucket & ~row_mask_) != tag) at = Next(at);
    *place = at;
    return bucket & row_mask_;
  }

  // Inserts a key that may have come earlier in the same batch.
  int64_t Insert(int64_t key) {
    const uint64_t hash = Hash(static_cast<uint64_t>(key));
    uint64_t at = Home(hash);
    for (;;) {
      const uint32_t row = Candidate(hash, &at);
      if (row == 0) break;
      if (keys_[row] == key) return row;
      at = Next(at);
    }
    const uint64_t row = count() + 1;
    if (row > capacity_) return kFull;
    keys_[row] = key;
    count_.store(row, std::memory_order_release);
    buckets_[at] = static_cast<uint32_t>(row) | Tag(hash);
    return static_cast<int64_t>(row);
  }

  bool Grow() {
    if (!Allocate(size_ + size_ / 2)) return false;
    Fill();
    return true;
  }

  // Puts all rows into empty buckets.
  void Fill() {
    const uint64_t count = this->count();
    for (uint64_t first = 1; first <= count; first += kBatch) {
      const uint64_t n = count - first + 1 < kBatch ? count - first + 1 : kBatch;
      uint64_t hashes[kBatch];
      for (uint64_t i = 0; i < n; ++i) {
        hashes[i] = Hash(static_cast<uint64_t>(keys_[first + i]));
        __builtin_prefetch(buckets_ + Home(hashes[i]), 1);
      }
      for (uint64_t i = 0; i < n; ++i) {
        uint64_t at = Home(hashes[i]);
        while (buckets_[at] != 0) at = Next(at);
        buckets_[at] = static_cast<uint32_t>(first + i) | Tag(hashes[i]);
      }
    }
  }

  uint64_t HomeOf(uint32_t row) const { return Home(Hash(static_cast<uint64_t>(keys_[row]))); }

  // Returns the bucket of a row that has one.
  uint64_t BucketOf(int64_t row) const {
    uint64_t at = HomeOf(static_cast<uint32_t>(row));
    while ((buckets_[at] & row_mask_) != static_cast<uint32_t>(row)) at = Next(at);
    return at;
  }

  // Empties a bucket. What follows moves back, as far as probes for it still pass this bucket.
  void Erase(uint64_t gap) {
    for (uint64_t at = Next(gap); buckets_[at] != 0; at = Next(at)) {
      const uint64_t home = HomeOf(buckets_[at] & row_mask_);
      const uint64_t from_home = at >= home ? at - home : at + size_ - home;
      const uint64_t from_gap = at >= gap ? at - gap : at + size_ - gap;
      if (from_home < from_gap) continue;
      buckets_[gap] = buckets_[at];
      gap = at;
    }
    buckets_[gap] = 0;
  }

  const uint64_t capacity_;
  int64_t* keys_ = nullptr;  // By row, from 1.
  uint32_t* buckets_ = nullptr;
  uint64_t size_ = 0;  // The number of buckets.
  // The bits of a bucket that hold the row; the others hold the same bits of the hash.
  uint32_t row_mask_ = 0;
  std::atomic<uint64_t> count_{0};
};

}  // namespace collective

#endif  // COLLECTIVE_KEYMAP_H_
