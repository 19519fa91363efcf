// The backend of process groups, secondccl.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace second {

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> gloo);

}  // namespace second
