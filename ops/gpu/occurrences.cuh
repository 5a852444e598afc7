// Rows that occur often: what is summed of them is summed in pieces, by many blocks. As in
// occurrences.py.

#include "integers.cuh"

constexpr u32 kLong = 64;    // occurrences of a row that are not cut
constexpr u32 kPiece = 512;  // occurrences of one piece
constexpr u32 kEmpty = 16;   // rows without occurrences that one thread writes the offsets of

struct Long {
  u32 row;
  u32 first, count;  // of its pieces
};

struct Piece {
  u32 row;
  u32 first, end;  // of its occurrences
};
