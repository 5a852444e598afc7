#include "scans.h"

#include <limits>

#include "clones.h"

namespace collective {
namespace {

// A value outside is negative, or its distance from the last allowed value is.
template <class T>
INLINE bool Within(const T* values, int64_t n, int64_t count) {
  const T last = static_cast<T>(count - 1);
  T signs = 0;
  for (int64_t i = 0; i < n; ++i) signs |= values[i] | (last - values[i]);
  return n == 0 || (count > 0 && signs >= 0);
}

}  // namespace

CLONES void SmallestAndLargest(const int64_t* values, int64_t n, int64_t* smallest,
                               int64_t* largest) {
  int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
  for (int64_t i = 0; i < n; ++i) {
    low = values[i] < low ? values[i] : low;
    high = values[i] > high ? values[i] : high;
  }
  *smallest = low;
  *largest = high;
}

CLONES uint64_t BitwiseOr(const int64_t* values, int64_t n) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits |= static_cast<uint64_t>(values[i]);
  return bits;
}

CLONES bool AreWithin(const int32_t* values, int64_t n, int64_t count) {
  return Within(values, n, count);
}

CLONES bool AreWithin(const int64_t* values, int64_t n, int64_t count) {
  return Within(values, n, count);
}

CLONES int64_t CountAscending(const int64_t* values, int64_t n) {
  if (n == 0) return 0;
  int64_t count = 1, falls = 0;
  for (int64_t i = 1; i < n; ++i) {
    count += values[i] != values[i - 1];
    falls |= values[i] < values[i - 1];
  }
  return falls != 0 || values[0] < 0 ? -1 : count;
}

CLONES int64_t CountFalls(const int64_t* values, int64_t n) {
  int64_t falls = n > 0 && values[0] < 0;
  for (int64_t i = 1; i < n; ++i) falls += values[i] < values[i - 1];
  return falls;
}

CLONES int64_t SumOfLengths(const int32_t* lengths, int64_t n) {
  int64_t sum = 0;
  int32_t signs = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += lengths[i];
    signs |= lengths[i];
  }
  return signs < 0 ? -1 : sum;
}

}  // namespace collective
