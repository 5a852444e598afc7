// Keeps the arenas of a mailbox: the memory of the data that each rank sends (see mailbox.h). It
// follows mailbox.cc, whose functions it uses.

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>

#include "mailbox.h"

namespace collective {
namespace mailbox {
namespace {

constexpr uint64_t kSmallestPiece = 4 << 20, kLargestPiece = 64 << 20;
constexpr uint64_t kFirstMapping = 64 << 20;
constexpr uint64_t kAlignment = 64;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack.

// Maps a part of the file, which begins with a huge page, where huge pages can be mapped; null if
// that fails.
char* MapAligned(int file, uint64_t start, uint64_t length) {
  void* reserved = mmap(nullptr, length + kHugePage, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(reserved);
  char* base = first + (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  const uint64_t before = base - first;
  if (before > 0) munmap(first, before);
  if (before < kHugePage) munmap(base + length, kHugePage - before);
  void* mapped = mmap(base, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
                      file, start);
  if (mapped == MAP_FAILED) {
    munmap(base, length);
    return nullptr;
  }
  return base;
}

}  // namespace

char* Mailbox::At(int rank, uint64_t place, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mapping_mutex_);
  Mapping& mapping = mappings_[rank];
  if (place + bytes > mapping.length) {
    // The mapping before stays: others may be reading there.
    uint64_t length = std::max(mapping.length, kFirstMapping);
    while (length < place + bytes) length *= 2;
    char* base = MapAligned(file_, arena_start_ + rank * kArenaStride, length);
    if (base == nullptr) return nullptr;
    madvise(base, length, MADV_HUGEPAGE);
    mapping.base = base;
    mapping.length = length;
  }
  return mapping.base + place;
}

Mailbox::Block* Mailbox::BlockAt(int rank, uint64_t place) {
  return reinterpret_cast<Block*>(At(rank, place, sizeof(Block)));
}

std::string Mailbox::Allocate(uint64_t bytes, uint64_t* place) {
  for (size_t i = 0; i < lent_.size();) {
    if (BlockAt(rank_, lent_[i].first)->readers.load(std::memory_order_acquire) == 0) {
      Free(lent_[i].first, lent_[i].second);
      lent_[i] = lent_.back();
      lent_.pop_back();
    } else {
      ++i;
    }
  }
  bytes = RoundUp(bytes, kAlignment);
  auto fits = [&] {
    return std::find_if(free_.begin(), free_.end(),
                        [&](const auto& piece) { return piece.second >= bytes; });
  };
  auto found = fits();
  if (found == free_.end()) {
    const std::string problem = Grow(bytes);
    if (!problem.empty()) return problem;
    found = fits();
  }
  *place = found->first;
  const uint64_t left = found->second - bytes;
  free_.erase(found);
  if (left > 0) free_[*place + bytes] = left;
  lent_.emplace_back(*place, bytes);
  return "";
}

std::string Mailbox::Grow(uint64_t bytes) {
  const uint64_t size = arena_size_;
  const uint64_t piece =
      std::max(RoundUp(bytes, kHugePage), std::min(std::max(size, kSmallestPiece), kLargestPiece));
  if (size + piece > kArenaStride) return "more than a tebibyte is under way";
  const uint64_t start = arena_start_ + rank_ * kArenaStride + size;
  // Reserved now: missing memory would end the process when it is written.
  int failed;
  do {
    failed = fallocate(file_, 0, start, piece);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0) {
    return Failed("there is no room for " + std::to_string(piece >> 20) +
                  " MB more of shared memory, in addition to " + std::to_string(size >> 20) +
                  " MB");
  }
  char* base = At(rank_, size, piece);
  if (base == nullptr) return Failed("shared memory can't be mapped");
  grown_.emplace_back(base, piece);
  arena_size_ = size + piece;
  // The place 0 stands for a message without a block.
  Free(size == 0 ? kAlignment : size, size == 0 ? piece - kAlignment : piece);
  return "";
}

void Mailbox::Free(uint64_t place, uint64_t bytes) {
  auto after = free_.lower_bound(place);
  if (after != free_.end() && place + bytes == after->first) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == place) {
      before->second += bytes;
      return;
    }
  }
  free_[place] = bytes;
}

const char* Mailbox::Data(int from, const Message& message) {
  if (message.place == 0) return message.text;
  char* block = At(from, message.place, sizeof(Block) + message.bytes);
  return block == nullptr ? nullptr : block + sizeof(Block);
}

void Mailbox::UseHugePages() {
  std::vector<Mapping> grown;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    grown.swap(grown_);
  }
  for (const Mapping& piece : grown) madvise(piece.base, piece.length, kCollapse);
}

std::string Mailbox::Reserve(uint64_t bytes, int readers, uint64_t* place) {
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    problem = Allocate(sizeof(Block) + bytes, place);
    if (problem.empty()) BlockAt(rank_, *place)->readers.store(static_cast<uint32_t>(readers));
  }
  UseHugePages();
  return problem;
}

char* Mailbox::Part(int rank, uint64_t place, uint64_t start, uint64_t bytes) {
  char* block = At(rank, place, sizeof(Block) + start + bytes);
  return block == nullptr ? nullptr : block + sizeof(Block) + start;
}

void Mailbox::Release(int from, uint64_t place) {
  if (place == 0) return;
  Block* block = BlockAt(from, place);
  if (block != nullptr) block->readers.fetch_sub(1, std::memory_order_release);
}

}  // namespace mailbox
}  // namespace collective
