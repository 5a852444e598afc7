// CollectiveAsk on a GPU: the keys of each section by owner, as a message, and where the rows that
// come back belong. Keys of a section that isn't pooled are distinct, and each id has a row.
//
//     join_ids         the ids of all members, one behind the other
//     count_samples    how many samples members have, for who pools them
//     distinct_…       distinct.h
//     write_request    the message, in room for one of keys that are all distinct; if sections are
//                      pooled, ask_bags.h instead
//     write_positions
//
// All is launched before the host waits for the counts, which tell how long the message is and how
// many samples there are; but for the lists of bags, whose lengths they tell.

#include <algorithm>
#include <vector>

#include "ask_bags.h"
#include "distinct.h"
#include "segments.h"
#include "stream.h"
#include "../wire.h"

namespace collective {
namespace gpu {
namespace ask_op {

using namespace tensorflow;

// As ask.cu reads it.
struct MemberWords {
  int64_t tile;  // its first one
  int64_t ids, positions;
  int64_t first, count;  // of its ids among all
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
    Tensor message;  // It outlives what writes to it.
    Stream stream(context);
    OP_REQUIRES_OK(context, stream.Open());
    Asked asked;
    OP_REQUIRES_OK(context, Read(context, &asked));
    const int64_t runs = ranks_ * static_cast<int64_t>(sections_.size());
    const int last = context->num_outputs() - 1;
    Tensor *counts = nullptr, *samples = nullptr;
    OP_REQUIRES_OK(context, stream.HostOutput(last - 1, TensorShape({runs}), &counts));
    OP_REQUIRES_OK(
        context,
        stream.HostOutput(last, TensorShape({static_cast<int64_t>(members_.size())}), &samples));
    asked.sample_counts = samples->flat<int32_t>().data();
    int32_t *bags = counts->flat<int32_t>().data(), *keys = bags;
    if (pooled_.empty()) {
      OP_REQUIRES_OK(context, AskRows(context, &stream, asked, &message, bags));
    } else {
      void* told = nullptr;
      OP_REQUIRES_OK(context, stream.HostScratch((2 * runs + 1) * sizeof(int32_t), &told));
      OP_REQUIRES_OK(context,
                     AskBags(context, &stream, &asked, &message, static_cast<int32_t*>(told)));
      std::copy_n(static_cast<int32_t*>(told), runs, bags);
      keys = static_cast<int32_t*>(told) + runs;
    }
    Finish(context, bags, keys, message);
  }

 private:
  // What members ask for, and what kernels read of it.
  struct Asked {
    std::vector<Segment> segments;
    Tiled<MemberWords> all, plain;  // Members; those that aren't pooled.
    Tiled<BagMemberWords> pooled;
    std::vector<int> member_of;  // Of each of those.
    int64_t keys = 0, pooled_keys = 0, weighted_keys = 0;
    std::vector<int64_t> lasts;        // [M], the address of each member's last sample, or 0.
    int32_t* sample_counts = nullptr;  // [M], on the host.
    Packed packed;
  };

  Status ReadSections(OpKernelConstruction* context) {
    std::vector<int> kinds;
    std::vector<int64_t> dims;
    std::vector<bool> weighted;
    TF_RETURN_IF_ERROR(context->GetAttr("ranks", &ranks_));
    TF_RETURN_IF_ERROR(context->GetAttr("kinds", &kinds));
    TF_RETURN_IF_ERROR(context->GetAttr("dims", &dims));
    TF_RETURN_IF_ERROR(context->GetAttr("pooled", &is_pooled_));
    TF_RETURN_IF_ERROR(context->GetAttr("weighted", &weighted));
    const size_t sections = kinds.size();
    if (dims.size() != sections || is_pooled_.size() != sections || weighted.size() != sections) {
      return errors::InvalidArgument("kinds, dims, pooled and weighted have ", sections, ", ",
                                     dims.size(), ", ", is_pooled_.size(), " and ", weighted.size(),
                                     " sections");
    }
    for (size_t s = 0; s < sections; ++s) {
      if ((kinds[s] != kStatic && kinds[s] != kDynamic) || dims[s] < 1 || dims[s] > kMaxCount ||
          (weighted[s] && !is_pooled_[s])) {
        return errors::InvalidArgument("section ", s, " is of kind ", kinds[s], " and dimension ",
                                       dims[s], ": there are kinds 0 and 1, and only pooled ",
                                       "sections have weights");
      }
      Section section;
      section.dim = dims[s];
      section.pooled = is_pooled_[s];
      section.weighted = weighted[s];
      sections_.push_back(section);
      is_dynamic_.push_back(kinds[s] == kDynamic);
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
    OpInputList ids, samples, weights, own_samples;
    OpOutputList positions;
    TF_RETURN_IF_ERROR(context->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(context->input_list("samples", &samples));
    TF_RETURN_IF_ERROR(context->input_list("weights", &weights));
    TF_RETURN_IF_ERROR(context->input_list("own_samples", &own_samples));
    TF_RETURN_IF_ERROR(context->output_list("positions", &positions));
    asked->segments.reserve(members_.size());
    asked->lasts.reserve(members_.size());
    for (size_t m = 0; m < members_.size(); ++m) {
      const Member& member = members_[m];
      const TensorShape& shape = ids[m].shape();
      if (!TensorShapeUtils::IsVector(shape)) {
        return errors::InvalidArgument("ids of member ", m, " must be a vector, but are ",
                                       shape.DebugString());
      }
      const int64_t count = ids[m].NumElements(), tiles = TilesOf(count);
      if (asked->keys + count > kMaxCount) {
        return errors::InvalidArgument(asked->keys + count,
                                       " ids or more are looked up at once, but no more than ",
                                       kMaxCount, " can be: use smaller batches");
      }
      asked->segments.push_back({count, member.section});
      MemberWords words{};
      words.ids = AddressOf(ids[m].flat<int64_t>().data());
      words.first = asked->keys;
      words.count = count;
      if (member.pooled >= 0) {
        TF_RETURN_IF_ERROR(AddPooled(static_cast<int>(m), shape, samples, weights, asked));
      } else {
        Tensor* out = nullptr;
        TF_RETURN_IF_ERROR(positions.allocate(static_cast<int>(m), shape, &out));
        words.positions = AddressOf(out->flat<int32_t>().data());
        asked->plain.Add(words, tiles);
      }
      asked->all.Add(words, tiles);
      asked->keys += count;
      asked->lasts.push_back(member.pooled >= 0 ? AddressOfLast(samples[member.pooled])
                             : member.own >= 0  ? AddressOfLast(own_samples[member.own])
                                                : 0);
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
    words.samples = AddressOf(samples[member.pooled].flat<int64_t>().data());
    words.first = asked->keys;
    words.count = shape.num_elements();
    words.number = static_cast<int64_t>(pooled_.size()) - member.pooled;
    words.combiner = member.combiner;
    if (member.weighted >= 0) {
      TF_RETURN_IF_ERROR(check("weights", weights[member.weighted]));
      words.weights = AddressOf(weights[member.weighted].flat<float>().data());
      asked->weighted_keys += words.count;
    }
    asked->pooled_keys += words.count;
    asked->pooled.Add(words, TilesOf(words.count));
    if (words.count > 0) asked->member_of.push_back(m);
    return OkStatus();
  }

  static int64_t AddressOfLast(const Tensor& samples) {
    const int64_t count = samples.NumElements();
    return count == 0 ? 0 : AddressOf(samples.flat<int64_t>().data() + count - 1);
  }

  // Has the counts of samples copied to the host. `lasts`: those of `asked`, on the device.
  static Status CountSamples(Stream* stream, const Asked& asked, const int64_t* lasts) {
    const int64_t members = static_cast<int64_t>(asked.lasts.size());
    const size_t bytes = members * sizeof(int32_t);
    if (std::count(asked.lasts.begin(), asked.lasts.end(), 0) == members) {
      std::fill_n(asked.sample_counts, members, 0);
      return OkStatus();
    }
    void* counts = nullptr;
    TF_RETURN_IF_ERROR(stream->Scratch(bytes, &counts));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kCountSamples, CeilOfQuotient(members, kThreads),
                                      lasts, static_cast<int32_t>(members), counts));
    return stream->CopyToHost(asked.sample_counts, counts, bytes);
  }

  // Launches what both ways begin with. The words of `asked` are on the device at `*there`, those
  // of the plan from `plan_at` on.
  Status Order(Stream* stream, Asked* asked, const DistinctPlan& plan, size_t plan_at,
               const int64_t** there, DistinctKeys* distinct) const {
    void* joined = nullptr;
    const size_t lasts_at = asked->packed.Add(asked->lasts);
    TF_RETURN_IF_ERROR(stream->Upload(asked->packed.words(), there));
    TF_RETURN_IF_ERROR(stream->Scratch(asked->keys * sizeof(int64_t), &joined));
    int64_t* all_keys = static_cast<int64_t*>(joined);
    TF_RETURN_IF_ERROR(
        stream->Launch(Kernel::kJoinIds, asked->all.tiles(), *there, asked->all.count(), all_keys));
    TF_RETURN_IF_ERROR(CountSamples(stream, *asked, *there + lasts_at));
    return LaunchDistinct(stream, plan, *there + plan_at, ranks_, all_keys, distinct);
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

  Status AskRows(OpKernelContext* context, Stream* stream, Asked asked, Tensor* message,
                 int32_t* counts) const {
    const DistinctPlan plan(asked.segments, is_dynamic_);
    const size_t members_at = asked.packed.Add(asked.all), plan_at = AddPlan(plan, &asked.packed);
    const int64_t* there = nullptr;
    DistinctKeys distinct{};
    TF_RETURN_IF_ERROR(Order(stream, &asked, plan, plan_at, &there, &distinct));
    TF_RETURN_IF_ERROR(MakeMessage(context, asked, message));
    const uint32_t sections = static_cast<uint32_t>(sections_.size());
    const uint32_t* by_number = nullptr;
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kWriteRequest, TilesOf(message->NumElements()),
                                      distinct.keys, distinct.counts, distinct.starts,
                                      static_cast<uint32_t>(ranks_), sections, message->data()));
    TF_RETURN_IF_ERROR(stream->Launch(Kernel::kWritePositions, asked.all.tiles(),
                                      there + members_at, asked.all.count(), distinct.numbers,
                                      distinct.firsts, by_number));
    TF_RETURN_IF_ERROR(
        stream->CopyToHost(counts, distinct.counts, ranks_ * sections * sizeof(int32_t)));
    return stream->WaitForCopies();
  }

  // `told`: see BagRequest.
  Status AskBags(OpKernelContext* context, Stream* stream, Asked* asked, Tensor* message,
                 int32_t* told) const {
    const DistinctPlan plan(asked->segments, is_dynamic_, is_pooled_);
    Packed* packed = &asked->packed;
    packed->Add(asked->all);
    const size_t plan_at = AddPlan(plan, packed), plain_at = packed->Add(asked->plain),
                 pooled_at = packed->Add(asked->pooled),
                 kinds_at = packed->Add(BagRequest::KindsOf(sections_));
    const int64_t* there = nullptr;
    DistinctKeys distinct{};
    TF_RETURN_IF_ERROR(Order(stream, asked, plan, plan_at, &there, &distinct));
    TF_RETURN_IF_ERROR(MakeMessage(context, *asked, message));
    BagRequest bags(stream, asked->pooled, there + pooled_at, there + kinds_at, ranks_,
                    static_cast<int64_t>(sections_.size()));
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
  std::vector<bool> is_dynamic_, is_pooled_;  // Of each section.
};

REGISTER_KERNEL_BUILDER(Name("CollectiveAsk")
                            .Device(DEVICE_GPU)
                            .HostMemory("splits")
                            .HostMemory("row_splits")
                            .HostMemory("counts"),
                        AskOp);
REGISTER_KERNEL_BUILDER(Name("CollectiveAsk").Device(DEVICE_CPU).Label("emulated"), AskOp);

}  // namespace ask_op
}  // namespace gpu
}  // namespace collective
