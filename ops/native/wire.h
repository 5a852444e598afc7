// Defines the messages between ranks: their sections, and how a received one is read.
// ops/exchange/embedding_bag.py describes the format.

#ifndef COLLECTIVE_NATIVE_WIRE_H_
#define COLLECTIVE_NATIVE_WIRE_H_

#include <cstdint>
#include <vector>

#include "parallel.h"
#include "placement.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace collective {

constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;  // Elements of anything counted in int32.

enum Combiner { kRows = 0, kSum = 1, kMean = 2, kSqrtN = 3 };

// Rows of a dynamic table that a lookup doesn't see are negative: it reads row 0.
constexpr int64_t kNoRow = -1;  // The key has no row: nothing is updated.

template <class Row>
constexpr bool IsUnseen(Row row) {
  return row < 0;
}

// Converts between a row, from 1, and its number for a run that updates it but doesn't see it yet.
constexpr int64_t SeenLater(int64_t row) { return -1 - row; }

struct Section {
  int table = 0;
  int kind = kStatic;
  int64_t dim = 0;
  bool pooled = false, weighted = false;
  bool counted = false;  // Keys come with their counts (unpooled sections only).
  float max_norm = 0;

  // Returns how many words the section takes in a message.
  int64_t Words(int64_t bags, int64_t keys) const {
    return keys + (pooled ? (bags + 1) / 2 : 0) + (weighted || counted ? (keys + 1) / 2 : 0);
  }
};

// The part of a message that one rank sent for one section.
struct Piece {
  int section;
  int64_t bags, keys;
  const int64_t* key;
  const int32_t* lengths;  // [bags], null if not pooled.
  const float* weights;    // [keys], null if not weighted.
  const int32_t* counts;   // [keys], null if not counted.
  int64_t flat;            // Element offset of its first bag's row.
  int64_t row;             // Its first key's place among the keys of its table.
};

// Returns the bag of each key of a pooled piece, in `buffer`.
const int32_t* BagOfEachKey(const Piece& piece, Buffer<int32_t>* buffer);

// A received message, its pieces ordered by rank, then section.
struct ReceivedMessage {
  std::vector<Piece> pieces;
  std::vector<int64_t> rows;        // [T], the number of keys of each table.
  std::vector<int64_t> row_splits;  // [N], elements that go back to each rank.
  int64_t elements = 0;

  // Writes bags and keys of each piece, as `Parse` takes them.
  void WriteHeaders(int64_t* headers) const {
    for (const Piece& piece : pieces) {
      *headers++ = piece.bags;
      *headers++ = piece.keys;
    }
  }
};

// The attributes of an operation that describe the received message.
struct Layout {
  int ranks = 0;
  int tables = 0;
  std::vector<bool> counted;  // [T], whether the table counts how often keys are asked for.
  std::vector<Section> sections;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
  // Finds the words of each of several concatenated messages.
  tensorflow::Status Lengths(const tensorflow::Tensor& message, tensorflow::Tensor* lengths) const;
  // A rank with a split of 0 asks for nothing.
  tensorflow::Status Parse(const tensorflow::Tensor& message, const tensorflow::Tensor& splits,
                           ReceivedMessage* received) const;

  // Parses the request of rank `rank`, `length` words, as a separate message.
  tensorflow::Status ParseOne(int rank, const int64_t* words, int64_t length,
                              ReceivedMessage* received) const;

  // Parses a message that is elsewhere: `headers` are copies of its 2 S words for each rank, one
  // after the other. The lengths of bags are not read.
  tensorflow::Status Parse(const tensorflow::Tensor& message, const tensorflow::Tensor& splits,
                           const int64_t* headers, ReceivedMessage* received) const;

 private:
  void Clear(ReceivedMessage* received) const;
  // Appends the pieces of one rank's words, of which `left` are there; `header` as above.
  tensorflow::Status Append(int rank, const int64_t* words, int64_t length, int64_t left,
                            const int64_t* header, ReceivedMessage* received) const;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_WIRE_H_
