/* A simulated host: a file in memory that the simulated accelerator and the stand-in NVML share.
 *
 * Each process writes what it has of each device into an entry of its own, and adds to it under a
 * lock. The kernel says which processes live: what a dead one had is in use a little longer, as
 * with a real driver. Tests change the rest: see the Python side, whose layout is the same.
 */
#pragma once

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { HOST_DEVICES = 4, HOST_PROCESSES = 64, HOST_XIDS = 8 };
enum { HOST_SHARED_MODE = 0, HOST_PROHIBITED = 2, HOST_EXCLUSIVE = 3 };

typedef struct {
    int32_t pid; /* 0: the entry is free */
    int32_t unused;
    uint64_t context, reserved;
    double gone_at; /* when it was first seen to be dead */
} host_process;

typedef struct {
    uint64_t total;
    uint32_t mode, mps_server, lost, mig, recovery, n_xids;
    uint32_t xids[HOST_XIDS];
    uint64_t refused; /* contexts and allocations for which there was no room */
    uint64_t most;    /* the most bytes in use at once */
    host_process processes[HOST_PROCESSES];
} host_device;

typedef struct {
    double linger_seconds;
    host_device devices[HOST_DEVICES]; /* two GPUs, and two slices of the second one */
} host_state;

static const char *const host_uuids[HOST_DEVICES] = {"GPU-aaaa", "GPU-bbbb", "MIG-cccc", "MIG-dddd"};

static int host_file = -1;

/* The host of this process, NULL if SIMULATED_HOST names none. */
static host_state *host(void) {
    static host_state *state = NULL;
    const char *path = getenv("SIMULATED_HOST");
    if (state == NULL && path != NULL) {
        host_file = open(path, O_RDWR | O_CLOEXEC);
        void *place = host_file < 0 ? MAP_FAILED
                                    : mmap(NULL, sizeof(host_state), PROT_READ | PROT_WRITE,
                                           MAP_SHARED, host_file, 0);
        if (place == MAP_FAILED) {
            perror(path);
            abort();
        }
        state = (host_state *)place;
    }
    return state;
}

static inline void host_lock(void) {
    while (flock(host_file, LOCK_EX) != 0) {
    }
}
static inline void host_unlock(void) { flock(host_file, LOCK_UN); }

static double host_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* True for a process that has memory: one that waits to be buried has none. */
static int host_lives(int32_t pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return 0;
    }
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = 0;
    const char *name_ends = strrchr(text, ')');
    return name_ends != NULL && strlen(name_ends) > 2 && strchr("ZXx", name_ends[2]) == NULL;
}

/* Bytes that an entry keeps in use. */
static uint64_t host_held(host_state *state, host_process *each) {
    if (each->pid == 0) {
        return 0;
    }
    if (!host_lives(each->pid)) {
        double now = host_now();
        if (each->gone_at == 0) {
            each->gone_at = now;
        }
        if (now - each->gone_at >= state->linger_seconds) {
            return 0;
        }
    }
    return each->context + each->reserved;
}

static inline uint64_t host_used(host_state *state, int index) {
    uint64_t sum = 0;
    for (int place = 0; place < HOST_PROCESSES; place++) {
        sum += host_held(state, &state->devices[index].processes[place]);
    }
    return sum;
}
