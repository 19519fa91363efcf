// Memory: a limit per device, bytes that are no number until they are written, and pinned host memory.
#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace second {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kErrorMemoryAllocation = 2;  // cudaErrorMemoryAllocation
constexpr int kUnwritten = 0xFF;  // NaN in every floating-point format, -1 as an integer

int64_t mebibytes(const char* variable, int64_t otherwise) {
  const char* value = std::getenv(variable);
  return value ? static_cast<int64_t>(std::atof(value) * (1 << 20)) : otherwise;
}

constexpr int64_t kMemoryOfT4 = int64_t{15109} << 20;

struct Account {  // what is allocated on a device
  std::mutex mutex;
  int64_t limit = mebibytes("SECOND_MEMORY_MIB", kMemoryOfT4);
  c10::CachingDeviceAllocator::Stat bytes, blocks;
  int64_t ooms = 0;

  bool take(int64_t wanted) {
    std::lock_guard<std::mutex> lock(mutex);
    if (bytes.current + wanted > limit) {
      ++ooms;
      return false;
    }
    bytes.increase(wanted), blocks.increase(1);
    return true;
  }
  void give_back(int64_t freed) {
    std::lock_guard<std::mutex> lock(mutex);
    bytes.decrease(freed), blocks.decrease(1);
  }
};

Account& account(int device) {
  static auto* all = new std::vector<Account>(device_count());
  return all->at(device);
}

// Blocks by address. Never destroyed, like the accounts, because tensors may outlive a library's statics.
struct Blocks {
  std::mutex mutex;
  std::unordered_map<const void*, std::shared_ptr<Block>> of;
};
Blocks& blocks() {
  static auto* all = new Blocks;
  return *all;
}

void free_block(void* data) {
  if (!data) return;
  std::shared_ptr<Block> block;
  {
    std::lock_guard<std::mutex> lock(blocks().mutex);
    auto found = blocks().of.find(data);
    block = found->second;
    blocks().of.erase(found);
  }
  leave(*block);
  account(block->device).give_back(block->bytes);
  std::free(data);
}

std::string readable(int64_t bytes) {
  const bool is_small = bytes < 1 << 30;
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %s", bytes / double(is_small ? 1 << 20 : 1 << 30), is_small ? "MiB" : "GiB");
  return text;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(kType, device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, where};
    auto& its = account(device);
    TORCH_CHECK_WITH(OutOfMemoryError, its.take(bytes), "SECOND out of memory. Tried to allocate ", readable(bytes),
        ". Device ", device, " has a total capacity of ", readable(its.limit), " of which ",
        readable(std::max<int64_t>(0, its.limit - its.bytes.current)), " is free.");
    void* data = nullptr;
    if (posix_memalign(&data, kAlignment, bytes)) {
      its.give_back(bytes);
      throw std::bad_alloc();
    }
    std::memset(data, kUnwritten, bytes);
    auto block = std::make_shared<Block>();
    block->data = data, block->bytes = bytes, block->device = device, block->owner = current_queue(device);
    inherit(*block);
    std::lock_guard<std::mutex> lock(blocks().mutex);
    blocks().of[data] = block;
    return {data, data, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  // what torch.accelerator asks for; nothing is cached, so that what is reserved is what is allocated
  bool initialized() override { return device_count() > 0; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& its = account(device);
    std::lock_guard<std::mutex> lock(its.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = stats.requested_bytes[0] = its.bytes;
    stats.allocation[0] = stats.segment[0] = stats.active[0] = its.blocks;
    stats.num_ooms = its.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    auto& its = account(device);
    std::lock_guard<std::mutex> lock(its.mutex);
    its.bytes.reset_accumulated(), its.blocks.reset_accumulated();
    its.ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& its = account(device);
    std::lock_guard<std::mutex> lock(its.mutex);
    its.bytes.reset_peak(), its.blocks.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // no `override`: torch 2.10 lacks it
    auto& its = account(device);
    std::lock_guard<std::mutex> lock(its.mutex);
    return {std::max<int64_t>(0, its.limit - its.bytes.current), its.limit};
  }
};

// CUDA's caching allocator of host memory rounds up to powers of two; so does this one, and counts that.
struct Pinned {
  std::mutex mutex;
  std::map<const void*, size_t> sizes;  // by address, rounded up
  int64_t bytes = 0;
};
Pinned& pinned() {
  static auto* all = new Pinned;
  return *all;
}

size_t power_of_two(size_t bytes) {
  size_t rounded = kAlignment;
  while (rounded < bytes) rounded *= 2;
  return rounded;
}

void free_pinned(void* data) {
  if (!data) return;
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto found = pinned().sizes.find(data);
  pinned().bytes -= found->second;
  pinned().sizes.erase(found);
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    static const int64_t limit = mebibytes("SECOND_PINNED_MIB", INT64_MAX);
    const size_t rounded = power_of_two(bytes);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    if (pinned().bytes + int64_t(rounded) > limit)  // CUDA doesn't say either that it is the host's memory
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kErrorMemoryAllocation,
          "SECOND error: out of memory\nSECOND kernel errors might be asynchronously reported at some other API call, "
          "so the stacktrace below might be incorrect.");
    void* data = nullptr;
    if (posix_memalign(&data, kAlignment, rounded)) throw std::bad_alloc();
    pinned().sizes[data] = rounded;
    pinned().bytes += rounded;
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;
REGISTER_ALLOCATOR(kType, &the_device_allocator);

}  // namespace

c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().sizes.upper_bound(pointer);
  if (after == pinned().sizes.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(pointer) < static_cast<const char*>(start) + bytes;
}

std::shared_ptr<Block> block_of(const void* data) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  auto found = blocks().of.find(data);
  return found == blocks().of.end() ? nullptr : found->second;
}

void resize(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  finish_copies_to(impl->data());
  OnDevice on(storage.device().index());
  auto fresh = device_allocator()->allocate(bytes);
  if (bytes && impl->nbytes()) std::memcpy(fresh.get(), impl->data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr(std::move(fresh));  // frees the old block
  impl->set_nbytes(bytes);
}

int64_t limit(int device) { return account(device).limit; }
void set_limit(int device, int64_t bytes) { account(device).limit = bytes; }
int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return pinned().bytes;
}

}  // namespace second
