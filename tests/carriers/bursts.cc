// Two ranks exchange more messages at a time than a ring holds, and look for them without rest.
//
// Prints how many messages had room in a ring without their sender hearing of it.

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "ops/native/mailbox.cc"

using namespace collective::mailbox;

constexpr int kRounds = 200, kBurst = 150;

std::shared_ptr<Exchange> NewExchange(int rank, int number) {
  auto exchange = std::make_shared<Exchange>();
  exchange->name = "m" + std::to_string(number);
  exchange->parcels.emplace_back(1 - rank, "word", 4, 1);
  exchange->awaited = {rank == 1, rank == 0};
  exchange->finish = [](Exchange*, int) {};
  return exchange;
}

int Exchanges(int file, int rank) {
  if (const std::string problem = Mailbox::Open(file, rank, 2); !problem.empty()) {
    fprintf(stderr, "%s\n", problem.c_str());
    return 1;
  }
  Mailbox* mailbox = Mailbox::Get();
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::shared_ptr<Exchange>> burst;
    for (int i = 0; i < kBurst; ++i) {
      burst.push_back(NewExchange(rank, i));
      if (!mailbox->Begin(burst.back()).empty()) return 2;
    }
    for (const auto& exchange : burst) {
      for (int looks = 1; !exchange->over; ++looks) {
        mailbox->Look();
        if (looks % 1000 == 0) sched_yield();  // Its peer may have no processor.
      }
    }
  }
  printf("unheard: %ld\n", static_cast<long>(mailbox->unheard()));
  fflush(stdout);
  mailbox->Leave();
  _exit(0);  // Its thread waits in it.
}

int main() {
  const int file = memfd_create("mailbox", 0);
  Header header{};
  memcpy(header.magic, kMagic, sizeof(header.magic));
  header.version = kVersion;
  header.ranks = 2;
  if (pwrite(file, &header, sizeof(header), 0) != sizeof(header)) return 1;
  const pid_t other = fork();
  if (other == 0) return Exchanges(file, 1);
  const pid_t one = fork();
  if (one == 0) return Exchanges(file, 0);
  int failed = 0, status = 0;
  for (pid_t child : {other, one}) {
    if (waitpid(child, &status, 0) != child || status != 0) failed = 1;
  }
  return failed;
}
