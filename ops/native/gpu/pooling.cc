#include "pooling.h"

namespace collective {
namespace gpu {

using tensorflow::OkStatus;
using tensorflow::OpInputList;
using tensorflow::OpKernelContext;
using tensorflow::Status;
using tensorflow::Tensor;
using tensorflow::TensorShapeUtils;
using tensorflow::errors::InvalidArgument;

Status Pooling::Open(OpKernelContext* context, const std::vector<Lookup>& attributes,
                     const std::vector<int>& wanted, bool with_rows) {
  LookupInputs inputs;
  OpInputList counts;
  TF_RETURN_IF_ERROR(inputs.Read(context, with_rows));
  TF_RETURN_IF_ERROR(context->input_list("counts", &counts));
  if (counts.size() != 2) {
    return InvalidArgument("on a GPU, the request counts rows and samples, two tensors: ",
                           counts.size(), " are given");
  }
  if (counts[1].NumElements() != static_cast<int64_t>(attributes.size())) {
    return InvalidArgument("the request must count the samples of ", attributes.size(),
                           " members, but these counts are of shape ",
                           counts[1].shape().DebugString());
  }
  const int32_t* sample_counts = counts[1].flat<int32_t>().data();
  TF_RETURN_IF_ERROR(ReadRows(inputs.flat, counts[0], attributes));
  members.reserve(wanted.size());
  for (int number : wanted) {
    Member member;
    member.attributes = attributes[number];
    member.number = number;
    member.id = ids;
    TF_RETURN_IF_ERROR(ReadMember(inputs, sample_counts[number], &member));
    ids += member.ids;
    samples += member.samples;
    clips = clips || member.attributes.max_norm > 0;
    members.push_back(member);
  }
  if (ids > kMaxCount)
    return InvalidArgument("the members have ", ids, " ids at once, but no more than ", kMaxCount,
                           " can be: use smaller batches");
  if (samples > kMaxCount)
    return InvalidArgument("the members have ", samples, " samples at once, but no more than ",
                           kMaxCount, " can be: use smaller batches");
  return OkStatus();
}

Status Pooling::ReadRows(const Tensor* flat, const Tensor& counts,
                         const std::vector<Lookup>& attributes) {
  for (const Lookup& member : attributes) sections = std::max(sections, member.section + 1);
  std::vector<int64_t> dims(sections, 1);
  for (const Lookup& member : attributes) dims[member.section] = member.dim;
  if (counts.NumElements() == 0 || counts.NumElements() % sections != 0)
    return InvalidArgument("counts must be of ", sections, " sections for each rank, but are of ",
                           counts.shape().DebugString());
  const int32_t* count = counts.flat<int32_t>().data();
  const int64_t begin = flat == nullptr ? 0 : AddressOf(flat->flat<float>().data());
  for (int64_t run = 0; run < counts.NumElements(); ++run) {
    const int64_t dim = dims[run % sections];
    if (count[run] < 0) return InvalidArgument("counts must not be negative: one is ", count[run]);
    const int64_t address = begin + elements * kFloatBytes;
    run_counts.push_back(count[run]);
    run_dims.push_back(dim);
    run_addresses.push_back(address);
    rows.Add(address, count[run], dim);
    elements += count[run] * dim;
  }
  const int64_t there = flat == nullptr ? elements : flat->NumElements();
  if (elements == there && elements <= kMaxCount) return OkStatus();
  return InvalidArgument("there are ", there,
                         " elements of rows, but by their counts "
                         "they are ",
                         elements, ", of at most ", kMaxCount);
}

Status Pooling::ReadMember(const LookupInputs& inputs, int64_t samples, Member* member) {
  const Tensor& places = inputs.positions[member->number];
  if (!TensorShapeUtils::IsVector(places.shape()))
    return InvalidArgument("positions of member ", member->number, " must be a vector, but are ",
                           places.shape().DebugString());
  member->positions = places.vec<int32_t>().data();
  member->ids = member->samples = places.NumElements();
  const auto agrees = [&](const Tensor& given, const char* what) {
    if (given.shape() == places.shape()) return OkStatus();
    return Status(InvalidArgument("member ", member->number, " has positions of shape ",
                                  places.shape().DebugString(), " and ", what, " of shape ",
                                  given.shape().DebugString()));
  };
  const Lookup& attributes = member->attributes;
  if (attributes.samples >= 0) {
    const Tensor& given = inputs.samples[attributes.samples];
    TF_RETURN_IF_ERROR(agrees(given, "samples"));
    member->of = given.vec<int64_t>().data();
    member->samples = samples;
    if (samples < 0)
      return InvalidArgument("samples of member ", member->number,
                             " must ascend from 0 on: the last one is negative");
    if (samples > kMaxCount / attributes.dim)
      return InvalidArgument("member ", member->number, " has ", samples,
                             " samples or more: so many rows of ", attributes.dim,
                             " have more than ", kMaxCount, " elements");
    if ((samples == 0) != (member->ids == 0))
      return InvalidArgument("member ", member->number, " has ", member->ids, " ids and ", samples,
                             " samples, by the counts of the request");
  }
  if (attributes.weights >= 0) {
    const Tensor& given = inputs.weights[attributes.weights];
    TF_RETURN_IF_ERROR(agrees(given, "weights"));
    member->weights = given.vec<float>().data();
  }
  return OkStatus();
}

Status Pooling::TakeFrom(const std::vector<Table>& tables, const OpInputList& given) {
  for (Member& member : members) {
    const size_t section = member.attributes.section;
    if (section >= tables.size() || tables[section].dim != member.attributes.dim) {
      return InvalidArgument("member ", member.number, " has rows of ", member.attributes.dim,
                             ", but the table of its section ", section, " of ", tables.size(),
                             section < tables.size() ? " has others" : " isn't there");
    }
    const Tensor& rows_of_member = given[member.number];
    if (rows_of_member.NumElements() != member.ids) {
      return InvalidArgument("member ", member.number, " has ", member.ids, " positions, but ",
                             rows_of_member.NumElements(), " ids");
    }
    // It is a part of what was uploaded, and needn't be aligned as tensors are.
    member.rows = static_cast<const int64_t*>(rows_of_member.data());
  }
  tables_ = tables;
  return OkStatus();
}

std::vector<RunWords> Pooling::RunsOfRows() const {
  if (tables_.empty()) return rows.entries();
  std::vector<RunWords> runs;
  for (const Table& table : tables_) runs.push_back({0, table.rows, AddressOf(table.values)});
  return runs;
}

Tiled<BatchWords> Pooling::Batches() const {
  Tiled<BatchWords> tiled;
  int64_t first = 0;
  for (const Member& member : members) {
    BatchWords words{};
    words.first = first;
    words.end = first += member.samples;
    words.id = member.id;
    words.ids = member.ids;
    words.samples = AddressOf(member.of);
    tiled.Add(words, CeilOfQuotient(member.samples, kThreads));
  }
  return tiled;
}

Tiled<LookupWords> Pooling::Lookups(int64_t lanes, Samples of_group,
                                    const std::vector<int64_t>& out) const {
  Tiled<LookupWords> tiled;
  const int64_t runs = tables_.empty() ? static_cast<int64_t>(rows.entries().size()) : 1;
  int64_t first = 0;
  for (size_t m = 0; m < members.size(); ++m) {
    const Member& member = members[m];
    PooledLookup lookup;
    lookup.first = first;
    lookup.samples = member.samples;
    lookup.dim = member.attributes.dim;
    lookup.combiner = std::max<int64_t>(member.attributes.combiner, kSum);
    lookup.weighted = member.weights != nullptr;
    lookup.max_norm = member.attributes.max_norm;
    lookup.runs = runs;
    if (tables_.empty()) {
      lookup.positions =
          AddressOf(member.positions) - member.id * static_cast<int64_t>(sizeof(int32_t));
    } else {
      lookup.run = member.attributes.section;
      lookup.positions = AddressOf(member.rows) - member.id * static_cast<int64_t>(sizeof(int64_t));
    }
    if (lookup.weighted) lookup.weights = AddressOf(member.weights) - member.id * kFloatBytes;
    first += member.samples;
    AddLookup(lookup, lanes == 0 ? GroupLanes(lookup.dim) : lanes, of_group, out[m], &tiled);
  }
  return tiled;
}

bool Pooling::IsPlain(const std::vector<int64_t>& out) const {
  constexpr int64_t kWidthOfAccess = 4, kAccessBytes = kWidthOfAccess * kFloatBytes;
  const std::vector<RunWords> runs = RunsOfRows();
  if (tables_.empty() && runs.size() != 1) return false;
  for (const RunWords& run : runs)
    if (run.address % kAccessBytes != 0) return false;
  for (size_t m = 0; m < members.size(); ++m) {
    const Lookup& attributes = members[m].attributes;
    if (members[m].weights != nullptr || attributes.max_norm > 0 ||
        attributes.dim % kWidthOfAccess != 0 || out[m] % kAccessBytes != 0)
      return false;
  }
  return true;
}

}  // namespace gpu
}  // namespace collective
