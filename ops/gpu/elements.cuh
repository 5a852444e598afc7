// Element types, and several of them at once.

struct Half {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

#ifdef __CUDACC__
// By instructions rather than by CUDA's headers, which need not be installed.
__device__ __forceinline__ float HalfToFloat(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
__device__ __forceinline__ unsigned short FloatToHalf(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
#endif

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Half value) { return HalfToFloat(value.bits); }
__device__ __forceinline__ float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

__device__ __forceinline__ void from_float(float value, float* to) { *to = value; }
__device__ __forceinline__ void from_float(float value, Half* to) { to->bits = FloatToHalf(value); }
__device__ __forceinline__ void from_float(float value, BFloat16* to) {
  const unsigned bits = __float_as_uint(value);
  const bool number = (bits & 0x7FFFFFFFu) <= 0x7F800000u;
  to->bits =
      static_cast<unsigned short>(number ? (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16 : 0x7FFFu);
}

// What is read or written at once.
template <int kBytes>
struct Words;
template <>
struct Words<16> {
  typedef uint4 Type;
};
template <>
struct Words<8> {
  typedef uint2 Type;
};
template <>
struct Words<4> {
  typedef unsigned Type;
};
template <>
struct Words<2> {
  typedef unsigned short Type;
};

template <class T, int kCount>
union Pack {
  typename Words<kCount * sizeof(T)>::Type words;
  T elements[kCount];

  __device__ __forceinline__ Pack() {}
};

// Read-only memory, at a multiple of its size.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load(const T* at) {
  Pack<T, kCount> pack;
  pack.words = __ldg(reinterpret_cast<const typename Words<kCount * sizeof(T)>::Type*>(at));
  return pack;
}

template <class T, int kCount>
__device__ __forceinline__ void store(T* at, const Pack<T, kCount>& pack) {
  *reinterpret_cast<typename Words<kCount * sizeof(T)>::Type*>(at) = pack.words;
}

// The very bits, if the types are the same.
template <class T, int kCount>
__device__ __forceinline__ void convert(const Pack<T, kCount>& from, Pack<T, kCount>* to) {
  to->words = from.words;
}
template <class T, class U, int kCount>
__device__ __forceinline__ void convert(const Pack<T, kCount>& from, Pack<U, kCount>* to) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) from_float(to_float(from.elements[e]), to->elements + e);
}
