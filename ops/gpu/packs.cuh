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

// The same where `there` holds, and zeros elsewhere. A predicate, never a branch, and in the order
// of the source (`volatile`), so that as many are under way at once as the source has.
__device__ __forceinline__ Pack<4> load_where(bool there, const float* at) {
  Pack<4> pack;
  pack.words = {};
#ifdef __CUDA_ARCH__
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(pack.words.x), "+r"(pack.words.y), "+r"(pack.words.z), "+r"(pack.words.w)
      : "l"(at), "r"(static_cast<unsigned>(there)));
#else
  if (there) pack = load<4>(at);
#endif
  return pack;
}

// The same of memory that this kernel writes, too, but only where this thread has read it.
__device__ __forceinline__ Pack<4> read_where(bool there, const float* at) {
  Pack<4> pack;
  pack.words = {};
#ifdef __CUDA_ARCH__
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(pack.words.x), "+r"(pack.words.y), "+r"(pack.words.z), "+r"(pack.words.w)
               : "l"(at), "r"(static_cast<unsigned>(there)));
#else
  if (there) pack.words = *reinterpret_cast<const uint4*>(at);
#endif
  return pack;
}

// The same of a single one.
__device__ __forceinline__ float read_one_where(bool there, const float* at) {
  float one = 0;
#ifdef __CUDA_ARCH__
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.f32 %0, [%1]; }"
               : "+f"(one)
               : "l"(at), "r"(static_cast<unsigned>(there)));
#else
  if (there) one = *at;
#endif
  return one;
}

template <int kCount>
__device__ __forceinline__ void store(float* at, const Pack<kCount>& pack) {
  *reinterpret_cast<typename Access<kCount>::Type*>(at) = pack.words;
}
