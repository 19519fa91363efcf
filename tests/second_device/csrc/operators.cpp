// Operators: each runs the CPU's kernel on the same bytes, after a check that a GPU would have taken its arguments.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_set>
#include <vector>

namespace second {

// -- random numbers: a generator per device, so that what is drawn from the CPU's doesn't count
namespace {

// The numbers come from a generator of the CPU, because kernels of the CPU take no other.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device, at::Generator host = at::make_generator<at::CPUGeneratorImpl>())
      : GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(kKey)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), host.clone()); }

  at::Generator host;
};

// While it lives, kernels that take no generator, such as dropout's, draw from `generator` instead of the CPU's.
class Drawing {
 public:
  explicit Drawing(at::Generator generator)
      : lock_(mutex()), generator_(std::move(generator)), host_(at::detail::getDefaultCPUGenerator()),
        before_(host_.get_state()) {
    host_.set_state(generator_.get_state());
  }
  ~Drawing() {
    generator_.set_state(host_.get_state());
    host_.set_state(before_);
  }

 private:
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex one;
    return one;
  }
  std::lock_guard<std::recursive_mutex> lock_;
  at::Generator generator_, host_;
  at::Tensor before_;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator& default_generator(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < device_count(); ++i) made.push_back(new_generator(i));
    return made;
  }();
  return all.at(device < 0 ? current_device() : device);
}

namespace {
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return second::device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return second::device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { second::set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return second::current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = second::current_device();
    second::set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize(storage, bytes); }
};
Hooks hooks;
const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }
}  // namespace

// -- tensors
at::Tensor as_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  const auto& storage = tensor.storage();
  auto host = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), new c10::Storage(storage),
          [](void* kept) { delete static_cast<c10::Storage*>(kept); }, at::kCPU),
      c10::GetCPUAllocator(), /*resizable=*/true);
  at::AutoDispatchBelowAutograd below;
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

namespace {

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int device) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), c10::DispatchKeySet(kKey), dtype);
}

at::Tensor as_ours(const at::Tensor& host, int device, const Queue& queue, int64_t work, const std::string& name) {
  if (!host.defined() || host.device().type() != at::kCPU) return host;
  auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), device);
  as_host(made).copy_(host);
  use(made, queue, work, /*writes=*/true, name);
  return made;
}

int index_of(std::optional<c10::Device> device) {
  return device && device->index() >= 0 ? device->index() : current_device();
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice on(index_of(device));
  return at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_op(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return empty_strided(sizes, strides, c10::dtype_or_default(dtype), index_of(device));
}

const at::Tensor& resize_(
    const at::Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  const size_t bytes = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.element_size();
  if (bytes > tensor.storage().nbytes()) resize(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve)
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

// -- copies
at::Tensor copy_between(const at::Tensor& from, const at::Tensor& to) {
  const auto source = current_queue(from.device().index()), target = current_queue(to.device().index());
  see(source, seen_by(target)), see(target, seen_by(source));  // the streams of both devices wait for each other
  use(from, source, new_work(source), /*writes=*/false, "copy_");
  use(to, target, new_work(target), /*writes=*/true, "copy_");
  as_host(to).copy_(as_host(from));
  see(source, seen_by(target)), see(target, seen_by(source));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  if (is_ours(from) && is_ours(to)) return copy_between(from, to);
  const bool goes_to_device = is_ours(to);
  const auto& ours = goes_to_device ? to : from;
  const auto& on_host = goes_to_device ? from : to;
  const auto queue = current_queue(ours.device().index());
  const auto work = new_work(queue);
  use(ours, queue, work, goes_to_device, "copy_");
  const auto source = as_host(from), target = as_host(to);
  if (non_blocking && is_pinned(on_host.const_data_ptr())) {
    put_off(source, target, goes_to_device ? to.storage().data() : nullptr, queue, work);
    return to;
  }
  std::string what = goes_to_device ? "copy from the host" : "copy to the host";
  count_wait(what + (non_blocking ? ", to or from memory that isn't pinned" : ""));
  host_sees(seen_by(queue));
  target.copy_(source);
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  const auto queue = current_queue(tensor.device().index());
  use(tensor, queue, new_work(queue), /*writes=*/false, "item");
  count_wait("aten::_local_scalar_dense (item)");
  host_sees(seen_by(queue));
  return at::_local_scalar_dense(as_host(tensor));
}

void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

void record_stream_op(at::Tensor& tensor, c10::Stream stream) { record_stream(tensor.storage().data(), stream); }

// -- all other operators
using Names = std::unordered_set<std::string>;
const Names kIndexing{"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_index_put_impl_"};
// the shape of what these return depends on values, or the host gets a value, or looks at one
const Names kWaits{"aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out",
    "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::_linalg_check_errors"};
// a number on the host is refused as well: CUDA's kernels read it by its address
const Names kTakesNoHostNumbers{"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_",
    "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_", "aten::index_select",
    "aten::gather", "aten::scatter.src", "aten::scatter.value", "aten::embedding", "aten::nll_loss_forward"};

using Stack = torch::jit::Stack;

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
  }
}

// Returns the device of the arguments, -1 if none is on one. Refuses what is on two devices, as CUDA does: numbers
// may be on the host, and indices.
int device_of(const c10::FunctionSchema& schema, const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  int device = -1;
  std::string on_host;
  bool indices_on_host = false;
  const bool takes_host_indices = kIndexing.count(name);
  for (size_t i = 0; i < arguments.size(); ++i)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        const int index = tensor.device().index();
        TORCH_CHECK(device < 0 || device == index, "Expected all tensors to be on the same device, but found at least "
            "two devices, ", kName, ":", device, " and ", kName, ":", index, "! (in ", name, ")");
        device = index;
      } else if (tensor.defined() && tensor.device().is_cpu() && on_host.empty()) {
        const auto& argument = schema.arguments()[i].name();
        const bool is_number = tensor.dim() == 0 && !kTakesNoHostNumbers.count(name);
        if (takes_host_indices && argument == "indices") {
          indices_on_host = true;
        } else if (!is_number) {
          on_host = argument;
        }
      }
    });
  TORCH_CHECK(device < 0 || on_host.empty(), "Expected all tensors to be on the same device, but found at least two "
      "devices, ", kName, ":", device, " and cpu! (argument ", on_host, " in ", name, ")");
  if (device >= 0 && indices_on_host) count_wait("copy indices from the host for " + name);
  return device;
}

bool is_write(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// A mask as an index is searched for what it holds, except where one number is put in its place.
bool searches_mask(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  if (!kIndexing.count(name)) return false;
  bool has_mask = false;
  each_tensor(arguments[1], [&](const at::Tensor& index) {
    has_mask |= index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
  });
  if (!has_mask || name.find("index_put") == std::string::npos) return has_mask;
  return arguments[2].toTensor().numel() != 1 || arguments[3].toBool();
}

void note_waits(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  const bool waits = kWaits.count(name) || searches_mask(name, arguments) ||
      (name == "aten::multinomial" && !arguments[2].toBool()) ||
      (name == "aten::repeat_interleave.Tensor" && arguments.back().isNone());
  if (waits) count_wait(name);
}

// Has `op` draw from a generator of the device if it takes one. Returns the generator if the op takes none but draws.
at::Generator choose_generator(const c10::OperatorHandle& op, int device, std::vector<c10::IValue>& arguments) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return {};
  auto host_of = [](const at::Generator& ours) { return ours.get<Generator>()->host; };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isGenerator()) {
      auto given = arguments[i].toGenerator();
      TORCH_CHECK(given.device().type() == kType, "Expected a '", kName, "' device type for generator but found '",
          given.device().type(), "'");
      arguments[i] = host_of(given);
      return {};
    }
    const auto& type = *op.schema().arguments()[i].type();
    if (type.isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      arguments[i] = host_of(default_generator(device));
      return {};
    }
  }
  return host_of(default_generator(device));
}

c10::IValue host_value(const c10::IValue& value) {
  if (value.isTensor()) return as_host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(as_host(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& tensor : value.toOptionalTensorVector())
      all.push_back(tensor ? std::optional<at::Tensor>(as_host(*tensor)) : std::nullopt);
    return all;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(at::kCPU);
  return value;
}

// Returns the argument that an operator has written to and returns, and resizes it if the kernel did.
at::Tensor written(const c10::FunctionSchema& schema, const std::string& name, const c10::AliasInfo& alias,
    const std::vector<c10::IValue>& arguments, const at::Tensor& host) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* its = schema.arguments()[i].alias_info();
    if (!its || !(*its == alias) || !arguments[i].isTensor()) continue;
    auto ours = arguments[i].toTensor();
    if (is_ours(ours) && ours.sizes() != host.sizes()) {
      resize_(ours, host.sizes(), std::nullopt);
      as_host(ours).copy_(host);
    }
    return ours;
  }
  TORCH_CHECK(false, kName, ": which argument does ", name, " return?");
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  int device = device_of(schema, name, given);
  if (device < 0) {
    device = current_device();
    for (const auto& argument : given)
      if (argument.isDevice() && argument.toDevice().type() == kType) device = index_of(argument.toDevice());
  }
  note_waits(name, given);
  const auto queue = current_queue(device);
  const auto work = new_work(queue);
  for (const bool writes : {false, true})
    for (size_t i = 0; i < count; ++i)
      if (is_write(schema.arguments()[i]) == writes)
        each_tensor(given[i], [&](const at::Tensor& tensor) {
          if (is_ours(tensor)) use(tensor, queue, work, writes, name);
        });

  auto arguments = given;
  auto generator = choose_generator(op, device, arguments);
  for (size_t i = 0; i < count; ++i) (*stack)[first + i] = host_value(arguments[i]);
  {
    std::optional<Drawing> drawing;
    if (generator.defined()) drawing.emplace(generator);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const auto& returns = schema.returns();
  const size_t begin = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[begin + i];
    const auto* alias = returns[i].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), kName, " has no kernel for ", name, ", which returns a view");
    if (value.isTensor() && value.toTensor().defined()) {
      value = alias ? written(schema, name, *alias, given, value.toTensor())
                    : as_ours(value.toTensor(), device, queue, work, name);
    } else if (value.isTensorList() && !alias) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(as_ours(tensor, device, queue, work, name));
      value = all;
    }
  }
}

// -- operators that the CPU lacks: products of half-precision matrices that are summed up and returned in another type
at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  return at::mm(a.to(dtype), b.to(dtype));
}

at::Tensor addmm_dtype(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
    const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(sum.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}

at::Tensor& addmm_dtype_out(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
    const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) {
  return at::addmm_out(out, sum.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}

// Lets `Module.to` put a tensor of this device in the place of the CPU's inside the same parameter, which keeps tied
// weights tied. torch says yes for CUDA, and no for a device that it doesn't know.
bool may_take_the_place(const at::Tensor& tensor, const at::Tensor& other) {
  auto is_plain = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && (t.device().is_cpu() || is_ours(t)) && !t.is_quantized();
  };
  return is_plain(tensor) && is_plain(other);
}

int64_t attention_by_math(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided_op);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("_copy_from", copy_from);
  library.impl("_foreach_copy_", foreach_copy);
  library.impl("record_stream", record_stream_op);
  library.impl("_local_scalar_dense", item);
  library.impl("mm.dtype", mm_dtype);
  library.impl("addmm.dtype", addmm_dtype);
  library.impl("addmm.dtype_out", addmm_dtype_out);
  library.impl("_has_compatible_shallow_copy_type", may_take_the_place);
}

}  // namespace
}  // namespace second

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &second::attention_by_math)
}
