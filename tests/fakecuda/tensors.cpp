// What needs no kernel: empty tensors, views, resizing, copies between host and GPUs.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include "graphs.h"
#include "results.h"

namespace fake {

at::Tensor as_cpu(const at::Tensor& tensor) {
  auto& memory = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(),
                       c10::DataPtr(memory.mutable_data(), c10::Device(c10::kCPU)),
                       c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto cpu = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = cpu.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return cpu;
}

at::Tensor to_gpu(const at::Tensor& cpu, int device) {
  OnDevice there(device);
  at::Tensor tensor = at::detail::empty_strided_generic(
      cpu.sizes(), cpu.strides(), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      cpu.scalar_type());
  if (auto bytes = tensor.storage().nbytes())
    std::memcpy(memory_at(tensor), memory_at(cpu) + cpu.storage_offset() * cpu.itemsize(), bytes);
  return tensor;
}

void resize_memory(const at::Tensor& tensor, size_t bytes) {
  wait_for_results(tensor);
  OnDevice there(tensor.device().index());
  auto storage = tensor.storage();
  auto memory = device_allocator()->allocate(bytes);
  std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

Span span_of(const at::Tensor& tensor) {
  auto* begin = (const char*)tensor.storage().data() + tensor.storage_offset() * tensor.itemsize();
  if (!tensor.numel()) return {begin, begin};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

namespace {
using at::IntArrayRef;
using at::Tensor;

at::ScalarType type_or_default(std::optional<at::ScalarType> type) {
  return type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}
int index_or_current(std::optional<at::Device> device) {
  return device && device->index() >= 0 ? device->index() : current_device();
}

Tensor empty_memory_format(IntArrayRef size, std::optional<at::ScalarType> type,
                           std::optional<at::Layout>, std::optional<at::Device> device,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice there(index_or_current(device));
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   type_or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  OnDevice there(index_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           type_or_default(type));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto bytes =
      at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_memory(self, bytes);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.data() && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  return set_storage(self, source, 0, {int64_t(source.nbytes() / self.itemsize())}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

// ---- copies

// A copy may use the host's memory after it has returned to the caller. Pageable memory that goes to
// a GPU is staged first.
Region* host_region(const Tensor& tensor) {
  return use_host_memory(memory_at(tensor), tensor.storage().nbytes());
}

void order_copy(const Tensor& to, const Tensor& from, StreamKey stream, bool waits,
                const std::string& name) {
  auto source = span_of(from), target = span_of(to);
  bool between_gpus = to.is_cuda() && from.is_cuda() && to.device() != from.device();
  auto other = current_stream(to.is_cuda() ? to.device().index() : stream.device);
  if (between_gpus) wait(stream, clock_of(other));
  launch(stream);
  if (from.is_cuda())
    read(stream, region_of(device_memory, source.begin), source.begin, source.end, name);
  else if (!waits && is_pinned(source.begin))
    read(stream, host_region(from), source.begin, source.end, name);
  else if (auto* region = region_of(host_memory, source.begin))
    read(stream, region, source.begin, source.end, name);
  if (to.is_cuda())
    write(stream, region_of(device_memory, target.begin), target.begin, target.end, name);
  else if (target.begin != target.end)
    write(stream, host_region(to), target.begin, target.end, name);
  if (between_gpus) wait(other, clock_of(stream));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  wait_for_results(source), wait_for_results(self);
  bool crosses = !self.is_cuda() || !source.is_cuda();
  bool waits = crosses && !non_blocking;
  int device = source.is_cuda() ? source.device().index() : self.device().index();
  auto stream = current_stream(device);
  bool is_within = !crosses && self.device() == source.device();
  std::string name = is_within          ? "a copy within a GPU"
                     : !crosses       ? "a copy between GPUs"
                     : self.is_cuda() ? "a copy to the GPU"
                                      : "a copy to the host";
  auto from = source.is_cuda() ? as_cpu(source) : source, to = self.is_cuda() ? as_cpu(self) : self;
  {
    LOCKED;
    check_fork();
    if (!source.is_cuda() && !is_pinned(memory_at(source)))
      host_uses(span_of(source).begin, span_of(source).end, /*writes=*/false, name);
    order_copy(self, source, stream, waits, name);
    if (auto* graph = graph_of(stream); graph && !crosses) {
      static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
      Recorded call{op, {to, from, true}, {to}, {}, name};
      for (auto [tensor, writes] : {std::pair(source, false), std::pair(self, true)}) {
        auto span = span_of(tensor);
        call.touched.push_back(
            {base_of(device_memory, span.begin), span.begin, span.end, writes});
        graph->uses(call.touched.back());
      }
      graph->calls.push_back(std::move(call));
    }
  }
  if (waits) synchronizing(stream, name);
  at::DisableRecordFunctionGuard unseen;  // by host.cpp: this copy is ordered already
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.copy_(from.expand(to.sizes()));
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  LOCKED;
  if (auto* region = region_of(device_memory, self.storage().data()))
    region->recorded.insert({stream.device_index(), stream.id()});
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided",
               static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef,
                                      std::optional<int64_t>)>(&at::native::as_strided_tensorimpl));
  library.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias", static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef)>(
                                     &at::native::_reshape_alias));
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("copy_", &copy_);
  library.impl("record_stream", &record_stream);
}
}  // namespace
}  // namespace fake
