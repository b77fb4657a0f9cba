// The GPUs as torch sees them: hooks, device guard, streams, events, allocators, generators.
#include "gpus.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <torch/csrc/utils/device_lazy_init.h>

#include <cstdlib>
#include <cstring>

#include "graphs.h"
#include "results.h"

namespace fake {

int device_count = 0;
int sync_debug_mode = IGNORE;

namespace {
constexpr size_t ALIGNMENT = 512;  // as of CUDA's caching allocator
constexpr int POISON = 0xFF;       // a NaN: what is read before it is written shows

thread_local int device_now = 0;  // torch's current device
thread_local int device_set = 0;  // CUDA's, which is another one until torch uses that without a context
std::set<int> contexts, in_use, with_collectives;
thread_local std::map<int, int64_t> streams_now;
constexpr int64_t STREAMS = 32;  // of a GPU; more are the first ones again, as torch's are
std::map<int, int64_t> streams_made;
std::map<int, Memory> memories;
std::map<char*, size_t> pinned_memory;
std::map<int, at::Generator> generators;
bool is_initialised = false, is_bad_fork = false;

[[noreturn]] void cuda_error(int code, const std::string& what) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, "CUDA error: " + what);
}
c10::Device device_at(int index) { return {c10::kCUDA, (c10::DeviceIndex)index}; }
int index_of(c10::Device given) { return given.index() < 0 ? device_now : given.index(); }
StreamKey key_of(const c10::Stream& stream) { return {index_of(stream.device()), stream.id()}; }
}  // namespace

// ---- contexts

namespace {
void note(std::set<int>& noted, const std::string& kind, int index, const std::string& what = "") {
  LOCKED;
  if (!noted.insert(index).second) return;
  auto process = std::to_string(getpid());
  report("@" + kind + " " + process + " " + std::to_string(index) + " " + what);
}
}  // namespace

void use_context(int index, const std::string& what) { note(contexts, "context", index, what); }
void note_collective(int index) { note(with_collectives, "collective", index); }

void forget_contexts() {
  LOCKED;
  contexts.clear(), in_use.clear(), with_collectives.clear();
}

// ---- current devices and streams

int current_device() { return device_now; }

void set_device(int index) {
  if (index < 0 || index >= device_count) cuda_error(101, "invalid device ordinal");
  if (index != device_set) use_context(index, "cudaSetDevice");
  device_now = device_set = index;
}

void maybe_set_device(int index) {
  LOCKED;
  if (contexts.count(index)) device_set = index;
  device_now = index;
}

StreamKey current_stream(int index) { return {index, streams_now[index]}; }
void set_stream(StreamKey stream) { streams_now[stream.device] = stream.id; }

StreamKey new_stream(int index) {
  LOCKED;
  use_context(index, "a stream");
  note(in_use, "use", index);
  return {index, 1 + streams_made[index]++ % STREAMS};
}

// ---- forks

void poison_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      is_bad_fork = true;
      torch::utils::set_requires_device_init(at::kCUDA, true);
    });
  });
}

void initialise() {
  poison_forks();
  is_initialised = true;
}

void check_fork() {
  if (is_bad_fork) {
    cuda_error(3, "initialization error");
  }
}

bool in_bad_fork() { return is_bad_fork; }

// ---- memory

Memory& memory_of(int index) { return memories[index]; }

namespace {
void free_device_memory(void* pointer) {
  LOCKED;
  auto entry = device_memory.find((char*)pointer);
  if (entry == device_memory.end()) return;
  auto& region = entry->second;
  check_free(region);
  forget_results((char*)pointer, (char*)pointer + region.size);
  auto& memory = memories[region.owner.device];
  memory.used -= region.size;
  memory.freed += region.size;
  if (region.graph) {  // its pool keeps it: a replay writes there
    region.graph->freed.push_back((char*)pointer);
    return;
  }
  std::memset(pointer, POISON, region.size);
  device_memory.erase(entry);
  std::free(pointer);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    LOCKED;
    check_fork();
    set_device(device_now);  // CUDA's current one, too
    use_context(device_now, "memory");
    note(in_use, "use", device_now);
    auto stream = current_stream(device_now);
    auto& memory = memories[device_now];
    if (memory.used + (int64_t)size > memory.limit) {
      memory.out_of_memory++;
      C10_THROW_ERROR(OutOfMemoryError, refusal(size, memory));
    }
    auto bytes = (std::max<size_t>(size, 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto* base = (char*)std::aligned_alloc(ALIGNMENT, bytes);
    std::memset(base, POISON, size);
    Region region{new_id(), size, stream};
    region.graph = graph_of(stream);
    if (region.graph) region.graph->pool.push_back(base);
    device_memory[base] = region;
    memory.used += size;
    memory.allocated += size;
    memory.peak = std::max(memory.peak, memory.used);
    return {base, base, &free_device_memory, device_at(device_now)};
  }

  static std::string refusal(size_t size, const Memory& memory) {
    auto gib = [](double bytes) { return std::to_string(bytes / (1 << 30)) + " GiB"; };
    return "CUDA out of memory. Tried to allocate " + gib(size) + ". GPU " +
           std::to_string(device_now) + " has a total capacity of " + gib(capacity) +
           " of which " + gib(memory.limit - memory.used) + " is free.";
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool initialized() override { return is_initialised; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    LOCKED;
    if (auto* region = region_of(device_memory, pointer.get()))
      region->recorded.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    LOCKED;
    auto& memory = memories[index];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* one : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                      &stats.requested_bytes}) {
      (*one)[0].current = memory.used;
      (*one)[0].peak = memory.peak;
      (*one)[0].allocated = memory.allocated;
      (*one)[0].freed = memory.freed;
    }
    stats.num_ooms = memory.out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    LOCKED;
    memories[index].allocated = memories[index].freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    LOCKED;
    memories[index].peak = memories[index].used;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    LOCKED;
    use_context(index, "cudaMemGetInfo");
    return {capacity - memories[index].used, capacity};
  }
} device_memory_allocator;

// Torch's own keeps a block that is freed until all copies that were begun are done.
void free_pinned(void* pointer) {
  LOCKED;
  forget_host_memory((char*)pointer);
  std::memset(pointer, POISON, pinned_memory[(char*)pointer]);
  pinned_memory.erase((char*)pointer);
  std::free(pointer);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    LOCKED;
    check_fork();
    if (contexts.empty()) use_context(device_now, "pinned memory");
    auto* base = (char*)std::malloc(std::max<size_t>(size, 1));
    pinned_memory[base] = size;
    return {base, base, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory_allocator;

// The CPU's own allocator, but that it looks for copies that still write what is freed.
c10::Allocator* pageable = nullptr;

void free_pageable(void* pointer) {
  if (is_host_memory_in_use()) {
    LOCKED;
    check_host_free((char*)pointer);
  }
  pageable->raw_deleter()(pointer);
}

struct PageableMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = pageable->allocate(size);
    auto* pointer = memory.release_context();
    return {pointer, pointer, &free_pageable, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pageable; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
} pageable_memory_allocator;
}  // namespace

c10::Allocator* device_allocator() { return &device_memory_allocator; }

bool is_pinned(const void* pointer) {
  LOCKED;
  auto next = pinned_memory.upper_bound((char*)pointer);
  if (next == pinned_memory.begin()) return false;
  auto& [base, size] = *std::prev(next);
  return (char*)pointer < base + std::max<size_t>(size, 1);
}

void take_allocators() {
  c10::SetAllocator(c10::kCUDA, &device_memory_allocator, 1);
  at::setHostAllocator(at::kCUDA, &pinned_memory_allocator, 1);
  pageable = c10::GetCPUAllocator();
  if (pageable->raw_deleter()) c10::SetCPUAllocator(&pageable_memory_allocator, 1);
}

// ---- synchronisation

namespace {
Clock now(StreamKey stream) {
  LOCKED;
  return clock_of(stream);
}
}  // namespace

void wait_for_device(int index) {
  Clock clock;
  {
    LOCKED;
    use_context(index, "cudaDeviceSynchronize");
    clock = clock_of_device(index);
  }
  wait_for_results(clock);
  LOCKED;
  host_waits(clock);
}

void synchronizing(StreamKey stream, const std::string& op) {
  wait_for_results(now(stream));
  LOCKED;
  forbid_while_capturing(stream, op);
  if (sync_debug_mode == ERROR)
    TORCH_CHECK(false, "called a synchronizing CUDA operation (", op, ")");
  if (sync_debug_mode == WARN) TORCH_WARN("called a synchronizing CUDA operation (", op, ")");
  host_waits(clock_of(stream));
}

// ---- random numbers

namespace {
constexpr uint64_t NUMBERS_OF_A_DRAW = 4;

// Its state are 16 bytes, a seed and an offset, as on a GPU.
struct GPUGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit GPUGenerator(int index)
      : GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    TORCH_CHECK(state.device_type() == c10::kCPU, "RNG state must be a torch.ByteTensor");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, (const char*)state.data() + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy((char*)state.mutable_data_ptr() + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    seed_ = other->current_seed(), offset_ = other->get_offset();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  GPUGenerator* clone_impl() const override {
    auto* copy = new GPUGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
};
}  // namespace

const at::Generator& default_generator(int index) {
  LOCKED;
  auto entry = generators.find(index);
  if (entry == generators.end())
    entry = generators.emplace(index, at::make_generator<GPUGenerator>(index)).first;
  return entry->second;
}

std::pair<uint64_t, uint64_t> random_state(int index) {
  auto& generator = default_generator(index);
  return {generator.current_seed(), generator.get_offset()};
}

void set_random_state(int index, std::pair<uint64_t, uint64_t> state) {
  auto generator = default_generator(index);
  generator.set_current_seed(state.first);
  generator.set_offset(state.second);
}

at::Generator draw_from(const at::Generator& given) {
  LOCKED;
  auto generator = given;
  auto offset = generator.get_offset();
  generator.set_offset(offset + NUMBERS_OF_A_DRAW);
  auto mixed = generator.current_seed() * 0x9E3779B97F4A7C15 + offset;
  return at::make_generator<at::CPUGeneratorImpl>(mixed);
}

// ---- torch's doors: CUDAHooks and DeviceGuard

namespace {
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasCUDA() const override { return device_count > 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? device_now : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<GPUGenerator>(index < 0 ? device_now : index);
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    LOCKED;
    auto* region = region_of(device_memory, pointer);
    TORCH_CHECK(region, "The specified pointer resides on host memory");
    return device_at(region->owner.device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    LOCKED;
    return contexts.count(index);
  }
  c10::DeviceIndex current_device() const override { return device_now; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory_allocator; }
  int getNumGPUs() const override { return device_count; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = device_now;
    if (index >= 0) set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    auto before = device_now;
    if (index >= 0) maybe_set_device(index);
    return before;
  }
  void deviceSynchronize(c10::DeviceIndex index) const override {
    wait_for_device(index);
  }
};

struct Event {
  Clock clock;
  Graph* graph = nullptr;  // that was captured when it was recorded
};

// Autograd's threads, which make a device current where it has a context already: a CPU's build of
// torch does not ask.
bool is_of_autograd() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string(name).starts_with("pt_autograd_");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = device_at(device_now);
    if (to.index() >= 0) set_device(to.index());
    return before;
  }
  c10::Device getDevice() const override { return device_at(device_now); }
  void setDevice(c10::Device to) const override {
    if (to.index() >= 0) is_of_autograd() ? maybe_set_device(to.index()) : set_device(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) maybe_set_device(to.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }

  static c10::Stream stream(StreamKey key) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(key.device), key.id);
  }
  c10::Stream getStream(c10::Device on) const override {
    return stream(current_stream(index_of(on)));
  }
  c10::Stream getDefaultStream(c10::Device on) const override { return stream({index_of(on), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override {
    return stream(new_stream(index_of(on)));
  }
  c10::Stream getNewStream(c10::Device on, int) const override {
    return stream(new_stream(index_of(on)));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    set_stream(key_of(to));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream given) const override { return (void*)given.id(); }
  bool queryStream(const c10::Stream& given) const override {
    if (!are_there(now(key_of(given)))) return false;
    synchronizeStream(given);  // all other work is done here, and who is told so knows it
    return true;
  }
  void synchronizeStream(const c10::Stream& given) const override {
    wait_for_results(now(key_of(given)));
    LOCKED;
    use_context(key_of(given).device, "cudaStreamSynchronize");
    forbid_while_capturing(key_of(given), "cudaStreamSynchronize");
    host_waits(clock_of(key_of(given)));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { wait_for_device(index); }
  bool isStreamCapturing(const c10::Stream& given) const override {
    LOCKED;
    return graph_of(key_of(given)) != nullptr;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    device_memory_allocator.recordStream(pointer, on);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    LOCKED;
    check_fork();
    auto key = key_of(on);
    use_context(key.device, "an event");
    if (!*event) *event = new Event;
    *(Event*)*event = {clock_of(key), graph_of(key)};
  }
  void block(void* event, const c10::Stream& on) const override {
    LOCKED;
    if (!event) return;
    auto key = key_of(on);
    auto* waited = (Event*)event;
    if (waited->graph) {
      join_capture(key, waited->graph);
    } else if (auto* graph = graph_of(key)) {
      graph->error = "waits for an event from outside";
      cuda_error(904, "dependency created on uncaptured work in another stream");
    }
    wait(key, waited->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    wait_for_results(((Event*)event)->clock);
    LOCKED;
    use_context(device_set, "cudaEventSynchronize");  // of this thread, whatever the event's is
    host_waits(((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event && !are_there(((Event*)event)->clock)) return false;
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Torch looks for the hooks once, early: this library is loaded before torch is.
const bool is_registered = [] {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs given) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>(given);
      });
  return true;
}();
}  // namespace
}  // namespace fake

extern "C" void fakecuda_set_device_count(int count) { fake::device_count = count; }
