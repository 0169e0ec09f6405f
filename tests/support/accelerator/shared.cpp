// The memory that several processes share: each sees the devices of a simulated host that
// CUDA_VISIBLE_DEVICES shows to it, and what others have of them is not for it.
//
// Without a host (SIMULATED_HOST is not set) a process has all devices to itself.

#include "simulated.h"

#include "../nvml/host.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

namespace simulated {
namespace {

// The host's devices in the order in which they are shown.
std::vector<int> shown() {
  const char* named = std::getenv("CUDA_VISIBLE_DEVICES");
  if (named == nullptr) {
    return {0, 1};
  }
  std::vector<int> found;
  std::string text = std::string(named) + ",";
  for (size_t start = 0, end; (end = text.find(',', start)) != std::string::npos; start = end + 1) {
    auto name = text.substr(start, end - start);
    auto at = std::find(host_uuids, host_uuids + HOST_DEVICES, name);
    if (at == host_uuids + HOST_DEVICES) {
      break; // what stands behind a name that is none does not count
    }
    found.push_back(static_cast<int>(at - host_uuids));
    if (name.rfind("MIG-", 0) == 0) {
      break; // a process uses one slice
    }
  }
  return found;
}

host_device* device_at(int index) {
  auto indices = shown();
  TORCH_CHECK(
      index < static_cast<int>(indices.size()), "CUDA error: invalid device ordinal (simulated)");
  return &host()->devices[indices[index]];
}

uint64_t used(host_device* device) {
  return host_used(host(), static_cast<int>(device - host()->devices));
}

// The entry of this process; the lock is held.
host_process* entry(host_device* device) {
  auto pid = static_cast<int32_t>(getpid());
  host_process* unused = nullptr;
  for (auto& each : device->processes) {
    if (each.pid == pid) {
      return &each;
    }
    if (unused == nullptr && host_held(host(), &each) == 0 && !(each.pid && host_lives(each.pid))) {
      unused = &each;
    }
  }
  TORCH_CHECK(unused != nullptr, "The simulated host has room for no more processes.");
  *unused = {pid, 0, 0, 0, 0};
  return unused;
}

bool is_anothers(host_device* device) {
  for (auto& each : device->processes) {
    bool here = each.pid != 0 && each.pid != getpid() && each.context != 0;
    if (here && host_lives(each.pid)) {
      return true;
    }
  }
  return false;
}

struct Locked {
  Locked() {
    host_lock();
  }
  ~Locked() {
    host_unlock();
  }
};

} // namespace

int visible_devices() {
  return host() == nullptr ? kDevices : static_cast<int>(shown().size());
}

void check_reachable(int index) {
  if (host() != nullptr) {
    TORCH_CHECK(!device_at(index)->lost, "CUDA error: GPU is lost (simulated)");
  }
}

void take_context(int index, size_t bytes) {
  if (host() == nullptr) {
    return;
  }
  Locked locked;
  host_device* device = device_at(index);
  bool alone = device->mode == HOST_EXCLUSIVE && !device->mps_server;
  TORCH_CHECK(
      device->mode != HOST_PROHIBITED && !(alone && is_anothers(device)),
      "CUDA error: all CUDA-capable devices are busy or unavailable (simulated)");
  if (used(device) + bytes > device->total) {
    device->refused += 1;
    TORCH_CHECK(false, "CUDA error: out of memory (simulated, of a context).");
  }
  entry(device)->context = bytes;
  device->most = std::max(device->most, used(device));
}

bool take_segment(int index, size_t bytes) {
  if (host() == nullptr) {
    return true;
  }
  Locked locked;
  host_device* device = device_at(index);
  if (used(device) + bytes > device->total) {
    return false;
  }
  entry(device)->reserved += bytes;
  device->most = std::max(device->most, used(device));
  return true;
}

void give_segment(int index, size_t bytes) {
  if (host() != nullptr) {
    Locked locked;
    entry(device_at(index))->reserved -= bytes;
  }
}

void note_refusal(int index) {
  if (host() != nullptr) {
    Locked locked;
    device_at(index)->refused += 1;
  }
}

bool shared_info(int index, size_t* free, size_t* total) {
  if (host() == nullptr) {
    return false;
  }
  Locked locked;
  host_device* device = device_at(index);
  *total = device->total;
  *free = device->total - std::min<uint64_t>(device->total, used(device));
  return true;
}

} // namespace simulated
