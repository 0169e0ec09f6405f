/* A libnvidia-ml.so.1 that plays a host with two GPUs and a driver, for the tests.
 *
 * What the host is like is said by words in the environment variable FAKE_NVML, or in the file
 * that FAKE_NVML_FILE names, which is read again for each question. GPU-bbbb is the one that has
 * troubles. xid=79 and the like are reported once each, in order, to the set that was made last.
 *
 * Where SIMULATED_HOST names a simulated host, it says what that one is like: see host.h.
 */
#include "host.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GIB (1ULL << 30)
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7,
       NO_DRIVER = 9, TIMEOUT = 10, NO_FUNCTION = 13, GPU_IS_LOST = 15, MISMATCH = 18,
       UNKNOWN = 999 };

typedef struct { const char *uuid; int parent; int index; } device;
typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process;

static device gpus[] = {{"GPU-aaaa", -1, 0}, {"GPU-bbbb", -1, 1}};
static device slices[] = {{"MIG-cccc", 1, 2}, {"MIG-dddd", 1, 3}};

/* The words that describe the host now. */
static const char *words(void) {
    static __thread char text[4096];
    const char *path = getenv("FAKE_NVML_FILE"), *said = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return said ? said : "";
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return text;
}
static int has(const char *trait) { return strstr(words(), trait) != NULL; }
static unsigned long long number(const char *name, unsigned long long other) {
    const char *at = strstr(words(), name);
    return at ? strtoull(at + strlen(name), NULL, 10) : other;
}
static int second(const device *d) { return d == &gpus[1]; }

/* The device of the simulated host, NULL if there is no such host. */
static host_device *simulated(const device *d) {
    return host() == NULL ? NULL : &host()->devices[d->index];
}
static int is_lost(const device *d) {
    if (host() == NULL) return second(d) && has("lost");
    return simulated(d)->lost || (d->parent >= 0 && simulated(&gpus[d->parent])->lost);
}
static int is_cut(const device *d) {
    return host() == NULL ? has("mig") && second(d) : (int)simulated(d)->mig;
}

int nvmlInitWithFlags(unsigned flags) {
    if (has("mismatch")) return MISMATCH;
    if (has("no-permission")) return NO_PERMISSION;
    if (has("too-old")) return NO_FUNCTION;
    if (has("unknown-error")) return UNKNOWN;
    return has("no-driver") ? NO_DRIVER : OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == TIMEOUT ? "Timeout" : "an error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (has("no-count")) return NO_DRIVER;
    *count = has("no-gpu") ? 0 : 2;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
    if (index > 1) return INVALID;
    if (is_lost(&gpus[index])) return GPU_IS_LOST;
    *out = &gpus[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device **out) {
    usleep(number("sleep=", 0) * 1000000);
    for (int i = 0; i < 2; i++)
        if (!strcmp(uuid, gpus[i].uuid)) {
            if (is_lost(&gpus[i])) return GPU_IS_LOST;
            if (i == 1 && has("failing")) return UNKNOWN;
            *out = &gpus[i];
            return OK;
        }
    for (int i = 0; i < (host() == NULL ? 1 : 2); i++)
        if (is_cut(&gpus[1]) && !strcmp(uuid, slices[i].uuid)) {
            if (is_lost(&slices[i])) return GPU_IS_LOST;
            *out = &slices[i];
            return OK;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(device *d, char *out, unsigned size) {
    snprintf(out, size, "%s", d->uuid);
    return OK;
}
int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    if (host() == NULL && !has("mig")) return NOT_SUPPORTED;
    *current = *pending = is_cut(d);
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) { *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **out) {
    if (index != 3 && (host() == NULL || index != 4)) return NOT_FOUND;
    *out = &slices[index - 3];
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *info) {
    host_device *its = simulated(d);
    if (its != NULL) {
        unsigned long long used = host_used(host(), d->index);
        info->total = its->total; info->reserved = 0; info->used = used;
        info->free = used < its->total ? its->total - used : 0;
        return OK;
    }
    if (second(d) && has("broken")) return GPU_IS_LOST;
    if (has("old-driver") || (second(d) && has("no-memory"))) return NOT_SUPPORTED;
    info->total = 80 * GIB; info->reserved = 1 * GIB;
    info->used = second(d) ? number("used=", 0) * GIB : 0;
    info->free = 79 * GIB - info->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *info) {
    if (second(d) && has("no-memory")) return NOT_SUPPORTED;
    info->total = 80 * GIB; info->free = 78 * GIB; info->used = 2 * GIB;
    return OK;
}
/* Those of the simulated host; under MPS they are its clients, and it lists the server instead. */
static unsigned simulated_processes(device *d, int clients, process *here) {
    host_device *its = simulated(d);
    unsigned n = 0;
    if (its->mps_server && !clients) {
        here[n++] = (process){.pid = its->mps_server, .used = host_used(host(), d->index)};
        return n;
    }
    for (int place = 0; place < HOST_PROCESSES && !its->mps_server == !clients; place++) {
        host_process *each = &its->processes[place];
        if (each->pid != 0 && host_lives(each->pid))
            here[n++] = (process){.pid = each->pid, .used = each->context + each->reserved};
    }
    return n;
}
static int give(unsigned n, const process *here, unsigned *count, process *out) {
    if (*count < n) { *count = n; return TOO_SMALL; }
    *count = n;
    memcpy(out, here, n * sizeof *here);
    return OK;
}
static int processes(device *d, unsigned *count, process *out) {
    process here[HOST_PROCESSES];
    unsigned n = 0;
    if (host() != NULL) return give(simulated_processes(d, 0, here), here, count, out);
    if (second(d) && has("foreign")) {
        here[n++] = (process){.pid = 4242, .used = 3 * GIB};
        here[n++] = (process){.pid = 4343, .used = (unsigned long long)-1};
    }
    if (second(d) && has("pid=")) here[n++] = (process){.pid = number("pid=", 0), .used = GIB};
    return give(n, here, count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(device *d, unsigned *count, process *out) {
    process here[HOST_PROCESSES];
    unsigned n = 0;
    if (host() != NULL) return give(simulated_processes(d, 1, here), here, count, out);
    if (has("no-clients")) return NOT_SUPPORTED;
    if (second(d) && has("client="))
        here[n++] = (process){.pid = number("client=", 0), .used = 2 * GIB};
    return give(n, here, count, out);
}
int nvmlDeviceGetComputeMode(device *d, unsigned *mode) {
    host_device *its = simulated(d);
    if (d->parent >= 0) return NOT_SUPPORTED;
    *mode = its != NULL ? its->mode : second(d) ? number("mode=", 0) : 0;
    return OK;
}

/* What it takes to recover: recovery=N, or nothing is told. */
typedef struct {
    unsigned field, scope;
    long timestamp, latency;
    unsigned type;
    int result;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_value;
int nvmlDeviceGetFieldValues(device *d, int count, field_value *values) {
    for (int i = 0; i < count; i++) {
        host_device *its = simulated(d);
        int told = its != NULL || (second(d) && has("recovery="));
        values[i].result = values[i].field == 230 && told ? OK : NOT_SUPPORTED;
        values[i].value.u = its != NULL ? its->recovery : number("recovery=", 0);
    }
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process *out) {
    if (has("old-processes") || (has("no-processes") && second(d))) return NOT_SUPPORTED;
    return processes(d, count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(device *d, unsigned *count, process *out) {
    if (has("no-processes") && second(d)) return NOT_SUPPORTED;
    return processes(d, count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(device *d, unsigned *count, process *out) {
    unsigned n = second(d) && has("desktop");
    if (*count < n) { *count = n; return TOO_SMALL; }
    *count = n;
    if (n) *out = (process){.pid = 99, .used = 4 * GIB};
    return OK;
}

/* What it reports. */
typedef struct { device *gpu; unsigned long long type, data; unsigned instance, part; } event;
static unsigned reported, listened[2], of_simulated[2];

int nvmlEventSetCreate(void **set) {
    if (has("no-events")) return NOT_SUPPORTED;
    reported = 0;
    *set = &reported;
    return OK;
}
int nvmlEventSetFree(void *set) { listened[0] = listened[1] = 0; return OK; }
int nvmlDeviceRegisterEvents(device *d, unsigned long long types, void *set) {
    if (is_lost(d)) return GPU_IS_LOST;
    listened[second(d)] = types == 8;
    return OK;
}
int nvmlEventSetWait_v2(void *set, event *out, unsigned milliseconds) {
    const char *at = words();
    for (int i = 0; host() != NULL && i < 2; i++) {
        host_device *its = simulated(&gpus[i]);
        if (!listened[i] || of_simulated[i] >= its->n_xids) continue;
        *out = (event){.gpu = &gpus[i], .type = 8, .data = its->xids[of_simulated[i]++],
                       .instance = 0xFFFFFFFF};
        return OK;
    }
    for (unsigned n = 0; (at = strstr(at, "xid=")); n++) {
        at += 4;
        if (n < reported || !listened[1]) continue;
        reported++;
        *out = (event){.gpu = &gpus[1], .type = 8, .data = strtoull(at, NULL, 10),
                       .instance = has("instance=") ? number("instance=", 0) : 0xFFFFFFFF};
        return OK;
    }
    return TIMEOUT;
}
int nvmlDeviceGetGpuInstanceId(device *d, unsigned *id) { *id = 3 + d->index; return OK; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *d, device **out) {
    *out = &gpus[d->parent];
    return OK;
}

/* What it takes: energy=N millijoules since it was made, with a limit of watts=N thousandths. */
int nvmlDeviceGetTotalEnergyConsumption(device *d, unsigned long long *millijoules) {
    if (!has("energy=") || !second(d)) return NOT_SUPPORTED;
    *millijoules = number("energy=", 0);
    return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(device *d, unsigned *milliwatts) {
    if (d->parent >= 0) return INVALID;
    if (!has("watts=")) return NO_FUNCTION;
    *milliwatts = number("watts=", 0);
    return OK;
}
