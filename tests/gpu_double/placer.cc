// Has TensorFlow's own placer choose devices, on a machine without a GPU as on one that has it.

#include <cstring>
#include <memory>
#include <string>

#include "tensorflow/core/common_runtime/device_set.h"
#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/common_runtime/placer.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/public/session_options.h"

namespace {

using tensorflow::Status;

tensorflow::DeviceAttributes AttributesOf(const std::string& type) {
  tensorflow::DeviceAttributes attributes;
  attributes.set_name("/job:localhost/replica:0/task:0/device:" + type + ":0");
  attributes.set_device_type(type);
  return attributes;
}

// Is there by name alone: nothing runs on it.
class NamedDevice : public tensorflow::Device {
 public:
  explicit NamedDevice(const std::string& type) : Device(nullptr, AttributesOf(type)) {}
  Status Sync() override { return tensorflow::OkStatus(); }
  tensorflow::Allocator* GetAllocator(tensorflow::AllocatorAttributes) override { return nullptr; }
};

Status Place(const std::string& serialized, std::string* lines) {
  tensorflow::GraphDef definition;
  if (!definition.ParseFromString(serialized))
    return tensorflow::errors::InvalidArgument("this is no graph");
  tensorflow::FunctionLibraryDefinition library(tensorflow::OpRegistry::Global(),
                                                definition.library());
  auto graph = std::make_unique<tensorflow::Graph>(library);
  TF_RETURN_IF_ERROR(tensorflow::ConvertGraphDefToGraph({}, definition, graph.get()));
  NamedDevice cpu("CPU"), gpu("GPU");
  tensorflow::DeviceSet devices;
  devices.AddDevice(&cpu);
  devices.AddDevice(&gpu);
  devices.set_client_device(&cpu);

  // As GraphExecutionState::InitBaseGraph does: branches and loops come apart before.
  tensorflow::SessionOptions session;
  tensorflow::GraphOptimizationPassOptions passes;
  passes.session_handle = "placer";
  passes.session_options = &session;
  passes.graph = &graph;
  passes.flib_def = &library;
  passes.device_set = &devices;
  TF_RETURN_IF_ERROR(tensorflow::OptimizationPassRegistry::Global()->RunGrouping(
      tensorflow::OptimizationPassRegistry::PRE_PLACEMENT, passes));
  constexpr bool kSoftly = false, kLogs = false;
  tensorflow::Placer placer(graph.get(), "", &library, &devices, nullptr, kSoftly, kLogs);
  TF_RETURN_IF_ERROR(placer.Run(passes));
  for (const tensorflow::Node* node : graph->op_nodes())
    *lines += node->name() + "\t" + node->assigned_device_name() + "\n";
  return tensorflow::OkStatus();
}

}  // namespace

// Writes a line for each operation, its name and its device, or the error. Returns how many bytes
// that takes; less than 0 of an error.
extern "C" __attribute__((visibility("default"))) long placer_place(const char* graph, size_t size,
                                                                    char* text, size_t room) {
  std::string lines;
  const Status status = Place(std::string(graph, size), &lines);
  if (!status.ok()) lines = std::string(status.message());
  std::strncpy(text, lines.c_str(), room);
  const long length = static_cast<long>(lines.size());
  return status.ok() ? length : -length;
}
