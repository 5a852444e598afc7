// Passes once over arrays of integers.

#ifndef COLLECTIVE_NATIVE_SCANS_H_
#define COLLECTIVE_NATIVE_SCANS_H_

#include <cstdint>

namespace collective {

// Finds the smallest and the largest; int64's largest and smallest of none.
void SmallestAndLargest(const int64_t* values, int64_t n, int64_t* smallest, int64_t* largest);

// Returns the bitwise or.
uint64_t BitwiseOr(const int64_t* values, int64_t n);

// Tells whether all are in [0, count).
bool AreWithin(const int32_t* values, int64_t n, int64_t count);
bool AreWithin(const int64_t* values, int64_t n, int64_t count);

// Returns how many are smaller than the one before (the first: smaller than 0).
int64_t CountFalls(const int64_t* values, int64_t n);

// Returns how many different values there are, if they ascend and none is negative; else -1.
int64_t CountAscending(const int64_t* values, int64_t n);

// Returns the sum, or -1 if a length is negative.
int64_t SumOfLengths(const int32_t* lengths, int64_t n);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_SCANS_H_
