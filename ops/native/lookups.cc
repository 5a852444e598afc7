#include "lookups.h"

#include <cmath>

#include "scans.h"

namespace collective {

using namespace tensorflow;

Status ReadLookups(OpKernelConstruction* context, std::vector<Lookup>* members) {
  int count = 0, pooled_wanted = 0, weighted_wanted = 0, pooled = 0, with_weights = 0;
  std::vector<int> sections, combiners;
  std::vector<int64_t> dims;
  std::vector<bool> weighted;
  std::vector<float> max_norms;
  TF_RETURN_IF_ERROR(context->GetAttr("M", &count));
  TF_RETURN_IF_ERROR(context->GetAttr("P", &pooled_wanted));
  TF_RETURN_IF_ERROR(context->GetAttr("W", &weighted_wanted));
  TF_RETURN_IF_ERROR(context->GetAttr("sections", &sections));
  TF_RETURN_IF_ERROR(context->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(context->GetAttr("combiners", &combiners));
  TF_RETURN_IF_ERROR(context->GetAttr("weighted", &weighted));
  TF_RETURN_IF_ERROR(context->GetAttr("max_norms", &max_norms));
  const size_t size = count;
  if (sections.size() != size || dims.size() != size || combiners.size() != size ||
      weighted.size() != size || max_norms.size() != size) {
    return errors::InvalidArgument("there are ", count, " members, but ", sections.size(),
                                   " sections, ", dims.size(), " dims, ", combiners.size(),
                                   " combiners, ", weighted.size(), " weighted and ",
                                   max_norms.size(), " max_norms");
  }
  for (int m = 0; m < count; ++m) {
    if (dims[m] < 1 || dims[m] > kMaxCount || combiners[m] < kRows || combiners[m] > kSqrtN ||
        sections[m] < 0) {
      return errors::InvalidArgument("member ", m, " of section ", sections[m], " has dimension ",
                                     dims[m], " and combiner ", combiners[m]);
    }
    if (weighted[m] && combiners[m] == kRows)
      return errors::InvalidArgument("member ", m, " has weights, but no combiner");
    Lookup member;
    member.section = sections[m];
    member.combiner = combiners[m];
    member.dim = dims[m];
    member.max_norm = max_norms[m] > 0 ? max_norms[m] : 0.f;
    if (member.combiner != kRows) member.samples = pooled++;
    if (weighted[m]) member.weights = with_weights++;
    members->push_back(member);
  }
  if (pooled != pooled_wanted || with_weights != weighted_wanted) {
    return errors::InvalidArgument(pooled, " members have a combiner and ", with_weights,
                                   " weights, but there are ", pooled_wanted, " samples and ",
                                   weighted_wanted, " weights");
  }
  return OkStatus();
}

Status ReadMembersOfGradients(OpKernelConstruction* context, size_t members, std::vector<int>* of) {
  int gradients = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("members", of));
  TF_RETURN_IF_ERROR(context->GetAttr("G", &gradients));
  if (of->size() != static_cast<size_t>(gradients)) {
    return errors::InvalidArgument("there are ", gradients, " gradients, of ", of->size(),
                                   " members");
  }
  std::vector<bool> seen(members);
  for (size_t g = 0; g < of->size(); ++g) {
    const int member = (*of)[g];
    if (member < 0 || member >= static_cast<int>(members) || seen[member]) {
      return errors::InvalidArgument("gradient ", g, " is of member ", member, " of ", members,
                                     ", or that has two");
    }
    seen[member] = true;
  }
  return OkStatus();
}

Status LookupInputs::Read(OpKernelContext* context, bool with_rows) {
  if (with_rows) TF_RETURN_IF_ERROR(context->input("rows", &flat));
  TF_RETURN_IF_ERROR(context->input_list("positions", &positions));
  TF_RETURN_IF_ERROR(context->input_list("samples", &samples));
  return context->input_list("weights", &weights);
}

Status MemberInputs::Open(const Lookup& member, int number, const LookupInputs& inputs) {
  const Tensor& places = inputs.positions[number];
  if (!TensorShapeUtils::IsVector(places.shape())) {
    return errors::InvalidArgument("positions of member ", number, " must be a vector, but are ",
                                   places.shape().DebugString());
  }
  ids = places.NumElements();
  const int64_t elements = inputs.flat->NumElements();
  if (ids > kMaxCount || elements > kMaxCount) {
    return errors::InvalidArgument("member ", number, " has ", ids, " ids in rows of ", elements,
                                   " elements, but no more than ", kMaxCount, " can be");
  }
  rows = {inputs.flat->flat<float>().data(), places.vec<int32_t>().data(), 1};
  if (!AreWithin(rows.at, ids, elements - member.dim + 1)) {
    return errors::InvalidArgument("member ", number,
                                   " has positions that are not those of rows of ", member.dim,
                                   " in the ", elements, " elements that came back");
  }
  out = bags = ids;
  if (member.combiner == kRows) return OkStatus();
  const Tensor& of = inputs.samples[member.samples];
  if (of.shape() != places.shape()) {
    return errors::InvalidArgument("member ", number, " has positions of shape ",
                                   places.shape().DebugString(), " and samples of shape ",
                                   of.shape().DebugString());
  }
  samples = of.vec<int64_t>().data();
  bags = CountAscending(samples, ids);
  if (bags < 0)
    return errors::InvalidArgument("samples of member ", number,
                                   " must ascend from 0 on: they are not sorted");
  if (ids > 0 && samples[ids - 1] >= kMaxCount / member.dim) {
    return errors::InvalidArgument("member ", number, " has sample ", samples[ids - 1],
                                   ": so many rows of ", member.dim, " have more than ", kMaxCount,
                                   " elements");
  }
  out = ids == 0 ? 0 : samples[ids - 1] + 1;
  if (member.weights < 0) return OkStatus();
  const Tensor& given = inputs.weights[member.weights];
  if (given.shape() != places.shape()) {
    return errors::InvalidArgument("member ", number, " has positions of shape ",
                                   places.shape().DebugString(), " and weights of shape ",
                                   given.shape().DebugString());
  }
  weights = given.vec<float>().data();
  return OkStatus();
}

const int64_t* MemberInputs::Samples(LookupScratch* scratch) const {
  if (samples != nullptr) return samples;
  int64_t* iota = scratch->iota.At(ids);
  for (int64_t k = 0; k < ids; ++k) iota[k] = k;
  return iota;
}

BagDivisors MemberInputs::Divisors(const Lookup& member, LookupScratch* scratch) const {
  int32_t* starts = scratch->starts.At(bags + 1);
  int64_t* bag_samples = scratch->bag_samples.At(bags);
  float* divisors = scratch->divisors.At(bags);
  int64_t count = 0;
  for (int64_t k = 0; k < ids; ++k) {
    if (k > 0 && samples[k] == samples[k - 1]) continue;
    starts[count] = static_cast<int32_t>(k);
    bag_samples[count++] = samples[k];
  }
  starts[bags] = static_cast<int32_t>(ids);
  for (int64_t b = 0; b < bags; ++b) {
    double sum = starts[b + 1] - starts[b];
    if (weights != nullptr) {
      sum = 0;
      for (int64_t k = starts[b]; k < starts[b + 1]; ++k) {
        sum += member.combiner == kMean ? weights[k] : static_cast<double>(weights[k]) * weights[k];
      }
    }
    divisors[b] = static_cast<float>(member.combiner == kSum    ? 1
                                     : member.combiner == kMean ? sum
                                                                : std::sqrt(sum));
  }
  return {divisors, bag_samples, starts};
}

}  // namespace collective
