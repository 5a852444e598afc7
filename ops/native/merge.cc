// CollectiveMergeRequests: what the ranks of one host request of some owners, as one message to
// each owner. CollectiveSpreadMerged: the rows that came back, to the ranks that asked for them;
// CollectiveSumMerged, its transpose: their gradients, summed by what travelled once.
//
//   asker 0: to owner 0, to owner 1, …          to owner 0: section by section the distinct keys
//   asker 1: to owner 0, to owner 1, …   ──►                of all askers, or all their bags
//   …                                           to owner 1: …
//
// In an unpooled section a key of several askers travels once, in the order of first appearance,
// and so does its row. A pooled section has the askers' bags one after the other.
//
// An owner that got the messages of all ranks merges them, too, host by host (`by_owner`: what is
// for one of the `owners` stands together): CollectiveFirstMerged leaves one row of each key for
// each host. The ranks of the host find the same merged message, so they know where each row is.

#include <algorithm>
#include <limits>

#include "numbering.h"
#include "parallel.h"
#include "scans.h"
#include "vectors.h"
#include "wire.h"

namespace collective {
namespace merge_op {

using namespace tensorflow;

// The requests of all askers to one owner for one section, as one.
struct Merged {
  int64_t bags = 0, keys = 0;
  int64_t* words = nullptr;  // Where its keys are written.
  int64_t flat = 0;          // Element offset of its first bag's row.
  Status error;
};

class MergeRequestsOp : public OpKernel {
 public:
  explicit MergeRequestsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("owners", &owners_));
    OP_REQUIRES(context, owners_ >= 1 && layout_.ranks % owners_ == 0,
                errors::InvalidArgument(layout_.ranks, " messages are not of askers to ", owners_,
                                        " owners each"));
    OP_REQUIRES_OK(context, context->GetAttr("by_owner", &by_owner_));
    askers_ = layout_.ranks / owners_;
  }

  void Compute(OpKernelContext* context) override {
    const int64_t sections = static_cast<int64_t>(layout_.sections.size());
    Tensor lengths;
    OP_REQUIRES_OK(context,
                   context->allocate_temp(DT_INT32, TensorShape({layout_.ranks}), &lengths));
    OP_REQUIRES_OK(context, layout_.Lengths(context->input(0), &lengths));
    ReceivedMessage received;
    OP_REQUIRES_OK(context, layout_.Parse(context->input(0), lengths, &received));
    Tensor *positions = nullptr, *bags = nullptr, *row_splits = nullptr, *splits = nullptr;
    const int64_t pieces = static_cast<int64_t>(received.pieces.size());
    std::vector<int64_t> first(pieces + 1, 0);  // Where each piece's bags begin among all.
    for (int64_t p = 0; p < pieces; ++p) first[p + 1] = first[p] + received.pieces[p].bags;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({owners_}), &splits));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({askers_}), &row_splits));
    OP_REQUIRES_OK(context, context->allocate_output(3, TensorShape({first[pieces]}), &positions));
    OP_REQUIRES_OK(context, context->allocate_output(4, TensorShape({pieces}), &bags));
    for (int64_t p = 0; p < pieces; ++p) bags->flat<int64_t>()(p) = received.pieces[p].bags;
    for (int a = 0; a < askers_; ++a) {
      int64_t elements = 0;
      for (int o = 0; o < owners_; ++o) elements += received.row_splits[Message(a, o)];
      row_splits->flat<int32_t>()(a) = static_cast<int32_t>(elements);
    }

    // 1. Number the distinct keys of each owner and section, in the place of the positions.
    std::vector<Merged> merged(owners_ * sections);
    std::vector<Buffer<int64_t>> distinct(merged.size()), counts(merged.size());
    int32_t* numbers = positions->flat<int32_t>().data();
    const auto of_asker = [&](int64_t m, int a) { return PieceOf(m, a, sections); };
    Parallel(context, static_cast<int64_t>(merged.size()), 6 * first[pieces], [&](int64_t m) {
      Merged& out = merged[m];
      const Section& section = layout_.sections[m % sections];
      uint64_t bits = 0;
      for (int a = 0; a < askers_; ++a) {
        const Piece& piece = received.pieces[of_asker(m, a)];
        out.bags += piece.bags;
        out.keys += piece.keys;
        if (!section.pooled) bits |= BitwiseOr(piece.key, piece.keys);
      }
      if (section.pooled) return;
      int64_t* keys = distinct[m].At(out.keys + 1);
      auto numbering = numberings_.Take();
      numbering->Start(out.keys, bits, keys);
      for (int a = 0; a < askers_; ++a) {
        const int64_t p = of_asker(m, a);
        numbering->Add(received.pieces[p].key, received.pieces[p].keys, numbers + first[p]);
      }
      if (section.counted) {
        out.error = Count(received, m, first, numbers, counts[m].At(out.keys + 1), out.keys);
      }
      out.keys = out.bags = numbering->count();
    });
    for (const Merged& of : merged) OP_REQUIRES_OK(context, of.error);

    // 2. Place every part.
    int64_t words = 0, elements = 0;
    for (int o = 0; o < owners_; ++o) {
      const int64_t before = words;
      words += 2 * sections;
      for (int64_t s = 0; s < sections; ++s) {
        Merged& part = merged[o * sections + s];
        part.flat = elements;
        words += layout_.sections[s].Words(part.bags, part.keys);
        elements += part.bags * layout_.sections[s].dim;
      }
      splits->flat<int32_t>()(o) = static_cast<int32_t>(words - before);
    }
    Tensor* message = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({words}), &message));
    int64_t* at = message->flat<int64_t>().data();
    for (int o = 0; o < owners_; ++o) {
      int64_t* header = at;
      at += 2 * sections;
      for (int64_t s = 0; s < sections; ++s) {
        Merged& part = merged[o * sections + s];
        header[2 * s] = part.bags;
        header[2 * s + 1] = part.keys;
        part.words = at;
        at += layout_.sections[s].Words(part.bags, part.keys);
      }
    }

    // 3. Write keys, and make numbers positions.
    Parallel(context, static_cast<int64_t>(merged.size()), 3 * first[pieces], [&](int64_t m) {
      const Merged& part = merged[m];
      const Section& section = layout_.sections[m % sections];
      if (section.pooled) return WriteBags(received, m, first, part, numbers);
      std::copy_n(distinct[m].data(), part.keys, part.words);
      if (section.counted) {
        int32_t* out = reinterpret_cast<int32_t*>(part.words + part.keys);
        if (part.keys % 2 == 1) out[part.keys] = 0;
        for (int64_t k = 0; k < part.keys; ++k) out[k] = static_cast<int32_t>(counts[m].data()[k]);
      }
      for (int a = 0; a < askers_; ++a) {
        const int64_t p = of_asker(m, a);
        for (int64_t b = first[p]; b < first[p + 1]; ++b)
          numbers[b] = static_cast<int32_t>(part.flat + numbers[b] * section.dim);
      }
    });
  }

 private:
  // Returns the number of the message of an asker to an owner.
  int64_t Message(int64_t asker, int64_t owner) const {
    return by_owner_ ? owner * askers_ + asker : asker * owners_ + owner;
  }

  // Returns the number of an asker's piece of m, which counts owners and sections.
  int64_t PieceOf(int64_t m, int64_t asker, int64_t sections) const {
    return Message(asker, m / sections) * sections + m % sections;
  }

  // Adds up how often the askers ask for each distinct key of an owner and section.
  Status Count(const ReceivedMessage& received, int64_t m, const std::vector<int64_t>& first,
               const int32_t* numbers, int64_t* counts, int64_t most) const {
    const int64_t sections = static_cast<int64_t>(layout_.sections.size());
    std::fill_n(counts, most, 0);
    for (int a = 0; a < askers_; ++a) {
      const int64_t p = PieceOf(m, a, sections);
      const Piece& piece = received.pieces[p];
      for (int64_t k = 0; k < piece.keys; ++k) counts[numbers[first[p] + k]] += piece.counts[k];
    }
    if (std::any_of(counts, counts + most, [](int64_t count) { return count > kMaxCount; })) {
      return errors::InvalidArgument("the ranks of a host ask for a key more than ", kMaxCount,
                                     " times at once: use smaller batches");
    }
    return OkStatus();
  }

  // Writes the askers' bags of a pooled section one after the other.
  void WriteBags(const ReceivedMessage& received, int64_t m, const std::vector<int64_t>& first,
                 const Merged& part, int32_t* positions) const {
    const int64_t sections = static_cast<int64_t>(layout_.sections.size());
    const Section& section = layout_.sections[m % sections];
    int64_t* keys = part.words;
    int64_t* after_keys = keys + part.keys;
    int64_t* after_lengths = after_keys + (part.bags + 1) / 2;
    int32_t* lengths = reinterpret_cast<int32_t*>(after_keys);
    float* weights = reinterpret_cast<float*>(after_lengths);
    if (part.bags % 2 == 1) after_lengths[-1] = 0;
    if (section.weighted && part.keys % 2 == 1) after_lengths[part.keys / 2] = 0;
    int64_t flat = part.flat;
    for (int a = 0; a < askers_; ++a) {
      const int64_t p = PieceOf(m, a, sections);
      const Piece& piece = received.pieces[p];
      keys = std::copy_n(piece.key, piece.keys, keys);
      if (piece.bags > 0) lengths = std::copy_n(piece.lengths, piece.bags, lengths);
      if (section.weighted && piece.keys > 0)
        weights = std::copy_n(piece.weights, piece.keys, weights);
      for (int64_t b = first[p]; b < first[p + 1]; ++b, flat += section.dim)
        positions[b] = static_cast<int32_t>(flat);
    }
  }

  Layout layout_;
  int owners_ = 1, askers_ = 1;
  bool by_owner_ = false;
  ObjectPool<Numbering> numberings_;
};

// Reads what both directions have: the positions of all bags, and how many each piece has.
class MergedRowsOp : public OpKernel {
 public:
  explicit MergedRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(context, context->GetAttr("owners", &owners_));
    for (const int64_t dim : dims_)
      OP_REQUIRES(context, dim >= 1, errors::InvalidArgument("a section has dimension ", dim));
  }

 protected:
  struct Piece {
    int64_t bags, dim;
    int64_t flat;             // Element offset of its first bag among what the askers have.
    const int32_t* position;  // [bags], element offsets among what travelled.
  };

  // `elements`: of what travelled; `all`: of what the askers have.
  Status Read(const Tensor& positions, const Tensor& bags, int64_t elements,
              std::vector<Piece>* pieces, int64_t* all) const {
    const int64_t sections = static_cast<int64_t>(dims_.size()), count = bags.NumElements();
    const int32_t* position = positions.flat<int32_t>().data();
    int64_t left = positions.NumElements();
    *all = 0;
    if (owners_ < 1 || sections == 0 || count % (owners_ * sections) != 0)
      return errors::InvalidArgument(count, " numbers of bags are not of ", sections,
                                     " sections of ", owners_, " owners");
    for (int64_t p = 0; p < count; ++p) {
      const int64_t of = bags.flat<int64_t>()(p), dim = dims_[p % sections];
      if (of < 0 || of > left)
        return errors::InvalidArgument("there are ", positions.NumElements(),
                                       " positions of other numbers of bags");
      if (!AreWithin(position, of, elements - dim + 1))
        return errors::InvalidArgument("positions of rows of ", dim, " are not in the ", elements,
                                       " elements that travelled");
      pieces->push_back({of, dim, *all, position});
      position += of;
      left -= of;
      *all += of * dim;
    }
    if (left != 0) return errors::InvalidArgument(left, " positions are of no bag");
    return OkStatus();
  }

  std::vector<int64_t> dims_;
  int owners_ = 1;
};

class SpreadMergedOp : public MergedRowsOp {
 public:
  using MergedRowsOp::MergedRowsOp;

  void Compute(OpKernelContext* context) override {
    const Tensor& rows = context->input(0);
    std::vector<Piece> pieces;
    int64_t all = 0;
    OP_REQUIRES_OK(context,
                   Read(context->input(1), context->input(2), rows.NumElements(), &pieces, &all));
    Tensor* flat = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({all}), &flat));
    const float* from = rows.flat<float>().data();
    float* out = flat->flat<float>().data();
    Parallel(context, static_cast<int64_t>(pieces.size()), all, [&](int64_t p) {
      const Piece& piece = pieces[p];
      CopyRows(Rows<int32_t>{from, piece.position, 1}, piece.bags, piece.dim, out + piece.flat);
    });
  }
};

class SumMergedOp : public MergedRowsOp {
 public:
  using MergedRowsOp::MergedRowsOp;

  void Compute(OpKernelContext* context) override {
    const Tensor &gradient = context->input(0), &rows = context->input(3);
    const int64_t elements = rows.NumElements();
    std::vector<Piece> pieces;
    int64_t all = 0;
    OP_REQUIRES_OK(context, Read(context->input(1), context->input(2), elements, &pieces, &all));
    OP_REQUIRES(context, gradient.NumElements() == all,
                errors::InvalidArgument("the gradient has ", gradient.NumElements(),
                                        " elements, but the askers have ", all));
    Tensor* flat = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({elements}), &flat));
    const float* from = gradient.flat<float>().data();
    float* out = flat->flat<float>().data();
    const int64_t merged = owners_ * static_cast<int64_t>(dims_.size());
    const int64_t count = static_cast<int64_t>(pieces.size());
    std::atomic<int64_t> written{0};
    // In the order of the askers. What the first of them sends is written, not added.
    Parallel(context, merged, all, [&](int64_t m) {
      auto targets = targets_.Take();
      int64_t start = -1;
      uint32_t next = 0;
      for (int64_t p = m; p < count; p += merged) {
        const Piece& piece = pieces[p];
        if (piece.bags == 0) continue;
        if (start < 0) start = piece.position[0];
        uint32_t* to = targets->At(piece.bags);
        for (int64_t b = 0; b < piece.bags; ++b) {
          const uint32_t number = static_cast<uint32_t>((piece.position[b] - start) / piece.dim);
          const uint32_t is_new = number == next;
          to[b] = number | is_new << 31;
          next += is_new;
        }
        AddRows<First::kFlags>(from + piece.flat, piece.bags, 1, to, piece.dim, piece.dim,
                               out + start);
      }
      written += next * dims_[m % dims_.size()];
    });
    OP_REQUIRES(context, written == elements,
                errors::InvalidArgument("gradients came for ", written.load(), " of the ", elements,
                                        " elements that travelled"));
  }

 private:
  ObjectPool<Buffer<uint32_t>> targets_;
};

// Of messages that were merged by owner.
class FirstMergedOp : public MergedRowsOp {
 public:
  using MergedRowsOp::MergedRowsOp;

  void Compute(OpKernelContext* context) override {
    const Tensor& rows = context->input(0);
    std::vector<Piece> pieces;
    int64_t all = 0;
    OP_REQUIRES_OK(context,
                   Read(context->input(1), context->input(2), rows.NumElements(), &pieces, &all));
    OP_REQUIRES(context, rows.NumElements() == all,
                errors::InvalidArgument("there are ", rows.NumElements(),
                                        " elements, but the askers have ", all));
    // The first bags of each owner and section begin where those of the one before end.
    const int64_t sections = static_cast<int64_t>(dims_.size()), merged = owners_ * sections;
    const int64_t askers = static_cast<int64_t>(pieces.size()) / merged;
    std::vector<int64_t> starts(merged + 1, 0);
    Tensor *flat = nullptr, *splits = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({owners_}), &splits));
    for (int o = 0; o < owners_; ++o) {
      for (int64_t s = 0; s < sections; ++s) {
        const int64_t m = o * sections + s;
        int64_t end = starts[m];
        for (int64_t a = 0; a < askers; ++a) {
          const Piece& piece = pieces[(o * askers + a) * sections + s];
          for (int64_t b = 0; b < piece.bags; ++b)
            end = std::max(end, piece.position[b] + piece.dim);
        }
        starts[m + 1] = end;
      }
      splits->flat<int32_t>()(o) =
          static_cast<int32_t>(starts[(o + 1) * sections] - starts[o * sections]);
    }
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({starts[merged]}), &flat));
    const float* from = rows.flat<float>().data();
    float* out = flat->flat<float>().data();
    std::atomic<int64_t> written{0};
    Parallel(context, merged, all, [&](int64_t m) {
      int64_t next = starts[m];
      for (int64_t a = 0; a < askers; ++a) {
        const Piece& piece = pieces[(m / sections * askers + a) * sections + m % sections];
        for (int64_t b = 0; b < piece.bags; ++b) {
          if (piece.position[b] != next) continue;
          std::copy_n(from + piece.flat + b * piece.dim, piece.dim, out + next);
          next += piece.dim;
        }
      }
      written += next - starts[m];
    });
    OP_REQUIRES(context, written == starts[merged],
                errors::InvalidArgument("rows came for ", written.load(), " of the ",
                                        starts[merged], " elements that travel"));
  }
};

REGISTER_KERNEL_BUILDER(Name("CollectiveFirstMerged").Device(DEVICE_CPU), FirstMergedOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveMergeRequests").Device(DEVICE_CPU), MergeRequestsOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSpreadMerged").Device(DEVICE_CPU), SpreadMergedOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveSumMerged").Device(DEVICE_CPU), SumMergedOp);

}  // namespace merge_op
}  // namespace collective
