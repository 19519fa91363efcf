// The functions of `second_device._device`, from which __init__.py makes `torch.second`.
#include "collectives.h"
#include "device.h"

#include <torch/csrc/utils/pybind.h>

#include <c10/core/impl/VirtualGuardImpl.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace second;
  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("set_device", &set_device);
  module.def("synchronize", [](int device) {
    c10::impl::VirtualGuardImpl(kType).synchronizeDevice(static_cast<c10::DeviceIndex>(device));
  });
  module.def("waits", &waits);
  module.def("set_waits", [](int mode) { set_waits(static_cast<Waits>(mode)); });
  module.def("get_waits", [] { return static_cast<int>(get_waits()); });
  module.def("begin_capture", &begin_capture);
  module.def("end_capture", &end_capture);
  module.def("is_capturing", &is_capturing);
  module.def("limit", &limit);
  module.def("set_limit", &set_limit);
  module.def("pinned_bytes", &pinned_bytes);
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("collectives", &make_collectives);
}
