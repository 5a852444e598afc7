// Integers of fixed width: the compiler at run time has no headers.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

constexpr u32 kAllLanes = 0xFFFFFFFFu;
