/* libnvidia-ml.so.1 as far as the probe calls it; FAKE_NVML_INIT is what nvmlInit_v2 gives. */

#include "cards.h"

struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { read_cards("FAKE_CARDS"); return number("FAKE_NVML_INIT"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) {
    switch (status) {
    case 4: return "Insufficient Permissions";
    case 9: return "Driver Not Loaded";
    case 18: return "Driver/library version mismatch";
    default: return "Not Supported";
    }
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "570.12");
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *found) { *found = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &cards[index];
    return has(*handle, 'p') ? 4 : 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    snprintf(text, size, "%s", ((struct card *)handle)->name);
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    snprintf(text, size, "GPU-%d0aa-fake", (int)((struct card *)handle - cards));
    return 0;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) {
    *now = *later = has(handle, 'm');
    return ((struct card *)handle)->major < 8 ? 3 : 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = ((struct card *)handle)->major;
    *minor = ((struct card *)handle)->minor;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    memory->total = ((struct card *)handle)->total * 1000000000;
    memory->free = ((struct card *)handle)->free * 1000000000;
    return has(handle, 's') ? 3 : 0;
}
