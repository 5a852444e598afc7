// A file system of TensorFlow whose work Python does (see ops/rows/remote_files.py).

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/file_system.h"

namespace collective {
namespace {

// What Python answers. Until it does, the call has failed: an exception between its lines (a
// signal's, say) must not pass for a success.
struct Answer {
  int64_t result = -static_cast<int64_t>(absl::StatusCode::kInternal);
  std::string text = "Python gave no answer";
};

// Does an operation, and gives `collective_file_system_answer` a number from 0 on with what it
// read, or minus the code of an error with its message.
using Callback = void (*)(const char* operation, const char* path, const char* target,
                          int64_t number, int64_t size, void* data, void* answer);

// Lets calls into Python while there is one, and waits at its end for those inside: a thread that
// asks an interpreter which has ended for its lock crashes or hangs.
class Gate {
 public:
  bool Enter() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    ++inside_;
    return true;
  }

  void Leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    --inside_;
    left_.notify_all();
  }

  bool Close(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    return left_.wait_for(lock, std::chrono::duration<double>(seconds),
                          [this] { return inside_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable left_;
  int64_t inside_ = 0;
  bool closed_ = false;
};

// Never destroyed: threads use it until the process ends. A forked child gets a new one, as the
// calls of its parent's threads never end there.
std::atomic<Gate*> gate{new Gate};

struct Arguments {
  std::string path, target;
  int64_t number = 0, size = 0;
  void* data = nullptr;
};

class PythonFiles {
 public:
  explicit PythonFiles(Callback callback) : callback_(callback) {}

  absl::Status Call(const char* operation, const Arguments& arguments, int64_t* result = nullptr,
                    std::string* text = nullptr) const {
    Gate* const entered = gate.load();
    if (!entered->Enter())
      return absl::UnavailableError(arguments.path + ": " + operation +
                                    " is not possible anymore: Python has ended");
    Answer answer;
    callback_(operation, arguments.path.c_str(), arguments.target.c_str(), arguments.number,
              arguments.size, arguments.data, &answer);
    entered->Leave();
    if (answer.result < 0)
      return absl::Status(static_cast<absl::StatusCode>(-answer.result), answer.text);
    if (result != nullptr) *result = answer.result;
    if (text != nullptr) *text = std::move(answer.text);
    return absl::OkStatus();
  }

  absl::Status List(const char* operation, const std::string& path,
                    std::vector<std::string>* names) const {
    std::string answer;
    const absl::Status status = Call(operation, {path}, nullptr, &answer);
    if (!status.ok()) return status;
    names->clear();  // Each name ends in a zero byte.
    for (size_t start = 0, end; (end = answer.find('\0', start)) != std::string::npos;
         start = end + 1)
      names->push_back(answer.substr(start, end - start));
    return status;
  }

 private:
  const Callback callback_;
};

// Has nothing open in Python: any thread may read or end it, in a forked child, too.
class RemoteReader : public tensorflow::RandomAccessFile {
 public:
  RemoteReader(const PythonFiles& files, std::string path, int64_t length)
      : files_(files), path_(std::move(path)), length_(length) {}

  absl::Status Name(absl::string_view* result) const override {
    *result = path_;
    return absl::OkStatus();
  }

  absl::Status Read(tensorflow::uint64 offset, size_t size, absl::string_view* result,
                    char* scratch) const override {
    const int64_t first = std::min<int64_t>(offset, length_);
    const int64_t count = std::min<int64_t>(size, length_ - first);
    *result = absl::string_view(scratch, 0);
    if (count > 0) {
      const absl::Status status = files_.Call("read", {path_, "", first, count, scratch});
      if (!status.ok()) return status;
      *result = absl::string_view(scratch, count);
    }
    if (static_cast<size_t>(count) < size)
      return absl::OutOfRangeError(path_ + ": the file ends before byte " +
                                   std::to_string(offset + size));
    return absl::OkStatus();
  }

 private:
  const PythonFiles files_;
  const std::string path_;
  const int64_t length_;
};

class RemoteWriter : public tensorflow::WritableFile {
 public:
  RemoteWriter(const PythonFiles& files, std::string path, int64_t handle)
      : files_(files), path_(std::move(path)), handle_(handle) {}

  ~RemoteWriter() override {
    if (!closed_) Close().IgnoreError();
  }

  absl::Status Name(absl::string_view* result) const override {
    *result = path_;
    return absl::OkStatus();
  }

  absl::Status Append(absl::string_view data) override {
    return files_.Call("append", {path_, "", handle_, static_cast<int64_t>(data.size()),
                                  const_cast<char*>(data.data())});
  }

  absl::Status Close() override {
    if (closed_) return absl::OkStatus();
    closed_ = true;
    return files_.Call("close_writer", {path_, "", handle_});
  }

  absl::Status Flush() override { return files_.Call("flush", {path_, "", handle_}); }
  absl::Status Sync() override { return Flush(); }

  absl::Status Tell(int64_t* position) override {
    return files_.Call("tell", {path_, "", handle_}, position);
  }

 private:
  const PythonFiles files_;
  const std::string path_;
  const int64_t handle_;
  bool closed_ = false;
};

class RemoteRegion : public tensorflow::ReadOnlyMemoryRegion {
 public:
  explicit RemoteRegion(std::string content) : content_(std::move(content)) {}
  const void* data() override { return content_.data(); }
  tensorflow::uint64 length() override { return content_.size(); }

 private:
  const std::string content_;
};

class RemoteFileSystem : public tensorflow::FileSystem {
 public:
  explicit RemoteFileSystem(Callback callback) : files_(callback) {}
  TF_USE_FILESYSTEM_METHODS_WITH_NO_TRANSACTION_SUPPORT;
  using Token = tensorflow::TransactionToken;

  absl::Status NewRandomAccessFile(const std::string& path, Token*,
                                   std::unique_ptr<tensorflow::RandomAccessFile>* file) override {
    int64_t length = 0;
    const absl::Status status = files_.Call("open_reader", {path}, &length);
    if (status.ok()) file->reset(new RemoteReader(files_, path, length));
    return status;
  }

  absl::Status NewWritableFile(const std::string& path, Token*,
                               std::unique_ptr<tensorflow::WritableFile>* file) override {
    return OpenWriter("open_writer", path, file);
  }

  absl::Status NewAppendableFile(const std::string& path, Token*,
                                 std::unique_ptr<tensorflow::WritableFile>* file) override {
    return OpenWriter("open_appender", path, file);
  }

  absl::Status NewReadOnlyMemoryRegionFromFile(
      const std::string& path, Token*,
      std::unique_ptr<tensorflow::ReadOnlyMemoryRegion>* region) override {
    std::string content;
    const absl::Status status = files_.Call("content", {path}, nullptr, &content);
    if (status.ok()) region->reset(new RemoteRegion(std::move(content)));
    return status;
  }

  absl::Status FileExists(const std::string& path, Token*) override {
    return files_.Call("exists", {path});
  }

  absl::Status GetChildren(const std::string& path, Token*,
                           std::vector<std::string>* names) override {
    return files_.List("children", path, names);
  }

  absl::Status GetMatchingPaths(const std::string& pattern, Token*,
                                std::vector<std::string>* paths) override {
    return files_.List("matching", pattern, paths);
  }

  absl::Status Stat(const std::string& path, Token*,
                    tensorflow::FileStatistics* statistics) override {
    int64_t of_file[3] = {};  // bytes, time of the last change in ns, whether it is a folder
    const absl::Status status = files_.Call("stat", {path, "", 0, 0, of_file});
    if (status.ok())
      *statistics = tensorflow::FileStatistics(of_file[0], of_file[1], of_file[2] != 0);
    return status;
  }

  absl::Status GetFileSize(const std::string& path, Token* token,
                           tensorflow::uint64* size) override {
    tensorflow::FileStatistics statistics;
    const absl::Status status = Stat(path, token, &statistics);
    if (status.ok()) *size = statistics.length;
    return status;
  }

  absl::Status DeleteFile(const std::string& path, Token*) override {
    return files_.Call("delete_file", {path});
  }

  absl::Status CreateDir(const std::string& path, Token*) override {
    return files_.Call("create_folder", {path});
  }

  absl::Status RecursivelyCreateDir(const std::string& path, Token*) override {
    return files_.Call("create_folders", {path});
  }

  absl::Status DeleteDir(const std::string& path, Token*) override {
    return files_.Call("delete_folder", {path});
  }

  absl::Status DeleteRecursively(const std::string& path, Token*, int64_t* undeleted_files,
                                 int64_t* undeleted_folders) override {
    *undeleted_files = *undeleted_folders = 0;
    return files_.Call("delete_tree", {path});
  }

  absl::Status RenameFile(const std::string& source, const std::string& target, Token*) override {
    return files_.Call("rename", {source, target});
  }

  absl::Status IsDirectory(const std::string& path, Token*) override {
    return files_.Call("is_folder", {path});
  }

  absl::Status HasAtomicMove(const std::string&, bool* has_atomic_move) override {
    *has_atomic_move = false;
    return absl::OkStatus();
  }

 private:
  absl::Status OpenWriter(const char* operation, const std::string& path,
                          std::unique_ptr<tensorflow::WritableFile>* file) {
    int64_t handle = 0;
    const absl::Status status = files_.Call(operation, {path}, &handle);
    if (status.ok()) file->reset(new RemoteWriter(files_, path, handle));
    return status;
  }

  const PythonFiles files_;
};

}  // namespace
}  // namespace collective

#define COLLECTIVE_EXPORTED extern "C" __attribute__((used, visibility("default")))

// Returns 0, or 1 if TensorFlow refuses the scheme, as it does where it has it.
COLLECTIVE_EXPORTED int collective_file_system_register(const char* scheme,
                                                        collective::Callback callback) {
  return !tensorflow::Env::Default()
              ->RegisterFileSystem(scheme, std::unique_ptr<tensorflow::FileSystem>(
                                               new collective::RemoteFileSystem(callback)))
              .ok();
}

COLLECTIVE_EXPORTED void collective_file_system_answer(void* answer, int64_t result,
                                                       const char* text, int64_t size) {
  auto* const given = static_cast<collective::Answer*>(answer);
  given->result = result;
  given->text.assign(text, size);
}

// Lets no more calls into Python; returns 0, or 1 if some are still inside after this time.
COLLECTIVE_EXPORTED int collective_file_system_close(double seconds) {
  return !collective::gate.load()->Close(seconds);
}

COLLECTIVE_EXPORTED void collective_file_system_forked() {
  collective::gate = new collective::Gate;
}
#undef COLLECTIVE_EXPORTED
