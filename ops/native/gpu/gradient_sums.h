// Sums the gradients of bags, as the ranks sent them, by row of each table: the results of
// CollectiveReduceRows, and the first step of the operation that updates rows by the sums. It uses
// the kernels of distinct.cu, pool.cu, occurrences.cu and sums.cu; the host waits only for the
// number of distinct rows of each table.

#ifndef COLLECTIVE_NATIVE_GPU_GRADIENT_SUMS_H_
#define COLLECTIVE_NATIVE_GPU_GRADIENT_SUMS_H_

#include <algorithm>
#include <optional>
#include <vector>

#include "../wire.h"
#include "bags.h"
#include "distinct.h"
#include "message.h"
#include "occurrences.h"
#include "segments.h"
#include "stream.h"
#include "sums.h"

namespace collective {
namespace gpu {

// As distinct.cu reads it.
struct PartWords {
  int64_t tile;
  int64_t from, to;  // addresses
  int64_t count;
  int64_t before;
};

inline void AddPart(const void* from, void* to, int64_t count, int64_t before,
                    Tiled<PartWords>* parts) {
  PartWords words{};
  words.from = AddressOf(static_cast<const char*>(from));
  words.to = AddressOf(static_cast<char*>(to));
  words.count = count;
  words.before = before;
  parts->Add(words, CeilOfQuotient(count, kKeysOfTile));
}

// Sums for U of T tables: all tables, or those numbered in an attribute `updated`.
class GradientSums {
 public:
  // Holds the sums of one run of an operation.
  struct Run {
    ReceivedMessage received;
    const tensorflow::Tensor* gradient = nullptr;
    tensorflow::OpInputList rows;      // [U]
    std::vector<Table> tables;         // [U]; where rows are clipped, the caller fills it first.
    int64_t keys = 0;                  // K
    std::vector<int64_t> came, count;  // [U], of keys and of distinct rows.
    int64_t* distinct = nullptr;       // Those of all tables, one after the other.
    int32_t* inverse = nullptr;        // [K], the number of each key among these.
    Runs gradients;                    // Those of all bags, table by table.
    // [U], the gradients of keys that one rank alone has asked for, in one section; null: of
    // others.
    std::vector<const float*> alone;
    std::optional<Bags<int64_t>> bags;
    void *terms = nullptr, *along = nullptr;  // Of each key; null: all are gradients of their own.
    std::optional<Occurrences> occurrences;
    RowSums sums;
  };

  // Reads the attributes of an operation.
  tensorflow::Status Read(tensorflow::OpKernelConstruction* context) {
    using tensorflow::errors::InvalidArgument;
    TF_RETURN_IF_ERROR(layout_.Read(context));
    TF_RETURN_IF_ERROR(context->GetAttr("scale", &scale_));
    if (context->HasAttr("updated")) {
      TF_RETURN_IF_ERROR(context->GetAttr("updated", &tables_));
    } else {
      for (int t = 0; t < layout_.tables; ++t) tables_.push_back(t);
    }
    place_of_.assign(layout_.tables, -1);
    for (size_t u = 0; u < tables_.size(); ++u) {
      const int t = tables_[u];
      if (t < 0 || t >= layout_.tables || place_of_[t] >= 0)
        return InvalidArgument("table ", t, " is none of ", layout_.tables, ", or there twice");
      place_of_[t] = static_cast<int>(u);
    }
    dims_.assign(size(), 0);
    for (const Section& section : layout_.sections) {
      const int u = place_of_[section.table];
      if (u < 0) continue;
      if (dims_[u] != 0 && dims_[u] != section.dim) {
        return InvalidArgument("table ", section.table, " has sections of dimension ", dims_[u],
                               " and ", section.dim);
      }
      dims_[u] = section.dim;
      pooled_ |= section.pooled;
      clips_ |= section.max_norm > 0;
      // Keys without a row all have the first one of a dynamic table.
      repeats_ |= section.pooled || IsDynamic(section.kind);
    }
    for (int64_t& dim : dims_) dim = std::max<int64_t>(dim, 1);
    return tensorflow::OkStatus();
  }

  int64_t size() const { return static_cast<int64_t>(tables_.size()); }
  int64_t dim(int64_t u) const { return dims_[u]; }
  bool clips() const { return clips_; }
  float scale() const { return scale_; }

  // Reads the inputs `gradient`, `rows`, `message`, `splits` and `headers`.
  tensorflow::Status Open(tensorflow::OpKernelContext* context, Run* run) const {
    using tensorflow::errors::InvalidArgument;
    const tensorflow::Tensor *message = nullptr, *splits = nullptr;
    tensorflow::OpInputList headers;
    TF_RETURN_IF_ERROR(context->input("gradient", &run->gradient));
    TF_RETURN_IF_ERROR(context->input_list("rows", &run->rows));
    TF_RETURN_IF_ERROR(context->input("message", &message));
    TF_RETURN_IF_ERROR(context->input("splits", &splits));
    TF_RETURN_IF_ERROR(context->input_list("headers", &headers));
    TF_RETURN_IF_ERROR(ParseByHeaders(layout_, *message, *splits, headers, &run->received));
    if (run->gradient->NumElements() != run->received.elements) {
      return InvalidArgument("the gradient has ", run->gradient->NumElements(),
                             " elements, but the ranks asked for ", run->received.elements);
    }
    for (int64_t u = 0; u < size(); ++u) {
      const int64_t came = run->rows[u].NumElements();
      if (came != run->received.rows[tables_[u]]) {
        return InvalidArgument("the ranks asked for ", run->received.rows[tables_[u]],
                               " rows of table ", tables_[u], ", but ", came,
                               " row numbers are given");
      }
      run->came.push_back(came);
      run->keys += came;
    }
    run->count.assign(size(), 0);
    if (run->keys > kMaxCount) {
      return InvalidArgument(run->keys, " keys at once, but no more than ", kMaxCount,
                             " can be: use smaller batches");
    }
    return AddPieces(run);
  }

  // Tells whether each row has one gradient: a rank's requests in a section are distinct. Then
  // there is nothing to sum.
  bool AreDistinct(const Run& run) const {
    for (int64_t u = 0; u < size(); ++u)
      if (repeats_ || (run.came[u] > 0 && run.alone[u] == nullptr)) return false;
    return true;
  }

  // Numbers the distinct rows. The host waits for their number.
  tensorflow::Status Number(Stream* stream, Run* run) const {
    if (run->keys == 0) return tensorflow::OkStatus();
    // 1. Plan all of it, and upload the plan.
    std::vector<Segment> segments;
    segments.reserve(size());
    for (int64_t u = 0; u < size(); ++u) segments.push_back({run->came[u], u});
    const DistinctPlan plan(segments, std::vector<int>(size(), kStatic));
    void *joined = nullptr, *here = nullptr, *wrong = nullptr;
    TF_RETURN_IF_ERROR(stream->Scratch(run->keys * sizeof(int64_t), &joined));
    TF_RETURN_IF_ERROR(stream->HostScratch((size() + 1) * sizeof(int32_t), &here));
    int32_t* counts = static_cast<int32_t*>(here);
    Tiled<PartWords> parts;
    int64_t before = 0;
    for (int64_t u = 0; u < size(); ++u) {
      AddPart(run->rows[u].data(), static_cast<int64_t*>(joined) + before, run->came[u], 0, &parts);
      before += run->came[u];
    }
    std::vector<int64_t> words;
    plan.AppendTo(&words);
    Packed packed;
    const size_t plan_at = packed.Add(words), parts_at = packed.Add(parts);
    PlannedTerms terms{};
    if (pooled_) terms = PackTerms(run, &packed);
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));

    // 2. Number the rows.
    TF_RETURN_IF_ERROR(
        stream->Launch(Kernel::kCopyKeys, parts.tiles(), there + parts_at, parts.count()));
    DistinctKeys distinct{};
    TF_RETURN_IF_ERROR(LaunchDistinct(stream, plan, there + plan_at, 1,
                                      static_cast<const int64_t*>(joined), &distinct));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kDistinctInverse,
                                      CeilOfQuotient(run->keys, kKeysOfTile), distinct.numbers,
                                      run->keys, distinct.firsts));
    run->distinct = distinct.keys;
    run->inverse = reinterpret_cast<int32_t*>(distinct.firsts);

    // 3. Wait for the counts.
    counts[size()] = 0;
    if (pooled_) {
      TF_RETURN_IF_ERROR(stream->ZeroScratch(sizeof(int32_t), &wrong));
      TF_RETURN_IF_ERROR(run->bags->FindOffsets(stream, there, wrong));
      TF_RETURN_IF_ERROR(stream->CopyToHost(counts + size(), wrong, sizeof(int32_t)));
    }
    TF_RETURN_IF_ERROR(stream->CopyToHost(counts, distinct.counts, size() * sizeof(int32_t)));
    TF_RETURN_IF_ERROR(stream->WaitForCopies());
    if (counts[size()] != 0) {
      return tensorflow::errors::InvalidArgument(
          "a malformed message: the lengths of its bags are not those of its keys");
    }
    run->count.assign(counts, counts + size());
    return pooled_ ? MakeTerms(stream, terms, there, run) : tensorflow::OkStatus();
  }

  // Packs the words of the kernels that sum for `targets`, all distinct rows.
  tensorflow::Status Pack(Stream* stream, const Targets& targets, Run* run, Packed* packed) const {
    run->occurrences.emplace(run->keys, targets.rows());
    run->occurrences->AddTo(packed);
    return run->sums.Pack(stream, targets, run->gradients, *run->occurrences, packed);
  }

  // Orders the gradients, so that `run->sums` sums them. `rows` as it takes them.
  tensorflow::Status Start(Stream* stream, const int64_t* rows, const int64_t* there,
                           Run* run) const {
    const void* placed = run->along == nullptr ? run->terms : nullptr;
    TF_RETURN_IF_ERROR(run->occurrences->Order(stream, run->inverse, there, placed));
    return run->sums.Start(stream, *run->occurrences, rows, run->terms, run->along, there);
  }

 private:
  // Where things are among what was packed.
  struct PlannedTerms {
    size_t gradients_at;
    int32_t gradient_count;
    PackedLookups by_thread;
  };

  // Numbers the gradients of all bags through, in the order of the keys: table by table.
  tensorflow::Status AddPieces(Run* run) const {
    const std::vector<Piece>& pieces = run->received.pieces;
    const Grouped by_table(pieces.size(), tables_.size(), [&](size_t i) {
      return place_of_[layout_.sections[pieces[i].section].table];
    });
    const int64_t begin = AddressOf(run->gradient->flat<float>().data()), nowhere = 0;
    run->tables.resize(size());
    run->bags.emplace(run->tables);
    run->alone.assign(size(), nullptr);
    for (int64_t u = 0; u < size(); ++u) {
      const Table& table = run->tables[u];
      if (clips_ && run->came[u] > 0 && table.dim != dims_[u]) {
        return tensorflow::errors::InvalidArgument("table ", tables_[u], " has rows of ", table.dim,
                                                   ", but its sections are of ", dims_[u]);
      }
      const int64_t* numbers = run->rows[u].flat<int64_t>().data();
      for (const size_t* i = by_table.begin(u); i != by_table.end(u); ++i) {
        const Piece* piece = &pieces[*i];
        run->gradients.Add(begin + piece->flat * kFloatBytes, piece->bags, dims_[u]);
        if (piece->bags == run->came[u])
          run->alone[u] = run->gradient->flat<float>().data() + piece->flat;
        if (!pooled_) continue;
        TF_RETURN_IF_ERROR(run->bags->Add(layout_.sections[piece->section], *piece,
                                          numbers + piece->row, u, nowhere));
      }
    }
    return tensorflow::OkStatus();
  }

  PlannedTerms PackTerms(Run* run, Packed* packed) const {
    PlannedTerms terms{};
    run->bags->Pack(packed);
    terms.by_thread = run->bags->PackLookups(1, Samples::kOne, packed);
    const std::vector<RunWords> gradients = run->gradients.entries();
    terms.gradient_count = static_cast<int32_t>(gradients.size());
    terms.gradients_at = packed->Add(gradients);
    return terms;
  }

  tensorflow::Status MakeTerms(Stream* stream, const PlannedTerms& terms, const int64_t* there,
                               Run* run) const {
    const int64_t bytes = run->keys * kFloatBytes, no_rows = 0;
    void *products = nullptr, *no_numbers = nullptr;
    TF_RETURN_IF_ERROR(stream->Scratch(2 * bytes, &run->terms));
    if (clips_) {
      TF_RETURN_IF_ERROR(stream->Scratch(bytes, &products));
      TF_RETURN_IF_ERROR(stream->Scratch(bytes, &run->along));
      TF_RETURN_IF_ERROR(run->bags->Square(stream, there));
      TF_RETURN_IF_ERROR(run->bags->Multiply(stream, there, there + terms.gradients_at,
                                             terms.gradient_count, products));
    }
    return run->bags->Launch(stream, Kernel::kPoolTerms, terms.by_thread, there, products,
                             run->terms, run->along, no_numbers, no_rows);
  }

  Layout layout_;
  std::vector<int> tables_;    // [U]
  std::vector<int> place_of_;  // [T], among these; -1: none.
  std::vector<int64_t> dims_;  // [U]
  float scale_ = 1;
  bool pooled_ = false, clips_ = false, repeats_ = false;
};

}  // namespace gpu
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_GPU_GRADIENT_SUMS_H_
