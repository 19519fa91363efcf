// Autocast: torch has the lists of operators, for CUDA, and a device that it doesn't know makes its own of them.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at {  // the macros name types without it
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macros want an `m`
#define IN_HALF(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_FP32_UNLESS_ASKED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(IN_HALF)
  AT_FORALL_FP32(IN_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(IN_FP32_UNLESS_ASKED)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(IN_WIDEST)
}

}  // namespace
}  // namespace at
