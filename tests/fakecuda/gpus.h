// The GPUs of this process: current device and streams, memory, random numbers.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "races.h"

namespace fake {

extern int device_count;
constexpr int64_t capacity = int64_t(80) << 30;  // of each GPU, in bytes

int current_device();
void set_device(int device);        // refuses one that is not there; makes its context
void maybe_set_device(int device);  // makes none: that begins when the device is used
StreamKey current_stream(int device);
void set_stream(StreamKey stream);
StreamKey new_stream(int device);

// A GPU is current within a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) { set_device(device); }
  ~OnDevice() { maybe_set_device(before_); }

 private:
  int before_;
};

// ---- contexts: of CUDA's memory, half a GiB of a GPU for each process that has one there
//
// FAKECUDA_REPORT gets a line for the first of each in a process; report.py knows which are wrong.

void use_context(int device, const std::string& what);  // makes it, where there is none
void note_collective(int device);
void forget_contexts();

struct Memory {
  int64_t used = 0, peak = 0, allocated = 0, freed = 0, out_of_memory = 0;
  int64_t limit = capacity;  // by torch.cuda.set_per_process_memory_fraction
};
Memory& memory_of(int device);
c10::Allocator* device_allocator();
bool is_pinned(const void* pointer);

// ---- synchronisation

enum SyncDebug { IGNORE = 0, WARN = 1, ERROR = 2 };
extern int sync_debug_mode;
void wait_for_device(int device);
void synchronizing(StreamKey stream, const std::string& op);  // the host waits in this operation

// ---- random numbers: a seed and an offset, as in Philox

const at::Generator& default_generator(int device);
std::pair<uint64_t, uint64_t> random_state(int device);
void set_random_state(int device, std::pair<uint64_t, uint64_t> state);
at::Generator draw_from(const at::Generator& generator);  // the CPU's, for one operation

void check_fork();  // refuses a process that was forked after its parent had initialised CUDA
void poison_forks();  // from here on, a fork makes children that can't use CUDA

}  // namespace fake
