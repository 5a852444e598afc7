// Functions marked CLONES are compiled for several instruction sets; glibc picks one when the
// library is loaded. The functions that they call must be INLINE. Floating point sums have the same
// order in all versions, and nothing is contracted (see setup.py), so the results are the same,
// too.

#ifndef COLLECTIVE_NATIVE_CLONES_H_
#define COLLECTIVE_NATIVE_CLONES_H_

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "avx512f", "default")))
#else
#define CLONES
#endif
#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

#endif  // COLLECTIVE_NATIVE_CLONES_H_
