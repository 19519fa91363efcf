// The parts of the second device. Each file beside this one is one part; README.md says what they prove.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

namespace second {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr const char* kName = "second";

// -- devices (streams.cpp): each thread has a current one
int device_count();
int current_device();
void set_device(int index);

struct OnDevice {  // makes a device current while it lives
  explicit OnDevice(int index) : before(current_device()) { set_device(index); }
  ~OnDevice() { set_device(before); }
  int before;
};

// -- time (streams.cpp). A queue is a stream of a device. Work number n of queue q has happened before other work
// if that work's queue has seen q at n or later; events, waits and synchronizing are what makes a queue see another.
using Queue = std::pair<int, c10::StreamId>;
using Clock = std::map<Queue, int64_t>;

Queue current_queue(int device);
Queue collective_queue(int device);  // the collectives' own, as NCCL has
void make_current(const c10::Stream& stream);
int64_t new_work(const Queue& queue);              // numbers the next piece of work of a queue
bool has_seen(const Queue& queue, const Queue& other, int64_t work);
Clock seen_by(const Queue& queue);
void see(const Queue& queue, const Clock& clock);  // work of `queue` from now on comes after `clock`
void host_sees(const Clock& clock);                // the host has waited for `clock`
c10::Stream stream_of(const Queue& queue);

// -- waits (streams.cpp)
// The host waits for the device in `what`: counted; refused during a capture, and if the debug mode says so.
void count_wait(const std::string& what);
int64_t waits();
enum class Waits { kAllowed, kWarned, kRefused };  // in all threads, as torch.cuda.set_sync_debug_mode
void set_waits(Waits mode);
Waits get_waits();
void begin_capture(bool all_threads);  // of the current stream; waits are refused in all threads, or only there
void end_capture();
bool is_capturing();  // whether the current stream is captured

// -- memory (memory.cpp)
struct Block {  // an allocation on a device
  void* data;
  size_t bytes;
  int device;
  Queue owner{-1, 0};       // the stream that it was allocated on, which may get its memory again once it is freed
  std::set<Queue> keepers;  // streams that it was recorded on: it isn't given out again before they are done with it
  Queue writer{-1, 0};
  int64_t written = 0;
  Clock read;
  Clock former;  // uses of memory that was freed on the owner's stream, so that it may be the same memory
};
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
std::shared_ptr<Block> block_of(const void* data);
void resize(const c10::Storage& storage, size_t bytes);
int64_t limit(int device), pinned_bytes();
void set_limit(int device, int64_t bytes);
void record_stream(const void* data, const c10::Stream& stream);

// -- use of memory (streams.cpp)
// Notes that work of `queue` reads or writes `tensor`. Raises an error if other work that it depends on has not been
// waited for. Copies that were put off until now are made first.
void use(const at::Tensor& tensor, const Queue& queue, int64_t work, bool writes, const std::string& name);
// Notes which streams may still use a block that is freed, and hands that on to what is allocated in its place.
void leave(const Block& block);
void inherit(Block& block);
// Puts off a copy, both sides of it seen from the host, until it is waited for. `block` is the memory that a copy to
// the device writes, null for one from the device; it is copied at the latest when work on the device uses that memory.
void put_off(const at::Tensor& source, const at::Tensor& target, const void* block, const Queue& queue, int64_t work);
void finish_copies_to(const void* block);

// -- operators (operators.cpp)
at::Tensor as_host(const at::Tensor& tensor);  // a tensor of the CPU over the same bytes
at::Generator& default_generator(int device);
at::Generator new_generator(int device);

}  // namespace second
