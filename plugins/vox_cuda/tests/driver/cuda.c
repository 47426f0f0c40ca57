/* libcuda.so.1 as far as the probe calls it; FAKE_CU_INIT is what cuInit gives. As CUDA does, it reads
   the order of the cards when it is initialised; the names say which it was. */

#include "cards.h"

static const char *order;
int cuInit(unsigned flags) {
    read_cards("FAKE_CUDA_CARDS");
    order = getenv("CUDA_DEVICE_ORDER");
    return number("FAKE_CU_INIT");
}
int cuGetErrorString(int status, const char **text) {
    *text = "no CUDA-capable device is detected";
    return status == 100 ? 0 : 1;
}
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *found) { *found = count; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 100; return 0; }
int cuDeviceGetName(char *text, int size, int device) {
    snprintf(text, size, "%s by %s", cards[device - 100].name, order ? order : "nothing");
    return 0;
}
int cuDeviceTotalMem_v2(size_t *size, int device) {
    *size = cards[device - 100].total * 1000000000;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? cards[device - 100].major : cards[device - 100].minor;
    return attribute != 75 && attribute != 76;
}
