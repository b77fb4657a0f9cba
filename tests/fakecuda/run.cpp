// The fallback of the CUDA dispatch key: see run.h.
#include "run.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <mutex>

#include "graphs.h"
#include "results.h"
#include "tensors.h"

namespace fake {

std::map<std::string, int> operators;

namespace {
using at::Tensor;
using c10::IValue;

// Those in which the host waits for a number, or for a shape that depends on the data.
const std::set<std::string> SYNCHRONIZING = {
    "_local_scalar_dense", "nonzero",    "equal",    "masked_select",
    "_unique2",            "unique_dim", "bincount", "unique_consecutive"};
// Their CPU kernels draw from the default generator of the CPU.
const std::set<std::string> DRAWS_UNASKED = {"native_dropout"};

struct Borrowed {
  Tensor gpu, cpu;
  bool is_written;
};

class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op), schema_(op.schema()) {
    auto& full = schema_.operator_name();
    name_ = full.name.substr(full.name.find("::") + 2);
    if (!full.overload_name.empty()) name_ += "." + full.overload_name;
    auto facts = operators.find(name_);
    is_known_ = facts != operators.end();
    facts_ = is_known_ ? facts->second : HAS_CUDA_KERNEL;
  }

  void run(c10::Stack* stack) {
    auto arguments = torch::jit::pop(*stack, schema_.arguments().size());
    c10::Stack cpu = borrow(arguments);
    if (device_ < 0) device_ = current_device();
    refuse_what_a_gpu_refuses();
    auto stream = current_stream(device_);
    if (SYNCHRONIZING.count(name_) || (may_mix() && has_host_tensor_)) synchronizing(stream, name_);
    draw_from_gpu(cpu);
    auto* graph = order(stream);
    auto kept = graph ? cpu : c10::Stack();
    compute(cpu);
    take_over_resized();
    for (auto& value : cpu) value = to_gpu(value);
    if (graph) record(graph, std::move(kept), cpu);
    for (auto& value : cpu) stack->push_back(std::move(value));
  }

 private:
  // ---- before

  c10::Stack borrow(const std::vector<IValue>& arguments) {
    c10::Stack cpu;
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& value = arguments[i];
      bool writes = is_written(schema_.arguments()[i]);
      if (value.isTensor()) {
        cpu.emplace_back(borrow(value.toTensor(), writes));
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (Tensor tensor : value.toTensorList()) list.push_back(borrow(tensor, writes));
        cpu.emplace_back(std::move(list));
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (std::optional<Tensor> tensor : value.toOptionalTensorList())
          list.push_back(tensor ? std::optional(borrow(*tensor, writes)) : tensor);
        cpu.emplace_back(std::move(list));
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        if (device_ < 0) device_ = value.toDevice().index();
        cpu.emplace_back(c10::Device(c10::kCPU));
      } else {
        cpu.push_back(value);
      }
    }
    return cpu;
  }

  static bool is_written(const c10::Argument& argument) {
    auto* alias = argument.alias_info();
    if (!alias) return false;
    auto& contained = alias->containedTypes();
    return alias->isWrite() || (!contained.empty() && contained[0].isWrite());
  }

  Tensor borrow(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      // TensorIterator takes a CPU tensor without dimensions for a number.
      bool is_taken = tensor.dim() == 0 && (!is_known_ || facts_ & MIXES_DEVICES);
      has_host_tensor_ |= !is_number && !is_taken;
      return tensor;
    }
    wait_for_results(tensor);
    int index = tensor.device().index();
    if (device_ >= 0 && device_ != index) other_device_ = index;
    device_ = index;
    for (auto& one : borrowed_)
      if (one.gpu.is_same(tensor)) {
        one.is_written |= writes;
        return one.cpu;
      }
    borrowed_.push_back({tensor, as_cpu(tensor), writes});
    return borrowed_.back().cpu;
  }

  bool may_mix() const {  // index tensors and scalars of the host are copied to the GPU
    auto begins = [&](const char* with) { return name_.rfind(with, 0) == 0; };
    return begins("index") || begins("_index_put") || begins("_foreach");
  }

  void refuse_what_a_gpu_refuses() const {
    TORCH_CHECK_NOT_IMPLEMENTED(facts_ & HAS_CUDA_KERNEL, "Could not run 'aten::", name_,
                                "' with arguments from the 'CUDA' backend.");
    bool is_mixed = other_device_ >= 0 || (has_host_tensor_ && !may_mix() && !borrowed_.empty());
    TORCH_CHECK(!is_mixed,
                "Expected all tensors to be on the same device, but found at least two devices, "
                "cuda:", device_, " and ",
                other_device_ >= 0 ? "cuda:" + std::to_string(other_device_) : "cpu", "! (", name_,
                ")");
  }

  void draw_from_gpu(c10::Stack& arguments) const {
    for (size_t i = 0; i < arguments.size(); i++) {
      static const std::string kind = "Generator";
      if (schema_.arguments()[i].type()->str().find(kind) == std::string::npos) continue;
      auto& value = arguments[i];
      if (value.isNone())
        value = draw_from(default_generator(device_));
      else if (value.isGenerator() && value.toGenerator().device().is_cuda())
        value = draw_from(value.toGenerator());
    }
  }

  Graph* order(StreamKey stream) const {
    LOCKED;
    check_fork();
    launch(stream);
    for (auto& one : borrowed_) {
      auto span = span_of(one.gpu);
      auto* region = region_of(device_memory, span.begin);
      (one.is_written ? write : read)(stream, region, span.begin, span.end, name_);
    }
    auto* graph = graph_of(stream);
    if (graph)
      for (auto& one : borrowed_) graph->uses(touched(one.gpu, one.is_written));
    return graph;
  }

  static Touched touched(const Tensor& tensor, bool writes) {
    auto span = span_of(tensor);
    return {base_of(device_memory, span.begin), span.begin, span.end, writes};
  }

  // ---- now

  void compute(c10::Stack& arguments) const {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    call_on_cpu(op_, arguments, device_, DRAWS_UNASKED.count(name_));
  }

  // ---- after

  void take_over_resized() const {  // an out= that was too small
    for (auto& one : borrowed_) {
      if (!one.is_written || one.cpu.sizes().equals(one.gpu.sizes())) continue;
      if (memory_at(one.cpu) != memory_at(one.gpu)) {
        auto bytes = one.cpu.storage().nbytes();
        resize_memory(one.gpu, bytes);
        std::memcpy(memory_at(one.gpu), memory_at(one.cpu), bytes);
      }
      one.gpu.unsafeGetTensorImpl()->set_sizes_and_strides(one.cpu.sizes(), one.cpu.strides());
    }
  }

  IValue to_gpu(const IValue& value) const {
    if (value.isTensor()) return to_gpu(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (Tensor tensor : value.toTensorList()) list.push_back(to_gpu(tensor));
    return list;
  }

  Tensor to_gpu(const Tensor& tensor) const {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& one : borrowed_)
      if (one.cpu.is_same(tensor)) return one.gpu;
    for (auto& one : borrowed_)
      if (tensor.storage().nbytes() && memory_at(tensor) == memory_at(one.gpu))
        return at::native::as_strided_tensorimpl(one.gpu, tensor.sizes(), tensor.strides(),
                                                 tensor.storage_offset());
    auto result = fake::to_gpu(tensor, device_);
    LOCKED;
    auto span = span_of(result);
    write(current_stream(device_), region_of(device_memory, span.begin), span.begin, span.end,
          name_);
    return result;
  }

  void record(Graph* graph, c10::Stack arguments, const c10::Stack& results) const {
    LOCKED;
    Recorded call{op_, std::move(arguments), {}, {}, name_};
    for (auto& one : borrowed_) call.touched.push_back(touched(one.gpu, one.is_written));
    auto keep = [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      call.touched.push_back(touched(tensor, true));
      return as_cpu(tensor);
    };
    for (auto& value : results) {
      if (value.isTensor()) {
        call.results.emplace_back(keep(value.toTensor()));
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (Tensor tensor : value.toTensorList()) list.push_back(keep(tensor));
        call.results.emplace_back(std::move(list));
      } else {
        call.results.emplace_back();
      }
    }
    graph->calls.push_back(std::move(call));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  bool is_known_;
  int facts_;
  std::vector<Borrowed> borrowed_;
  int device_ = -1, other_device_ = -1;
  bool has_host_tensor_ = false;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, c10::Stack* stack) {
  Call(op).run(stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
// Those that torch would cut up first, for a device that it has no kernel for: into a kernel that it
// chooses by the device (convolutions), or with a result of another shape (losses).
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (auto* name : {"convolution", "convolution_backward", "mse_loss", "smooth_l1_loss"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace

void call_on_cpu(const c10::OperatorHandle& op, c10::Stack& stack, int device, bool draws_unasked) {
  if (!draws_unasked) return op.callBoxed(stack);
  static std::mutex one_draw;  // threads of other GPUs borrow the same generator
  std::lock_guard<std::mutex> locked(one_draw);
  auto cpu = at::detail::getDefaultCPUGenerator();
  auto before = cpu.get_state();
  cpu.set_state(draw_from(default_generator(device)).get_state());
  try {
    op.callBoxed(stack);
  } catch (...) {
    cpu.set_state(before);
    throw;
  }
  cpu.set_state(before);
}

void choose_attention() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(
      +[](const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
          std::optional<double>, bool) -> int64_t { return 0; });
}

}  // namespace fake

namespace c10d {
// DistributedDataParallel measures with it what it logs.
struct NoTimer final : Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}  // namespace c10d
