// Tensors of a GPU seen as the CPU's, and which bytes they span.
#pragma once
#include <ATen/core/Tensor.h>

#include "gpus.h"

namespace fake {

at::Tensor as_cpu(const at::Tensor& tensor);  // the same memory
at::Tensor to_gpu(const at::Tensor& cpu, int device);  // new memory
void resize_memory(const at::Tensor& tensor, size_t bytes);  // what is in it is kept

struct Span {
  const char *begin, *end;
};
Span span_of(const at::Tensor& tensor);
inline char* memory_at(const at::Tensor& tensor) { return (char*)tensor.storage().data(); }

}  // namespace fake
