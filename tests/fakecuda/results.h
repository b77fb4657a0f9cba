// Results of collectives that are not there yet. The host goes on; who uses their memory waits for
// them here, and so does the host where it waits for their stream.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "races.h"

namespace fake {

struct Collective {
  StreamKey stream;
  uint64_t time;  // of the stream
  std::function<void(std::vector<at::Tensor>& results)> compute;
  std::vector<at::Tensor> outputs;  // the GPUs' memory, seen as the CPU's; null: it was freed
};

// The collectives of a group in this process, one after the other, on a thread of their own.
class Queue {
 public:
  Queue();
  ~Queue();
  void add(Collective collective);
  void finish();  // waits for all
  size_t drop();  // gives up those that are not done, and returns how many these were
  struct State;

 private:
  std::shared_ptr<State> state_;
};

// Never under LOCKED: those who are waited for may need it. They throw what a collective has thrown.
void wait_for_results(const at::Tensor& tensor);
void wait_for_results(const Clock& clock);
bool are_there(const Clock& clock);
void forget_results(const char* begin, const char* end);  // in memory that is freed

}  // namespace fake
