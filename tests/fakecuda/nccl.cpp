// `nccl` between processes: gloo on copies, with NCCL's rules, a stream of its own, and a host that goes
// on: see results.h.
#include <ATen/core/ivalue.h>
#include <Python.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <thread>

#include "results.h"
#include "tensors.h"

namespace fake {
namespace {
using at::Tensor;
using c10::intrusive_ptr;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using namespace c10d;

Tensors flat(const Lists& lists) {
  Tensors all;
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Where only the root has a list.
Lists listed(const Tensors& tensors) { return tensors.empty() ? Lists{} : Lists{tensors}; }

// An error gives up its peers; anything else that ends a group must not.
bool handles_error() {
  pybind11::gil_scoped_acquire gil;
  auto error = pybind11::module_::import("sys").attr("exc_info")().cast<pybind11::tuple>()[1];
  return PyErr_GivenExceptionMatches(pybind11::object(error).ptr(), PyExc_Exception);
}

class NCCL final : public Backend {
 public:
  NCCL(intrusive_ptr<Backend> gloo, intrusive_ptr<Store> store)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo), store_(store) {}

  const std::string getBackendName() const override { return "fakenccl"; }

  // Each lambda gets copies of the inputs, and room for what is to be in the outputs.

  intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return run(tensors, tensors, [gloo = gloo_, options](Tensors copies, Tensors& results) {
      gloo->allreduce(copies, options)->wait();
      results = copies;
    });
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                          const AllreduceCoalescedOptions& options) override {
    return run(tensors, tensors, [gloo = gloo_, options](Tensors copies, Tensors& results) {
      for (auto& copy : copies) {
        Tensors one{copy};
        gloo->allreduce(one, options)->wait();
      }
      results = copies;
    });
  }
  intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return run(tensors, tensors, [gloo = gloo_, options](Tensors copies, Tensors& results) {
      gloo->broadcast(copies, options)->wait();
      results = copies;
    });
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const ReduceOptions& options) override {
    return run(tensors, tensors, [gloo = gloo_, options](Tensors copies, Tensors& results) {
      gloo->reduce(copies, options)->wait();
      results = copies;
    });
  }
  intrusive_ptr<Work> allgather(Lists& outputs, Tensors& inputs,
                                const AllgatherOptions& options) override {
    return run(inputs, flat(outputs), [gloo = gloo_, options](Tensors copies, Tensors& results) {
      Lists gathered{results};
      gloo->allgather(gathered, copies, options)->wait();
    });
  }
  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                      const AllgatherOptions& options) override {
    return run({input}, {output}, [gloo = gloo_, options](Tensors copies, Tensors& results) {
      gloo->_allgather_base(results[0], copies[0], options)->wait();
    });
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const AllgatherOptions& options) override {
    return run(inputs, outputs, [gloo = gloo_, options](Tensors copies, Tensors& results) {
      for (size_t i = 0; i < results.size(); i++)
        gloo->_allgather_base(results[i], copies[i], options)->wait();
    });
  }
  intrusive_ptr<Work> gather(Lists& outputs, Tensors& inputs,
                             const GatherOptions& options) override {
    return run(inputs, flat(outputs), [gloo = gloo_, options](Tensors copies, Tensors& results) {
      auto gathered = listed(results);
      gloo->gather(gathered, copies, options)->wait();
    });
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, Lists& inputs,
                              const ScatterOptions& options) override {
    return run(flat(inputs), outputs, [gloo = gloo_, options](Tensors copies, Tensors& results) {
      auto sent = listed(copies);
      gloo->scatter(results, sent, options)->wait();
    });
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                           const ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    AllreduceOptions same;
    same.reduceOp = options.reduceOp;
    auto rank = getRank(), size = getSize();
    return run(inputs, outputs, [=, gloo = gloo_](Tensors copies, Tensors& results) {
      for (size_t i = 0; i < copies.size(); i++) {
        Tensors one{copies[i]};
        gloo->allreduce(one, same)->wait();
        results[i] = one[0].view({size, -1})[rank].view(results[i].sizes());
      }
    });
  }
  intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to,
                                    std::vector<int64_t>& from,
                                    const AllToAllOptions& options) override {
    return run({input}, {output},
               [=, gloo = gloo_](Tensors copies, Tensors& results) mutable {
                 gloo->alltoall_base(results[0], copies[0], to, from, options)->wait();
               });
  }
  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return run(tensors, {}, [=, gloo = gloo_](Tensors copies, Tensors&) {
      gloo->send(copies, to, tag)->wait();
    });
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return run({}, tensors, [=, gloo = gloo_](Tensors, Tensors& results) {
      gloo->recv(results, from, tag)->wait();
    });
  }
  intrusive_ptr<Work> barrier(const BarrierOptions& options) override {
    auto work = run({}, {}, [gloo = gloo_, options](Tensors, Tensors&) {
      gloo->barrier(options)->wait();
    });
    Clock clock;
    {
      LOCKED;
      clock = clock_of(stream_on(current_device()));
    }
    wait_for_results(clock);
    LOCKED;
    host_waits(clock);
    return work;
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  // What was begun is done first. ncclCommDestroy waits for its peers, too: FAKENCCL_STRICT=1 plays that.
  void shutdown() override {
    queue_.finish();
    if (!std::getenv("FAKENCCL_STRICT")) return;
    pybind11::gil_scoped_release no_gil;
    store_->add("shutdown", 1);
    while (store_->add("shutdown", 0) < getSize())
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  void abort() override {
    auto left = queue_.drop();
    if (left && !handles_error())
      violation("ABORT: a rank ends its group before " + std::to_string(left) +
                " of its collectives, which its peers need, and no error is the reason; "
                "synchronize first");
    gloo_->abort();
  }

 private:
  StreamKey stream_on(int device) {
    auto entry = streams_.find(device);
    if (entry == streams_.end()) entry = streams_.emplace(device, new_stream(device)).first;
    return entry->second;
  }

  template <class Compute>
  intrusive_ptr<Work> run(const Tensors& inputs, const Tensors& outputs, Compute compute) {
    check(inputs);
    check(outputs);
    for (auto& tensor : inputs) wait_for_results(tensor);
    for (auto& tensor : outputs) wait_for_results(tensor);
    int device = current_device();
    auto stream = stream_on(device), caller = current_stream(device);
    Collective collective{stream};
    {
      LOCKED;
      check_fork();
      note_collective(device);
      wait(stream, clock_of(caller));
      launch(stream);
      collective.time = clock_of(stream)[stream];
    }
    Tensors copies;
    for (auto& tensor : inputs) copies.push_back(touch(stream, tensor, false).clone());
    for (auto& tensor : outputs) collective.outputs.push_back(touch(stream, tensor, true));
    collective.compute = [compute, copies](Tensors& results) mutable { compute(copies, results); };
    queue_.add(std::move(collective));
    c10::StreamGuard here(
        c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), stream.id));
    auto future = c10::make_intrusive<at::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::kCUDA, device)});
    // Whose devices `wait` waits for: a send has no output, and NCCL waits for its end, too. As of
    // NCCL, it is the stream that waits, and not the host.
    future->markCompleted(at::IValue(outputs.empty() ? inputs : outputs));
    return Work::create_from_future(future);
  }

  // A tensor's memory, as a kernel of the stream uses it.
  static Tensor touch(StreamKey stream, const Tensor& tensor, bool writes) {
    LOCKED;
    auto span = span_of(tensor);
    auto* region = region_of(device_memory, span.begin);
    if (region) region->recorded.insert(stream);  // as NCCL keeps tensors that are in use
    (writes ? fake::write : fake::read)(stream, region, span.begin, span.end, "a collective");
    return as_cpu(tensor);
  }

  void check(const Tensors& tensors) const {
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "NCCL: Tensors must be CUDA and dense");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "NCCL: Tensors must be contiguous");
      TORCH_CHECK(tensor.device().index() == current_device(), "NCCL: a tensor of ",
                  tensor.device(), " while the current device is cuda:", current_device(),
                  "; call torch.cuda.set_device");
    }
  }

  intrusive_ptr<Backend> gloo_;
  intrusive_ptr<Store> store_;
  Queue queue_;
  std::map<int, StreamKey> streams_;
};
}  // namespace

void define_nccl(pybind11::module_& module) {
  pybind11::class_<NCCL, Backend, c10::intrusive_ptr<NCCL>>(module, "NCCL")
      .def(pybind11::init([](const c10::intrusive_ptr<Backend>& gloo,
                             const c10::intrusive_ptr<Store>& store) {
        return c10::make_intrusive<NCCL>(gloo, store);
      }));
}

}  // namespace fake
