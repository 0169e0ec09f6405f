// Device memory behind a caching allocator with a limit, and pinned host memory.

#include "simulated.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace simulated {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kMost = 1024 * kMiB; // address space of a device
constexpr size_t kRound = 512;
constexpr size_t kSegment = 2 * kMiB;
constexpr size_t kContext = 16 * kMiB;

struct Block {
  size_t size;
  size_t segment; // where its segment starts
  bool is_free;
  c10::StreamId stream; // only this stream takes it again
  std::vector<std::pair<c10::Stream, uint64_t>> users; // see recordStream
};

struct Device {
  char* guarded = nullptr;
  char* open = nullptr;
  size_t limit = 256 * kMiB;
  size_t context = 0;
  std::map<size_t, size_t> segments; // start -> size
  std::map<size_t, Block> blocks; // start -> block
  size_t reserved = 0, allocated = 0, peak_reserved = 0, peak_allocated = 0;
  int64_t live = 0;
};

Device devices[kDevices];

Device& mapped(int index) {
  Device& device = devices[index];
  if (device.guarded == nullptr) {
    int file = memfd_create("simulated-device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kMost) == 0, "There is no memory to simulate with.");
    auto map = [&](int access) {
      void* place = mmap(nullptr, kMost, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(place != MAP_FAILED, "There is no address space to simulate with.");
      madvise(place, kMost, MADV_DONTFORK);
      return static_cast<char*>(place);
    };
    device.guarded = map(PROT_NONE);
    device.open = map(PROT_READ | PROT_WRITE);
    close(file);
  }
  return device;
}

size_t rounded(size_t size, size_t unit) {
  return (size + unit - 1) / unit * unit;
}

// Give all segments without a live block back; their contents are lost.
void release_unused(int index) {
  Device& device = mapped(index);
  finish_device(index); // as cudaFree does
  for (auto each = device.segments.begin(); each != device.segments.end();) {
    auto [start, size] = *each;
    auto block = device.blocks.find(start);
    if (block->second.is_free && block->second.size == size) {
      device.blocks.erase(block);
      madvise(device.open + start, size, MADV_REMOVE);
      device.reserved -= size;
      give_segment(index, size);
      each = device.segments.erase(each);
    } else {
      ++each;
    }
  }
}

// The first gap between segments that is large enough, or kMost.
size_t gap(const Device& device, size_t size) {
  size_t start = 0;
  for (auto& [at, length] : device.segments) {
    if (at - start >= size) {
      return start;
    }
    start = at + length;
  }
  return start + size <= kMost ? start : kMost;
}

bool add_segment(int index, size_t size, c10::StreamId stream) {
  Device& device = mapped(index);
  size = rounded(size, kSegment);
  size_t start = gap(device, size);
  if (device.context + device.reserved + size > device.limit || start == kMost ||
      !take_segment(index, size)) {
    return false;
  }
  device.segments[start] = size;
  device.blocks[start] = {size, start, true, stream, {}};
  std::memset(device.open + start, 0xFF, size); // whoever reads it before writing gets NaN
  device.reserved += size;
  device.peak_reserved = std::max(device.peak_reserved, device.reserved);
  return true;
}

std::map<size_t, Block>::iterator find_free(Device& device, size_t size, c10::StreamId stream) {
  auto best = device.blocks.end();
  for (auto each = device.blocks.begin(); each != device.blocks.end(); ++each) {
    Block& block = each->second;
    if (block.is_free && block.stream == stream && block.size >= size &&
        (best == device.blocks.end() || block.size < best->second.size)) {
      best = each;
    }
  }
  return best;
}

void merge(Device& device, std::map<size_t, Block>::iterator block) {
  auto join = [&](std::map<size_t, Block>::iterator left) {
    auto right = std::next(left);
    if (right != device.blocks.end() && left->second.is_free && right->second.is_free &&
        left->second.segment == right->second.segment) {
      left->second.size += right->second.size;
      device.blocks.erase(right);
    }
  };
  join(block);
  if (block != device.blocks.begin()) {
    join(std::prev(block));
  }
}

void free_device(void* address) {
  std::lock_guard<std::recursive_mutex> held(lock());
  int index = device_of(address);
  Device& device = devices[index];
  auto block = device.blocks.find(static_cast<char*>(address) - device.guarded);
  for (auto& [stream, number] : block->second.users) {
    if (!is_done(stream, number)) {
      finish(stream);
    }
  }
  block->second.users.clear();
  block->second.is_free = true;
  device.allocated -= block->second.size;
  device.live -= 1;
  merge(device, block);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    int index = current_device();
    c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
    if (bytes == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    }
    use(index);
    std::lock_guard<std::recursive_mutex> held(lock());
    Device& device = mapped(index);
    size_t size = rounded(bytes, kRound);
    auto stream = current_stream(index).id();
    auto block = find_free(device, size, stream);
    if (block == device.blocks.end()) {
      if (!add_segment(index, size, stream)) {
        release_unused(index);
        bool added = add_segment(index, size, stream);
        if (!added) {
          note_refusal(index);
        }
        TORCH_CHECK_WITH(
            OutOfMemoryError,
            added,
            "Simulated device ", index, " out of memory. Tried to allocate ", bytes, " bytes; of ",
            device.limit, " bytes ", device.allocated, " are allocated, ", device.reserved,
            " are reserved, and the context has ", device.context, ".");
      }
      block = find_free(device, size, stream);
    }
    if (block->second.size > size) {
      device.blocks[block->first + size] = {
          block->second.size - size, block->second.segment, true, stream, {}};
      block->second.size = size;
    }
    block->second.is_free = false;
    device.allocated += size;
    device.peak_allocated = std::max(device.peak_allocated, device.allocated);
    device.live += 1;
    void* address = device.guarded + block->first;
    return {address, address, &free_device, where};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    int index = device_of(to);
    queue(index, [to = for_kernels(to), from = for_kernels(from), bytes] {
      std::memmove(to, from, bytes);
    });
  }

  bool initialized() override {
    return devices[0].guarded != nullptr || devices[1].guarded != nullptr;
  }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    for (int index = 0; index < kDevices; ++index) {
      if (devices[index].guarded != nullptr) {
        release_unused(index);
      }
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    if (data.get() != nullptr) {
      Device& device = devices[device_of(data.get())];
      auto block = device.blocks.find(static_cast<char*>(data.get()) - device.guarded);
      block->second.users.emplace_back(stream, queued(stream));
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    Device& device = devices[index];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = static_cast<int64_t>(device.allocated);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(device.peak_allocated);
    stats.reserved_bytes[0].current = static_cast<int64_t>(device.reserved);
    stats.reserved_bytes[0].peak = static_cast<int64_t>(device.peak_reserved);
    stats.allocation[0].current = device.live;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    devices[index].peak_allocated = devices[index].allocated;
    devices[index].peak_reserved = devices[index].reserved;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> held(lock());
    Device& device = devices[index];
    size_t taken = device.context + device.reserved, free = 0, total = 0;
    if (shared_info(index, &free, &total)) {
      return {free, total};
    }
    return {device.limit > taken ? device.limit - taken : 0, device.limit};
  }
};

struct Pinned {
  size_t size;
  bool is_free = false;
  std::vector<std::pair<c10::Stream, uint64_t>> users;
};

std::map<const char*, Pinned> pinned_blocks;

std::map<const char*, Pinned>::iterator pinned_block(const void* address) {
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(address));
  if (after == pinned_blocks.begin()) {
    return pinned_blocks.end();
  }
  auto block = std::prev(after);
  bool inside = static_cast<const char*>(address) < block->first + block->second.size;
  return inside ? block : pinned_blocks.end();
}

bool is_unused(Pinned& block) {
  auto done = [](auto& user) { return is_done(user.first, user.second); };
  return block.is_free && std::all_of(block.users.begin(), block.users.end(), done);
}

void free_pinned(void* address) {
  std::lock_guard<std::recursive_mutex> held(lock());
  pinned_block(address)->second.is_free = true;
}

// Caches, and rounds up to powers of two, as PyTorch's own does.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::DeviceType::CPU)};
    }
    use(current_device());
    std::lock_guard<std::recursive_mutex> held(lock());
    size_t size = kRound;
    while (size < bytes) {
      size *= 2;
    }
    for (auto& [address, block] : pinned_blocks) {
      if (block.size == size && is_unused(block)) {
        block = {size, false, {}};
        return owned(const_cast<char*>(address));
      }
    }
    void* address = std::aligned_alloc(kRound, size);
    TORCH_CHECK(address != nullptr, "CUDA error: out of memory (simulated, of pinned memory).");
    pinned_blocks[static_cast<char*>(address)] = {size, false, {}};
    return owned(address);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool record_event(void* address, void*, c10::Stream stream) override {
    note_use_of_pinned(address, stream);
    return true;
  }

  void empty_cache() override {
    std::lock_guard<std::recursive_mutex> held(lock());
    for (auto each = pinned_blocks.begin(); each != pinned_blocks.end();) {
      if (is_unused(each->second)) {
        std::free(const_cast<char*>(each->first));
        each = pinned_blocks.erase(each);
      } else {
        ++each;
      }
    }
  }

  at::HostStats get_stats() override {
    return {};
  }

  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static c10::DataPtr owned(void* address) {
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)
const bool registered = [] {
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_memory);
  return true;
}();

} // namespace

void reserve_context(int index) {
  std::lock_guard<std::recursive_mutex> held(lock());
  Device& device = mapped(index);
  TORCH_CHECK(
      device.limit >= kContext, "CUDA error: out of memory (simulated, of a context).");
  take_context(index, kContext);
  device.context = kContext;
}

void* for_kernels(const void* address) {
  if (address == nullptr) {
    return nullptr;
  }
  Device& device = devices[device_of(address)];
  return device.open + (static_cast<const char*>(address) - device.guarded);
}

int device_of(const void* address) {
  for (int index = 0; index < kDevices; ++index) {
    const char* start = devices[index].guarded;
    if (start != nullptr && address >= start && address < start + kMost) {
      return index;
    }
  }
  TORCH_CHECK(false, "an illegal memory access was encountered (simulated)");
}

bool is_pinned(const void* address) {
  std::lock_guard<std::recursive_mutex> held(lock());
  return pinned_block(address) != pinned_blocks.end();
}

void note_use_of_pinned(const void* address, c10::Stream stream) {
  std::lock_guard<std::recursive_mutex> held(lock());
  auto block = pinned_block(address);
  if (block != pinned_blocks.end()) {
    block->second.users.emplace_back(stream, queued(stream));
  }
}

c10::Allocator* device_allocator() {
  return &device_memory;
}

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

void set_limit(int64_t index, int64_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock());
  devices[index].limit = std::min(static_cast<size_t>(bytes), kMost);
}

int64_t pinned_bytes() {
  std::lock_guard<std::recursive_mutex> held(lock());
  int64_t sum = 0;
  for (auto& [address, block] : pinned_blocks) {
    sum += static_cast<int64_t>(block.size);
  }
  return sum;
}

} // namespace simulated
