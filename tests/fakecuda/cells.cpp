// The fused cells of GRU and LSTM, which torch has for GPUs alone: here by operators of the GPU.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace fake {
namespace {
using at::Tensor;
using std::optional;
using std::tuple;

Tensor with_bias(const Tensor& gates, const optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}
Tensor total(const Tensor& gates, bool has_bias) {  // the gradient of a bias
  return has_bias ? gates.sum(0) : Tensor();
}
Tensor slope_of_sigmoid(const Tensor& y) { return y * (1 - y); }
Tensor slope_of_tanh(const Tensor& y) { return 1 - y * y; }

// The second result is what the backward needs; its layout is nobody else's business.
tuple<Tensor, Tensor> gru(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                          const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  auto update = (from_input[1] + from_hidden[1]).sigmoid();
  auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh),
          at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad,
                                                           const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  auto &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hidden = kept[4];
  auto of_fresh = grad * (1 - update) * slope_of_tanh(fresh);
  auto of_update = grad * (hx - fresh) * slope_of_sigmoid(update);
  auto of_reset = of_fresh * hidden * slope_of_sigmoid(reset);
  auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, grad * update, total(of_input, has_bias),
          total(of_hidden, has_bias)};
}

tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input_gates, const Tensor& hidden_gates,
                                   const Tensor& cx, const optional<Tensor>& input_bias,
                                   const optional<Tensor>& hidden_bias) {
  auto sums = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  auto gates = sums.chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  auto fresh = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * fresh;
  return {out * cy.tanh(), cy, at::cat({in, forget, fresh, out}, 1)};
}

tuple<Tensor, Tensor, Tensor> lstm_backward(const optional<Tensor>& grad_hy,
                                            const optional<Tensor>& grad_cy, const Tensor& cx,
                                            const Tensor& cy, const Tensor& workspace,
                                            bool has_bias) {
  auto or_zeros = [&](const optional<Tensor>& grad) {
    return grad && grad->defined() ? *grad : at::zeros_like(cx);
  };
  auto kept = workspace.chunk(4, 1);
  auto &in = kept[0], &forget = kept[1], &fresh = kept[2], &out = kept[3];
  auto of_hy = or_zeros(grad_hy), shown = cy.tanh();
  auto of_cy = or_zeros(grad_cy) + of_hy * out * slope_of_tanh(shown);
  auto of_gates = at::cat({of_cy * fresh * slope_of_sigmoid(in),
                           of_cy * cx * slope_of_sigmoid(forget), of_cy * in * slope_of_tanh(fresh),
                           of_hy * shown * slope_of_sigmoid(out)},
                          1);
  return {of_gates, of_cy * forget, total(of_gates, has_bias)};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_thnn_fused_gru_cell", &gru);
  library.impl("_thnn_fused_gru_cell_backward", &gru_backward);
  library.impl("_thnn_fused_lstm_cell", &lstm);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
}
}  // namespace
}  // namespace fake
