#include "admission.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>

namespace collective {

namespace {

constexpr int kMostHashes = 64;
constexpr uint64_t kFirstHash = 0x8CB92BA72F3D8DD7ull, kSecondHash = 0xAEF17502108EF2D9ull;
constexpr uint64_t kCounter = 0x9E3779B97F4A7C15ull;

// The generator of `collective.tables.rows.initializers.hashed`.
uint64_t HashOf(uint64_t seed, uint64_t counter) { return Mix(counter * kCounter + seed); }

}  // namespace

bool ExactCounter::Start() {
  auto map = std::make_unique<KeyMap>(capacity_);
  if (!map->Start()) return false;
  map_ = std::move(map);
  counts_.assign(1, 0);
  return true;
}

bool ExactCounter::Add(const int64_t* keys, const int64_t* counts, int64_t n) {
  std::vector<int64_t> rows(n);
  const bool found_all = map_->FindOrInsert(keys, n, rows.data()) >= 0;
  counts_.resize(map_->count() + 1);
  if (!found_all) return false;
  for (int64_t i = 0; i < n; ++i) counts_[rows[i]] += counts[i];
  return true;
}

void ExactCounter::Counts(const int64_t* keys, int64_t n, int64_t* counts) const {
  map_->Find(keys, n, counts);
  for (int64_t i = 0; i < n; ++i) counts[i] = counts_[counts[i]];
}

void ExactCounter::Forget(const int64_t* keys, int64_t n) {
  if (map_->count() == 0) return;
  std::vector<int64_t> rows(n);
  map_->Find(keys, n, rows.data());
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  if (!rows.empty() && rows[0] == 0) rows.erase(rows.begin());
  if (rows.empty()) return;
  std::vector<int64_t> from(rows.size()), to(rows.size());
  const int64_t moved =
      map_->Remove(rows.data(), static_cast<int64_t>(rows.size()), from.data(), to.data());
  for (int64_t i = 0; i < moved; ++i) counts_[to[i]] = counts_[from[i]];
  counts_.resize(map_->count() + 1);
  // Memory of many keys is given back.
  if (counts_.capacity() > 4096 && counts_.size() * 4 < counts_.capacity()) counts_.shrink_to_fit();
}

void ExactCounter::ForgetAll() {
  // Where address space is missing for a new map, the old one is emptied.
  if (Start()) return;
  std::vector<int64_t> keys(map_->keys() + 1, map_->keys() + 1 + map_->count());
  Forget(keys.data(), static_cast<int64_t>(keys.size()));
}

void ExactCounter::Copy(int64_t* keys, int64_t* counts) const {
  std::copy_n(map_->keys() + 1, size(), keys);
  std::copy_n(counts_.data() + 1, size(), counts);
}

BloomCounter::~BloomCounter() {
  if (cells_ != nullptr) munmap(cells_, Bytes());
}

bool BloomCounter::Start() {
  if (shape_.hashes < 1 || shape_.hashes > kMostHashes || shape_.cells < 1 || shape_.step < 1)
    return false;
  // Memory is taken as counters are written.
  void* at = mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return false;
  cells_ = static_cast<char*>(at);
  return true;
}

int BloomCounter::Places(int64_t key, uint64_t* places) const {
  const uint64_t k = static_cast<uint64_t>(key);
  const uint64_t partition = static_cast<uint64_t>(partitions_.Owner(key));
  const uint64_t first = partition / shape_.step * shape_.cells;
  const uint64_t stride = HashOf(kSecondHash, k) | 1;
  uint64_t hash = HashOf(kFirstHash, k);
  int count = 0;
  for (int64_t i = 0; i < shape_.hashes; ++i, hash += stride) {
    // Without the mix, keys of a small partition would share all of their counters too often.
    const uint64_t cell = static_cast<uint64_t>(
        (static_cast<unsigned __int128>(Mix(hash)) * static_cast<uint64_t>(shape_.cells)) >> 64);
    places[count] = first + cell;
    // A counter that a key has twice is counted once.
    count += std::find(places, places + count, first + cell) == places + count;
  }
  return count;
}

template <class Cell>
void BloomCounter::AddTo(const int64_t* keys, const int64_t* counts, int64_t n) {
  Cell* cells = reinterpret_cast<Cell*>(cells_);
  uint64_t places[kMostHashes];
  for (int64_t i = 0; i < n; ++i) {
    const int found = Places(keys[i], places);
    const uint64_t added = static_cast<uint64_t>(counts[i]);
    for (int p = 0; p < found; ++p) {
      const uint64_t room = shape_.most - std::min<uint64_t>(cells[places[p]], shape_.most);
      cells[places[p]] = static_cast<Cell>(cells[places[p]] + std::min(room, added));
    }
  }
}

template <class Cell>
void BloomCounter::Read(const int64_t* keys, int64_t n, int64_t* counts) const {
  const Cell* cells = reinterpret_cast<const Cell*>(cells_);
  uint64_t places[kMostHashes];
  for (int64_t i = 0; i < n; ++i) {
    const int found = Places(keys[i], places);
    uint64_t least = std::numeric_limits<int64_t>::max();
    for (int p = 0; p < found; ++p) least = std::min<uint64_t>(least, cells[places[p]]);
    counts[i] = static_cast<int64_t>(least);
  }
}

bool BloomCounter::Add(const int64_t* keys, const int64_t* counts, int64_t n) {
  switch (shape_.width) {
    case 1:
      AddTo<uint8_t>(keys, counts, n);
      break;
    case 2:
      AddTo<uint16_t>(keys, counts, n);
      break;
    case 4:
      AddTo<uint32_t>(keys, counts, n);
      break;
    default:
      AddTo<uint64_t>(keys, counts, n);
  }
  return true;
}

void BloomCounter::Counts(const int64_t* keys, int64_t n, int64_t* counts) const {
  switch (shape_.width) {
    case 1:
      return Read<uint8_t>(keys, n, counts);
    case 2:
      return Read<uint16_t>(keys, n, counts);
    case 4:
      return Read<uint32_t>(keys, n, counts);
    default:
      return Read<uint64_t>(keys, n, counts);
  }
}

void BloomCounter::ForgetAll() { madvise(cells_, Bytes(), MADV_DONTNEED); }

bool Admission::Admits(int64_t key, int64_t count, int64_t step) const {
  if (counter_ != nullptr && count < frequency_) return false;
  if (probability_ >= 1) return true;
  const uint64_t of_key = HashOf(seed_, static_cast<uint64_t>(key));
  const uint64_t bits = HashOf(of_key, static_cast<uint64_t>(step));
  return static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0) < probability_;
}

}  // namespace collective
