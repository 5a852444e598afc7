// Reads and plans lookups for the kernels of pool.cu.

#ifndef COLLECTIVE_NATIVE_GPU_POOLING_H_
#define COLLECTIVE_NATIVE_GPU_POOLING_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../lookups.h"
#include "../variables.h"
#include "segments.h"
#include "stream.h"

namespace collective {
namespace gpu {

// How many samples a group of lanes works on.
enum class Samples { kOne, kInFlight, kOneForEachLane };

// Returns what is best for pooling: long parts of the work, but several for each multiprocessor.
inline Samples SamplesOfGroup(int64_t ids, int64_t samples) {
  constexpr int64_t kMany = 4096 * kThreads;
  return ids <= samples || samples >= kMany ? Samples::kOneForEachLane : Samples::kInFlight;
}

// As pool.cu reads it.
struct LookupWords {
  int64_t tile;
  int64_t first, end;  // of its samples
  int64_t dim;
  int64_t lanes;      // of a group
  int64_t out;        // address
  int64_t run, runs;  // where its rows are
  int64_t combiner;
  int64_t weighted;
  int64_t max_norm;  // the bits of a float; 0 for none
  int64_t positions, weights;
  int64_t each;  // samples of a group
};

// As pool.cu reads it.
struct BatchWords {
  int64_t tile;
  int64_t first, end;  // of its samples
  int64_t id, ids;     // the first of all, and how many
  int64_t samples;     // address
};

// A lookup whose rows are combined by sample.
struct PooledLookup {
  int64_t first = 0, samples = 0;  // Numbered among those of all lookups.
  int64_t dim = 0;
  int64_t combiner = kSum;
  bool weighted = false;
  float max_norm = 0;
  int64_t run = 0, runs = 0;
  // Addresses where those of the first id of all lookups would be, if this one had it.
  int64_t positions = 0, weights = 0;
};

// Adds a lookup, of which a group of `lanes` works on samples `of_group`.
inline void AddLookup(const PooledLookup& lookup, int64_t lanes, Samples of_group, int64_t out,
                      Tiled<LookupWords>* tiled) {
  uint32_t norm = 0;
  std::memcpy(&norm, &lookup.max_norm, sizeof(norm));
  LookupWords words{};
  words.first = lookup.first;
  words.end = lookup.first + lookup.samples;
  words.dim = lookup.dim;
  words.lanes = lanes;
  words.out = out;
  words.run = lookup.run;
  words.runs = lookup.runs;
  words.combiner = lookup.combiner;
  words.weighted = lookup.weighted;
  words.max_norm = norm;
  words.positions = lookup.positions;
  words.weights = lookup.weights;
  constexpr int64_t kInFlight = 4;  // as in pool.cu
  words.each = of_group == Samples::kOne ? 1 : of_group == Samples::kInFlight ? kInFlight : lanes;
  tiled->Add(words, CeilOfQuotient(lookup.samples, kThreads / lanes * words.each));
}

// A member of CollectivePool, and its inputs on the device.
struct Member {
  Lookup attributes;
  int number = 0;
  int64_t id = 0, ids = 0;  // The first among those of all, and how many.
  int64_t samples = 0;      // Rows of its result.
  const int32_t* positions = nullptr;
  const int64_t* rows = nullptr;  // Of its table; null: positions are of rows that came back.
  const int64_t* of = nullptr;    // The sample of each id; null: each has its own.
  const float* weights = nullptr;
};

// The members that an operation pools, and the rows that came back.
class Pooling {
 public:
  // Reads inputs, and checks what can be checked without the device. `counts`: of CollectiveAsk,
  // [N · S] rows and [M] samples. `with_rows`: the rows that came back are an input, `rows`; else
  // only their numbers count, and addresses are offsets into the gradient of all of them.
  tensorflow::Status Open(tensorflow::OpKernelContext* context, const std::vector<Lookup>& members,
                          const std::vector<int>& wanted, bool with_rows = true);

  // Has members take their rows straight from `tables` [S], which are their sections' and have all
  // rows. `ids`: for each of all members [K] int64, the rows.
  tensorflow::Status TakeFrom(const std::vector<Table>& tables, const tensorflow::OpInputList& ids);

  // Describes the members for sample_offsets.
  Tiled<BatchWords> Batches() const;
  // Describes the members for the other kernels; `out` of each; `lanes` 0: by its dimension.
  Tiled<LookupWords> Lookups(int64_t lanes, Samples of_group,
                             const std::vector<int64_t>& out) const;
  // The table that a member takes its rows from.
  const Table& TableOf(const Member& member) const { return tables_[member.attributes.section]; }
  // The runs that the kernels of Lookups take rows from.
  std::vector<RunWords> RunsOfRows() const;
  // Whether the numbers of rows have 64 bits, as these kernels take it.
  int32_t IsWide() const { return tables_.empty() ? 0 : 1; }
  // Tells whether rows are taken as they are, each lookup's from one run, by whole accesses: what
  // the faster kernel can do.
  bool IsPlain(const std::vector<int64_t>& out) const;

  std::vector<Member> members;
  Runs rows;  // Those that came back.
  int sections = 0;
  // The same by rank and section, also where none came.
  std::vector<int64_t> run_counts, run_dims, run_addresses;
  int64_t elements = 0;          // Of all of these.
  int64_t ids = 0, samples = 0;  // Of all members.
  bool clips = false;

 private:
  tensorflow::Status ReadRows(const tensorflow::Tensor* flat, const tensorflow::Tensor& counts,
                              const std::vector<Lookup>& members);
  // `samples`: of the member, if it has a combiner.
  tensorflow::Status ReadMember(const LookupInputs& inputs, int64_t samples, Member* member);

  std::vector<Table> tables_;  // None: rows are those that came back.
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_POOLING_H_
