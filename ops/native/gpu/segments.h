// Describes to kernels what their blocks work on, and where rows are: the words that they read.

#ifndef COLLECTIVE_NATIVE_GPU_SEGMENTS_H_
#define COLLECTIVE_NATIVE_GPU_SEGMENTS_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

namespace collective {
namespace gpu {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kLanesOfWarp = 32;

inline int64_t CeilOfQuotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
int64_t AddressOf(const T* pointer) {
  return reinterpret_cast<int64_t>(pointer);
}

// Returns how many threads work on a row: a power of two that covers its accesses, as far as a warp
// does, but at least one for each row that is in flight (sums.cuh).
inline int64_t GroupLanes(int64_t dim) {
  constexpr int64_t kWidthOfAccess = 4, kFewestLanes = 4;
  int64_t lanes = kFewestLanes;
  while (lanes < std::min(CeilOfQuotient(dim, kWidthOfAccess), kLanesOfWarp)) lanes *= 2;
  return lanes;
}

// The numbers of things, group by group; those of one group ascend.
class Grouped {
 public:
  // `group_of(i)` is the group of the thing i; none if it is negative.
  template <class GroupOf>
  Grouped(size_t things, size_t groups, const GroupOf& group_of) : ends_(groups + 1, 0) {
    for (size_t i = 0; i < things; ++i) {
      if (group_of(i) >= 0) ++ends_[group_of(i) + 1];
    }
    std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
    numbers_.resize(ends_.back());
    // Each group ends where the next one begins, once it is filled.
    for (size_t i = 0; i < things; ++i) {
      if (group_of(i) >= 0) numbers_[ends_[group_of(i)]++] = i;
    }
  }

  const size_t* begin(size_t group) const {
    return numbers_.data() + (group == 0 ? 0 : ends_[group - 1]);
  }
  const size_t* end(size_t group) const { return numbers_.data() + ends_[group]; }

 private:
  std::vector<size_t> numbers_, ends_;
};

// Things that blocks share: each has some tiles, and each block works on one.
//
// An Entry is words as the kernel reads them, of which the first, `tile`, is its first one.
template <class Entry>
class Tiled {
 public:
  // A thing without tiles isn't one: it holds none.
  void Add(Entry entry, int64_t tiles) {
    if (tiles == 0) return;
    entry.tile = tiles_;
    tiles_ += tiles;
    entries_.push_back(entry);
  }

  const std::vector<Entry>& entries() const { return entries_; }
  int32_t count() const { return static_cast<int32_t>(entries_.size()); }
  int64_t tiles() const { return tiles_; }

 private:
  std::vector<Entry> entries_;
  int64_t tiles_ = 0;
};

// A run of rows side by side, as sums.cuh reads it.
struct RunWords {
  int64_t first;  // the number of its first row
  int64_t count;
  int64_t address;  // of that row
};

// Numbers rows through that lie in several runs.
class Runs {
 public:
  void Add(int64_t address, int64_t count, int64_t dim) {
    if (count == 0) return;
    if (!entries_.empty() && dim == dim_ && address == end_) {
      entries_.back().count += count;
    } else {
      entries_.push_back({rows_, count, address});
    }
    rows_ += count;
    dim_ = dim;
    end_ = address + count * dim * kFloatBytes;
  }

  int64_t rows() const { return rows_; }
  // Returns the number of the run that holds a row.
  int64_t RunOf(int64_t row) const {
    const auto after =
        std::upper_bound(entries_.begin(), entries_.end(), row,
                         [](int64_t number, const RunWords& run) { return number < run.first; });
    return after - entries_.begin() - 1;
  }
  // There is one of no rows if there are none.
  std::vector<RunWords> entries() const {
    return entries_.empty() ? std::vector<RunWords>{{0, 0, 0}} : entries_;
  }

 private:
  std::vector<RunWords> entries_;
  int64_t rows_ = 0, dim_ = 0, end_ = 0;
};

// Collects what the kernels of an operation read, to be uploaded in one piece.
class Packed {
 public:
  // Returns where the entries will be, in words from where all of it is.
  template <class Entry>
  size_t Add(const std::vector<Entry>& entries) {
    static_assert(std::is_trivially_copyable<Entry>::value && sizeof(Entry) % sizeof(int64_t) == 0,
                  "words");
    const size_t at = words_.size(), words = entries.size() * (sizeof(Entry) / sizeof(int64_t));
    const int64_t* first = reinterpret_cast<const int64_t*>(entries.data());
    words_.insert(words_.end(), first, first + words);
    return at;
  }
  template <class Entry>
  size_t Add(const Tiled<Entry>& tiled) {
    return Add(tiled.entries());
  }

  const std::vector<int64_t>& words() const { return words_; }

 private:
  std::vector<int64_t> words_;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_SEGMENTS_H_
