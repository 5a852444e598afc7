// CollectiveAsk: what a rank requests of its peers, and where it will find the rows that come back.
//
//   1. Each section by itself: an unpooled one numbers the distinct keys of all its members, and
//      each key takes the next place among those of its owner; a pooled one counts keys and bags
//      by owner.
//   2. The counts tell the size of the message, and where each section's keys and rows begin in
//      it and in what comes back.
//   3. Each section by itself: keys are written, and numbers become positions.

#include <cmath>

#include "numbering.h"
#include "parallel.h"
#include "scans.h"
#include "wire.h"

namespace collective {
namespace ask_op {

using namespace tensorflow;

struct Member {
  int section, combiner;
  int pooled;    // Its number among the pooled members, or -1.
  int weighted;  // Its number among the weighted members, or -1.
};

// The keys and bags of one section for one owner: first their counts, then where they begin.
struct Part {
  int64_t bags = 0, keys = 0;
  int64_t* words = nullptr;  // Where its keys are written.
  int64_t flat = 0;          // The position of its first row.
};

struct Scratch {
  Buffer<int64_t> distinct;
  // Of each distinct key; in a pooled section the owner of each id, and the sample of each bag.
  Buffer<int32_t> owner, place;
  Buffer<int32_t> starts;  // Of each sample of a pooled member.
};

class AskOp : public OpKernel {
 public:
  explicit AskOp(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<int> of, combiners, kinds;
    std::vector<int64_t> dims;
    std::vector<bool> pooled, weighted, counted;
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("hosts", &hosts_));
    OP_REQUIRES(context, hosts_ >= 1 && ranks_ % hosts_ == 0,
                errors::InvalidArgument(ranks_, " ranks are not evenly on ", hosts_, " hosts"));
    OP_REQUIRES_OK(context, context->GetAttr("C", &counts_));
    OP_REQUIRES(
        context, counts_ <= 1,
        errors::InvalidArgument("there are counts once or not at all, not ", counts_, " times"));
    OP_REQUIRES_OK(context, context->GetAttr("member_sections", &of));
    OP_REQUIRES_OK(context, context->GetAttr("combiners", &combiners));
    OP_REQUIRES_OK(context, context->GetAttr("kinds", &kinds));
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims));
    OP_REQUIRES_OK(context, context->GetAttr("pooled", &pooled));
    OP_REQUIRES_OK(context, context->GetAttr("weighted", &weighted));
    OP_REQUIRES_OK(context, context->GetAttr("counted", &counted));
    const size_t sections = kinds.size();
    if (counted.empty()) counted.assign(sections, false);
    OP_REQUIRES(
        context, counted.size() == sections,
        errors::InvalidArgument("counted has ", counted.size(), " of ", sections, " sections"));
    OP_REQUIRES(context,
                dims.size() == sections && pooled.size() == sections && weighted.size() == sections,
                errors::InvalidArgument("kinds, dims, pooled and weighted have ", sections, ", ",
                                        dims.size(), ", ", pooled.size(), " and ", weighted.size(),
                                        " sections"));
    for (size_t s = 0; s < sections; ++s) {
      OP_REQUIRES(context,
                  IsKind(kinds[s], ranks_) && dims[s] >= 1 && dims[s] <= kMaxCount &&
                      (pooled[s] || !weighted[s]),
                  errors::InvalidArgument("section ", s, " of kind ", kinds[s], " and dimension ",
                                          dims[s], ": there are kinds 0 to ", MostKinds(ranks_) - 1,
                                          ", and only pooled sections have weights"));
      Section section;
      section.kind = kinds[s];
      section.dim = dims[s];
      section.pooled = pooled[s];
      section.weighted = weighted[s];
      section.counted = counted[s] && !pooled[s];
      sections_.push_back(section);
    }
    int members = 0, pooled_wanted = 0, weighted_wanted = 0;
    OP_REQUIRES_OK(context, context->GetAttr("M", &members));
    OP_REQUIRES_OK(context, context->GetAttr("P", &pooled_wanted));
    OP_REQUIRES_OK(context, context->GetAttr("W", &weighted_wanted));
    OP_REQUIRES(context, of.size() == static_cast<size_t>(members) && combiners.size() == of.size(),
                errors::InvalidArgument("there are ", members, " members, but ", of.size(),
                                        " of their sections and ", combiners.size(), " combiners"));
    members_of_.resize(sections);
    for (int m = 0; m < members; ++m) {
      const int s = of[m];
      OP_REQUIRES(
          context,
          s >= 0 && s < static_cast<int>(sections) && combiners[m] >= 0 && combiners[m] <= 3,
          errors::InvalidArgument("member ", m, " is of section ", s, " of ", sections,
                                  " with combiner ", combiners[m]));
      OP_REQUIRES(context, !pooled[s] || (combiners[m] > 0 && members_of_[s].empty()),
                  errors::InvalidArgument(
                      "section ", s, " is pooled: it serves one member, which has a combiner"));
      members_.push_back(
          {s, combiners[m], pooled[s] ? pooled_++ : -1, weighted[s] ? weighted_++ : -1});
      members_of_[s].push_back(m);
    }
    OP_REQUIRES(context, pooled_ == pooled_wanted && weighted_ == weighted_wanted,
                errors::InvalidArgument("of the members ", pooled_, " are pooled and ", weighted_,
                                        " weighted, but there are ", pooled_wanted, " samples and ",
                                        weighted_wanted, " weights"));
  }

  void Compute(OpKernelContext* context) override {
    Run run;
    OP_REQUIRES_OK(context, Open(context, &run));
    auto scratch = scratch_.Take();
    const int64_t count = static_cast<int64_t>(sections_.size());
    run.distinct = scratch->distinct.At(run.first[count] + count);
    run.owner = scratch->owner.At(run.first[count] + count);
    run.place = scratch->place.At(run.first[count] + count);
    run.starts = scratch->starts.At(run.first[count] + count);
    run.parts.resize(count * ranks_);
    run.counts.resize(count);
    run.errors.resize(count);
    const int64_t cost = 6 * run.first[count];
    Parallel(context, count, cost, [&](int64_t s) {
      if (sections_[s].pooled) {
        Count(&run, s);
      } else {
        Number(&run, s);
      }
    });
    for (const Status& error : run.errors) OP_REQUIRES_OK(context, error);
    OP_REQUIRES_OK(context, Place(context, &run));
    Parallel(context, count, cost, [&](int64_t s) {
      if (sections_[s].pooled) {
        WriteBags(run, s);
      } else {
        WriteKeys(run, s);
      }
    });
  }

 private:
  struct Run {
    OpInputList ids, samples, weights;
    OpOutputList positions, bag_samples, bag_scales;
    std::vector<int64_t> first;   // [S + 1], where each section's ids begin among all.
    std::vector<int64_t> counts;  // [S], distinct keys, or bags.
    std::vector<Part> parts;      // [S, N]
    std::vector<Status> errors;   // [S]
    int64_t* distinct;
    int32_t *owner, *place, *starts;
  };

  Status Open(OpKernelContext* context, Run* run) const {
    TF_RETURN_IF_ERROR(context->input_list("ids", &run->ids));
    TF_RETURN_IF_ERROR(context->input_list("samples", &run->samples));
    TF_RETURN_IF_ERROR(context->input_list("weights", &run->weights));
    TF_RETURN_IF_ERROR(context->output_list("positions", &run->positions));
    TF_RETURN_IF_ERROR(context->output_list("bag_samples", &run->bag_samples));
    TF_RETURN_IF_ERROR(context->output_list("bag_scales", &run->bag_scales));
    run->first.assign(1, 0);
    for (const auto& members : members_of_) {
      int64_t keys = 0;
      for (int m : members) keys += run->ids[m].NumElements();
      run->first.push_back(run->first.back() + keys);
    }
    if (run->first.back() > kMaxCount) {
      return errors::InvalidArgument(run->first.back(),
                                     " ids are looked up at once, but no more than ", kMaxCount,
                                     " can be: use smaller batches");
    }
    for (size_t m = 0; m < members_.size(); ++m) {
      const Tensor& ids = run->ids[m];
      if (!TensorShapeUtils::IsVector(ids.shape())) {
        return errors::InvalidArgument("ids of member ", m, " must be a vector, but are ",
                                       ids.shape().DebugString());
      }
      const auto matches = [&](const Tensor& other) { return other.shape() == ids.shape(); };
      if (members_[m].pooled >= 0 && !matches(run->samples[members_[m].pooled])) {
        return errors::InvalidArgument("member ", m, " has ids of shape ",
                                       ids.shape().DebugString(), " and samples of shape ",
                                       run->samples[members_[m].pooled].shape().DebugString());
      }
      if (members_[m].weighted >= 0 && !matches(run->weights[members_[m].weighted])) {
        return errors::InvalidArgument("member ", m, " has ids of shape ",
                                       ids.shape().DebugString(), " and weights of shape ",
                                       run->weights[members_[m].weighted].shape().DebugString());
      }
      if (members_[m].pooled >= 0) continue;
      Tensor* positions = nullptr;
      TF_RETURN_IF_ERROR(run->positions.allocate(static_cast<int>(m), ids.shape(), &positions));
    }
    return OkStatus();
  }

  static const int64_t* Ids(const Run& run, int m) { return run.ids[m].flat<int64_t>().data(); }

  // ---- An unpooled section

  void Number(Run* run, int64_t s) {
    int64_t* distinct = run->distinct + run->first[s] + s;
    uint64_t bits = 0;
    for (int m : members_of_[s]) bits |= BitwiseOr(Ids(*run, m), run->ids[m].NumElements());
    auto numbering = numberings_.Take();
    numbering->Start(run->first[s + 1] - run->first[s], bits, distinct);
    for (int m : members_of_[s]) {
      numbering->Add(Ids(*run, m), run->ids[m].NumElements(),
                     run->positions[m]->flat<int32_t>().data());
    }
    const int64_t count = run->counts[s] = numbering->count();
    Part* parts = &run->parts[s * ranks_];
    const Placement placement(sections_[s].kind, ranks_);
    int32_t *owner = run->owner + run->first[s] + s, *place = run->place + run->first[s] + s;
    for (int64_t u = 0; u < count; ++u) {
      const int32_t r = placement.Owner(distinct[u]);
      owner[u] = r;
      place[u] = static_cast<int32_t>(parts[r].keys++);
    }
    for (int r = 0; r < ranks_; ++r) parts[r].bags = parts[r].keys;
  }

  void WriteKeys(Run& run, int64_t s) const {
    const int64_t* distinct = run.distinct + run.first[s] + s;
    const int32_t* owner = run.owner + run.first[s] + s;
    int32_t* place = run.place + run.first[s] + s;
    const Part* parts = &run.parts[s * ranks_];
    const int64_t dim = Stride(s);
    if (sections_[s].counted) WriteCounts(run, s);
    for (int64_t u = 0; u < run.counts[s]; ++u) {
      const Part& part = parts[owner[u]];
      part.words[place[u]] = distinct[u];
      place[u] = static_cast<int32_t>(part.flat + place[u] * dim);
    }
    for (int m : members_of_[s]) {
      int32_t* positions = run.positions[m]->flat<int32_t>().data();
      for (int64_t i = 0, n = run.ids[m].NumElements(); i < n; ++i)
        positions[i] = place[positions[i]];
    }
  }

  // Writes how often the ids of a section have each distinct key, two to a word after the keys.
  void WriteCounts(Run& run, int64_t s) const {
    const int64_t first = run.first[s] + s;
    int32_t* counts = run.starts + first;
    std::fill_n(counts, run.counts[s], 0);
    for (int m : members_of_[s]) {
      const int32_t* numbers = run.positions[m]->flat<int32_t>().data();
      for (int64_t i = 0, n = run.ids[m].NumElements(); i < n; ++i) ++counts[numbers[i]];
    }
    const Part* parts = &run.parts[s * ranks_];
    for (int r = 0; r < ranks_; ++r)
      if (parts[r].keys % 2 == 1) parts[r].words[parts[r].keys + parts[r].keys / 2] = 0;
    for (int64_t u = 0; u < run.counts[s]; ++u) {
      const Part& part = parts[run.owner[first + u]];
      reinterpret_cast<int32_t*>(part.words + part.keys)[run.place[first + u]] = counts[u];
    }
  }

  // ---- A pooled section

  // Nothing here branches on where one sample ends or which owner comes next: the processor can't
  // predict that.

  void Count(Run* run, int64_t s) const {
    if (members_of_[s].empty()) return;
    const int m = members_of_[s][0];
    const int64_t *ids = Ids(*run, m),
                  *samples = run->samples[members_[m].pooled].flat<int64_t>().data();
    const int64_t n = run->ids[m].NumElements();
    if (CountAscending(samples, n) < 0) {
      run->errors[s] = errors::InvalidArgument("samples of member ", m,
                                               " must ascend from 0 on: they are not sorted");
      return;
    }
    struct Counter {
      int64_t keys = 0, bags = 0, last = -1;
    };
    std::vector<Counter> counters(ranks_);
    const Placement placement(sections_[s].kind, ranks_);
    int32_t* owner = run->owner + run->first[s] + s;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t r = placement.Owner(ids[i]);
      Counter& counter = counters[r];
      owner[i] = r;
      ++counter.keys;
      counter.bags += counter.last != samples[i];
      counter.last = samples[i];
    }
    for (int r = 0; r < ranks_; ++r) {
      Part& part = run->parts[s * ranks_ + r];
      part.keys = counters[r].keys;
      part.bags = counters[r].bags;
      run->counts[s] += part.bags;
    }
  }

  // Where the keys of one owner, and what belongs to them, are written.
  struct Writer {
    int64_t* key;
    int32_t* length;  // Of the bag that is being filled.
    float* weight;
    int32_t* sample;  // Of that bag: its number among the samples.
    int64_t position;
    int32_t last;  // The last sample.
    int32_t keys;  // In that bag.
  };

  void WriteBags(Run& run, int64_t s) const {
    if (members_of_[s].empty()) return;
    const int m = members_of_[s][0], p = members_[m].pooled, w = members_[m].weighted;
    const int64_t *ids = Ids(run, m), *samples = run.samples[p].flat<int64_t>().data();
    const float* weights = w < 0 ? nullptr : run.weights[w].flat<float>().data();
    const int32_t* owner = run.owner + run.first[s] + s;
    const int64_t n = run.ids[m].NumElements();
    std::vector<Writer> writers(ranks_);
    int32_t* sample_of_bag = run.place + run.first[s] + s;
    for (int r = 0; r < ranks_; ++r) {
      const Part& part = run.parts[s * ranks_ + r];
      int64_t* lengths = part.words + part.keys;
      int64_t* factors = lengths + (part.bags + 1) / 2;
      writers[r] = {part.words,
                    reinterpret_cast<int32_t*>(lengths) - 1,
                    reinterpret_cast<float*>(factors),
                    sample_of_bag - 1,
                    part.flat,
                    -1,
                    0};
      sample_of_bag += part.bags;
      if (part.bags % 2 == 1) factors[-1] = 0;
      if (weights != nullptr && part.keys % 2 == 1) factors[part.keys / 2] = 0;
    }
    int32_t* starts = run.starts + run.first[s] + s;  // Of the samples.
    int32_t sample = -1;
    for (int64_t i = 0; i < n; ++i) {
      sample += i == 0 || samples[i] != samples[i - 1];
      starts[sample + 1] = static_cast<int32_t>(i + 1);
      Writer& writer = writers[owner[i]];
      const bool is_new = writer.last != sample;
      writer.last = sample;
      writer.keys = is_new ? 1 : writer.keys + 1;
      writer.length += is_new;
      writer.sample += is_new;
      *writer.length = writer.keys;
      *writer.sample = sample;
      *writer.key++ = ids[i];
      if (weights != nullptr) *writer.weight++ = weights[i];
    }
    starts[0] = 0;
    ListBags(run, s, sample + 1, starts, weights, &writers);
  }

  // Lists the bags as the asker sees them: by sample, then owner.
  void ListBags(Run& run, int64_t s, int32_t count, const int32_t* starts, const float* weights,
                std::vector<Writer>* writers) const {
    const int m = members_of_[s][0], p = members_[m].pooled;
    const int64_t *samples = run.samples[p].flat<int64_t>().data(), dim = Stride(s);
    int32_t* positions = run.positions[m]->flat<int32_t>().data();
    int64_t* bag_samples = run.bag_samples[p]->flat<int64_t>().data();
    float* bag_scales = run.bag_scales[p]->flat<float>().data();
    for (int r = 0; r < ranks_; ++r) {
      Writer& writer = (*writers)[r];
      writer.length = writer.sample + 1;  // The end of the list.
      writer.sample -= run.parts[s * ranks_ + r].bags - 1;
    }
    int64_t bag = 0;
    for (int32_t sample = 0; sample < count; ++sample) {
      const float scale =
          ScaleOf(members_[m].combiner, starts[sample], starts[sample + 1], weights);
      for (Writer& writer : *writers) {
        if (writer.sample == writer.length || *writer.sample != sample) continue;
        ++writer.sample;
        positions[bag] = static_cast<int32_t>(writer.position);
        writer.position += dim;
        bag_samples[bag] = samples[starts[sample]];
        bag_scales[bag++] = scale;
      }
    }
  }

  // Returns the factor of the sum of the ids from `first` to before `end`.
  static float ScaleOf(int combiner, int32_t first, int32_t end, const float* weights) {
    if (combiner == kSum) return 1;
    double sum = end - first;
    if (weights != nullptr) {
      sum = 0;
      for (int32_t i = first; i < end; ++i)
        sum += combiner == kMean ? weights[i] : static_cast<double>(weights[i]) * weights[i];
    }
    const float divisor = static_cast<float>(combiner == kMean ? sum : std::sqrt(sum));
    return divisor == 0 ? 0 : 1 / divisor;
  }

  // ---- All sections

  // Allocates the message and the outputs of pooled members, writes the headers, and sets where
  // every part begins.
  Status Place(OpKernelContext* context, Run* run) const {
    const int64_t count = static_cast<int64_t>(sections_.size());
    Tensor *message = nullptr, *splits = nullptr, *row_splits = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({ranks_}), &splits));
    TF_RETURN_IF_ERROR(context->allocate_output(2, TensorShape({ranks_}), &row_splits));
    int32_t* counts = nullptr;
    if (counts_ == 1) {
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(context->num_outputs() - 1,
                                                  TensorShape({ranks_ * count}), &out));
      counts = out->flat<int32_t>().data();
    }
    int64_t words = 0, elements = 0, rows = 0;
    for (int place = 0; place < ranks_; ++place) {
      const int r = OwnerAt(place);
      const int64_t words_before = words, elements_before = elements;
      words += 2 * count;
      for (int64_t s = 0; s < count; ++s) {
        Part& part = run->parts[s * ranks_ + r];
        part.flat = counts == nullptr ? elements : rows;
        if (counts != nullptr) *counts++ = static_cast<int32_t>(part.bags);
        rows += part.bags;
        words += sections_[s].Words(part.bags, part.keys);
        elements += part.bags * sections_[s].dim;
      }
      if (words > kMaxCount || elements > kMaxCount) {
        return errors::InvalidArgument("this batch asks for ", elements, " elements of rows in ",
                                       words, " words or more, but no more than ", kMaxCount,
                                       " can travel at once: use smaller batches");
      }
      splits->flat<int32_t>()(place) = static_cast<int32_t>(words - words_before);
      row_splits->flat<int32_t>()(place) = static_cast<int32_t>(elements - elements_before);
    }
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({words}), &message));
    int64_t* header = message->flat<int64_t>().data();
    for (int place = 0; place < ranks_; ++place) {
      int64_t* at = header + 2 * count;
      for (int64_t s = 0; s < count; ++s) {
        Part& part = run->parts[s * ranks_ + OwnerAt(place)];
        header[2 * s] = part.bags;
        header[2 * s + 1] = part.keys;
        part.words = at;
        at += sections_[s].Words(part.bags, part.keys);
      }
      header = at;
    }
    for (size_t m = 0; m < members_.size(); ++m) {
      if (members_[m].pooled < 0) continue;
      const TensorShape bags({run->counts[members_[m].section]});
      Tensor* out = nullptr;
      TF_RETURN_IF_ERROR(run->positions.allocate(static_cast<int>(m), bags, &out));
      TF_RETURN_IF_ERROR(run->bag_samples.allocate(members_[m].pooled, bags, &out));
      TF_RETURN_IF_ERROR(run->bag_scales.allocate(members_[m].pooled, bags, &out));
    }
    return OkStatus();
  }

  // Returns the owner of the part of a message that is at `place`: by its number on its host, then
  // by host.
  int OwnerAt(int place) const { return place % hosts_ * (ranks_ / hosts_) + place / hosts_; }

  // Returns how far apart the positions of two rows of a section are.
  int64_t Stride(int64_t s) const { return counts_ == 1 ? 1 : sections_[s].dim; }

  int ranks_ = 0, hosts_ = 1, counts_ = 0;
  int pooled_ = 0, weighted_ = 0;
  std::vector<Section> sections_;
  std::vector<Member> members_;
  std::vector<std::vector<int>> members_of_;  // Of each section.
  ObjectPool<Scratch> scratch_;
  ObjectPool<Numbering> numberings_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveAsk").Device(DEVICE_CPU), AskOp);

}  // namespace ask_op
}  // namespace collective
