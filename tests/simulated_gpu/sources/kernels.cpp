// The CPU's kernels in the place of CUDA's, on the memory of the simulated runtime. Metadata,
// allocations and copies between host and device stay torch's own.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <map>
#include <numeric>
#include <set>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

std::mutex counts_mutex;  // backward runs in a thread of its own
std::map<std::string, long> kernel_counts;
long allocations = 0, refused_allocation = 0;

// Whose CUDA kernels wait for the device in code that does not run here.
const std::set<std::string> kWaiting = {
    "aten::nonzero",         "aten::nonzero.out",  "aten::masked_select", "aten::masked_select.out",
    "aten::_unique2",        "aten::_unique",      "aten::unique_dim",    "aten::unique_consecutive",
    "aten::bincount",        "aten::equal",        "aten::histc",         "aten::multinomial",
    "aten::linalg_eigh",     "aten::_linalg_eigh", "aten::_linalg_svd",   "aten::linalg_inv_ex",
};
// Which take tensors of the CPU beside those of the device.
const std::set<std::string> kMixing = {
    "aten::index.Tensor",  "aten::index.Tensor_out",       "aten::_index_put_impl_",
    "aten::index_put_",    "aten::_foreach_addcdiv_.Tensor", "aten::_foreach_addcmul_.Tensor",
    "aten::bernoulli_.Tensor",
};

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

void carry_out_current_stream() {
  static auto carry_out =
      reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "simulated_carry_out"));
  carry_out(current_stream());
}

void wait() {  // seen by torch.cuda.set_sync_debug_mode
  c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream().stream());
}

void count(const std::string& name) {
  std::lock_guard lock(counts_mutex);
  kernel_counts[name]++;
}

Tensor on_cpu(const Tensor& t) {
  auto options = t.options().device(at::kCPU).requires_grad(false);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  auto* data = const_cast<void*>(t.const_data_ptr());
  return at::for_blob(data, t.sizes()).strides(t.strides()).options(options)
      .target_device(at::kCPU).make_tensor();
}

Tensor on_device(const Tensor& t, c10::Device device) {
  if (!t.defined()) return t;
  auto options = t.options().device(device).pinned_memory(false);
  auto result = at::empty_strided(t.sizes(), t.strides(), options);
  if (t.numel()) on_cpu(result).copy_(t);
  return result;
}

// Random numbers follow the seed and the offset of the CUDA generator, which moves on.
at::Generator generator_like(const std::optional<at::Generator>& given) {
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given, at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard lock(generator->mutex_);
  auto state = generator->philox_cuda_state(4);
  uint64_t mixed = state.seed_.val * 0x9E3779B97F4A7C15ull +
                   state.offset_.val * 0xBF58476D1CE4E5B9ull + 1;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
}

bool has_mask(const IValue& value) {
  if (!value.isOptionalTensorList()) return false;
  for (const std::optional<Tensor>& t : value.toOptionalTensorList())
    if (t && t->defined() && (t->dtype() == at::kBool || t->dtype() == at::kByte)) return true;
  return false;
}

bool waits(const std::string& name, const IValue* arguments) {
  if (name == "aten::_index_put_impl_")  // one value under a mask is filled in without waiting
    return has_mask(arguments[1]) && arguments[2].toTensor().numel() != 1;
  if (name == "aten::repeat_interleave.Tensor") return arguments[1].isNone();
  return kWaiting.count(name) || (name == "aten::index.Tensor" && has_mask(arguments[1]));
}

// The arguments as a CPU kernel takes them, and the device that they are on.
class Arguments {
 public:
  explicit Arguments(const std::string& name) : name_(name) {}

  void convert(IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      value = convert(value.toTensor(), argument.name());
    } else if (value.isTensorList()) {
      c10::List<Tensor> converted;
      for (const Tensor& t : value.toTensorVector()) converted.push_back(convert(t, argument.name()));
      value = converted;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> converted;
      for (std::optional<Tensor> t : value.toOptionalTensorList())
        converted.push_back(t && t->defined() ? convert(*t, argument.name()) : t);
      value = converted;
    } else if (value.isDevice()) {
      device_ = device_.value_or(value.toDevice());
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      value = generator_like(value.toGenerator());
    } else if (value.isNone() && argument.type()->str().find("Generator") != std::string::npos) {
      value = generator_like(std::nullopt);
    }
  }

  c10::Device device() const {
    if (tensors_on_ && other_ && !kMixing.count(name_))
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                  "devices, ", *tensors_on_, " and ", *other_, "! (argument ", other_name_, " of ",
                  name_, ")");
    auto device = tensors_on_ ? tensors_on_ : device_;
    if (device && device->has_index()) return *device;
    return {at::kCUDA, c10::cuda::current_device()};
  }

 private:
  Tensor convert(const Tensor& t, const std::string& argument) {
    if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return t;
    if (t.is_cuda() && !tensors_on_) tensors_on_ = t.device();
    if (!tensors_on_ || t.device() != *tensors_on_) {
      other_ = t.device();
      other_name_ = argument;
    }
    return t.is_cuda() ? on_cpu(t) : t;
  }

  const std::string& name_;
  std::optional<c10::Device> device_, tensors_on_, other_;
  std::string other_name_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  const size_t begin = stack->size() - parameters.size();
  const auto& overload = schema.overload_name();
  const std::string name = schema.name() + (overload.empty() ? "" : "." + overload);
  count(name);
  carry_out_current_stream();
  const std::vector<IValue> originals(stack->begin() + begin, stack->end());
  if (waits(name, originals.data())) wait();
  Arguments arguments(name);
  for (size_t i = 0; i < parameters.size(); i++) arguments.convert((*stack)[begin + i], parameters[i]);
  const auto device = arguments.device();
  const std::vector<IValue> converted(stack->begin() + begin, stack->end());

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  std::vector<Tensor> written;  // in the order of the arguments, which is that of the results
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto* alias = parameters[i].alias_info();
    if (!alias || !alias->isWrite() || !originals[i].isTensor()) continue;
    Tensor tensor = originals[i].toTensor(), result = converted[i].toTensor();
    const bool moved = tensor.defined() && tensor.is_cuda() &&
        (tensor.sizes() != result.sizes() ||
         (tensor.numel() && tensor.const_data_ptr() != result.const_data_ptr()));
    if (moved) {  // an output that was made larger
      tensor.resize_(result.sizes());
      if (tensor.numel()) on_cpu(tensor).copy_(result);
    }
    written.push_back(tensor);
  }
  const auto& returns = schema.returns();
  const size_t first = stack->size() - returns.size();
  size_t next_written = 0;
  for (size_t i = 0; i < returns.size(); i++) {
    IValue& value = (*stack)[first + i];
    const auto* alias = returns[i].alias_info();
    if (value.isTensor() && alias && alias->isWrite() && next_written < written.size()) {
      value = written[next_written++];
    } else if (value.isTensor()) {
      value = on_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> results;
      for (const Tensor& t : value.toTensorVector()) results.push_back(on_device(t, device));
      value = results;
    }
  }
}

// ---- what has no kernel of the CPU's with the same name or meaning

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool crosses = !self.is_cuda() || !source.is_cuda();
  const bool plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
      self.strides() == source.strides() && self.is_non_overlapping_and_dense();
  if (crosses && plain) return at::native::copy_(self, source, non_blocking);
  count("aten::copy_");
  if (self.numel() == 0) return self;
  carry_out_current_stream();
  Tensor to = self.is_cuda() ? on_cpu(self) : self;
  to.copy_(source.is_cuda() ? on_cpu(source) : source);
  if (crosses && !non_blocking) wait();
  return self;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  count("aten::native_dropout");
  carry_out_current_stream();
  const auto mask_options = x.options().dtype(at::kBool);
  if (train.has_value() && !*train) return {x.clone(), at::ones_like(x, mask_options)};
  Tensor kept = at::empty(x.sizes(), mask_options.device(at::kCPU));
  kept.bernoulli_(1 - p, generator_like(std::nullopt));
  Tensor result = at::empty_like(x), mask = at::empty_like(x, mask_options);
  on_cpu(mask).copy_(kept);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  const auto precise = at::toOpMathType(x.scalar_type());  // rounded once, as there
  on_cpu(result).copy_(on_cpu(x).to(precise) * kept * scale);
  return {result, mask};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& gradient, const Tensor& x,
                                             at::IntArrayRef normalized, const Tensor& rstd,
                                             const std::optional<Tensor>& weight,
                                             std::array<bool, 2> wanted) {
  count("aten::_fused_rms_norm_backward");
  carry_out_current_stream();
  const auto precise = at::toOpMathType(x.scalar_type());
  const Tensor scale = on_cpu(rstd), unit = on_cpu(x).to(precise) * scale;
  const Tensor full = on_cpu(gradient).to(precise);
  const bool weighs = weight && weight->defined();
  const Tensor inner = weighs ? full * on_cpu(*weight).to(precise) : full;
  std::vector<int64_t> within(normalized.size()), others(x.dim() - normalized.size());
  std::iota(others.begin(), others.end(), 0);
  std::iota(within.begin(), within.end(), others.size());
  Tensor to_x, to_weight;
  if (wanted[0])
    to_x = ((inner - unit * (inner * unit).mean(within, true)) * scale).to(x.scalar_type());
  if (wanted[1] && weighs)
    to_weight = (others.empty() ? full * unit : (full * unit).sum(others)).to(weight->scalar_type());
  return {on_device(to_x, x.device()), on_device(to_weight, x.device())};
}

int64_t choose_plain_attention(const Tensor&, const Tensor&, const Tensor&,
                               const std::optional<Tensor>&, double, bool, std::optional<double>,
                               bool) {
  return 0;
}

// ---- memory that a test refuses

void allocate(at::IntArrayRef size) {
  if (c10::multiply_integers(size) == 0) return;
  std::lock_guard lock(counts_mutex);
  allocations++;
  TORCH_CHECK_WITH(OutOfMemoryError, allocations != refused_allocation,
                   "CUDA out of memory. Allocation ", allocations, " is refused by a test.");
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  allocate(size);
  return Tensor(at::detail::empty_cuda(size, dtype, layout, device, pin, format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pin) {
  allocate(size);
  return Tensor(at::detail::empty_strided_cuda(size, stride, dtype, layout, device, pin));
}

// ---- for Python

std::unique_ptr<torch::Library> library;

void install(const std::vector<std::string>& names) {
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                             __FILE__, __LINE__);
  for (const auto& name : names)
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  library->impl("copy_", TORCH_FN(copy_));
  library->impl("native_dropout", TORCH_FN(native_dropout));
  library->impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  library->impl("_fused_sdp_choice", TORCH_FN(choose_plain_attention));
  library->impl("empty.memory_format", TORCH_FN(empty));
  library->impl("empty_strided", TORCH_FN(empty_strided));
}

void refuse_allocation(long number) {
  std::lock_guard lock(counts_mutex);
  allocations = 0;
  refused_allocation = number;
}

}  // namespace

PYBIND11_MODULE(kernels, module) {
  module.def("install", &install);
  module.def("kernel_counts", [] { return kernel_counts; });
  module.def("allocations", [] { return allocations; });
  module.def("refuse_allocation", &refuse_allocation);
}
