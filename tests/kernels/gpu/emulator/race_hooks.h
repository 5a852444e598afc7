// What the emulator tells a search for races. Kernels that were compiled for one (SEARCHES_RACES)
// are linked with race_search.cc; in all others these functions do nothing. Included by
// cuda_on_cpu.h.
#pragma once

#include <cstdint>

#ifdef SEARCHES_RACES
#define RACE_HOOK(declaration) __attribute__((visibility("hidden"))) void declaration;
#else
#define RACE_HOOK(declaration) \
  inline void declaration {}
#endif

namespace races {

struct Range {
  const void *begin, *end;
};

// How memory is accessed. What blocks tell each other goes through the L2 cache: by `volatile`,
// __ldcg, __stcg or atomic operations. A kernel must not write at all where it reads by __ldg.
enum Kind : uint8_t { kPlain, kReadOnly, kThroughL2, kAtomic };

RACE_HOOK(BeginLaunch(Range static_shared, Range dynamic_shared))
RACE_HOOK(EndLaunch())
RACE_HOOK(BeginBlock(unsigned threads, Range of_emulator))

// Whose turn it is; then whether the emulator or the kernel works.
RACE_HOOK(Resume(unsigned thread, Range stack))
RACE_HOOK(Suspend())
RACE_HOOK(Continue())

// The lanes of a mask have met, or all threads of the block.
RACE_HOOK(Exchange(unsigned first, unsigned mask))
RACE_HOOK(Barrier())

RACE_HOOK(Fence())
RACE_HOOK(Access(Kind kind))

// Is the emulator's own work, in the midst of a thread's.
struct Aside {
  Aside() { Suspend(); }
  ~Aside() { Continue(); }
};

// What a thread accesses is of a kind.
struct As {
  explicit As(Kind kind) { Access(kind); }
  ~As() { Access(kPlain); }
};

}  // namespace races

#undef RACE_HOOK
