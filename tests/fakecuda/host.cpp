// Operators on CPU tensors that a copy may still read or write.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include "tensors.h"

namespace fake {
namespace {

bool uses_data(const c10::OperatorHandle& op) {
  if (op.operator_name().name == "aten::copy_") return true;
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return false;  // it calls others
  for (auto& argument : op.schema().arguments())
    if (auto* alias = argument.alias_info(); alias && !alias->isWrite()) return false;  // a view
  return op.operator_name().name != "aten::set_" && op.operator_name().name != "aten::resize_";
}

void look_at(const at::Tensor& tensor, bool writes, const std::string& op) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return;
  auto span = span_of(tensor);
  LOCKED;
  host_uses(span.begin, span.end, writes, op);
}

std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
  if (!is_host_memory_in_use()) return nullptr;
  auto name = call.operator_name();
  if (!name) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || !uses_data(*op)) return nullptr;
  auto values = call.inputs();
  bool is_copy = name->name == "aten::copy_";
  if (is_copy && (values[0].toTensor().is_cuda() || values[1].toTensor().is_cuda()))
    return nullptr;  // these have streams
  auto& arguments = op->schema().arguments();
  for (size_t i = 0; i < values.size() && i < arguments.size(); i++) {
    auto* alias = arguments[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (values[i].isTensor()) look_at(values[i].toTensor(), writes, name->name);
    if (values[i].isTensorList())
      for (at::Tensor tensor : values[i].toTensorList()) look_at(tensor, writes, name->name);
  }
  return nullptr;
}
}  // namespace

void watch_the_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&on_call)
                            .needsInputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}

}  // namespace fake
