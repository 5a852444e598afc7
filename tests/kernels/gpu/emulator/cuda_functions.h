// CUDA's device functions and vector types, as far as kernels here use them. Included by
// cuda_on_cpu.h.
#pragma once

#define CUDA_VECTOR(element, name, bytes2, bytes4)                       \
  struct alignas(bytes2) name##2 { element x, y; };                      \
  struct alignas(bytes4) name##4 { element x, y, z, w; };                \
  inline name##2 make_##name##2(element x, element y) { return {x, y}; } \
  inline name##4 make_##name##4(element x, element y, element z, element w) { return {x, y, z, w}; }
CUDA_VECTOR(int, int, 8, 16)
CUDA_VECTOR(unsigned, uint, 8, 16)
CUDA_VECTOR(float, float, 8, 16)
CUDA_VECTOR(long long, longlong, 16, 16)
CUDA_VECTOR(unsigned long long, ulonglong, 16, 16)
CUDA_VECTOR(double, double, 16, 16)
#undef CUDA_VECTOR

inline void __syncthreads() { cuda_on_cpu::Barrier("__syncthreads", false); }
inline int __syncthreads_count(int value) {
  return cuda_on_cpu::Barrier("__syncthreads_count", value != 0);
}
inline int __syncthreads_or(int value) {
  return cuda_on_cpu::Barrier("__syncthreads_or", value != 0) != 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  cuda_on_cpu::Exchange("__syncwarp", mask, 0);
}
inline void __threadfence() {
  cuda_on_cpu::Tick();
  races::Fence();
}
inline void __threadfence_block() { cuda_on_cpu::Tick(); }
inline void __nanosleep(unsigned) { cuda_on_cpu::Yield(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const int first = static_cast<int>(cuda_on_cpu::Lane()) / width * width;
  return cuda_on_cpu::Shuffle("__shfl_sync", mask, value, first + (lane & (width - 1)), width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cuda_on_cpu::Shuffle("__shfl_up_sync", mask, value, int64_t{cuda_on_cpu::Lane()} - delta,
                              width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cuda_on_cpu::Shuffle("__shfl_down_sync", mask, value, int64_t{cuda_on_cpu::Lane()} + delta,
                              width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return cuda_on_cpu::Shuffle("__shfl_xor_sync", mask, value,
                              cuda_on_cpu::Lane() ^ static_cast<unsigned>(bits), width);
}

inline unsigned __ballot_sync(unsigned mask, int value) {
  const uint64_t* seen = cuda_on_cpu::Exchange("__ballot_sync", mask, value != 0);
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    lanes |= (mask >> lane & 1) && seen[lane] ? 1u << lane : 0;
  return lanes;
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t mine = cuda_on_cpu::Bits(value);
  const uint64_t* seen = cuda_on_cpu::Exchange("__match_any_sync", mask, mine);
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    lanes |= (mask >> lane & 1) && seen[lane] == mine ? 1u << lane : 0;
  return lanes;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(uint64_t{x} * y >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline int __float_as_int(float x) { return cuda_on_cpu::Of<int>(cuda_on_cpu::Bits(x)); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::Of<unsigned>(cuda_on_cpu::Bits(x)); }
inline float __int_as_float(int x) { return cuda_on_cpu::Of<float>(cuda_on_cpu::Bits(x)); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::Of<float>(cuda_on_cpu::Bits(x)); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
template <class T>
__forceinline__ T __ldg(const T* at) {
  const races::As as(races::kReadOnly);
  return *at;
}
template <class T>
__forceinline__ T __ldcg(const T* at) {
  const races::As as(races::kThroughL2);
  return *at;
}
template <class T>
__forceinline__ T __ldcs(const T* at) {
  return *at;
}
template <class T>
__forceinline__ void __stcs(T* at, T value) {
  *at = value;
}
template <class T>
__forceinline__ void __stcg(T* at, T value) {
  const races::As as(races::kThroughL2);
  *at = value;
}
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }
inline long long min(long long x, long long y) { return x < y ? x : y; }
inline long long max(long long x, long long y) { return x > y ? x : y; }

// What was there before.
template <class T, class Change>
__forceinline__ T Atomic(T* at, Change change) {
  cuda_on_cpu::Yield();
  const races::As as(races::kAtomic);
  const T old = *at;
  *at = change(old);
  return old;
}

#define CUDA_ATOMIC_BOUNDS(T)                                            \
  __forceinline__ T atomicMin(T* at, T value) {                          \
    return Atomic(at, [=](T old) { return old < value ? old : value; }); \
  }                                                                      \
  __forceinline__ T atomicMax(T* at, T value) {                          \
    return Atomic(at, [=](T old) { return old > value ? old : value; }); \
  }
#define CUDA_INTEGER_ATOMICS(T)                                              \
  CUDA_ATOMIC_BOUNDS(T)                                                      \
  __forceinline__ T atomicAdd(T* at, T value) {                              \
    return Atomic(at, [=](T old) { return static_cast<T>(old + value); });   \
  }                                                                          \
  __forceinline__ T atomicExch(T* at, T value) {                             \
    return Atomic(at, [=](T) { return value; });                             \
  }                                                                          \
  __forceinline__ T atomicAnd(T* at, T value) {                              \
    return Atomic(at, [=](T old) { return static_cast<T>(old & value); });   \
  }                                                                          \
  __forceinline__ T atomicOr(T* at, T value) {                               \
    return Atomic(at, [=](T old) { return static_cast<T>(old | value); });   \
  }                                                                          \
  __forceinline__ T atomicCAS(T* at, T expected, T value) {                  \
    return Atomic(at, [=](T old) { return old == expected ? value : old; }); \
  }
CUDA_INTEGER_ATOMICS(int)
CUDA_INTEGER_ATOMICS(unsigned)
CUDA_INTEGER_ATOMICS(unsigned long long)
CUDA_ATOMIC_BOUNDS(long long)
#undef CUDA_INTEGER_ATOMICS
#undef CUDA_ATOMIC_BOUNDS
__forceinline__ float atomicAdd(float* at, float value) {
  return Atomic(at, [=](float old) { return old + value; });
}
__forceinline__ double atomicAdd(double* at, double value) {
  return Atomic(at, [=](double old) { return old + value; });
}
__forceinline__ float atomicExch(float* at, float value) {
  return Atomic(at, [=](float) { return value; });
}
