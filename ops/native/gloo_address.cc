// Tells Horovod by which address its ranks reach each other.
//
// Horovod 0.28.1 takes HOROVOD_GLOO_IFACE for its first connections only. Those that carry data, of
// the process set of all ranks, listen at the address to which the host's name leads: on many hosts
// that is 127.0.1.1, which no other host reaches, and on others an address that anybody reaches. It
// asks by gethostname(3), which the launcher has this library answer, by LD_PRELOAD: for Horovod
// alone, with the address in COLLECTIVE_GLOO_ADDRESS.
//
// TensorFlow asks, too, in each call of a tf.function. To look up who asks takes milliseconds,
// since a library's symbols are many, so the last other caller is remembered.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include <atomic>

namespace {

bool IsHorovod(void* caller) {
  static std::atomic<void*> other{nullptr};
  if (caller == other.load(std::memory_order_relaxed)) return false;
  Dl_info library;
  const bool is_horovod = dladdr(caller, &library) != 0 && library.dli_fname != nullptr &&
                          strstr(library.dli_fname, "mpi_lib") != nullptr;
  if (!is_horovod) other.store(caller, std::memory_order_relaxed);
  return is_horovod;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int gethostname(char* name,
                                                                  size_t size) noexcept {
  struct utsname names;
  const char* answer = getenv("COLLECTIVE_GLOO_ADDRESS");
  if (answer == nullptr || *answer == '\0' || !IsHorovod(__builtin_return_address(0))) {
    if (uname(&names) != 0) return -1;
    answer = names.nodename;
  }
  const size_t length = strlen(answer) + 1;
  memcpy(name, answer, length < size ? length : size);
  if (length <= size) return 0;
  errno = ENAMETOOLONG;
  return -1;
}
