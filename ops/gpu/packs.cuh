// Floats that are read or written in one access.

template <int kCount>
struct Access;
template <>
struct Access<4> {
  typedef uint4 Type;
};
template <>
struct Access<1> {
  typedef unsigned Type;
};

template <int kCount>
union Pack {
  typename Access<kCount>::Type words;
  float elements[kCount];

  __device__ __forceinline__ Pack() {}
};

// Reads read-only memory, at a multiple of the access's size.
template <int kCount>
__device__ __forceinline__ Pack<kCount> load(const float* at) {
  Pack<kCount> pack;
  pack.words = __ldg(reinterpret_cast<const typename Access<kCount>::Type*>(at));
  return pack;
}

template <int kCount>
__device__ __forceinline__ void store(float* at, const Pack<kCount>& pack) {
  *reinterpret_cast<typename Access<kCount>::Type*>(at) = pack.words;
}
