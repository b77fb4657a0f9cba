// Vector clocks; see races.h.
#include "races.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "graphs.h"

namespace fake {

std::recursive_mutex state;
Regions device_memory, host_memory;

namespace {
constexpr size_t MOST_ACCESSES = 128;  // of a region; more are merged
std::map<StreamKey, Clock> streams;
std::map<StreamKey, uint64_t> host_joined;  // by each stream: the version of the host's clock
Clock host;
uint64_t host_version = 1;
uint64_t last_id = 0;
std::atomic<bool> host_in_use{false};
std::vector<std::string> found;
std::set<std::string> known;

std::string name(StreamKey stream) {
  return "cuda:" + std::to_string(stream.device) + " stream " + std::to_string(stream.id);
}

void join(Clock& clock, const Clock& other) {
  for (auto& [stream, time] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, time);
  }
}

bool knows(const Clock& clock, const Access& access) {
  auto entry = clock.find(access.stream);
  return entry != clock.end() && entry->second >= access.time;
}

bool overlaps(const Access& access, const char* begin, const char* end) {
  return access.begin < end && begin < access.end;
}

void forget_what_the_host_knows(std::vector<Access>& accesses) {
  std::erase_if(accesses, [](const Access& access) { return knows(host, access); });
}

void add(std::vector<Access>& accesses, const Access& access) {
  std::erase_if(accesses, [&](const Access& other) {
    return other.stream == access.stream && access.begin <= other.begin && other.end <= access.end;
  });
  accesses.push_back(access);
  if (accesses.size() <= MOST_ACCESSES) return;
  forget_what_the_host_knows(accesses);
  std::map<StreamKey, Access> merged;
  for (auto& one : accesses) {
    auto [entry, is_new] = merged.emplace(one.stream, one);
    if (is_new) continue;
    auto& whole = entry->second;
    whole.begin = std::min(whole.begin, one.begin);
    whole.end = std::max(whole.end, one.end);
    if (one.time > whole.time) whole.time = one.time, whole.op = one.op;
  }
  accesses.clear();
  for (auto& [_, access] : merged) accesses.push_back(access);
}

void check_order(StreamKey stream, const std::vector<Access>& accesses, const char* begin,
                 const char* end, const std::string& does, const std::string& was) {
  auto& clock = streams[stream];
  for (auto& other : accesses)
    if (other.stream != stream && overlaps(other, begin, end) && !knows(clock, other))
      violation("RACE: " + does + " on " + name(stream) + ", which does not wait for " + other.op +
                " on " + name(other.stream) + ": it may still " + was + " this memory");
}
}  // namespace

Region* region_of(Regions& regions, const void* pointer) {
  auto* base = base_of(regions, pointer);
  return base ? &regions[base] : nullptr;
}

char* base_of(Regions& regions, const void* pointer) {
  auto next = regions.upper_bound((char*)pointer);
  if (next == regions.begin()) return nullptr;
  auto& [base, region] = *std::prev(next);
  return (char*)pointer < base + std::max<size_t>(region.size, 1) ? base : nullptr;
}

uint64_t new_id() { return ++last_id; }

// ---- streams, and the host

void launch(StreamKey stream) {
  if (graph_of(stream)) return;  // what is captured does not run
  auto& clock = streams[stream];
  if (auto& joined = host_joined[stream]; joined != host_version) {
    join(clock, host);
    joined = host_version;
  }
  clock[stream]++;
}

void read(StreamKey stream, Region* region, const char* begin, const char* end,
          const std::string& op) {
  if (!region || begin == end || graph_of(stream)) return;
  check_order(stream, region->writes, begin, end, op + " reads", "write");
  add(region->reads, {stream, streams[stream][stream], begin, end, op});
}

void write(StreamKey stream, Region* region, const char* begin, const char* end,
           const std::string& op) {
  if (!region || begin == end || graph_of(stream)) return;
  check_order(stream, region->writes, begin, end, op + " writes", "write");
  check_order(stream, region->reads, begin, end, op + " writes", "read");
  std::erase_if(region->reads, [&](const Access& access) {
    return begin <= access.begin && access.end <= end;
  });
  add(region->writes, {stream, streams[stream][stream], begin, end, op});
}

Clock clock_of(StreamKey stream) {
  Clock clock = streams[stream];
  join(clock, host);
  return clock;
}

void wait(StreamKey stream, const Clock& clock) { join(streams[stream], clock); }

void host_waits(const Clock& clock) {
  join(host, clock);
  host_version++;
  for (auto& [base, region] : host_memory) {
    forget_what_the_host_knows(region.reads);
    forget_what_the_host_knows(region.writes);
  }
  std::erase_if(host_memory, [](const auto& entry) {
    return entry.second.reads.empty() && entry.second.writes.empty();
  });
  host_in_use = !host_memory.empty();
}

Clock clock_of_device(int device) {
  Clock clock;
  for (auto& [stream, done] : streams)
    if (stream.device == device) join(clock, done);
  return clock;
}

Region* use_host_memory(char* base, size_t size) {
  auto [entry, is_new] = host_memory.try_emplace(base);
  if (is_new) entry->second = {new_id(), size, {}};
  host_in_use = true;
  return &entry->second;
}

bool is_host_memory_in_use() { return host_in_use; }

void host_uses(const char* begin, const char* end, bool writes, const std::string& op) {
  auto* region = region_of(host_memory, begin);
  if (!region) return;
  auto check = [&](const std::vector<Access>& accesses, const std::string& was) {
    for (auto& copy : accesses)
      if (overlaps(copy, begin, end) && !knows(host, copy))
        violation("HAZARD: " + op + " on the CPU " + (writes ? "writes" : "reads") +
                  " a tensor that " + copy.op + " on " + name(copy.stream) + " may still " + was +
                  "; wait for the stream or an event first");
  };
  check(region->writes, "write");
  if (writes) check(region->reads, "read");
}

// ---- the end of memory

void check_free(const Region& region) {
  auto is_safe = [&](const Access& access) {
    if (access.stream == region.owner || region.recorded.count(access.stream)) return true;
    if (knows(host, access) || knows(streams[region.owner], access)) return true;
    return std::any_of(region.recorded.begin(), region.recorded.end(),
                       [&](StreamKey stream) { return knows(streams[stream], access); });
  };
  for (auto* accesses : {&region.reads, &region.writes})
    for (auto& access : *accesses)
      if (!is_safe(access))
        violation("HAZARD: memory of " + name(region.owner) + " is freed while " + access.op +
                  " on " + name(access.stream) + " may still use it; call record_stream");
}

void check_host_free(char* base) {
  auto entry = host_memory.find(base);
  if (entry == host_memory.end()) return;
  for (auto& copy : entry->second.writes)
    if (!knows(host, copy))
      violation("HAZARD: memory of the host is freed while " + copy.op + " on " +
                name(copy.stream) + " may still write it");
  forget_host_memory(base);
}

void forget_host_memory(char* base) {
  host_memory.erase(base);
  host_in_use = !host_memory.empty();
}

// ---- what was found

void violation(const std::string& text) {
  if (!known.insert(text).second) return;
  found.push_back(text);
  report(text);  // at once, as a process may be killed
}

void report(const std::string& text) {
  auto* path = std::getenv("FAKECUDA_REPORT");
  if (!path) return;
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
  auto line = text + "\n";
  if (file < 0) return;
  [[maybe_unused]] auto written = ::write(file, line.data(), line.size());
  close(file);
}

std::vector<std::string> violations(bool clear) {
  auto texts = found;
  if (clear) found.clear(), known.clear();
  return texts;
}

}  // namespace fake
