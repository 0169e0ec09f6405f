// Operators: queued where the shape of the result is known before, else computed once all work is
// done. All run PyTorch's own kernels for CPUs, over the open mapping of the device's memory.

#include "simulated.h"

#include "random.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {
namespace {

using c10::DispatchKey;
using c10::OperatorHandle;
using torch::jit::Stack;

// Kernels see no autograd, no autocast and no Python around them.
struct Plain {
  at::AutoDispatchBelowAutograd below;
  c10::impl::ExcludeDispatchKeyGuard outside{c10::DispatchKeySet(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::AutocastCPU,
       DispatchKey::AutocastPrivateUse1})};
};

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_privateuseone();
}

// The tensor as kernels see it.
at::Tensor opened(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  void* address = for_kernels(tensor.const_data_ptr());
  return at::from_blob(address, tensor.sizes(), tensor.strides(), options);
}

at::Tensor on_meta(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// A number that a kernel is given stays what it is now.
at::Tensor number(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.dim() == 0 && tensor.device().is_cpu(),
      "Expected all tensors to be on the same device, but found at least two devices.");
  auto copy = tensor.detach().clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

template <typename Change>
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor() && value.toTensor().defined()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) {
      list.push_back(change(each));
    }
    return list;
  }
  return value;
}

template <typename Change>
Stack changed(const Stack& values, const Change& change) {
  Stack result;
  for (auto& value : values) {
    result.push_back(changed(value, change));
  }
  return result;
}

int device_in(const Stack& arguments) {
  int device = -1;
  for (auto& value : arguments) {
    changed(value, [&](const at::Tensor& tensor) {
      if (is_here(tensor)) {
        TORCH_CHECK(
            device < 0 || device == tensor.device().index(),
            "Expected all tensors to be on the same device, but found at least two devices.");
        device = tensor.device().index();
      }
      return tensor;
    });
  }
  return device < 0 ? current_device() : device;
}

at::Tensor for_kernel(const at::Tensor& tensor) {
  return is_here(tensor) ? opened(tensor) : number(tensor);
}

Stack popped(const OperatorHandle& op, Stack* stack) {
  return torch::jit::pop(*stack, op.schema().arguments().size());
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_on(int device, const at::Tensor& like) {
  at::Device where(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  return empty_strided(
      like.sizes(), like.strides(), like.scalar_type(), std::nullopt, where, std::nullopt);
}

// -- queued --------------------------------------------------------------------------------------

void queued_in_place(const OperatorHandle& op, Stack* stack) {
  Plain plain;
  Stack arguments = popped(op, stack);
  at::Tensor self = arguments[0].toTensor();
  queue(device_in(arguments), [op, inside = changed(arguments, for_kernel)]() mutable {
    Plain plain;
    op.callBoxed(&inside);
  });
  torch::jit::push(*stack, self);
}

void queued_random(const OperatorHandle& op, Stack* stack) {
  Stack arguments = popped(op, stack);
  int device = device_in(arguments);
  auto& last = arguments.back();
  at::Generator from = last.isNone() ? default_generator(device) : last.toGenerator();
  uint64_t seed = static_cast<Generator*>(from.unsafeGetGeneratorImpl())->draw();
  last = at::detail::createCPUGenerator(seed);
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  queued_in_place(op, stack);
}

void queued_new(const OperatorHandle& op, Stack* stack) {
  Plain plain;
  Stack arguments = popped(op, stack);
  int device = device_in(arguments);
  Stack shapes = changed(
      arguments, [](const at::Tensor& each) { return is_here(each) ? on_meta(each) : each; });
  op.callBoxed(&shapes);
  std::vector<at::Tensor> results, targets;
  for (auto& shape : shapes) {
    results.push_back(empty_on(device, shape.toTensor()));
    targets.push_back(opened(results.back()));
  }
  queue(device, [op, inside = changed(arguments, for_kernel), targets]() mutable {
    Plain plain;
    op.callBoxed(&inside);
    for (size_t each = 0; each < targets.size(); ++each) {
      targets[each].copy_(inside[each].toTensor());
    }
  });
  for (auto& result : results) {
    torch::jit::push(*stack, result);
  }
}

std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(train.value_or(true) ? 1 - p : 1.0);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor native_dropout_backward(
    const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return gradient.mul(mask).mul_(scale);
}

// -- computed at once ----------------------------------------------------------------------------

void fallback(const OperatorHandle& op, Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

// Also changes arguments that the schema does not mark, such as the statistics of batch norm.
void over_open_memory(const OperatorHandle& op, Stack* stack) {
  Plain plain;
  Stack arguments = popped(op, stack);
  int device = device_in(arguments);
  finish(current_stream(device));
  Stack inside = changed(arguments, for_kernel);
  op.callBoxed(&inside);
  for (auto& value : inside) {
    auto result = empty_on(device, value.toTensor());
    opened(result).copy_(value.toTensor());
    torch::jit::push(*stack, result);
  }
}

at::Tensor to_device(int device, const at::Tensor& value) {
  if (!value.defined()) {
    return value;
  }
  auto result = empty_on(device, value);
  opened(result).copy_(value);
  return result;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  Plain plain;
  int device = input.device().index();
  finish(current_stream(device));
  auto with = bias.has_value() && bias->defined() ? std::optional(opened(*bias)) : std::nullopt;
  return to_device(device, at::convolution_symint(
      opened(input), opened(weight), with, stride, padding, dilation, transposed, output_padding,
      groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  Plain plain;
  int device = input.device().index();
  finish(current_stream(device));
  std::vector<c10::SymInt> bias_sizes = {weight.sym_size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      opened(gradient), opened(input), opened(weight), bias_sizes, stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {to_device(device, of_input), to_device(device, of_weight), to_device(device, of_bias)};
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Plain plain;
  finish(current_stream(self.device().index()));
  return at::_local_scalar_dense(opened(self));
}

// -- copies --------------------------------------------------------------------------------------

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  Plain plain;
  if (self.numel() == 0) {
    return target;
  }
  int device = is_here(self) ? self.device().index() : target.device().index();
  if (is_here(self) && is_here(target) && self.device() != target.device()) {
    finish(current_stream(target.device().index()));
    non_blocking = false;
  }
  auto from = is_here(self) ? opened(self) : self.detach();
  auto to = is_here(target) ? opened(target) : target.detach();
  const auto& host = is_here(self) ? target : self;
  bool both_here = is_here(self) && is_here(target) && self.device() == target.device();
  bool waits = !both_here && !(non_blocking && is_pinned(host.const_data_ptr()));
  auto stream = current_stream(device);
  if (!waits && !both_here) {
    // Only addresses from here on: as with CUDA, the memory may be freed, or be written to.
    auto view = at::from_blob(
        const_cast<void*>(host.const_data_ptr()), host.sizes(), host.strides(),
        at::TensorOptions().dtype(host.dtype()).device(at::kCPU));
    (is_here(self) ? to : from) = view;
  }
  queue(device, [from, to] {
    Plain plain;
    at::Tensor(to).copy_(from);
  });
  if (waits) {
    finish(stream);
  } else if (!both_here) {
    note_use_of_pinned(host.const_data_ptr(), stream);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

// -- shapes --------------------------------------------------------------------------------------

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, source, offset, sizes, strides);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {count}, {});
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, self.storage_offset());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  static_cast<c10::DeviceAllocator*>(device_allocator())
      ->recordStream(self.storage().data_ptr(), stream);
}

// PyTorch has one kernel for a cell of a GRU on accelerators, whose formula for CPUs is another.
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto biased = [](const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
    return (bias.has_value() && bias->defined() ? gates.add(*bias) : gates).chunk(3, 1);
  };
  auto of_input = biased(input_gates, input_bias);
  auto of_hidden = biased(hidden_gates, hidden_bias);
  auto reset = of_input[0].add(of_hidden[0]).sigmoid();
  auto update = of_input[1].add(of_hidden[1]).sigmoid();
  auto fresh = of_input[2].add(reset.mul(of_hidden[2])).tanh();
  auto result = hidden.sub(fresh).mul(update).add(fresh);
  return {result, at::cat({reset, update, fresh, of_hidden[2], hidden}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& kept, bool has_bias) {
  auto parts = kept.chunk(5, 1);
  auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &inner = parts[3];
  auto of_update = gradient.mul(parts[4].sub(fresh)).mul(update).mul(update.mul(-1).add(1));
  auto of_fresh = gradient.mul(update.mul(-1).add(1)).mul(fresh.mul(fresh).mul(-1).add(1));
  auto of_reset = of_fresh.mul(inner).mul(reset).mul(reset.mul(-1).add(1));
  auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  auto of_hidden = at::cat({of_reset, of_update, of_fresh.mul(reset)}, 1);
  auto bias = [&](const at::Tensor& gates) { return has_bias ? gates.sum(0) : at::Tensor(); };
  return {of_input, of_hidden, gradient.mul(update), bias(of_input), bias(of_hidden)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
  m.impl("native_dropout_backward", &native_dropout_backward);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  for (const char* name :
       {"add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "addcmul_", "addcdiv_",
        "lerp_.Scalar", "lerp_.Tensor", "zero_", "fill_.Scalar", "fill_.Tensor", "sqrt_", "neg_",
        "clamp_", "masked_fill_.Scalar", "add_.Scalar", "mul_.Scalar"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&queued_in_place>());
  }
  for (const char* name :
       {"bernoulli_.float", "bernoulli_.Tensor", "normal_", "uniform_", "exponential_", "random_",
        "random_.from", "random_.to"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&queued_random>());
  }
  for (const char* name :
       {"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "mm", "addmm", "bmm", "cat",
        "sigmoid", "tanh", "sigmoid_backward", "tanh_backward", "threshold_backward", "sqrt",
        "neg", "sum.dim_IntList", "mean.dim", "_log_softmax", "_log_softmax_backward_data"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&queued_new>());
  }
  for (const char* name : {"native_batch_norm", "native_batch_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&over_open_memory>());
  }
}

} // namespace
} // namespace simulated
