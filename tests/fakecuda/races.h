// Vector clocks: which work of which stream is known to be done before which other work.
//
// Kernels run at once here, on the CPU, so a missing wait never shows in the numbers. It shows in the
// clocks: an access to memory is a RACE if a conflicting one of another stream is not known to be done.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

struct Graph;

struct StreamKey {
  int device;
  int64_t id;  // 0: the default stream
  auto operator<=>(const StreamKey&) const = default;
};
using Clock = std::map<StreamKey, uint64_t>;  // of each stream: how much of its work is done before

struct Access {
  StreamKey stream;
  uint64_t time;
  const char *begin, *end;
  std::string op;
};

// Memory of a GPU, or of the host while a copy may still read or write it.
struct Region {
  uint64_t id;
  size_t size;
  StreamKey owner;  // the stream that it was allocated on
  Graph* graph = nullptr;  // the one whose pool it is in
  std::vector<Access> reads, writes;
  std::set<StreamKey> recorded;  // by record_stream
};
using Regions = std::map<char*, Region>;  // by their first byte

extern std::recursive_mutex state;  // guards everything below, and graphs
#define LOCKED std::lock_guard<std::recursive_mutex> locked(fake::state)

extern Regions device_memory, host_memory;

Region* region_of(Regions& regions, const void* pointer);
char* base_of(Regions& regions, const void* pointer);  // nullptr: in none of them
uint64_t new_id();

// ---- streams, and the host

void launch(StreamKey stream);  // what follows is a new piece of work of this stream
void read(StreamKey stream, Region* region, const char* begin, const char* end, const std::string& op);
void write(StreamKey stream, Region* region, const char* begin, const char* end, const std::string& op);
Clock clock_of(StreamKey stream);  // what is done once the stream's work so far is done
void wait(StreamKey stream, const Clock& clock);
void host_waits(const Clock& clock);
Clock clock_of_device(int device);
void host_uses(const char* begin, const char* end, bool writes, const std::string& op);
Region* use_host_memory(char* base, size_t size);  // by a copy
bool is_host_memory_in_use();

// ---- the end of memory

void check_free(const Region& region);  // of a GPU
void check_host_free(char* base);       // of the host, pageable
void forget_host_memory(char* base);

// ---- what was found

void violation(const std::string& text);
void report(const std::string& line);  // to FAKECUDA_REPORT, which is what a process's parents read
std::vector<std::string> violations(bool clear);

}  // namespace fake
