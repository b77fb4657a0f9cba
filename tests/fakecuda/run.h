// All operators that compute something: refused as on a GPU, else run by the CPU's kernels.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>

namespace fake {

// From torch's native_functions.yaml, by operator and overload.
enum OperatorFacts { HAS_CUDA_KERNEL = 1, MIXES_DEVICES = 2 };
extern std::map<std::string, int> operators;

// `draws_unasked`: its kernel draws from the default generator, whatever it is given.
void call_on_cpu(const c10::OperatorHandle& op, c10::Stack& stack, int device, bool draws_unasked);

void choose_attention();  // scaled_dot_product_attention by plain products

}  // namespace fake
