// The moments at which two ranks look at one full ring, each played in one process, one thread.
//
// An atomic of the mailbox calls `meanwhile` before a store in the watched place: there the test
// does what the other rank does in that moment. Prints a line for each moment.

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {
const void* watched = nullptr;
std::function<void()> meanwhile;
}  // namespace

namespace std {
template <class T>
struct watched_atomic : atomic<T> {
  using atomic<T>::atomic;
  using atomic<T>::operator=;
  void store(T value, memory_order order = memory_order_seq_cst) {
    if (this == watched) {
      watched = nullptr;
      meanwhile();
    }
    atomic<T>::store(value, order);
  }
};
}  // namespace std

#define atomic watched_atomic
#define private public
#include "ops/native/mailbox.cc"
#include "ops/native/arena.cc"

using namespace collective::mailbox;

// This rank sends: the other takes all messages in the moment in which this one notes that the ring
// is full. The other has seen no note, so it won't ring: the message must go out now.
const char* RoomIsMadeWhileItIsNoted(Mailbox* mailbox) {
  Ring* ring = mailbox->RingOf(0, 1);
  for (int i = 0; i < kEntries; ++i) {
    if (!mailbox->Put(1, Message{})) return "a ring with room takes no message";
  }
  watched = &ring->was_full;
  meanwhile = [=] { ring->taken.store(ring->posted.load()); };
  return mailbox->Put(1, Message{}) ? "sent" : "it waits for a bell that won't be rung";
}

// This rank receives: the other finds the ring full and notes it in the last moment before this one
// makes room. It sleeps then: this one must ring.
const char* ItIsNotedWhileRoomIsMade(Mailbox* mailbox) {
  Ring* ring = mailbox->RingOf(1, 0);
  ring->posted.store(kEntries);
  watched = &ring->taken;
  meanwhile = [=] { ring->was_full.store(1); };
  const uint32_t bell = mailbox->Page(1)->bell.load();
  Mailbox::Events events;
  mailbox->Pump(true, &events);
  if (ring->taken.load() != kEntries) return "it has not taken the messages";
  return mailbox->Page(1)->bell.load() != bell ? "rung" : "it doesn't ring";
}

int main() {
  const int file = memfd_create("mailbox", 0);
  Header header{};
  memcpy(header.magic, kMagic, sizeof(header.magic));
  header.version = kVersion;
  header.ranks = 2;
  if (pwrite(file, &header, sizeof(header), 0) != sizeof(header)) return 1;
  if (const std::string problem = Mailbox::Open(file, 0, 2); !problem.empty()) {
    fprintf(stderr, "%s\n", problem.c_str());
    return 1;
  }
  puts(RoomIsMadeWhileItIsNoted(Mailbox::Get()));
  puts(ItIsNotedWhileRoomIsMade(Mailbox::Get()));
  return 0;
}
