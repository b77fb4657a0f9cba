// What Python sees of the GPUs; gpus.py gives it to torch under torch's names.
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "gpus.h"
#include "graphs.h"
#include "run.h"

namespace fake {
bool in_bad_fork();
void initialise();
void take_allocators();
void watch_the_host();
void define_nccl(pybind11::module_& module);
}  // namespace fake

namespace py = pybind11;
using namespace fake;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("set_up", [](std::map<std::string, int> facts) {
    operators = std::move(facts);
    take_allocators();
    choose_attention();
    watch_the_host();
  });
  module.def("define_nccl", [module]() mutable { define_nccl(module); });
  module.def("initialise", &initialise);
  module.def("poison_forks", &poison_forks);
  module.def("in_bad_fork", &in_bad_fork);

  module.def("device_count", [] { return device_count; });
  module.def("get_device", &current_device);
  module.def("set_device", &set_device);
  module.def("exchange_device", [](int device) {
    int before = current_device();
    if (device >= 0) set_device(device);
    return before;
  });
  module.def("maybe_exchange_device", [](int device) {
    int before = current_device();
    if (device >= 0) maybe_set_device(device);
    return before;
  });
  module.def("use_context", &use_context);
  module.def("forget_contexts", &forget_contexts);
  module.def("get_stream", [](int device) { return current_stream(device).id; });
  module.def("new_stream", [](int device) { return new_stream(device).id; });
  module.def("set_stream", [](int64_t id, int device) {
    set_device(device);
    set_stream({device, id});
  });
  module.def("synchronize", [] {
    auto stream = current_stream(current_device());
    {
      LOCKED;
      forbid_while_capturing(stream, "cudaDeviceSynchronize");
    }
    wait_for_device(stream.device);
  });
  module.def("get_sync_debug_mode", [] { return sync_debug_mode; });
  module.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });

  module.def("memory", [](int device) {
    LOCKED;
    auto& memory = memory_of(device);
    return std::map<std::string, int64_t>{{"current", memory.used},
                                          {"peak", memory.peak},
                                          {"allocated", memory.allocated},
                                          {"freed", memory.freed},
                                          {"out_of_memory", memory.out_of_memory},
                                          {"capacity", capacity}};
  });
  module.def("reset_peak", [](int device) {
    LOCKED;
    memory_of(device).peak = memory_of(device).used;
  });
  module.def("set_memory_fraction", [](double fraction, int device) {
    LOCKED;
    memory_of(device).limit = fraction * capacity;
  });
  module.def("reset_accumulated", [](int device) {
    LOCKED;
    memory_of(device).allocated = memory_of(device).freed = 0;
  });
  module.def("generator", [](int device) {
    return py::reinterpret_steal<py::object>(
        THPGenerator_initDefaultGenerator(default_generator(device)));
  });

  module.def("resize_storage", [](const at::Tensor& tensor, int64_t bytes) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto data = storage->allocator()->allocate(bytes);
    auto kept = std::min<int64_t>(bytes, storage->nbytes());
    if (kept > 0) std::memcpy(data.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  });
  module.def("violations", [](bool clear) {
    LOCKED;
    return violations(clear);
  });
  module.def("host_reads", [](uintptr_t begin, size_t size, const std::string& what) {
    LOCKED;
    host_uses((const char*)begin, (const char*)begin + size, /*writes=*/false, what);
  });

  py::class_<Graph>(module, "Graph")
      .def(py::init([](bool) { return new Graph; }), py::arg("keep_graph") = false)
      .def("capture_begin", [](Graph& graph, py::args, py::kwargs) { graph.begin(); })
      .def("capture_end", &Graph::end)
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>())
      .def("reset", &Graph::reset)
      .def("register_generator_state", [](Graph&, py::object) {})
      .def("pool", [](Graph&) { return std::pair(0, 1); });
  module.def("is_capturing", [] {
    LOCKED;
    return graph_of(current_stream(current_device())) != nullptr;
  });
}
