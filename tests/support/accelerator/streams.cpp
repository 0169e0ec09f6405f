// Streams and events. Nothing that is queued runs before something waits for it: no other order of
// work finds more missing waits, and this one finds them each time.

#include "simulated.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <deque>
#include <map>

namespace simulated {
namespace {

constexpr size_t kLongest = 1000; // then the oldest work runs, as a full queue makes CUDA do

struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t queued = 0, done = 0;
};

struct Event {
  c10::Stream stream;
  uint64_t number;
};

std::map<std::pair<int, c10::StreamId>, Queue> queues;
c10::StreamId last_stream = 0;
thread_local int device_now = 0;
thread_local c10::StreamId streams_now[kDevices] = {};

c10::Stream stream_of(int device, c10::StreamId id) {
  auto index = static_cast<c10::DeviceIndex>(device);
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, index), id);
}

Queue& queue_of(c10::Stream stream) {
  return queues[{stream.device_index(), stream.id()}];
}

void run_until(Queue& queue, uint64_t number) {
  while (queue.done < number && !queue.work.empty()) {
    auto work = std::move(queue.work.front());
    queue.work.pop_front();
    queue.done += 1;
    work();
  }
}

void put(Queue& queue, std::function<void()> work) {
  queue.work.push_back(std::move(work));
  queue.queued += 1;
  if (queue.work.size() > kLongest) {
    run_until(queue, queue.done + kLongest / 2);
  }
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_now;
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_now)};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < kDevices, "CUDA error: invalid device ordinal (simulated)");
    device_now = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_now = index_of(device);
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    use(index_of(device));
    std::lock_guard<std::recursive_mutex> held(lock());
    return stream_of(index_of(device), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    streams_now[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, c10::EventFlag)
      const override {
    std::lock_guard<std::recursive_mutex> held(lock());
    delete static_cast<Event*>(*event);
    *event = new Event{stream, queued(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> held(lock());
    if (event != nullptr) {
      Event now = *static_cast<Event*>(event);
      put(queue_of(stream), [now] { run_until(queue_of(now.stream), now.number); });
    }
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event); // else who polls would wait for ever
    return true;
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> held(lock());
    if (event != nullptr) {
      Event* now = static_cast<Event*>(event);
      run_until(queue_of(now->stream), now->number);
    }
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 0.0;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(visible_devices());
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    finish_device(index < 0 ? device_now : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex; // outlives the destructors at exit
  return *mutex;
}

int current_device() {
  return device_now;
}

c10::Stream current_stream(int device) {
  return stream_of(device, streams_now[device]);
}

void queue(int device, std::function<void()> work) {
  use(device);
  std::lock_guard<std::recursive_mutex> held(lock());
  put(queue_of(current_stream(device)), std::move(work));
}

void finish(c10::Stream stream) {
  check_not_forked();
  std::lock_guard<std::recursive_mutex> held(lock());
  Queue& queue = queue_of(stream);
  run_until(queue, queue.queued);
}

void finish_device(int device) {
  check_not_forked();
  std::lock_guard<std::recursive_mutex> held(lock());
  for (auto& [place, queue] : queues) {
    if (place.first == device) {
      run_until(queue, queue.queued);
    }
  }
}

uint64_t queued(c10::Stream stream) {
  std::lock_guard<std::recursive_mutex> held(lock());
  return queue_of(stream).queued;
}

bool is_done(c10::Stream stream, uint64_t number) {
  std::lock_guard<std::recursive_mutex> held(lock());
  return queue_of(stream).done >= number;
}

int64_t waiting(int64_t device) {
  std::lock_guard<std::recursive_mutex> held(lock());
  int64_t sum = 0;
  for (auto& [place, queue] : queues) {
    sum += place.first == device ? static_cast<int64_t>(queue.work.size()) : 0;
  }
  return sum;
}

} // namespace simulated
