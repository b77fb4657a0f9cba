// Results of collectives; see results.h.
#include "results.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <Python.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <list>
#include <optional>
#include <pybind11/pybind11.h>
#include <thread>
#include <unistd.h>

#include "tensors.h"

namespace fake {
namespace {
struct Begun : Collective {
  std::vector<at::Tensor> room;  // for the results: an output's own memory may be freed meanwhile
  const void* queue = nullptr;
  bool is_done = false;
  std::exception_ptr error;
};
using One = std::shared_ptr<Begun>;

// Of all groups. Never destroyed: the threads may outlive this library's other objects.
struct Shared {
  std::mutex mutex;  // nothing is called, and no other one is taken, under it
  std::condition_variable changed;
  std::list<One> begun;  // not done; or failed, which nobody has been told
};
Shared& shared = *new Shared;
std::atomic<size_t> count{0};  // of `begun`

void set_count() { count = shared.begun.size(); }

bool overlaps(const at::Tensor& output, const char* begin, const char* end) {
  if (!output.defined()) return false;
  auto span = span_of(output);
  return span.begin < end && begin < span.end;
}

// Waits until none that `is_meant` is left.
template <class Meant>
void wait_for(Meant is_meant) {
  if (!count) return;
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  std::exception_ptr error;
  {
    std::unique_lock<std::mutex> lock(shared.mutex);
    shared.changed.wait(lock, [&] {
      for (auto entry = shared.begun.begin(); entry != shared.begun.end(); ++entry) {
        if (!is_meant(**entry)) continue;
        if (!(*entry)->is_done) return false;
        error = (*entry)->error;
        shared.begun.erase(entry);
        set_count();
        return true;
      }
      return true;
    });
  }
  if (error) std::rethrow_exception(error);
}

bool is_before(const Begun& one, const Clock& clock) {
  auto entry = clock.find(one.stream);
  return entry != clock.end() && entry->second >= one.time;
}
}  // namespace

struct Queue::State {
  std::list<One> waiting;  // under shared.mutex
  size_t left = 0;         // waiting, or being computed
  const pid_t process = getpid();  // a fork has no such thread
  bool is_closed = false;

  void run() {
    at::DisableRecordFunctionGuard unseen;  // by host.cpp
    at::NoGradGuard no_grad;
    for (;;) {
      One one;
      {
        std::unique_lock<std::mutex> lock(shared.mutex);
        shared.changed.wait(lock, [&] { return is_closed || !waiting.empty(); });
        if (waiting.empty()) return;
        one = waiting.front();
        waiting.pop_front();
      }
      compute(one);
    }
  }

  void compute(const One& one) {
    auto results = one->room;
    std::exception_ptr error;
    try {
      one->compute(results);
      for (size_t i = 0; i < results.size(); i++)
        if (!results[i].is_same(one->room[i])) results[i] = one->room[i].copy_(results[i]);
    } catch (...) {
      error = std::current_exception();
    }
    one->compute = nullptr;
    std::lock_guard<std::mutex> lock(shared.mutex);
    left--;
    one->is_done = true;
    one->error = error;
    if (!error) {
      for (size_t i = 0; i < results.size(); i++)
        if (one->outputs[i].defined()) {
          auto span = span_of(one->outputs[i]);
          std::memcpy((void*)span.begin, span_of(results[i]).begin, span.end - span.begin);
        }
      shared.begun.remove(one);
      set_count();
    }
    shared.changed.notify_all();
  }
};

Queue::Queue() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->run(); }).detach();
}

Queue::~Queue() {
  if (state_->process != getpid()) return;
  std::lock_guard<std::mutex> lock(shared.mutex);
  state_->is_closed = true;  // once what is waiting is done
  shared.changed.notify_all();
}

void Queue::add(Collective collective) {
  auto one = std::make_shared<Begun>();
  (Collective&)*one = std::move(collective);
  one->queue = state_.get();
  {
    at::DisableRecordFunctionGuard unseen;  // by host.cpp
    for (auto& output : one->outputs)
      one->room.push_back(at::empty_strided(output.sizes(), output.strides(), output.options()));
  }
  std::lock_guard<std::mutex> lock(shared.mutex);
  state_->waiting.push_back(one);
  state_->left++;
  shared.begun.push_back(one);
  set_count();
  shared.changed.notify_all();
}

void Queue::finish() {
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  std::unique_lock<std::mutex> lock(shared.mutex);
  shared.changed.wait(lock, [&] { return !state_->left; });
}

size_t Queue::drop() {
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto dropped = state_->left;
  state_->left -= state_->waiting.size();
  state_->waiting.clear();
  for (auto& one : shared.begun)
    if (one->queue == state_.get())
      for (auto& output : one->outputs) output.reset();
  shared.begun.remove_if([&](const One& one) { return one->queue == state_.get(); });
  state_->is_closed = true;
  set_count();
  shared.changed.notify_all();
  return dropped;
}

void wait_for_results(const at::Tensor& tensor) {
  if (!count || !tensor.defined() || !tensor.is_cuda() || !tensor.numel()) return;
  auto span = span_of(tensor);
  wait_for([&](const Begun& one) {
    for (auto& output : one.outputs)
      if (overlaps(output, span.begin, span.end)) return true;
    return false;
  });
}

void wait_for_results(const Clock& clock) {
  wait_for([&](const Begun& one) { return is_before(one, clock); });
}

bool are_there(const Clock& clock) {
  std::lock_guard<std::mutex> lock(shared.mutex);
  for (auto& one : shared.begun)
    if (!one->is_done && is_before(*one, clock)) return false;
  return true;
}

void forget_results(const char* begin, const char* end) {
  if (!count) return;
  std::lock_guard<std::mutex> lock(shared.mutex);
  for (auto& one : shared.begun)
    for (auto& output : one->outputs)
      if (overlaps(output, begin, end)) output.reset();
}

}  // namespace fake
