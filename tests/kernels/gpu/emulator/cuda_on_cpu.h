// Stands in for CUDA, so that g++ compiles kernels and a CPU runs them.
//
// Every thread of a block is a fibre. It runs until it waits: at a barrier, at a warp's exchange,
// or, if the order is shuffled, at any atomic operation. Blocks run one after the other. With a
// seed, blocks and threads take their turns at random, some warps far ahead of others, so that a
// kernel which counts on an order goes wrong. What could never go on is an error: a barrier that
// some threads don't reach, lanes that wait with different masks, an access that isn't aligned, and
// more seconds than were granted (seen by what waits or calls an atomic operation).
#pragma once

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <ucontext.h>

#include "race_hooks.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("cuda_shared")))
#define threadIdx (cuda_on_cpu::current->index)
#define blockIdx (cuda_on_cpu::block_index)
#define blockDim (cuda_on_cpu::block_size)
#define gridDim (cuda_on_cpu::grid_size)
#define warpSize 32

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// The bounds of all static shared memory, by the linker; there are none if no kernel has any.
extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

namespace cuda_on_cpu {

constexpr size_t kStack = 128 * 1024;
constexpr int kWarp = 32;

enum State { kReady, kAtBarrier, kAtExchange, kDone };

// A stack, and where on it the next thread starts.
struct Fibre {
  jmp_buf idle;
  bool started = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
};

struct Thread {
  dim3 index;
  unsigned number;
  State state = kReady;
  bool started = false;
  Fibre* fibre = nullptr;
  jmp_buf resume;
  const char* waits = nullptr;  // the name of the operation
  unsigned mask = 0;
  uint64_t value = 0;
  uint64_t seen[kWarp];  // what all lanes brought
};

static dim3 block_index, block_size, grid_size;
static Thread* current = nullptr;
static std::vector<Thread> threads;
static std::vector<std::vector<unsigned>> ready;  // of each warp
static size_t favourite = 0;                      // warp
static std::vector<Fibre*> fibres;                // Without a thread.
static std::vector<char> shared_memory;
static char* dynamic_shared = nullptr;
static std::function<void()> body;
static std::mt19937_64 random_numbers;
static bool shuffled = false;
static jmp_buf scheduler;
static char failure[1024];
static std::chrono::steady_clock::time_point deadline;
static unsigned ticks = 0;

static inline void Fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int written = std::snprintf(failure, sizeof failure, "block %u: ", block_index.x);
  std::vsnprintf(failure + written, sizeof failure - written, format, arguments);
  va_end(arguments);
  if (current != nullptr) _longjmp(scheduler, 1);
}

// What g++ calls before an access whose address isn't a multiple of what its type needs.
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(
    void*, uintptr_t address) {
  Fail("thread %u reads or writes at an address that is not aligned: %#zx",
       current == nullptr ? 0 : current->number, address);
}

static inline void Pause() {
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

static inline void Tick() {
  if (++ticks % 4096 == 0 && std::chrono::steady_clock::now() > deadline) {
    Fail("thread %u has run out of time: does a kernel wait for another block?", current->number);
  }
}

static inline void MakeReady(Thread& thread) {
  thread.state = kReady;
  ready[thread.number / kWarp].push_back(thread.number);
}

// Lets others go first, sometimes.
static inline void Yield() {
  const races::Aside aside;
  Tick();
  if (shuffled && random_numbers() % 4 == 0) {
    MakeReady(*current);
    Pause();
  }
}

static inline unsigned Lane() { return current->number % kWarp; }

static inline unsigned FirstOfWarp() { return current->number / kWarp * kWarp; }

// What each lane of `mask` brings to the same operation; waits for all of them.
static inline const uint64_t* Exchange(const char* name, unsigned mask, uint64_t value) {
  const races::Aside aside;
  Tick();
  if ((mask >> Lane() & 1) == 0)
    Fail("thread %u calls %s with mask %08x, which lacks itself", current->number, name, mask);
  current->waits = name;
  current->mask = mask;
  current->value = value;
  current->state = kAtExchange;
  bool all = true;
  const unsigned first = FirstOfWarp();
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    if (first + lane >= threads.size() || threads[first + lane].state == kDone) {
      Fail("thread %u calls %s with mask %08x, but lane %u is not there", current->number, name,
           mask, lane);
    }
    const Thread& other = threads[first + lane];
    all = all && other.state == kAtExchange && other.mask == mask &&
          std::strcmp(other.waits, name) == 0;
  }
  if (all) {
    races::Exchange(first, mask);
    for (unsigned to = 0; to < kWarp; ++to) {
      if ((mask >> to & 1) == 0) continue;
      Thread& other = threads[first + to];
      for (unsigned from = 0; from < kWarp; ++from) {
        if (mask >> from & 1) other.seen[from] = threads[first + from].value;
      }
      MakeReady(other);
    }
  }
  Pause();
  return current->seen;
}

// How many threads brought something else than 0; waits for all that have not ended.
static inline int Barrier(const char* name, bool value) {
  const races::Aside aside;
  Tick();
  current->waits = name;
  current->value = value;
  current->state = kAtBarrier;
  Pause();
  return static_cast<int>(current->seen[0]);
}

// ---- One block

static inline void Run() {
  while (true) {
    races::Continue();
    body();
    races::Suspend();
    current->state = kDone;
    Fibre* fibre = current->fibre;
    fibres.push_back(fibre);
    if (_setjmp(fibre->idle) == 0) _longjmp(scheduler, 1);
  }
}

static inline void Resume(Thread* thread) {
  current = thread;
  if (_setjmp(scheduler) != 0) {
    races::Suspend();
    current = nullptr;
    return;
  }
  if (!thread->started) {
    if (fibres.empty()) fibres.push_back(new Fibre);
    thread->fibre = fibres.back();
    fibres.pop_back();
  }
  Fibre* fibre = thread->fibre;
  races::Resume(thread->number, {fibre->stack.get(), fibre->stack.get() + kStack});
  if (thread->started) _longjmp(thread->resume, 1);
  thread->started = true;
  if (fibre->started) _longjmp(fibre->idle, 1);
  fibre->started = true;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre->stack.get();
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, Run, 0);
  setcontext(&context);
}

static inline bool Release() {
  const char* name = nullptr;
  uint64_t count = 0;
  for (const Thread& thread : threads) {
    if (thread.state == kDone) continue;
    if (thread.state != kAtBarrier || (name != nullptr && std::strcmp(name, thread.waits) != 0))
      return false;
    name = thread.waits;
    count += thread.value;
  }
  races::Barrier();
  for (Thread& thread : threads) {
    if (thread.state == kDone) continue;
    thread.seen[0] = count;
    MakeReady(thread);
  }
  return name != nullptr;
}

static inline void ReportDeadlock() {
  char text[900];
  int at = 0, told = 0;
  for (const Thread& thread : threads) {
    if (thread.state == kDone || at > 700 || told++ == 8) continue;
    at += std::snprintf(text + at, sizeof text - at, " thread %u at %s (mask %08x);", thread.number,
                        thread.waits, thread.mask);
  }
  Fail("deadlock:%s of %zu threads", text, threads.size());
}

// Null if all wait.
static inline Thread* Next() {
  if (shuffled && random_numbers() % 64 == 0) favourite = random_numbers() % ready.size();
  if (!shuffled) favourite = 0;
  for (size_t tried = 0; tried < ready.size(); ++tried) {
    std::vector<unsigned>& lanes = ready[favourite];
    if (lanes.empty()) {
      favourite = (favourite + 1) % ready.size();
      continue;
    }
    if (shuffled) std::swap(lanes[random_numbers() % lanes.size()], lanes.back());
    const unsigned number = lanes.back();
    lanes.pop_back();
    return &threads[number];
  }
  return nullptr;
}

static inline void RunBlock() {
  threads.assign(block_size.x * block_size.y * block_size.z, Thread());
  ready.assign((threads.size() + kWarp - 1) / kWarp, {});
  favourite = 0;
  races::BeginBlock(static_cast<unsigned>(threads.size()),
                    {threads.data(), threads.data() + threads.size()});
  for (unsigned t = static_cast<unsigned>(threads.size()); t-- > 0;) {
    threads[t].number = t;
    threads[t].index = {t % block_size.x, t / block_size.x % block_size.y,
                        t / block_size.x / block_size.y};
    MakeReady(threads[t]);
  }
  // Nobody may count on what shared memory holds.
  std::memset(shared_memory.data(), 0xA5, shared_memory.size());
  if (__start_cuda_shared != nullptr)
    std::memset(__start_cuda_shared, 0xA5, __stop_cuda_shared - __start_cuda_shared);
  while (failure[0] == 0) {
    Thread* next = Next();
    if (next != nullptr) {
      Resume(next);
    } else if (!Release()) {
      break;
    }
  }
  if (failure[0] == 0 && std::any_of(threads.begin(), threads.end(),
                                     [](const Thread& t) { return t.state != kDone; })) {
    ReportDeadlock();
  }
}

// ---- CUDA's functions

template <class T>
uint64_t Bits(T value) {
  static_assert(sizeof(T) <= 8, "of 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T Of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T Shuffle(const char* name, unsigned mask, T value, int64_t source, int width) {
  const uint64_t* seen = Exchange(name, mask, Bits(value));
  const int64_t lane = Lane(), first = lane / width * width;
  if (source < first || source >= first + width) return value;
  if ((mask >> source & 1) == 0)
    Fail("thread %u reads from lane %d, which mask %08x lacks", current->number, int(source), mask);
  return Of<T>(seen[source]);
}

}  // namespace cuda_on_cpu

#include "cuda_functions.h"
#include "cuda_launch.h"
