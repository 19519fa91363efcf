// Devices, streams, events, and what may be forgotten about them. Nothing runs later than it is called, except copies
// that were asked for with non_blocking: those are put off as long as a GPU might take. That other work has been waited
// for is checked by vector clocks (Lamport; Fidge, 1988; Mattern, 1989) instead of by luck.
#include "device.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <vector>

namespace second {
namespace {

thread_local int t_device = 0;
thread_local std::map<int, c10::StreamId> t_streams;  // the current stream of each device; 0 if it has none yet

constexpr c10::StreamId kCollectives = -1;
std::atomic<c10::StreamId> newest_stream{0};

struct Copy {  // what a queue has still to copy
  at::Tensor source, target;  // on the host; for a copy from the device, the bytes as they were when it was asked for
  const void* block;          // whose contents wait for it, if it goes to the device
  Queue queue;
  int64_t work;
};

struct Times {
  std::recursive_mutex mutex;
  std::map<Queue, Clock> seen;
  Clock host;
  std::deque<Copy> copies;
  std::map<Queue, Clock> left;  // uses by other streams of memory that was freed on a stream
};
Times& times() {
  static auto* all = new Times;
  return *all;
}
using Lock = std::lock_guard<std::recursive_mutex>;

void merge(Clock& clock, const Clock& other) {
  for (const auto& [queue, work] : other) {
    auto& mine = clock[queue];
    mine = std::max(mine, work);
  }
}

int64_t at_of(const Clock& clock, const Queue& queue) {
  auto found = clock.find(queue);
  return found == clock.end() ? 0 : found->second;
}

std::atomic<int64_t> wait_count{0};
std::atomic<Waits> mode_of_waits{Waits::kAllowed};

struct Capture {  // one at a time
  std::atomic<bool> is_on{false};
  bool all_threads = true;
  Queue queue;
};
Capture the_capture;

// Takes the copies that are wanted off the list and makes them. Those whose bytes such a copy needs are made before:
// what comes from a device may go to another by way of the same memory of the host. The caller destroys what is
// returned after it has given its lock back: a tensor may belong to Python, whose own lock that takes.
using Copies = std::vector<Copy>;

template <typename Condition>
Copies finish_copies_if(Condition is_wanted) {
  auto& copies = times().copies;
  std::vector<size_t> wanted;  // the newest first
  auto is_needed = [&](const Copy& copy) {
    return std::any_of(wanted.begin(), wanted.end(), [&](size_t other) {
      const auto& later = copies[other];
      return later.source.storage().data() == copy.target.storage().data() &&
          has_seen(later.queue, copy.queue, copy.work);
    });
  };
  for (size_t i = copies.size(); i-- > 0;)
    if (is_wanted(copies[i]) || is_needed(copies[i])) wanted.push_back(i);
  Copies done;
  at::NoGradGuard no_grad;
  for (auto i = wanted.rbegin(); i != wanted.rend(); ++i) {
    copies[*i].target.copy_(copies[*i].source);
    done.push_back(std::move(copies[*i]));
  }
  for (const size_t i : wanted) copies.erase(copies.begin() + i);
  return done;
}

std::string named(const Queue& queue) {
  if (queue.second == kCollectives) return "the collectives' stream";
  return queue.second ? "stream " + std::to_string(queue.second) : std::string("the default stream");
}

}  // namespace

int device_count() {
  static const int count = [] {
    const char* wanted = std::getenv("SECOND_DEVICES");
    return wanted ? std::atoi(wanted) : 2;
  }();
  return count;
}
int current_device() { return t_device; }
void set_device(int index) {
  TORCH_CHECK(index < std::max(1, device_count()), "SECOND error: invalid device ordinal ", index);
  if (index >= 0) t_device = index;
}

Queue current_queue(int device) { return {device, t_streams[device]}; }
Queue collective_queue(int device) { return {device, kCollectives}; }
void make_current(const c10::Stream& stream) { t_streams[stream.device_index()] = stream.id(); }
c10::Stream stream_of(const Queue& queue) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(queue.first)), queue.second);
}

int64_t new_work(const Queue& queue) {
  Lock lock(times().mutex);
  auto& clock = times().seen[queue];
  merge(clock, times().host);
  return ++clock[queue];
}

bool has_seen(const Queue& queue, const Queue& other, int64_t work) {
  return queue == other || at_of(times().seen[queue], other) >= work;
}

Clock seen_by(const Queue& queue) {
  Lock lock(times().mutex);
  return times().seen[queue];
}

void see(const Queue& queue, const Clock& clock) {
  Lock lock(times().mutex);
  merge(times().seen[queue], clock);
}

void host_sees(const Clock& clock) {
  Copies done;
  Lock lock(times().mutex);
  done = finish_copies_if([&](const Copy& copy) { return at_of(clock, copy.queue) >= copy.work; });
  merge(times().host, clock);
}

void count_wait(const std::string& what) {
  const bool here = the_capture.is_on && (the_capture.all_threads || is_capturing());
  TORCH_CHECK(!here, "SECOND error: operation not permitted when stream is capturing (", what, ")");
  TORCH_CHECK(mode_of_waits != Waits::kRefused, "the host waits for the device: ", what);
  if (mode_of_waits == Waits::kWarned) TORCH_WARN("the host waits for the device: ", what);
  ++wait_count;
}
int64_t waits() { return wait_count; }
void set_waits(Waits mode) { mode_of_waits = mode; }
Waits get_waits() { return mode_of_waits; }

void begin_capture(bool all_threads) {
  TORCH_CHECK(!the_capture.is_on, "SECOND error: a stream is captured already");
  the_capture.all_threads = all_threads;
  the_capture.queue = current_queue(current_device());
  the_capture.is_on = true;
}
void end_capture() { the_capture.is_on = false; }
bool is_capturing() { return the_capture.is_on && current_queue(the_capture.queue.first) == the_capture.queue; }

void put_off(const at::Tensor& source, const at::Tensor& target, const void* block, const Queue& queue, int64_t work) {
  // what is copied from the device is what is there now; on the host, it is what will be there
  Copy copy{block ? source : source.clone(), target, block, queue, work};
  Lock lock(times().mutex);
  times().copies.push_back(std::move(copy));
}

void finish_copies_to(const void* block) {
  Copies done;
  Lock lock(times().mutex);
  done = finish_copies_if([&](const Copy& copy) { return copy.block == block; });
}

void use(const at::Tensor& tensor, const Queue& queue, int64_t work, bool writes, const std::string& name) {
  auto block = block_of(tensor.storage().data());
  if (!block) return;
  finish_copies_to(block->data);
  Lock lock(times().mutex);
  auto check = [&](const Queue& other, int64_t when, const char* did, const char* remedy) {
    TORCH_CHECK(has_seen(queue, other, when), "race: ", name, " on ", named(queue), " ", writes ? "writes" : "reads",
        " memory that ", named(other), " ", did, "; ", remedy);
  };
  constexpr auto kWait = "it has to wait for that stream or an event of it";
  if (block->writer.first >= 0) check(block->writer, block->written, "writes", kWait);
  if (writes) {
    for (const auto& [reader, when] : block->read) check(reader, when, "reads", kWait);
    for (const auto& [user, when] : block->former)
      check(user, when, "still used when it was freed", "wait for that stream before, or call record_stream");
    block->read.clear(), block->former.clear();
    block->writer = queue, block->written = work;
  } else {
    block->read[queue] = work;
  }
}

void record_stream(const void* data, const c10::Stream& stream) {
  auto block = block_of(data);
  Lock lock(times().mutex);
  if (block) block->keepers.insert({stream.device_index(), stream.id()});
}

void leave(const Block& block) {
  Lock lock(times().mutex);
  auto& left = times().left[block.owner];
  auto note = [&](const Queue& user, int64_t when) {
    if (user.first < 0 || block.keepers.count(user) || has_seen(block.owner, user, when)) return;
    if (at_of(times().host, user) >= when) return;
    auto& mine = left[user];
    mine = std::max(mine, when);
  };
  note(block.writer, block.written);
  for (const auto& uses : {block.read, block.former})
    for (const auto& [user, when] : uses) note(user, when);
}

void inherit(Block& block) {
  Lock lock(times().mutex);
  auto found = times().left.find(block.owner);
  if (found == times().left.end()) return;
  for (auto use = found->second.begin(); use != found->second.end();) {
    const auto& [user, when] = *use;
    const bool is_over = has_seen(block.owner, user, when) || at_of(times().host, user) >= when;
    if (!is_over) block.former[user] = when;
    use = is_over ? found->second.erase(use) : std::next(use);
  }
}

namespace {

struct Moment {  // an event
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    second::set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(t_device)}; }
  void setDevice(c10::Device device) const override { second::set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) t_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return second::device_count(); }

  static int index_of(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_queue(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({index_of(device), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of({index_of(device), ++newest_stream});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    make_current(stream);
    return before;
  }
  static Queue queue_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    new_work(queue_of(stream));
    *static_cast<Moment*>(*event) = {seen_by(queue_of(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) see(queue_of(stream), static_cast<Moment*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) host_sees(static_cast<Moment*>(event)->clock);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void synchronizeEvent(void* event) const override {
    count_wait("synchronize an event");
    queryEvent(event);
  }
  double elapsedTime(void* begun, void* ended, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(
        static_cast<Moment*>(ended)->time - static_cast<Moment*>(begun)->time).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    new_work(queue_of(stream));
    host_sees(seen_by(queue_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("synchronize a stream");
    queryStream(stream);
  }
  bool isStreamCapturing(const c10::Stream& stream) const {  // no `override`: torch 2.10 lacks it
    return the_capture.is_on && queue_of(stream) == the_capture.queue;
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count_wait("synchronize a device");
    std::vector<Queue> all;
    {
      Lock lock(times().mutex);
      for (const auto& [queue, clock] : times().seen)
        if (queue.first == device) all.push_back(queue);
    }
    for (const auto& queue : all) host_sees(seen_by(queue));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), stream);
  }
};

}  // namespace
}  // namespace second

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, second::Guard);
}
