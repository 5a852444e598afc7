#include "wire.h"

#include <algorithm>

#include "scans.h"

namespace collective {

using tensorflow::OkStatus;
using tensorflow::Status;
using tensorflow::Tensor;
using tensorflow::TensorShapeUtils;
using tensorflow::errors::InvalidArgument;

Status Layout::Read(tensorflow::OpKernelConstruction* context) {
  std::vector<int> section_tables, kinds;
  std::vector<int64_t> dims;
  std::vector<bool> pooled, weighted;
  std::vector<float> max_norms;
  TF_RETURN_IF_ERROR(context->GetAttr("ranks", &ranks));
  TF_RETURN_IF_ERROR(context->GetAttr("T", &tables));
  TF_RETURN_IF_ERROR(context->GetAttr("section_tables", &section_tables));
  TF_RETURN_IF_ERROR(context->GetAttr("kinds", &kinds));
  TF_RETURN_IF_ERROR(context->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(context->GetAttr("pooled", &pooled));
  TF_RETURN_IF_ERROR(context->GetAttr("weighted", &weighted));
  if (context->HasAttr("max_norms")) {
    TF_RETURN_IF_ERROR(context->GetAttr("max_norms", &max_norms));
  } else {
    max_norms.assign(section_tables.size(), 0.f);
  }
  if (context->HasAttr("counted")) TF_RETURN_IF_ERROR(context->GetAttr("counted", &counted));
  if (counted.empty()) counted.assign(tables, false);
  if (counted.size() != static_cast<size_t>(tables))
    return InvalidArgument("counted has ", counted.size(), " of ", tables, " tables");
  const size_t count = section_tables.size();
  if (dims.size() != count || pooled.size() != count || weighted.size() != count ||
      max_norms.size() != count) {
    return InvalidArgument("section_tables names ", count, " sections, but there are ", dims.size(),
                           " dims, ", pooled.size(), " pooled, ", weighted.size(), " weighted and ",
                           max_norms.size(), " max_norms");
  }
  if (kinds.size() != static_cast<size_t>(tables)) {
    return InvalidArgument("kinds has ", kinds.size(), " of ", tables, " tables");
  }
  for (size_t s = 0; s < count; ++s) {
    if (section_tables[s] < 0 || section_tables[s] >= tables)
      return InvalidArgument("section ", s, " is of table ", section_tables[s], " of ", tables);
    if (!IsKind(kinds[section_tables[s]], ranks))
      return InvalidArgument("table ", section_tables[s], " is of no kind that there is");
    if (dims[s] < 1 || dims[s] > kMaxCount)
      return InvalidArgument("section ", s, " has dimension ", dims[s]);
    if (weighted[s] && !pooled[s])
      return InvalidArgument("section ", s, " is weighted, but not pooled");
    Section section;
    section.table = section_tables[s];
    section.kind = kinds[section_tables[s]];
    section.dim = dims[s];
    section.pooled = pooled[s];
    section.weighted = weighted[s];
    section.counted = counted[section.table] && !pooled[s];
    section.max_norm = pooled[s] && max_norms[s] > 0 ? max_norms[s] : 0.f;
    sections.push_back(section);
  }
  return OkStatus();
}

const int32_t* BagOfEachKey(const Piece& piece, Buffer<int32_t>* buffer) {
  // The number of bags that begin at each key, then its running sum. A bag's length can't be
  // predicted, so no loop goes over its keys.
  int32_t* bags = buffer->At(piece.keys + 1);
  std::fill_n(bags, piece.keys + 1, 0);
  int64_t first = 0;
  for (int64_t b = 0; b < piece.bags; ++b) {
    ++bags[first];
    first += piece.lengths[b];
  }
  int32_t bag = -1;
  for (int64_t k = 0; k < piece.keys; ++k) bags[k] = bag += bags[k];
  return bags;
}

Status Layout::Lengths(const Tensor& message, Tensor* lengths) const {
  if (!TensorShapeUtils::IsVector(message.shape()))
    return InvalidArgument("a message is a vector, not ", message.shape().DebugString());
  const int64_t count = static_cast<int64_t>(sections.size());
  const int64_t* words = message.vec<int64_t>().data();
  int64_t left = message.NumElements();
  for (int64_t r = 0; r < lengths->NumElements(); ++r) {
    int64_t length = 2 * count;
    for (int64_t s = 0; s < count && length <= left; ++s) {
      const int64_t bags = words[2 * s], keys = words[2 * s + 1];
      if (bags < 0 || bags > kMaxCount || keys < 0 || keys > kMaxCount)
        return InvalidArgument("message ", r, " is malformed: section ", s, " has ", bags,
                               " bags of ", keys, " keys");
      length += sections[s].Words(bags, keys);
    }
    if (length > left || length > kMaxCount)
      return InvalidArgument("message ", r, " is malformed: it has ", length, " words, and ", left,
                             " are left");
    lengths->vec<int32_t>()(r) = static_cast<int32_t>(length);
    words += length;
    left -= length;
  }
  return OkStatus();
}

Status Layout::Parse(const Tensor& message, const Tensor& splits, ReceivedMessage* received) const {
  return Parse(message, splits, nullptr, received);
}

Status Layout::Parse(const Tensor& message, const Tensor& splits, const int64_t* headers,
                     ReceivedMessage* received) const {
  if (!TensorShapeUtils::IsVector(message.shape()) || !TensorShapeUtils::IsVector(splits.shape()) ||
      splits.NumElements() != ranks) {
    return InvalidArgument("a message is a vector, and its splits are one for each of ", ranks,
                           " ranks: there are ", message.shape().DebugString(), " and ",
                           splits.shape().DebugString());
  }
  const int count = static_cast<int>(sections.size());
  const int64_t* words = message.vec<int64_t>().data();
  const int32_t* lengths = splits.vec<int32_t>().data();
  int64_t left = message.NumElements();
  Clear(received);
  for (int r = 0; r < ranks; ++r) {
    const int64_t length = lengths[r];
    if (length == 0 && message.NumElements() > 0) {  // It has a proxy that asks for it.
      for (int s = 0; s < count; ++s) {
        const int table = sections[s].table;
        received->pieces.push_back(
            {s, 0, 0, words, nullptr, nullptr, nullptr, received->elements, received->rows[table]});
      }
      continue;
    }
    TF_RETURN_IF_ERROR(Append(r, words, length, left,
                              headers == nullptr ? words : headers + r * 2 * count, received));
    words += length;
    left -= length;
  }
  if (left != 0)
    return InvalidArgument("the message is malformed: its splits leave ", left, " words over");
  return OkStatus();
}

void Layout::Clear(ReceivedMessage* received) const {
  received->rows.assign(tables, 0);
  received->pieces.clear();
  received->pieces.reserve(static_cast<size_t>(ranks) * sections.size());
  received->row_splits.assign(ranks, 0);
  received->elements = 0;
}

Status Layout::ParseOne(int rank, const int64_t* words, int64_t length,
                        ReceivedMessage* received) const {
  Clear(received);
  return Append(rank, words, length, length, words, received);
}

Status Layout::Append(int rank, const int64_t* words, int64_t length, int64_t left,
                      const int64_t* header, ReceivedMessage* received) const {
  const int count = static_cast<int>(sections.size());
  if (length < 2 * count || length > left) {
    return InvalidArgument("the message of rank ", rank, " is malformed: it has ", length,
                           " words of ", left, " that are left, and its header needs ", 2 * count);
  }
  const int64_t* at = words + 2 * count;
  int64_t rest = length - 2 * count;
  for (int s = 0; s < count; ++s) {
    const Section& section = sections[s];
    Piece piece{s,
                header[2 * s],
                header[2 * s + 1],
                at,
                nullptr,
                nullptr,
                nullptr,
                received->elements,
                received->rows[section.table]};
    const bool plausible = piece.keys >= 0 && piece.keys <= rest && piece.bags >= 0 &&
                           piece.bags <= 2 * rest && (section.pooled || piece.bags == piece.keys);
    if (!plausible || section.Words(piece.bags, piece.keys) > rest) {
      return InvalidArgument("the message of rank ", rank, " is malformed: section ", s, " has ",
                             piece.bags, " bags of ", piece.keys, " keys in ", rest, " words");
    }
    at += piece.keys;
    if (section.pooled) {
      piece.lengths = reinterpret_cast<const int32_t*>(at);
      at += (piece.bags + 1) / 2;
      // Where the header is a copy, the message isn't in the host's memory.
      const int64_t sum = header == words ? SumOfLengths(piece.lengths, piece.bags) : piece.keys;
      if (sum != piece.keys) {
        return InvalidArgument("the message of rank ", rank, " is malformed: the bags of section ",
                               s, " have ", sum < 0 ? "negative lengths" : "other lengths",
                               " than its ", piece.keys, " keys");
      }
    }
    if (section.weighted) {
      piece.weights = reinterpret_cast<const float*>(at);
      at += (piece.keys + 1) / 2;
    }
    if (section.counted) {
      piece.counts = reinterpret_cast<const int32_t*>(at);
      at += (piece.keys + 1) / 2;
    }
    rest -= section.Words(piece.bags, piece.keys);
    received->elements += piece.bags * section.dim;
    received->row_splits[rank] += piece.bags * section.dim;
    received->rows[section.table] += piece.keys;
    if (received->elements > kMaxCount) {
      return InvalidArgument("the ranks ask for ", received->elements,
                             " elements of rows or more, but no more than ", kMaxCount,
                             " can travel at once: use smaller batches");
    }
    received->pieces.push_back(piece);
  }
  if (rest != 0)
    return InvalidArgument("the message of rank ", rank, " is malformed: ", rest,
                           " words are left over");
  return OkStatus();
}

}  // namespace collective
