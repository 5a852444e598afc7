// CollectiveAsk on a GPU: the keys of each section by owner, as a message, and where the rows that
// come back belong. Keys of a section that isn't pooled are distinct, and each id has a row.
//
//     distinct_…       distinct.h
//     write_request    the message, in room for one of keys that are all distinct; if sections are
//                      pooled, ask_bags.h instead
//     write_positions
//
// Ids, samples and weights come from the host's memory, and are uploaded in one piece, those of all
// members one after the other. Where the rank that asks pools them itself, parts of it are
// outputs.
//
// All is launched before the host waits for the counts, which tell how long the message is; except
// for the lists of bags, whose lengths they tell.

#include <algorithm>
#include <vector>

#include "ask_bags.h"
#include "distinct.h"
#include "joined_upload.h"
#include "segments.h"
#include "stream.h"
#include "../wire.h"

namespace collective {
namespace gpu {
namespace ask_op {

using namespace tensorflow;

// As ask.cu reads it.
struct MemberWords {
  int64_t tile;          // its first one
  int64_t positions;     // address
  int64_t first, count;  // of its ids among all
};

// As ask.cu reads it.
struct OffsetWords {
  int64_t tile;              // its first one
  int64_t offsets, samples;  // where these are: among numbers of 32 bits, among samples
  int64_t count;             // of samples
};

struct Member {
  int section, combiner;
  int pooled;    // Its number among the pooled members, or -1.
  int weighted;  // Its number among the weighted members, or -1.
  int own = -1;  // Its number among those that the rank itself pools by sample, or -1.
};

class AskOp : public OpKernel {
 public:
  explicit AskOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadSections(context));
    OP_REQUIRES_OK(context, ReadMembers(context));
    std::vector<bool> counted;
    int hosts = 1, counts = 0;
    OP_REQUIRES_OK(context, context->GetAttr("hosts", &hosts));
    OP_REQUIRES_OK(context, context->GetAttr("C", &counts));
    OP_REQUIRES_OK(context, context->GetAttr("counted", &counted));
    OP_REQUIRES(context, std::count(counted.begin(), counted.end(), true) == 0 && hosts == 1,
                errors::Unimplemented("on a GPU no table counts how often keys are asked for, and "
                                      "ranks exchange keys with each other, not by hosts"));
    OP_REQUIRES(context, counts == 2,
                errors::InvalidArgument("on a GPU, positions are numbers of rows, and samples are "
                                        "counted: C must be 2"));
  }

  void Compute(OpKernelContext* context) override {
    Tensor message;  // It and what is uploaded outlive what reads and writes there.
    Asked asked;
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    OP_REQUIRES_OK(context, Read(context, &asked));
    const int64_t runs = ranks_ * static_cast<int64_t>(sections_.size());
    const int last = context->num_outputs() - 1;
    Tensor *counts = nullptr, *samples = nullptr;
    OP_REQUIRES_OK(context, stream.HostOutput(last - 1, TensorShape({runs}), &counts));
    OP_REQUIRES_OK(context,
                   context->allocate_output(
                       last, TensorShape({static_cast<int64_t>(members_.size())}), &samples));
    std::copy(asked.sample_counts.begin(), asked.sample_counts.end(),
              samples->flat<int32_t>().data());
    int32_t *bags = counts->flat<int32_t>().data(), *keys = bags;
    if (pooled_.empty()) {
      OP_REQUIRES_OK(context, AskRows(context, &stream, &asked, &message, bags));
    } else {
      void* told = nullptr;
      OP_REQUIRES_OK(context, stream.HostScratch((2 * runs + 1) * sizeof(int32_t), &told));
      OP_REQUIRES_OK(context,
                     AskBags(context, &stream, &asked, &message, static_cast<int32_t*>(told)));
      std::copy_n(static_cast<int32_t*>(told), runs, bags);
      keys = static_cast<int32_t*>(told) + runs;
    }
    GiveUploaded(context, asked);
    Finish(context, bags, keys, message);
  }

 private:
  // An array within what was uploaded, in words from where all of it is.
  struct Part {
    int64_t at, count;
    bool is_filled = false;  // On the device: it is among what is filled in there.
  };

  // What members ask for, and what kernels read of it.
  struct Asked {
    std::vector<Segment> segments;
    Tiled<MemberWords> plain;  // Members that aren't pooled.
    Tiled<BagMemberWords> pooled;
    std::vector<int> member_of;  // Of each of those.
    int64_t keys = 0, pooled_keys = 0, weighted_keys = 0;
    std::vector<int32_t> sample_counts;  // [M]
    JoinedUpload joined;                 // It begins with the ids.
    Packed packed;
    std::vector<Part> own_samples, own_weights;
    Tiled<OffsetWords> offsets;  // Of samples of the rank's own that are filled in on the device.
    int64_t filled = 0;          // Their words.
    Tensor uploaded, filled_in;
  };

  Status ReadSections(OpKernelConstruction* context) {
    std::vector<int64_t> dims;
    std::vector<bool> weighted;
    TF_RETURN_IF_ERROR(context->GetAttr("ranks", &ranks_));
    TF_RETURN_IF_ERROR(context->GetAttr("kinds", &kinds_));
    TF_RETURN_IF_ERROR(context->GetAttr("dims", &dims));
    TF_RETURN_IF_ERROR(context->GetAttr("pooled", &is_pooled_));
    TF_RETURN_IF_ERROR(context->GetAttr("weighted", &weighted));
    const size_t sections = kinds_.size();
    if (dims.size() != sections || is_pooled_.size() != sections || weighted.size() != sections) {
      return errors::InvalidArgument("kinds, dims, pooled and weighted have ", sections, ", ",
                                     dims.size(), ", ", is_pooled_.size(), " and ", weighted.size(),
                                     " sections");
    }
    for (size_t s = 0; s < sections; ++s) {
      if (!IsKind(kinds_[s], ranks_) || dims[s] < 1 || dims[s] > kMaxCount ||
          (weighted[s] && !is_pooled_[s])) {
        return errors::InvalidArgument("section ", s, " is of kind ", kinds_[s], " and dimension ",
                                       dims[s], ": there are kinds 0 to ", MostKinds(ranks_) - 1,
                                       ", and only pooled sections have weights");
      }
      Section section;
      section.dim = dims[s];
      section.pooled = is_pooled_[s];
      section.weighted = weighted[s];
      sections_.push_back(section);
    }
    return OkStatus();
  }

  Status ReadMembers(OpKernelConstruction* context) {
    std::vector<int> of, combiners;
    int members = 0, pooled = 0, weighted = 0, weighted_so_far = 0;
    TF_RETURN_IF_ERROR(context->GetAttr("M", &members));
    TF_RETURN_IF_ERROR(context->GetAttr("P", &pooled));
    TF_RETURN_IF_ERROR(context->GetAttr("W", &weighted));
    TF_RETURN_IF_ERROR(context->GetAttr("member_sections", &of));
    TF_RETURN_IF_ERROR(context->GetAttr("combiners", &combiners));
    if (of.size() != static_cast<size_t>(members) || combiners.size() != of.size()) {
      return errors::InvalidArgument("there are ", members, " members, but ", of.size(),
                                     " of their sections and ", combiners.size(), " combiners");
    }
    std::vector<int> served(sections_.size(), 0);
    for (int m = 0; m < members; ++m) {
      const int s = of[m];
      if (s < 0 || s >= static_cast<int>(sections_.size()) || combiners[m] < 0 ||
          combiners[m] > kSqrtN) {
        return errors::InvalidArgument("member ", m, " is of section ", s, " of ", sections_.size(),
                                       " with combiner ", combiners[m]);
      }
      const Section& section = sections_[s];
      if (section.pooled && (combiners[m] == kRows || served[s]++ > 0)) {
        return errors::InvalidArgument("section ", s,
                                       " is pooled: it serves one member, which has a combiner");
      }
      members_.push_back({s, combiners[m], section.pooled ? static_cast<int>(pooled_.size()) : -1,
                          section.weighted ? weighted_so_far++ : -1});
      if (section.pooled) pooled_.push_back(m);
    }
    int uploaded = 0;
    TF_RETURN_IF_ERROR(context->GetAttr("I", &uploaded));
    if (uploaded != 0 && uploaded != members) {
      return errors::InvalidArgument("there are ", members, " members, but uploaded_ids of ",
                                     uploaded, ": all are given out, or none");
    }
    std::vector<int> own;
    TF_RETURN_IF_ERROR(context->GetAttr("own", &own));
    int own_samples = 0;
    TF_RETURN_IF_ERROR(context->GetAttr("L", &own_samples));
    if (own.size() != static_cast<size_t>(own_samples)) {
      return errors::InvalidArgument("own names ", own.size(), " members, but there are ",
                                     own_samples, " own_samples");
    }
    for (int l = 0; l < own_samples; ++l) {
      const int m = own[l];
      if (m < 0 || m >= members || members_[m].pooled >= 0 || members_[m].own >= 0) {
        return errors::InvalidArgument(
            "own names member ", m, " of ", members,
            ": it must name members whose sections are not pooled, each ", "at most once");
      }
      members_[m].own = l;
    }
    if (pooled_.size() != static_cast<size_t>(pooled) || weighted_so_far != weighted) {
      return errors::InvalidArgument("of the members ", pooled_.size(), " are pooled and ",
                                     weighted_so_far, " weighted, but there are ", pooled,
                                     " samples and ", weighted, " weights");
    }
    return OkStatus();
  }

  Status Read(OpKernelContext* context, Asked* asked) const {
    OpInputList ids, samples, weights, own_samples, own_weights;
    TF_RETURN_IF_ERROR(context->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(context->input_list("samples", &samples));
    TF_RETURN_IF_ERROR(context->input_list("weights", &weights));
    TF_RETURN_IF_ERROR(context->input_list("own_samples", &own_samples));
    TF_RETURN_IF_ERROR(context->input_list("own_weights", &own_weights));
    for (const Tensor& of : ids) asked->joined.Add(of);
    TF_RETURN_IF_ERROR(AddMembers(context, ids, samples, weights, asked));
    for (const Member& member : members_)
      asked->sample_counts.push_back(member.pooled >= 0 ? CountOf(samples[member.pooled])
                                     : member.own >= 0  ? CountOf(own_samples[member.own])
                                                        : 0);
    for (const Tensor& of : own_samples) AddOwn(of, asked);
    for (const Tensor& of : own_weights)
      asked->own_weights.push_back({asked->joined.AddTensor(of), of.NumElements(), false});
    return OkStatus();
  }

  // Adds samples that the rank pools by itself: by their offsets, where these are fewer bytes.
  static void AddOwn(const Tensor& samples, Asked* asked) {
    const int64_t ids = samples.NumElements(), count = CountOf(samples);
    Part part{0, ids, count >= 0 && (count + 2) / 2 < ids && count < kMaxCount};
    if (part.is_filled) {
      part.at = asked->filled = JoinedUpload::Aligned(asked->filled);
      asked->filled += ids;
      asked->offsets.Add({0, 2 * asked->joined.AddOffsets(samples, count), part.at, count},
                         CeilOfQuotient(count, kThreads));
    } else {
      part.at = asked->joined.AddTensor(samples);
    }
    asked->own_samples.push_back(part);
  }

  Status AddMembers(OpKernelContext* context, const OpInputList& ids, const OpInputList& samples,
                    const OpInputList& weights, Asked* asked) const {
    OpOutputList positions;
    TF_RETURN_IF_ERROR(context->output_list("positions", &positions));
    asked->segments.reserve(members_.size());
    for (size_t m = 0; m < members_.size(); ++m) {
      const Member& member = members_[m];
      const TensorShape& shape = ids[m].shape();
      if (!TensorShapeUtils::IsVector(shape)) {
        return errors::InvalidArgument("ids of member ", m, " must be a vector, but are ",
                                       shape.DebugString());
      }
      const int64_t count = ids[m].NumElements();
      if (asked->keys + count > kMaxCount) {
        return errors::InvalidArgument(asked->keys + count,
                                       " ids or more are looked up at once, but no more than ",
                                       kMaxCount, " can be: use smaller batches");
      }
      asked->segments.push_back({count, member.section});
      if (member.pooled >= 0) {
        TF_RETURN_IF_ERROR(AddPooled(static_cast<int>(m), shape, samples, weights, asked));
      } else {
        Tensor* out = nullptr;
        TF_RETURN_IF_ERROR(positions.allocate(static_cast<int>(m), shape, &out));
        MemberWords words{};
        words.positions = AddressOf(out->flat<int32_t>().data());
        words.first = asked->keys;
        words.count = count;
        asked->plain.Add(words, TilesOf(count));
      }
      asked->keys += count;
    }
    return OkStatus();
  }

  Status AddPooled(int m, const TensorShape& shape, const OpInputList& samples,
                   const OpInputList& weights, Asked* asked) const {
    const Member& member = members_[m];
    const auto check = [&](const char* name, const Tensor& other) {
      if (other.shape() == shape) return OkStatus();
      return Status(errors::InvalidArgument("member ", m, " has ids of shape ", shape.DebugString(),
                                            " and ", name, " of shape ",
                                            other.shape().DebugString()));
    };
    BagMemberWords words{};
    TF_RETURN_IF_ERROR(check("samples", samples[member.pooled]));
    words.samples = asked->joined.Add(samples[member.pooled]);
    words.first = asked->keys;
    words.count = shape.num_elements();
    words.number = static_cast<int64_t>(pooled_.size()) - member.pooled;
    words.combiner = member.combiner;
    if (member.weighted >= 0) {
      TF_RETURN_IF_ERROR(check("weights", weights[member.weighted]));
      words.weights = asked->joined.Add(weights[member.weighted]);
      asked->weighted_keys += words.count;
    }
    asked->pooled_keys += words.count;
    asked->pooled.Add(words, TilesOf(words.count));
    if (words.count > 0) asked->member_of.push_back(m);
    return OkStatus();
  }

  // How many samples there are, by the last one: -1 if that is negative, and the largest number if
  // there are more.
  static int32_t CountOf(const Tensor& samples) {
    const int64_t count = samples.NumElements();
    if (count == 0) return 0;
    const int64_t last = samples.flat<int64_t>()(count - 1);
    return last < 0 ? -1 : static_cast<int32_t>(std::min(last, kMaxCount - 1) + 1);
  }

  // Launches what both ways begin with. The words of `asked` are on the device at `*there`, those
  // of the plan from `plan_at` on.
  Status Order(OpKernelContext* context, Stream* stream, Asked* asked, const DistinctPlan& plan,
               size_t plan_at, const int64_t** there, DistinctKeys* distinct) const {
    const size_t offsets_at = asked->packed.Add(asked->offsets);
    TF_RETURN_IF_ERROR(
        asked->joined.Launch(context, stream, asked->packed, &asked->uploaded, there));
    if (asked->filled > 0) {
      TF_RETURN_IF_ERROR(
          context->allocate_temp(DT_INT64, TensorShape({asked->filled}), &asked->filled_in));
      const void* numbers = asked->uploaded.data();
      TF_RETURN_IF_ERROR(stream->Launch(Kernel::kFillSamples, asked->offsets.tiles(),
                                        *there + offsets_at, asked->offsets.count(), numbers,
                                        asked->filled_in.data()));
    }
    return LaunchDistinct(stream, plan, *there + plan_at, ranks_, AllKeys(*asked), distinct);
  }

  static const int64_t* AllKeys(const Asked& asked) {
    return static_cast<const int64_t*>(asked.uploaded.data());
  }

  // Makes room for the longest message that there could be.
  Status MakeMessage(OpKernelContext* context, const Asked& asked, Tensor* message) const {
    const auto halves = [this](int64_t count, bool Section::* which) {
      const int64_t runs =
          std::count_if(sections_.begin(), sections_.end(),
                        [which](const Section& section) { return section.*which; }) *
          ranks_;
      return (count + runs) / 2;
    };
    const int64_t most = asked.keys + 2 * ranks_ * static_cast<int64_t>(sections_.size()) +
                         halves(asked.pooled_keys, &Section::pooled) +
                         halves(asked.weighted_keys, &Section::weighted);
    if (most > kMaxCount) {
      return errors::InvalidArgument("this batch asks in up to ", most, " words, but no more than ",
                                     kMaxCount, " can travel at once: use smaller batches");
    }
    return context->allocate_temp(DT_INT64, TensorShape({most}), message);
  }

  Status AskRows(OpKernelContext* context, Stream* stream, Asked* asked, Tensor* message,
                 int32_t* counts) const {
    const DistinctPlan plan(asked->segments, kinds_);
    const size_t members_at = asked->packed.Add(asked->plain),
                 plan_at = AddPlan(plan, &asked->packed);
    const int64_t* there = nullptr;
    DistinctKeys distinct{};
    TF_RETURN_IF_ERROR(Order(context, stream, asked, plan, plan_at, &there, &distinct));
    TF_RETURN_IF_ERROR(MakeMessage(context, *asked, message));
    const uint32_t sections = static_cast<uint32_t>(sections_.size());
    const uint32_t* by_number = nullptr;
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kWriteRequest, TilesOf(message->NumElements()),
                                      distinct.keys, distinct.counts, distinct.starts,
                                      static_cast<uint32_t>(ranks_), sections, message->data()));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kWritePositions, asked->plain.tiles(),
                                      there + members_at, asked->plain.count(), distinct.numbers,
                                      distinct.firsts, by_number));
    TF_RETURN_IF_ERROR(
        stream->CopyToHost(counts, distinct.counts, ranks_ * sections * sizeof(int32_t)));
    return stream->WaitForCopies();
  }

  // `told`: see BagRequest.
  Status AskBags(OpKernelContext* context, Stream* stream, Asked* asked, Tensor* message,
                 int32_t* told) const {
    const DistinctPlan plan(asked->segments, kinds_, is_pooled_);
    Packed* packed = &asked->packed;
    const size_t plan_at = AddPlan(plan, packed), plain_at = packed->Add(asked->plain),
                 pooled_at = packed->Add(asked->pooled),
                 kinds_at = packed->Add(BagRequest::KindsOf(sections_));
    const int64_t* there = nullptr;
    DistinctKeys distinct{};
    TF_RETURN_IF_ERROR(Order(context, stream, asked, plan, plan_at, &there, &distinct));
    TF_RETURN_IF_ERROR(MakeMessage(context, *asked, message));
    BagRequest bags(stream, asked->pooled, there + pooled_at, AllKeys(*asked), there + kinds_at,
                    ranks_, static_cast<int64_t>(sections_.size()));
    TF_RETURN_IF_ERROR(bags.Number(distinct, asked->keys, asked->weighted_keys > 0,
                                   plan.SectionTiles(there + plan_at)));
    TF_RETURN_IF_ERROR(bags.Write(distinct, asked->keys, message->data()));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kWritePositions, asked->plain.tiles(),
                                      there + plain_at, asked->plain.count(), distinct.numbers,
                                      distinct.firsts, bags.bags()));
    TF_RETURN_IF_ERROR(stream->CopyToHost(told, bags.told(), bags.told_count() * sizeof(int32_t)));
    TF_RETURN_IF_ERROR(stream->WaitForCopies());
    const int32_t unsorted = told[bags.told_count() - 1];
    if (unsorted != 0) {
      return errors::InvalidArgument("samples of member ", pooled_[pooled_.size() - unsorted],
                                     " must ascend from 0 on: they are not sorted");
    }
    return ListBags(context, stream, &bags, *asked, told);
  }

  // Makes the outputs of pooled members. `counts` [N, S] are their bags.
  Status ListBags(OpKernelContext* context, Stream* stream, BagRequest* bags, const Asked& asked,
                  const int32_t* counts) const {
    OpOutputList positions, samples, scales;
    TF_RETURN_IF_ERROR(context->output_list("positions", &positions));
    TF_RETURN_IF_ERROR(context->output_list("bag_samples", &samples));
    TF_RETURN_IF_ERROR(context->output_list("bag_scales", &scales));
    std::vector<BagMemberWords> words = asked.pooled.entries();
    size_t listed = 0;
    for (size_t p = 0; p < pooled_.size(); ++p) {
      const int m = pooled_[p];
      int64_t count = 0;
      for (int r = 0; r < ranks_; ++r) count += counts[r * sections_.size() + members_[m].section];
      Tensor *position = nullptr, *sample = nullptr, *scale = nullptr;
      const int number = static_cast<int>(p);
      TF_RETURN_IF_ERROR(positions.allocate(m, TensorShape({count}), &position));
      TF_RETURN_IF_ERROR(samples.allocate(number, TensorShape({count}), &sample));
      TF_RETURN_IF_ERROR(scales.allocate(number, TensorShape({count}), &scale));
      if (listed == words.size() || asked.member_of[listed] != m) continue;  // It has no ids.
      words[listed].positions = AddressOf(position->flat<int32_t>().data());
      words[listed].bag_samples = AddressOf(sample->flat<int64_t>().data());
      words[listed].bag_scales = AddressOf(scale->flat<float>().data());
      ++listed;
    }
    Packed packed;
    packed.Add(words);
    const int64_t* there = nullptr;
    TF_RETURN_IF_ERROR(stream->Upload(packed.words(), &there));
    return bags->List(there);
  }

  static size_t AddPlan(const DistinctPlan& plan, Packed* packed) {
    std::vector<int64_t> words;
    plan.AppendTo(&words);
    return packed->Add(words);
  }

  // Gives out samples, weights and ids where the rank's own pooling takes them.
  static void GiveUploaded(OpKernelContext* context, const Asked& asked) {
    OpOutputList samples, weights, ids;
    OP_REQUIRES_OK(context, context->output_list("uploaded_ids", &ids));
    int64_t first = 0;
    for (int m = 0; m < ids.size(); ++m) {
      const int64_t end = first + asked.segments[m].keys;
      ids.set(m, asked.uploaded.Slice(first, end));
      first = end;
    }
    OP_REQUIRES_OK(context, context->output_list("uploaded_samples", &samples));
    OP_REQUIRES_OK(context, context->output_list("uploaded_weights", &weights));
    for (int i = 0; i < samples.size(); ++i) {
      const Part& part = asked.own_samples[i];
      const Tensor& of = part.is_filled ? asked.filled_in : asked.uploaded;
      samples.set(i, of.Slice(part.at, part.at + part.count));
    }
    for (int i = 0; i < weights.size(); ++i) {
      const Part& part = asked.own_weights[i];
      const int64_t words = CeilOfQuotient(part.count, 2);
      Tensor floats;
      OP_REQUIRES_OK(context, floats.BitcastFrom(asked.uploaded.Slice(part.at, part.at + words),
                                                 DT_FLOAT, TensorShape({2 * words})));
      weights.set(i, floats.Slice(0, part.count));
    }
  }

  // Gives out the splits that bags and keys [N, S] tell, and as much of the message as there is.
  void Finish(OpKernelContext* context, const int32_t* bags, const int32_t* keys,
              const Tensor& message) const {
    Tensor *splits = nullptr, *row_splits = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({ranks_}), &splits));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({ranks_}), &row_splits));
    int64_t words = 0, elements = 0;
    for (int r = 0; r < ranks_; ++r) {
      int64_t words_of_rank = 2 * static_cast<int64_t>(sections_.size()), elements_of_rank = 0;
      for (const Section& section : sections_) {
        words_of_rank += section.Words(*bags, *keys++);
        elements_of_rank += *bags++ * section.dim;
      }
      words += words_of_rank;
      elements += elements_of_rank;
      OP_REQUIRES(context, elements <= kMaxCount,
                  errors::InvalidArgument("this batch asks for ", elements,
                                          " elements of rows or more, but no more than ", kMaxCount,
                                          " can travel at once: use smaller batches"));
      splits->flat<int32_t>()(r) = static_cast<int32_t>(words_of_rank);
      row_splits->flat<int32_t>()(r) = static_cast<int32_t>(elements_of_rank);
    }
    context->set_output(0, message.Slice(0, words));
  }

  int ranks_ = 0;
  std::vector<Member> members_;
  std::vector<int> pooled_;  // Members whose sections are pooled.
  std::vector<Section> sections_;
  std::vector<int> kinds_;       // Of each section.
  std::vector<bool> is_pooled_;  // Likewise.
};

REGISTER_KERNEL_BUILDER(Name("CollectiveAsk")
                            .Device(DEVICE_GPU)
                            .HostMemory("ids")
                            .HostMemory("samples")
                            .HostMemory("weights")
                            .HostMemory("own_samples")
                            .HostMemory("own_weights")
                            .HostMemory("splits")
                            .HostMemory("row_splits")
                            .HostMemory("counts"),
                        AskOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveAsk").Device(DEVICE_CPU).Label("emulated"), AskOp);

}  // namespace ask_op
}  // namespace gpu
}  // namespace collective
