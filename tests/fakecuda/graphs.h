// CUDA graphs: what is captured on a stream is recorded, and replayed on the CPU.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "races.h"

namespace fake {

struct Touched {
  char* base;
  const char *begin, *end;
  bool writes;
};

// A call of an operator, with tensors that are the CPU's but lie in the GPUs' memory.
struct Recorded {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments, results;
  std::vector<Touched> touched;
  std::string name;
};

struct Graph {
  StreamKey origin{};
  bool is_ready = false;
  std::string error;  // what broke the capture
  std::vector<Recorded> calls;
  std::map<char*, uint64_t> external;            // memory that it does not own, and its id
  std::map<char*, std::vector<char>> contents;   // of that, when the capture began
  std::vector<char*> pool, freed;                // its own memory; what of it was freed since
  std::vector<std::pair<uint64_t, uint64_t>> random;  // the states of the generators

  ~Graph();
  void begin();
  void end();
  void replay();
  void reset();
  void uses(const Touched& memory);  // before a call that is recorded
};

Graph* graph_of(StreamKey stream);  // that is being captured there
void join_capture(StreamKey stream, Graph* graph);
void forbid_while_capturing(StreamKey stream, const std::string& what);

}  // namespace fake
