// Follows which rows of shards change, for one consumer: a ChangeSet.
//
//     announcements ──► marks of rows, keys that went ──► Begin ──► read ──► Done, or Undo
//
// `Begin` sets aside what has changed until now, and new changes are noted apart. Rows move on
// while what was set aside is being read or may have to be taken back: both kinds of marks move
// with them.

#include <algorithm>
#include <unordered_map>

#include "row_changes.h"

namespace collective {

class ChangeSet : public WriteListener {
 public:
  // Rows from `rows` on aren't any.
  explicit ChangeSet(int64_t rows) : rows_(rows) {}

  struct Marks {
    bool all = false;
    std::vector<uint64_t> bits;    // By row; the last ones may be missing.
    std::vector<int64_t> removed;  // Keys that were removed, perhaps to come back.
    std::vector<int64_t> in_file;  // Keys that had changed when they went to the file.

    void Mark(int64_t row) {
      const size_t word = static_cast<size_t>(row >> 6);
      if (word >= bits.size()) bits.resize(std::max(word + 1, bits.size() + bits.size() / 2));
      bits[word] |= uint64_t{1} << (row & 63);
    }

    bool Take(int64_t row) {
      const size_t word = static_cast<size_t>(row >> 6);
      if (word >= bits.size()) return false;
      const uint64_t bit = uint64_t{1} << (row & 63);
      const bool was_marked = bits[word] & bit;
      bits[word] &= ~bit;
      return was_marked;
    }

    void Add(const Marks& other) {
      all |= other.all;
      if (other.bits.size() > bits.size()) bits.resize(other.bits.size());
      for (size_t word = 0; word < other.bits.size(); ++word) bits[word] |= other.bits[word];
      removed.insert(removed.end(), other.removed.begin(), other.removed.end());
      in_file.insert(in_file.end(), other.in_file.begin(), other.in_file.end());
    }

    int64_t Count() const {
      int64_t count = 0;
      for (uint64_t word : bits) count += __builtin_popcountll(word);
      return count;
    }
  };

  void BeforeWrite(const WatchedShard&, const RowWrite& write) override {
    if (write.kind == RowWrite::kMoves) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (write.all()) now_.all = true;
    if (now_.all) return;  // Rows needn't be told apart until they are set aside.
    for (int64_t i = 0; i < write.n; ++i)
      if (write.rows[i] >= 0 && write.rows[i] < rows_) now_.Mark(write.rows[i]);
  }

  void RowsLeave(const int64_t* keys, const int64_t* rows, int64_t n, bool gone) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Marks* marks : {&now_, &aside_}) {
      for (int64_t i = 0; i < n; ++i) {
        if (rows != nullptr && marks->Take(rows[i]) && !gone) marks->in_file.push_back(keys[i]);
      }
    }
    if (gone) now_.removed.insert(now_.removed.end(), keys, keys + n);
  }

  void RowsMoved(const int64_t* from, const int64_t* to, int64_t n, int64_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Marks* marks : {&now_, &aside_}) {
      for (int64_t i = 0; i < n; ++i)
        if (marks->Take(from[i])) marks->Mark(to[i]);
    }
  }

  void Begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    aside_.Add(now_);
    now_ = Marks();
  }

  void Done() {
    std::lock_guard<std::mutex> lock(mutex_);
    aside_ = Marks();
  }

  void Undo() {
    std::lock_guard<std::mutex> lock(mutex_);
    now_.Add(aside_);
    aside_ = Marks();
  }

  template <class Use>
  auto WithAside(Use use) {
    std::lock_guard<std::mutex> lock(mutex_);
    return use(aside_);
  }

 private:
  const int64_t rows_;
  std::mutex mutex_;
  Marks now_, aside_;
};

namespace {

struct ChangeSets {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<ChangeSet>> by_number;
};

ChangeSets& AllChangeSets() {
  static auto* sets = new ChangeSets;
  return *sets;
}

std::shared_ptr<ChangeSet> FindChangeSet(int64_t number) {
  ChangeSets& sets = AllChangeSets();
  std::lock_guard<std::mutex> lock(sets.mutex);
  return sets.by_number.at(number);
}

}  // namespace
}  // namespace collective

// What Python calls (`collective.ops.rows.row_changes`).

extern "C" {

// Makes a change set of shards with fewer than `rows` rows. Its number is Python's.
COLLECTIVE_EXPORT void change_set_new(int64_t number, int64_t rows) {
  collective::ChangeSets& sets = collective::AllChangeSets();
  std::lock_guard<std::mutex> lock(sets.mutex);
  sets.by_number[number] = std::make_shared<collective::ChangeSet>(rows);
}

COLLECTIVE_EXPORT void change_set_free(int64_t number) {
  collective::ChangeSets& sets = collective::AllChangeSets();
  std::lock_guard<std::mutex> lock(sets.mutex);
  sets.by_number.erase(number);
}

// Returns 0 if the shard's session is closed.
COLLECTIVE_EXPORT int change_set_listen(int64_t number, int64_t shard) {
  const auto watched = collective::FindWatchedShard(shard);
  if (watched == nullptr) return 0;
  watched->Add(collective::FindChangeSet(number));
  return 1;
}

COLLECTIVE_EXPORT void change_set_leave(int64_t number, int64_t shard) {
  const auto watched = collective::FindWatchedShard(shard);
  if (watched != nullptr) watched->Remove(collective::FindChangeSet(number).get());
}

COLLECTIVE_EXPORT void change_set_begin(int64_t number) {
  collective::FindChangeSet(number)->Begin();
}

COLLECTIVE_EXPORT void change_set_done(int64_t number) {
  collective::FindChangeSet(number)->Done();
}

COLLECTIVE_EXPORT void change_set_undo(int64_t number) {
  collective::FindChangeSet(number)->Undo();
}

// Of what was set aside: whether all rows count as changed, and the sizes of what `change_set_read`
// writes.
COLLECTIVE_EXPORT int change_set_sizes(int64_t number, int64_t* rows, int64_t* removed,
                                       int64_t* in_file) {
  return collective::FindChangeSet(number)->WithAside([&](const collective::ChangeSet::Marks& of) {
    *rows = of.Count();
    *removed = static_cast<int64_t>(of.removed.size());
    *in_file = static_cast<int64_t>(of.in_file.size());
    return static_cast<int>(of.all);
  });
}

// Writes the changed rows, ascending, and the keys.
COLLECTIVE_EXPORT void change_set_read(int64_t number, int64_t* rows, int64_t* removed,
                                       int64_t* in_file) {
  collective::FindChangeSet(number)->WithAside([&](const collective::ChangeSet::Marks& of) {
    for (size_t word = 0; word < of.bits.size(); ++word) {
      for (uint64_t left = of.bits[word]; left != 0; left &= left - 1)
        *rows++ = static_cast<int64_t>(word * 64) + __builtin_ctzll(left);
    }
    std::copy(of.removed.begin(), of.removed.end(), removed);
    std::copy(of.in_file.begin(), of.in_file.end(), in_file);
  });
}

}  // extern "C"
