// Pooled look-ups: their ids, how these are weighted, and what divides the sums of samples. pool.py
// writes them.

#include "sums.cuh"

enum Combiner { kRows, kSum, kMean, kSqrtN };  // as in ops/exchange/embedding_bag.py

struct Lookup {
  i64 tile;        // its first one
  i64 first, end;  // of its samples
  i64 dim;
  i64 lanes;      // of a group
  i64 out;        // address
  i64 run, runs;  // where its rows are
  i64 combiner;
  i64 weighted;
  i64 max_norm;  // the bits of a float; 0 for none
  // Addresses where those of the first id of all look-ups would be, if this one had it.
  i64 positions, weights;
  i64 each;  // samples of a group

  __device__ __forceinline__ float norm() const {
    return __uint_as_float(static_cast<u32>(max_norm));
  }

  __device__ __forceinline__ float weight(u32 id) const {
    return __ldg(reinterpret_cast<const float*>(weights + static_cast<i64>(id) * kFloatBytes));
  }
};

// Ids of all look-ups: which belong to each sample, and the square of the norm of the row of each
// where there is a max_norm.
struct Ids {
  int wide;  // positions are of 64 bits
  const int* offsets;
  const float* squares;

  __device__ __forceinline__ i64 row(const Lookup& lookup, u32 id) const {
    const i64 bytes = wide != 0 ? sizeof(i64) : sizeof(int), at = lookup.positions + id * bytes;
    return wide != 0 ? __ldg(reinterpret_cast<const i64*>(at))
                     : __ldg(reinterpret_cast<const int*>(at));
  }
};

// The samples of one look-up, numbered among those of all, and its ids.
struct Batch {
  i64 tile;        // its first one, of kThreads samples
  i64 first, end;  // of its samples
  i64 id, ids;     // the first of all, and how many
  i64 samples;     // address: of each id, ascending; 0: each id is a sample of its own
};

#define IDS_PARAMETERS                                                                             \
  const Lookup *__restrict__ lookups, int lookup_count, int wide, const int *__restrict__ offsets, \
      const float *__restrict__ squares
#define IDS \
  Ids { wide, offsets, squares }

// The factor by which a row's norm isn't above max_norm. A NaN stays one.
__device__ __forceinline__ float clip_of(float square, float max_norm) {
  const float norm = sqrtf(square);
  return max_norm / (norm < max_norm ? max_norm : norm);
}

__device__ __forceinline__ float factor_of(const Lookup& lookup, const Ids& ids, u32 id) {
  const float weight = lookup.weighted != 0 ? lookup.weight(id) : 1.f;
  return lookup.max_norm != 0 ? weight * clip_of(ids.squares[id], lookup.norm()) : weight;
}

// As on the CPU, weights are added in double precision, so that those which cancel out do so
// everywhere.
__device__ __forceinline__ double share_of(const Lookup& lookup, float weight) {
  return lookup.combiner == kMean ? weight : static_cast<double>(weight) * weight;
}

__device__ __forceinline__ float divisor_of(const Lookup& lookup, double sum) {
  if (lookup.combiner == kSum) return 1;
  return static_cast<float>(lookup.combiner == kMean ? sum : sqrt(sum));
}

__device__ __forceinline__ float divisor_of(const Lookup& lookup, const Ids& ids, u32 begin,
                                            u32 end) {
  double sum = end - begin;
  if (lookup.weighted != 0 && lookup.combiner != kSum) {
    sum = 0;
    for (u32 id = begin; id < end; ++id) sum += share_of(lookup, lookup.weight(id));
  }
  return divisor_of(lookup, sum);
}
