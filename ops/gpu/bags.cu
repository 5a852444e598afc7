// Where the bags of a message begin, by their lengths. native/gpu/bags.h describes and launches it.

#include "scans.cuh"

constexpr int kEach = 4;  // lengths of one thread

// What one rank sent of one section.
struct Bags {
  i64 tile;        // the number of its block
  i64 first, end;  // of its bags, among those of all
  i64 id, ids;     // the first of all, and how many
  i64 lengths;     // address; 0: each id is a bag of its own
};

// offsets[bag]: its first id; after the last bag, what comes after its ids. One block for each of
// the pieces. Where lengths are not those of the ids, `wrong` is set, if there is one; offsets are
// of the piece's own ids even so.
extern "C" __global__ void __launch_bounds__(1024)
    bag_offsets(const Bags* __restrict__ pieces, int* __restrict__ offsets, int* wrong) {
  __shared__ u32 sums[33];
  const Bags piece = pieces[blockIdx.x];
  const int* lengths = reinterpret_cast<const int*>(piece.lengths);
  const i64 bags = piece.end - piece.first;
  const u32 ids = static_cast<u32>(piece.ids);
  bool is_wrong = false;
  u32 before = 0;
  for (i64 begin = 0; begin < bags; begin += static_cast<i64>(blockDim.x) * kEach) {
    const i64 first = begin + static_cast<i64>(threadIdx.x) * kEach;
    u32 within[kEach], sum = 0, total;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const i64 bag = first + e;
      const int length = bag >= bags ? 0 : lengths == nullptr ? 1 : __ldg(lengths + bag);
      is_wrong = is_wrong || length < 0 || static_cast<u32>(length) > ids;
      within[e] = sum;
      sum += static_cast<u32>(length);
    }
    const u32 mine = before + exclusive_sum(sum, sums, &total);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (first + e < bags)
        offsets[piece.first + first + e] = static_cast<int>(piece.id + min(mine + within[e], ids));
    }
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[piece.end] = static_cast<int>(piece.id + piece.ids);
  if (wrong != nullptr && (is_wrong || before != ids)) *wrong = 1;
}
