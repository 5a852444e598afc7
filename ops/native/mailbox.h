// Carries messages between the ranks of one host, through memory that all of them have mapped.
//
//     rank 0 ──copies──▶ ┌ its arena ────────────┐ ──copies──▶ rank 1
//            ──posts───▶ │ ring 0 ─▶ 1, bell of 1│ ──takes───▶
//                        └───────────────────────┘
//
// Memory: one unnamed file, made by rank 0 (ops/communication/shared_memory.py). It has a header, a
// page and a bell for each rank, a ring of messages for each ordered pair of ranks, and an arena
// for each rank's data. The ring holds a small message completely; for a larger one it says where
// the data is in the sender's arena. An arena grows in pieces, as far as a rank has data in flight
// at one time; pieces stay until the job ends, and the file ends with the last process that has it.
//
// Order: a message is found by (name, sequence): its collective's name, and how often this rank has
// used that name. Ranks may start collectives in different orders: early messages are kept aside
// (as descriptions: the data stays in the arena). Sending never waits. So a rank waits for another
// only for data that the other has still to send, and collectives can't block each other.
//
// Waiting: no thread of TensorFlow is blocked for long. The thread that starts an exchange polls
// for some microseconds. After that one thread of the process waits for all exchanges, on a futex,
// and sleeps while nothing is in flight. With more ranks than cores, nothing polls.
//
// Answers: a rank that asks for something may say in its message where in its own arena the answer
// belongs. The asked rank writes the answer there, without the rings, and posts that it has. The
// block stays until all asked ranks have written, whatever happens to the run. Meanwhile an asked
// rank may report how much it has written, by messages marked `more`.
//
// Giving up: a run that is cancelled while it waits (its time is over, or it has failed elsewhere)
// ends every exchange of the process. Not all ranks know then which messages of the run arrived, so
// the process exchanges nothing more, and says so: ranks that wait for it are told, as for a lost
// peer.
//
// Lost peers: each rank locks a byte of the file; the kernel unlocks it when the process ends, for
// whatever reason. A waiting rank checks the locks of the ranks it waits for ten times a second. A
// rank that is about to leave says so. Messages that it has posted before are still taken: a
// message is posted only once it is complete, so none is seen in part.

#ifndef COLLECTIVE_NATIVE_MAILBOX_H_
#define COLLECTIVE_NATIVE_MAILBOX_H_

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace collective {
namespace mailbox {

constexpr int kInlineBytes = 168;

// Describes data that one rank sends another.
struct Message {
  uint64_t name, sequence;
  uint64_t place;  // Of a block in the sender's arena; 0: the data is in `text`.
  uint64_t bytes;
  int64_t rows, item;    // How many, and the bytes of each.
  uint32_t kind, dtype;  // Of the collective: must be the same on all ranks.
  // Where an answer belongs: a block in the sender's arena (0: nowhere), and a part of the block.
  uint64_t answer, answer_start, answer_bytes;
  uint64_t more;  // Not 0: the rank sends more in this exchange; its last message has 0.
  char text[kInlineBytes];
};
static_assert(sizeof(Message) == 256, "rings hold messages of 256 bytes");

struct RankPage;
struct Ring;

// A part of what a parcel carries.
struct Piece {
  const char* data;
  uint64_t bytes;
};

// What this rank sends to one other rank: the pieces, one after the other.
struct Parcel {
  Parcel(int rank, const char* data, uint64_t bytes, int64_t rows)
      : rank(rank), pieces{{data, bytes}}, bytes(bytes), rows(rows) {}
  Parcel(int rank, std::vector<Piece> all, int64_t rows)
      : rank(rank), pieces(std::move(all)), rows(rows) {
    for (const Piece& piece : pieces) bytes += piece.bytes;
  }
  void CopyTo(char* out) const;

  int rank;
  std::vector<Piece> pieces;
  uint64_t bytes = 0;
  int64_t rows;
  uint64_t answer = 0, answer_start = 0, answer_bytes = 0;  // As in the message.
};

// Instead of a lost rank: none is lost, or this rank itself has given up.
constexpr int kNobodyLost = -1, kGivenUp = -2;

// Holds one collective that this rank has started.
struct Exchange {
  std::string name;
  uint32_t kind = 0, dtype = 0;
  int64_t item = 0;
  std::vector<Parcel> parcels;
  bool same_data = false;     // All parcels have the same data.
  std::vector<bool> awaited;  // By rank: whether it sends something.
  // Called for each rank once its message has arrived, in any thread, several at a time; may be
  // empty.
  std::function<void(Exchange*, int from)> arrived;
  // Called likewise for each message to which a rank sends more, with its value.
  std::function<void(int from, int64_t rows)> partly;
  // Called once all is sent, by the thread that starts the exchange; may be empty.
  std::function<void()> meanwhile;
  // Called once, in any thread: with the lost rank, or when everything has arrived.
  std::function<void(Exchange*, int lost)> finish;

  // Set by the mailbox.
  uint64_t key = 0, sequence = 0;
  std::vector<Message> received;  // By rank.
  int missing = 0;
  std::atomic<bool> over{false};
};

class Mailbox {
 public:
  // Returns the process's mailbox; null before it is open.
  static Mailbox* Get();

  // Opens it, once, in a file that it keeps. Returns why that failed; empty if it is open.
  static std::string Open(int file, int rank, int ranks);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  uint64_t arena_bytes() const { return arena_size_; }

  // Sends an exchange's parcels, and waits some microseconds for the others'. `finish` may be
  // called before this returns, or later. Returns why it couldn't be sent; empty if it was.
  std::string Start(const std::shared_ptr<Exchange>& exchange);

  // Starts an exchange that sends nothing itself, and doesn't wait. Returns the same as `Start`.
  std::string Begin(const std::shared_ptr<Exchange>& exchange);
  // Sends a parcel without data in a started exchange; `more` of them follow.
  void Send(const Exchange& exchange, int to, int64_t rows, bool more = false);
  // Takes what has arrived; nothing if another thread is doing so.
  void Look();
  // Waits some microseconds for the others' parcels, and leaves the rest to the waiting thread.
  void Poll(const Exchange& exchange);

  // Reserves a block of this rank's arena, which is lent until `Release` has been called `readers`
  // times. Returns why there is none; empty if there is one.
  std::string Reserve(uint64_t bytes, int readers, uint64_t* place);
  // Returns where a part of a block is; null if it can't be mapped.
  char* Part(int rank, uint64_t place, uint64_t start, uint64_t bytes);

  // Returns the data of a message, which is valid until it is released.
  const char* Data(int from, const Message& message);
  void Release(int from, const Message& message) { Release(from, message.place); }
  void Release(int from, uint64_t place);

  // Returns a rank that has ended, or has said that it leaves; kNobodyLost if there is none.
  int Ended();

  // Tells the others, once and for all, that this rank has aborted what they exchange without the
  // mailbox, by NCCL: they may wait for it on a device, where they see no message.
  void SayNcclAborted();
  // Returns a rank that has said so; kNobodyLost if there is none.
  int NcclAborted();

  // Gives up all exchanges, now and later, and tells the others: a run has failed half-way.
  void GiveUp();
  // Returns what waited for which rank when this rank gave up; empty if it hasn't.
  std::string given_up();
  // Tells whether another rank has given up.
  bool HasGivenUp(int rank) const;

  // Tells the others that this rank sends nothing more, once everything that it sent is on its way.
  void Leave();

 private:
  struct Block {
    std::atomic<uint32_t> readers;  // 0: the sender may use it again.
    char padding[60];
  };
  struct Mapping {
    Mapping(char* base = nullptr, uint64_t length = 0) : base(base), length(length) {}
    char* base;
    uint64_t length;
  };
  using Key = std::pair<uint64_t, uint64_t>;
  // What an exchange is to be told: that a rank's message has arrived, maybe with more to follow
  // (then `rows` is its value, else -1), or that the exchange is over.
  struct Event {
    std::shared_ptr<Exchange> exchange;
    int lost, from;
    int64_t rows = -1;
  };
  using Events = std::vector<Event>;

  Mailbox(int file, int rank, int ranks)
      : file_(file), rank_(rank), ranks_(ranks), process_(getpid()) {}
  std::string Map();
  std::string Allocate(uint64_t bytes, uint64_t* place);
  std::string Grow(uint64_t bytes);
  // Asks for huge pages where the arena has grown, whatever the system's setting for shared memory:
  // rows are read there in no order. Since Linux 6.1; without them small pages are used. It takes
  // long, so no exchange waits for it.
  void UseHugePages();
  void Free(uint64_t place, uint64_t bytes);
  char* At(int rank, uint64_t place, uint64_t bytes);
  Block* BlockAt(int rank, uint64_t place);

  void Post(int to, const Message& message);
  bool Put(int to, const Message& message);
  void RingBell(int rank);
  void Pump(bool always, Events* events);
  void Deliver(int from, const Message& message, Events* events);
  void FindLost(Events* events);
  bool IsLost(int rank);
  static void Tell(Events* events);
  std::string Send(const std::shared_ptr<Exchange>& exchange);
  void Wait();

  RankPage* Page(int rank) const;
  Ring* RingOf(int from, int to) const;

  const int file_, rank_, ranks_;
  const pid_t process_;
  char* control_ = nullptr;
  uint64_t arena_start_ = 0;
  int spins_ = 0;

  std::mutex mutex_;  // Of everything below, except for the mappings.
  std::map<Key, std::shared_ptr<Exchange>> waiting_;
  std::map<Key, std::vector<std::pair<int, Message>>> early_;
  std::vector<std::vector<Message>> unsent_;  // By rank: messages for which its ring had no room.
  int unsent_count_ = 0;
  std::unordered_map<uint64_t, std::pair<std::string, uint64_t>> names_;  // Name, next sequence.
  std::map<uint64_t, uint64_t> free_;                                     // Place -> bytes.
  std::vector<std::pair<uint64_t, uint64_t>> lent_;  // (Place, bytes) of blocks in use by readers.
  std::atomic<uint64_t> arena_size_{0};
  std::vector<Mapping> grown_;  // Pieces of the arena that have no huge pages yet.
  std::vector<bool> lost_;
  std::string given_up_;
  std::chrono::steady_clock::time_point looked_;
  uint32_t seen_ = 0;
  int polling_ = 0;
  bool thread_started_ = false, idle_ = false;
  std::condition_variable wake_;

  std::mutex mapping_mutex_;
  std::vector<Mapping> mappings_;
};

}  // namespace mailbox
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MAILBOX_H_
