#include "lookups.h"

#include <cmath>

#include "wire.h"

namespace collective {

using namespace tensorflow;

Status Lookups::Read(OpKernelConstruction* context) {
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
  if (sections.size() != size || dims.size() != size || combiners.size() != size || weighted.size() != size ||
      max_norms.size() != size) {
    return errors::InvalidArgument("there are ", count, " members, but ", sections.size(), " sections, ", dims.size(), " dims, ",
                                   combiners.size(), " combiners, ", weighted.size(), " weighted and ", max_norms.size(),
                                   " max_norms");
  }
  for (int m = 0; m < count; ++m) {
    if (dims[m] < 1 || dims[m] > kMost || combiners[m] < kRows || combiners[m] > kSqrtN || sections[m] < 0) {
      return errors::InvalidArgument("member ", m, " of section ", sections[m], " has dimension ", dims[m], " and combiner ",
                                     combiners[m]);
    }
    if (weighted[m] && combiners[m] == kRows) return errors::InvalidArgument("member ", m, " has weights, but no combiner");
    Lookup member;
    member.section = sections[m];
    member.combiner = combiners[m];
    member.dim = dims[m];
    member.max_norm = max_norms[m] > 0 ? max_norms[m] : 0.f;
    if (member.combiner != kRows) member.samples = pooled++;
    if (weighted[m]) member.weights = with_weights++;
    members.push_back(member);
  }
  if (pooled != pooled_wanted || with_weights != weighted_wanted) {
    return errors::InvalidArgument(pooled, " members have a combiner and ", with_weights, " weights, but there are ",
                                   pooled_wanted, " samples and ", weighted_wanted, " weights");
  }
  return OkStatus();
}

Status Opened::Open(const Lookup& member, int m, const Tensor& flat, const OpInputList& positions, const OpInputList& samples,
                    const OpInputList& all_weights, LookupScratch* scratch) {
  const Tensor& places = positions[m];
  if (!TensorShapeUtils::IsVector(places.shape())) {
    return errors::InvalidArgument("positions of member ", m, " must be a vector, but are ", places.shape().DebugString());
  }
  ids = places.NumElements();
  if (ids > kMost) return errors::InvalidArgument("member ", m, " has ", ids, " ids, but no more than ", kMost, " can be");
  rows = {flat.flat<float>().data(), places.vec<int32_t>().data(), 1};
  const int32_t last_place = static_cast<int32_t>(std::max<int64_t>(flat.NumElements() - member.dim, -1));
  int32_t wrong = 0;
  for (int64_t k = 0; k < ids; ++k) wrong |= rows.at[k] | (last_place - rows.at[k]);
  if (ids > 0 && (wrong < 0 || last_place < 0)) {
    return errors::InvalidArgument("member ", m, " has positions outside of the ", flat.NumElements(), " elements that came back");
  }
  int32_t* starts = scratch->starts.At(ids + 1);
  if (member.combiner == kRows) {
    for (int64_t k = 0; k <= ids; ++k) starts[k] = static_cast<int32_t>(k);
    bags = {ids, starts, nullptr, nullptr};
    out = ids;
    return OkStatus();
  }
  const Tensor& of = samples[member.samples];
  if (of.shape() != places.shape()) {
    return errors::InvalidArgument("member ", m, " has positions of shape ", places.shape().DebugString(),
                                   " and samples of shape ", of.shape().DebugString());
  }
  const int64_t* sample = of.vec<int64_t>().data();
  int64_t count = 0, before = -1, falls = 0;
  for (int64_t k = 0; k < ids; ++k) {
    starts[count] = static_cast<int32_t>(k);
    count += sample[k] != before;
    falls |= sample[k] < before;
    before = sample[k];
  }
  starts[count] = static_cast<int32_t>(ids);
  if (falls != 0 || (ids > 0 && sample[0] < 0)) {
    return errors::InvalidArgument("samples of member ", m, " must ascend from 0 on: they are not sorted");
  }
  out = ids == 0 ? 0 : before + 1;
  if (out < 0 || out > kMost / member.dim) {
    return errors::InvalidArgument("member ", m, " has sample ", before, ": its ", out, " rows of ", member.dim,
                                   " are more than ", kMost, " elements");
  }
  bags = {count, starts, sample, nullptr};
  if (member.weights >= 0) {
    const Tensor& given = all_weights[member.weights];
    if (given.shape() != places.shape()) {
      return errors::InvalidArgument("member ", m, " has positions of shape ", places.shape().DebugString(),
                                     " and weights of shape ", given.shape().DebugString());
    }
    weights = given.vec<float>().data();
  }
  if (member.combiner == kSum) return OkStatus();
  float* divisors = scratch->divisors.At(count);
  for (int64_t b = 0; b < count; ++b) {
    double sum = starts[b + 1] - starts[b];
    if (weights != nullptr) {
      sum = 0;
      for (int64_t k = starts[b]; k < starts[b + 1]; ++k) {
        sum += member.combiner == kMean ? weights[k] : static_cast<double>(weights[k]) * weights[k];
      }
    }
    divisors[b] = static_cast<float>(member.combiner == kMean ? sum : std::sqrt(sum));
  }
  bags.divisors = divisors;
  return OkStatus();
}

const float* Opened::Factors(const Lookup& member, LookupScratch* scratch) const {
  if (member.max_norm == 0) return weights;
  float* factors = scratch->factors.At(ids);
  ClipFactors(rows, ids, member.dim, member.max_norm, weights, factors);
  return factors;
}

}  // namespace collective
