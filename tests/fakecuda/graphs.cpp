// CUDA graphs; see graphs.h.
#include "graphs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "gpus.h"
#include "run.h"

namespace fake {

namespace {
std::map<StreamKey, Graph*> captures;

void leave(Graph* graph) {
  std::erase_if(captures, [&](const auto& entry) { return entry.second == graph; });
}
StreamKey here() { return current_stream(current_device()); }
}  // namespace

Graph* graph_of(StreamKey stream) {
  auto entry = captures.find(stream);
  return entry == captures.end() ? nullptr : entry->second;
}

void join_capture(StreamKey stream, Graph* graph) {
  bool is_active = std::any_of(captures.begin(), captures.end(),
                               [&](const auto& entry) { return entry.second == graph; });
  if (is_active && !graph_of(stream)) captures[stream] = graph;
}

void forbid_while_capturing(StreamKey stream, const std::string& what) {
  auto* graph = graph_of(stream);
  if (!graph) return;
  graph->error = what;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

Graph::~Graph() { reset(); }

void Graph::begin() {
  LOCKED;
  TORCH_CHECK(here().id != 0, "CUDA graphs must be captured on a non-default stream.");
  origin = here();
  captures[origin] = this;
  for (int device = 0; device < device_count; device++) random.push_back(random_state(device));
}

void Graph::uses(const Touched& memory) {
  if (!memory.base) return;
  auto& region = device_memory[memory.base];
  if (region.graph == this) return;
  external[memory.base] = region.id;
  if (!contents.count(memory.base))
    contents[memory.base] = {memory.base, memory.base + region.size};
}

// What was computed while capturing is undone: on a GPU it has not run.
void Graph::end() {
  LOCKED;
  leave(this);
  for (auto& [base, bytes] : contents) {
    auto region = device_memory.find(base);
    if (region != device_memory.end() && region->second.id == external[base])
      std::memcpy(base, bytes.data(), bytes.size());
  }
  contents.clear();
  for (size_t device = 0; device < random.size(); device++)
    set_random_state(device, random[device]);
  random.clear();
  for (auto* base : pool) std::memset(base, 0xFF, device_memory[base].size);
  TORCH_CHECK(here() == origin, "Capture must end on the same stream it began on.");
  TORCH_CHECK(error.empty(), "CUDA error: operation failed due to a previous error during capture (",
              error, ")");
  is_ready = true;
}

void Graph::replay() {
  LOCKED;
  TORCH_CHECK(is_ready, "Called CUDAGraph::replay without a preceding successful capture.");
  forbid_while_capturing(here(), "replay");
  for (auto& [base, id] : external) {
    auto region = device_memory.find(base);
    if (region == device_memory.end() || region->second.id != id)
      violation("GRAPH: a replay uses memory that was freed after the capture");
  }
  auto stream = here();
  launch(stream);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto store = [](const at::Tensor& to, const at::Tensor& value) {
    if (value.defined() && to.data_ptr() != value.data_ptr()) to.copy_(value);
  };
  for (auto& call : calls) {
    for (auto& memory : call.touched)
      (memory.writes ? write : read)(stream, region_of(device_memory, memory.base), memory.begin,
                                     memory.end, "replayed " + call.name);
    auto stack = call.arguments;
    for (auto& value : stack)
      if (value.isGenerator()) value = draw_from(default_generator(stream.device));
    call_on_cpu(call.op, stack, stream.device, call.name == "native_dropout");
    for (size_t i = 0; i < stack.size() && i < call.results.size(); i++) {
      auto& result = call.results[i];
      if (result.isTensor() && stack[i].isTensor()) store(result.toTensor(), stack[i].toTensor());
      if (!result.isTensorList()) continue;
      auto to = result.toTensorList(), values = stack[i].toTensorList();
      for (size_t j = 0; j < to.size(); j++) store(to.get(j), values.get(j));
    }
  }
}

void Graph::reset() {
  LOCKED;
  calls.clear();
  leave(this);
  for (auto* base : freed) {
    device_memory.erase(base);
    std::free(base);
  }
  freed.clear();
  for (auto* base : pool)
    if (auto entry = device_memory.find(base);
        entry != device_memory.end() && entry->second.graph == this)
      entry->second.graph = nullptr;
  pool.clear();
  is_ready = false;
}

}  // namespace fake
