// `nccl` between processes: gloo on copies, with NCCL's rules and a stream of its own.
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <thread>

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

// Copies of tensors of a card, in the host's memory, as of a kernel of the current stream.
class Copies {
 public:
  explicit Copies(StreamKey stream) : stream_(stream) {}

  Tensors read(const Tensors& tensors) {
    Tensors copies;
    for (auto& tensor : tensors) copies.push_back(touch(tensor, false).clone());
    return copies;
  }
  Lists read(const Lists& lists) {
    Lists copies;
    for (auto& list : lists) copies.push_back(read(list));
    return copies;
  }
  void write(const Tensors& tensors, const Tensors& copies) {
    for (size_t i = 0; i < tensors.size(); i++) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      touch(tensors[i], true).copy_(copies[i]);
    }
  }

 private:
  Tensor touch(const Tensor& tensor, bool writes) {
    LOCKED;
    auto span = span_of(tensor);
    auto* region = region_of(device_memory, span.begin);
    if (region) region->recorded.insert(stream_);  // as NCCL keeps tensors that are in use
    (writes ? fake::write : fake::read)(stream_, region, span.begin, span.end, "a collective");
    return as_cpu(tensor);
  }

  StreamKey stream_;
};

class NCCL final : public Backend {
 public:
  NCCL(intrusive_ptr<Backend> gloo, intrusive_ptr<Store> store)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo), store_(store) {}

  const std::string getBackendName() const override { return "fakenccl"; }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return run(tensors, tensors, [&](Copies&, Tensors& copies) {
      gloo_->allreduce(copies, options)->wait();
    });
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                          const AllreduceCoalescedOptions& options) override {
    return run(tensors, tensors, [&](Copies&, Tensors& copies) {
      for (auto& copy : copies) {
        Tensors one{copy};
        gloo_->allreduce(one, options)->wait();
      }
    });
  }
  intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return run(tensors, tensors, [&](Copies&, Tensors& copies) {
      gloo_->broadcast(copies, options)->wait();
    });
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const ReduceOptions& options) override {
    return run(tensors, tensors, [&](Copies&, Tensors& copies) {
      gloo_->reduce(copies, options)->wait();
    });
  }
  intrusive_ptr<Work> allgather(Lists& outputs, Tensors& inputs,
                                const AllgatherOptions& options) override {
    return run(inputs, flat(outputs), [&](Copies& card, Tensors& copies) {
      Lists gathered = card.read(outputs);
      gloo_->allgather(gathered, copies, options)->wait();
      copies = flat(gathered);
    });
  }
  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                      const AllgatherOptions& options) override {
    return run({input}, {output}, [&](Copies& card, Tensors& copies) {
      auto gathered = card.read({output})[0];
      gloo_->_allgather_base(gathered, copies[0], options)->wait();
      copies = {gathered};
    });
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const AllgatherOptions& options) override {
    return run(inputs, outputs, [&](Copies& card, Tensors& copies) {
      Tensors gathered = card.read(outputs);
      for (size_t i = 0; i < gathered.size(); i++)
        gloo_->_allgather_base(gathered[i], copies[i], options)->wait();
      copies = gathered;
    });
  }
  intrusive_ptr<Work> gather(Lists& outputs, Tensors& inputs,
                             const GatherOptions& options) override {
    return run(inputs, flat(outputs), [&](Copies& card, Tensors& copies) {
      Lists gathered = card.read(outputs);
      gloo_->gather(gathered, copies, options)->wait();
      copies = flat(gathered);
    });
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, Lists& inputs,
                              const ScatterOptions& options) override {
    return run(flat(inputs), outputs, [&](Copies& card, Tensors& copies) {
      Lists sent = card.read(inputs);
      Tensors received = card.read(outputs);
      gloo_->scatter(received, sent, options)->wait();
      copies = received;
    });
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                           const ReduceScatterOptions& options) override {
    return run({input}, {output}, [&](Copies& card, Tensors& copies) {
      AllreduceOptions same;
      same.reduceOp = options.reduceOp;
      gloo_->allreduce(copies, same)->wait();
      copies = {copies[0].view({getSize(), -1})[getRank()].view(output.sizes())};
    });
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    return run(inputs, outputs, [&](Copies& card, Tensors& copies) {
      AllreduceOptions same;
      same.reduceOp = options.reduceOp;
      for (size_t i = 0; i < copies.size(); i++) {
        Tensors one{copies[i]};
        gloo_->allreduce(one, same)->wait();
        copies[i] = one[0].view({getSize(), -1})[getRank()].view(outputs[i].sizes());
      }
    });
  }
  intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to,
                                    std::vector<int64_t>& from,
                                    const AllToAllOptions& options) override {
    return run({input}, {output}, [&](Copies& card, Tensors& copies) {
      auto received = card.read({output})[0];
      gloo_->alltoall_base(received, copies[0], to, from, options)->wait();
      copies = {received};
    });
  }
  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return run(tensors, {}, [&](Copies&, Tensors& copies) { gloo_->send(copies, to, tag)->wait(); });
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return run(tensors, tensors, [&](Copies&, Tensors& copies) {
      gloo_->recv(copies, from, tag)->wait();
    });
  }
  intrusive_ptr<Work> barrier(const BarrierOptions& options) override {
    auto work = run({}, {}, [&](Copies&, Tensors&) { gloo_->barrier(options)->wait(); });
    LOCKED;
    host_waits(clock_of(stream_on(current_device())));
    return work;
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  // ncclCommDestroy waits for its peers. FAKENCCL_STRICT=1 plays that.
  void shutdown() override {
    if (!std::getenv("FAKENCCL_STRICT")) return;
    pybind11::gil_scoped_release no_gil;
    store_->add("shutdown", 1);
    while (store_->add("shutdown", 0) < getSize())
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  void abort() override { gloo_->abort(); }

 private:
  StreamKey stream_on(int device) {
    auto entry = streams_.find(device);
    if (entry == streams_.end()) entry = streams_.emplace(device, new_stream(device)).first;
    return entry->second;
  }

  // `collective` gets copies of the inputs, and puts what is to be in the outputs in their place.
  template <class Collective>
  intrusive_ptr<Work> run(const Tensors& inputs, const Tensors& outputs, Collective collective) {
    check(inputs);
    check(outputs);
    int device = current_device();
    auto stream = stream_on(device), caller = current_stream(device);
    {
      LOCKED;
      check_fork();
      note_collective(device);
      wait(stream, clock_of(caller));
      launch(stream);
    }
    Copies card(stream);
    auto copies = card.read(inputs);
    collective(card, copies);
    card.write(outputs, copies);
    c10::StreamGuard here(
        c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), stream.id));
    auto future = c10::make_intrusive<at::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::kCUDA, device)});
    // Whose devices `wait` waits for: a send has no output, and NCCL waits for its end, too.
    future->markCompleted(at::IValue(outputs.empty() ? inputs : outputs));
    return Work::create_from_future(future);
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
