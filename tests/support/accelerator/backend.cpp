// Contexts, random generators, PyTorch's hooks, and what Python asks for by torch.ops.simulated.

#include "simulated.h"

#include "random.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <pthread.h>

#include <cstdlib>
#include <cstring>

namespace simulated {

// Of memory.cpp and streams.cpp, for tests only.
void set_limit(int64_t device, int64_t bytes);
int64_t pinned_bytes();
int64_t waiting(int64_t device);

namespace {

bool has_context[kDevices] = {};
bool driver_used = false; // a fork of this process cannot use the devices
bool forked = false;
uint64_t default_seeds[kDevices] = {67280421310721, 67280421310721};

void after_fork() {
  forked = driver_used;
}

void use_driver() {
  static const int registered = pthread_atfork(nullptr, nullptr, &after_fork);
  (void)registered;
  driver_used = true;
}

// Asking for devices wakes the driver up, unless torch is told to ask NVML.
int count() {
  const char* asked = std::getenv("PYTORCH_NVML_BASED_CUDA_CHECK");
  if (asked == nullptr || std::strcmp(asked, "1") != 0) {
    if (forked) {
      return 0;
    }
    use_driver();
  }
  return visible_devices();
}

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return has_context[index];
  }
  void init() const override {
    use(current_device());
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(count());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchangeDevice(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
    return guard->exchangeDevice({c10::DeviceType::PrivateUse1, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static at::Generator generators[kDevices] = {
        at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return generators[index < 0 ? current_device() : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device() : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto fresh = device_allocator()->allocate(bytes);
    size_t kept = std::min(bytes, impl->nbytes());
    if (kept > 0) {
      device_allocator()->copy_data(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

Hooks& hooks() {
  static auto* made = new Hooks;
  return *made;
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks());
  return true;
}();

} // namespace

void check_not_forked() {
  TORCH_CHECK(
      !forked,
      "Cannot re-initialize the simulated accelerator in forked subprocess. To use it with "
      "multiprocessing, you must use the 'spawn' start method");
}

void use(int device) {
  check_not_forked();
  check_reachable(device);
  std::lock_guard<std::recursive_mutex> held(lock());
  if (!has_context[device]) {
    use_driver();
    reserve_context(device);
    has_context[device] = true;
  }
}

// -- generators ----------------------------------------------------------------------------------

Generator::Generator(int device)
    : GeneratorImpl(
          {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)},
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      seed_(default_seeds[device]) {}

uint64_t Generator::draw() {
  std::lock_guard<std::mutex> held(mutex_);
  uint64_t mixed = seed_ + 0x9E3779B97F4A7C15 * ++offset_;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  return mixed ^ (mixed >> 31);
}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void Generator::set_offset(uint64_t offset) {
  offset_ = offset;
}

uint64_t Generator::get_offset() const {
  return offset_;
}

uint64_t Generator::current_seed() const {
  return seed_;
}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
  std::memcpy(state.mutable_data_ptr(), &seed_, 8);
  std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
  return state.getIntrusivePtr();
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "A state must be 16 bytes on a CPU.");
  std::memcpy(&seed_, state.data(), 8);
  std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator default_generator(int64_t device) {
  return hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(device));
}

TORCH_LIBRARY(simulated, m) {
  m.def("default_generator(int device) -> Generator?", &default_generator);
  m.def("set_limit(int device, int bytes) -> ()", &set_limit);
  m.def("pinned_bytes() -> int", &pinned_bytes);
  m.def("waiting(int device) -> int", &waiting);
  m.def("initialize() -> ()", []() { use(current_device()); });
  m.def("is_initialized() -> bool", []() { return !forked && (has_context[0] || has_context[1]); });
  m.def("is_in_bad_fork() -> bool", []() { return forked; });
  m.def("device_count() -> int", []() -> int64_t { return count(); });
}

} // namespace simulated
