// Orders occurrences by row, so that gradients are summed without atomics: a counting sort, with
// the kernels of occurrences.cu and the scan of partition.cu.

#ifndef COLLECTIVE_NATIVE_GPU_OCCURRENCES_H_
#define COLLECTIVE_NATIVE_GPU_OCCURRENCES_H_

#include <algorithm>
#include <cstdint>

#include "segments.h"
#include "stream.h"

namespace collective {
namespace gpu {

constexpr int64_t kKeysOfTile = 2048;           // keys of a block, as in segments.cuh
constexpr int64_t kSortTile = 16 * kThreads;    // keys of a block that sorts, as in occurrences.cu
constexpr int64_t kLongRow = 64, kPiece = 512;  // as in occurrences.cuh
constexpr int64_t kWordsOfLong = 3, kWordsOfPiece = 3;

// How many passes sort row numbers, of how many bits each.
struct Digits {
  int passes, bits;

  // Finds those that move the fewest bytes: larger digits need fewer passes, but more counters, and
  // write shorter runs for each value.
  static Digits Of(int64_t rows) {
    constexpr int kMostBits = 9;  // what shared memory has counters for
    // Of a key; of a digit of a tile, with what its keys miss of whole sectors.
    constexpr double kKeyBytes = 20, kDigitBytes = 64;
    int bits = 1;
    while (bits < 63 && (rows - 1) >> bits > 0) ++bits;
    Digits best{0, 0};
    double fewest = 0;
    for (int passes = 1; passes <= bits; ++passes) {
      const int width = (bits + passes - 1) / passes;
      if (width > kMostBits) continue;
      const double moved =
          passes * (kKeyBytes + kDigitBytes * static_cast<double>(int64_t{1} << width) / kSortTile);
      if (best.passes == 0 || moved < fewest) {
        best = {passes, width};
        fewest = moved;
      }
    }
    return best;
  }
};

// K occurrences of R rows; K and R fit in 31 bits. See occurrences.py for what it holds.
class Occurrences {
 public:
  Occurrences(int64_t count, int64_t rows)
      : count_(count),
        rows_(rows),
        tiles_(CeilOfQuotient(count, kSortTile)),
        digits_(Digits::Of(rows)) {}

  // Bounds the pieces that rows with many occurrences have.
  int64_t most_pieces() const { return count_ / kPiece + count_ / kLongRow; }
  int64_t most_longs() const { return count_ / kLongRow; }

  void AddTo(Packed* packed) {
    // Numbers of 32 bits: the tiles of the one section begin and end; and the scan's counter.
    scan_at_ = packed->Add(std::vector<int64_t>{tiles_ << 32, 0});
  }

  // Orders by the `numbers` [K] int32, of rows that there are. `uploaded`: all that was packed.
  // `of_each`: 8 bytes of each occurrence, which go to the occurrences' places; null: their numbers
  // do.
  tensorflow::Status Order(Stream* stream, const void* numbers, const int64_t* uploaded,
                           const void* of_each) {
    const int64_t values = int64_t{1} << digits_.bits;
    constexpr int64_t kBytes = sizeof(int32_t), kWarps = kThreads / kLanesOfWarp;
    void *counts = nullptr, *starts = nullptr, *section_counts = nullptr, *room[2][2] = {};
    TF_RETURN_IF_ERROR(stream->Scratch(values * (tiles_ + 1) * kBytes, &counts));
    TF_RETURN_IF_ERROR(stream->Scratch((values + 1) * kBytes, &starts));
    TF_RETURN_IF_ERROR(stream->Scratch(values * kBytes, &section_counts));
    for (int way = 0; way < std::min(digits_.passes, 2); ++way) {
      const bool is_last = of_each != nullptr && way == (digits_.passes - 1) % 2;
      TF_RETURN_IF_ERROR(stream->Scratch(count_ * kBytes, &room[way][0]));
      TF_RETURN_IF_ERROR(stream->Scratch(count_ * kBytes * (is_last ? 2 : 1), &room[way][1]));
    }
    void* const placed_terms = room[(digits_.passes - 1) % 2][1];
    const size_t room_to_place = kBytes * (2 * kSortTile + values) + 2 * kWarps * values;
    const uint32_t tile_count = static_cast<uint32_t>(tiles_),
                   digits = static_cast<uint32_t>(values);
    for (int pass = 0; pass < digits_.passes; ++pass) {
      const uint32_t shift = static_cast<uint32_t>(pass * digits_.bits);
      void *placed = room[pass % 2][0], *placed_order = room[pass % 2][1];
      TF_RETURN_IF_ERROR(stream->Launch(
          Kernel::kOccurrencesCount, Grid(tiles_, kThreads, static_cast<size_t>(kBytes * values)),
          numbers, count_, shift, digits, counts, tile_count));
      TF_RETURN_IF_ERROR(Scan(stream, counts, section_counts, starts, uploaded + scan_at_));
      TF_RETURN_IF_ERROR(
          stream->Launch(Kernel::kOccurrencesPlace, Grid(tiles_, kThreads, room_to_place), numbers,
                         order, count_, shift, digits, counts, tile_count, starts,
                         pass == digits_.passes - 1 ? of_each : nullptr, placed, placed_order));
      numbers = placed;
      order = placed_order;
    }
    if (of_each != nullptr) {
      order = nullptr;
      terms = placed_terms;
    }
    TF_RETURN_IF_ERROR(stream->Scratch((rows_ + 1) * kBytes, &offsets));
    TF_RETURN_IF_ERROR(stream->Scratch(2 * kBytes, &counters));
    void* marks = nullptr;
    TF_RETURN_IF_ERROR(stream->Scratch(rows_ / kThreads + 1, &marks));
    TF_RETURN_IF_ERROR(stream->Scratch(most_longs() * kWordsOfLong * kBytes, &longs));
    TF_RETURN_IF_ERROR(stream->Scratch(most_pieces() * kWordsOfPiece * kBytes, &pieces));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kOccurrencesOffsets, Grid(count_ / kKeysOfTile + 1),
                                      numbers, count_, static_cast<uint32_t>(rows_), offsets,
                                      counters, marks));
    return stream->Launch(Kernel::kOccurrencesSplit, Grid(CeilOfQuotient(rows_, kThreads)), offsets,
                          rows_, counters, longs, pieces, marks);
  }

  // On the device, once they are ordered.
  void *offsets = nullptr, *counters = nullptr, *longs = nullptr, *pieces = nullptr;
  const void* order = nullptr;  // Null: places have their `terms` themselves.
  const void* terms = nullptr;

 private:
  tensorflow::Status Scan(Stream* stream, void* counts, void* section_counts, void* starts,
                          const int64_t* uploaded) const {
    constexpr int64_t kMostThreads = 1024;
    const int64_t threads = std::min(
        kMostThreads, kLanesOfWarp * CeilOfQuotient(std::max<int64_t>(tiles_, 1), kLanesOfWarp));
    const int64_t* ended = uploaded + 1;
    return stream->Launch(
        Kernel::kPartitionScan, Grid(int64_t{1} << digits_.bits, static_cast<int>(threads)), counts,
        static_cast<uint32_t>(tiles_), uploaded, uint32_t{1}, section_counts, starts, ended);
  }

  int64_t count_, rows_, tiles_;
  Digits digits_;
  size_t scan_at_ = 0;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_OCCURRENCES_H_
