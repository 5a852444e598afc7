// De-duplicates keys: numbers them 0, 1, 2, ... in the order in which they first appear.
//
// If all keys are small, the number of a key is in an array at the key's own place. Otherwise it is
// in a hash table with open addressing, linear probing and a load of at most a half, and the key is
// in the list of distinct keys. Both are the same array of 32-bit words, which is never cleared: a
// word counts only if it is at least `base_`, which is added to numbers and advances after each
// use. The array holds no keys, so that it stays in the cache.
//
// Whether a key is new can't be predicted, so the loops don't branch on it. A candidate is written
// after the distinct keys: an empty place also points there, and so seems to hold the key.

#ifndef COLLECTIVE_NATIVE_NUMBERING_H_
#define COLLECTIVE_NATIVE_NUMBERING_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace collective {

class Numbering {
 public:
  // Starts on up to `most` keys (below 2**31), whose bitwise or is `bits` (see scans.h). `distinct`
  // takes the distinct keys: it needs room for most + 1.
  void Start(int64_t most, uint64_t bits, int64_t* distinct) {
    const uint64_t slots =
        std::max<uint64_t>(uint64_t{1} << 6, PowerOfTwo(2 * static_cast<uint64_t>(most)));
    direct_ = bits < std::max(kDirect, slots);
    const uint64_t size = direct_ ? PowerOfTwo(bits + 1) : slots;
    shift_ = 64;
    for (uint64_t s = size; s > 1; s /= 2) --shift_;
    base_ += count_;
    if (size > size_) {
      size_ = size;
      words_.reset(new uint32_t[size_]());
      base_ = 1;
    } else if (base_ + static_cast<uint64_t>(most) >= uint64_t{1} << 32) {
      std::memset(words_.get(), 0, size_ * sizeof(uint32_t));
      base_ = 1;
    }
    mask_ = size - 1;
    distinct_ = distinct;
    count_ = 0;
  }

  // Writes the number of keys[i] to numbers[i].
  void Add(const int64_t* keys, int64_t n, int32_t* numbers) {
    if (direct_) {
      AddDirect(keys, n, numbers);
    } else {
      AddHashed(keys, n, numbers);
    }
  }

  int64_t count() const { return count_; }

 private:
  static constexpr uint64_t kDirect = uint64_t{1} << 16;  // words: a quarter of a megabyte

  static uint64_t PowerOfTwo(uint64_t least) {
    uint64_t size = 1;
    while (size < least) size *= 2;
    return size;
  }

  uint64_t Home(int64_t key) const {
    const uint64_t x = static_cast<uint64_t>(key);
    return ((x ^ (x >> 32)) * 0x9E3779B97F4A7C15ull) >> shift_;
  }

  void AddDirect(const int64_t* keys, int64_t n, int32_t* numbers) {
    uint32_t* words = words_.get();
    const uint32_t base = static_cast<uint32_t>(base_);
    uint32_t count = count_;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t key = keys[i];
      uint32_t& word = words[key];
      const uint32_t number = std::min(word - base, count);
      word = base + number;
      distinct_[count] = key;
      numbers[i] = static_cast<int32_t>(number);
      count += number == count;
    }
    count_ = count;
  }

  void AddHashed(const int64_t* keys, int64_t n, int32_t* numbers) {
    uint32_t* words = words_.get();
    const uint32_t base = static_cast<uint32_t>(base_);
    uint32_t count = count_;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t key = keys[i];
      uint64_t at = Home(key);
      distinct_[count] = key;
      uint32_t number = std::min(words[at] - base, count);
      while (distinct_[number] != key) {
        at = (at + 1) & mask_;
        number = std::min(words[at] - base, count);
      }
      words[at] = base + number;
      numbers[i] = static_cast<int32_t>(number);
      count += number == count;
    }
    count_ = count;
  }

  bool direct_ = false;
  int shift_ = 64;
  uint64_t mask_ = 0, size_ = 0, base_ = 1;
  uint32_t count_ = 0;
  int64_t* distinct_ = nullptr;
  std::unique_ptr<uint32_t[]> words_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_NUMBERING_H_
