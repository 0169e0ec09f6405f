// A simulated accelerator for tests: what its parts know of each other.
//
// Every device is a file in memory that is mapped twice. Tensors hold addresses in the first mapping,
// which nobody may read or write: a CPU that touches them is ended by SIGSEGV. Kernels use the second.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <mutex>

namespace simulated {

constexpr int kDevices = 2;

// -- backend.cpp ---------------------------------------------------------------------------------

int current_device();
// Make the context of a device, as its first use does; raises in a forked process.
void use(int device);
// Raise if the process was forked from one that had used a device.
void check_not_forked();

// -- memory.cpp ----------------------------------------------------------------------------------

// Take the memory of a context, or raise.
void reserve_context(int device);
// The address at which kernels find what is at an address of a device.
void* for_kernels(const void* device_address);
int device_of(const void* address);
bool is_pinned(const void* address);
// Keep pinned memory from being used again before what is queued now is done.
void note_use_of_pinned(const void* address, c10::Stream stream);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// -- shared.cpp: without a simulated host nothing is shared, and nothing of it does anything ------

int visible_devices();
// Raise if a device has fallen off the bus.
void check_reachable(int device);
// Take the memory of a context from the host's device, or raise as CUDA does.
void take_context(int device, size_t bytes);
// Take memory for a segment; false if there is not as much.
bool take_segment(int device, size_t bytes);
void give_segment(int device, size_t bytes);
// Count an allocation that failed.
void note_refusal(int device);
// What is free, and all that there is; false without a host.
bool shared_info(int device, size_t* free, size_t* total);

// -- streams.cpp ---------------------------------------------------------------------------------

// One lock for all: allocators, queues and the kernels that run. No kernel takes the GIL.
std::recursive_mutex& lock();
c10::Stream current_stream(int device);
// Queue work on the current stream of a device; it runs when something waits for it, not before.
void queue(int device, std::function<void()> work);
// Run what is queued on a stream, or on all streams of a device.
void finish(c10::Stream stream);
void finish_device(int device);
// The number of the last piece of work queued on a stream, and whether it has run.
uint64_t queued(c10::Stream stream);
bool is_done(c10::Stream stream, uint64_t number);

} // namespace simulated
