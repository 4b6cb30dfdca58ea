/* Gives one program in SPIR-V to the first OpenCL device and makes its kernel, so that the driver compiles it. */
#include <stddef.h>
#include <stdio.h>

#define ANY_DEVICE 0xFFFFFFFFUL
enum { DEVICE_NAME = 0x102B, BUILD_LOG = 0x1183, MOST_BYTES = 1 << 24 };

extern int clGetPlatformIDs(unsigned, void **, unsigned *);
extern int clGetDeviceIDs(void *, unsigned long, unsigned, void **, unsigned *);
extern int clGetDeviceInfo(void *, unsigned, size_t, void *, size_t *);
extern void *clCreateContext(const void *, unsigned, void **, void *, void *, int *);
extern void *clCreateProgramWithIL(void *, const void *, size_t, int *);
extern int clBuildProgram(void *, unsigned, void **, const char *, void *, void *);
extern int clGetProgramBuildInfo(void *, void *, unsigned, size_t, void *, size_t *);
extern void *clCreateKernel(void *, const char *, int *);

static char program_bytes[MOST_BYTES], log_text[1 << 16];

static int failed(const char *where, int error) {
  fprintf(stderr, "%s: error %d\n", where, error);
  return 1;
}

int main(int count, char **arguments) {
  void *platforms[8], *device;
  unsigned found = 0;
  int error = clGetPlatformIDs(8, platforms, &found);
  if (error || !found) return failed("platforms", error);
  for (unsigned i = 0; i < found; i++) {
    unsigned devices = 0;
    if (clGetDeviceIDs(platforms[i], ANY_DEVICE, 1, &device, &devices) || !devices) continue;
    char name[256] = "";
    clGetDeviceInfo(device, DEVICE_NAME, sizeof name, name, NULL);
    fprintf(stderr, "device: %s\n", name);
    FILE *file = count > 2 ? fopen(arguments[1], "rb") : NULL;
    if (!file) return failed("file", 0);
    const size_t size = fread(program_bytes, 1, MOST_BYTES, file);
    void *context = clCreateContext(NULL, 1, &device, NULL, NULL, &error);
    if (error) return failed("context", error);
    void *program = clCreateProgramWithIL(context, program_bytes, size, &error);
    if (error) return failed("program", error);
    error = clBuildProgram(program, 1, &device, "", NULL, NULL);
    clGetProgramBuildInfo(program, device, BUILD_LOG, sizeof log_text, log_text, NULL);
    if (error) return fprintf(stderr, "%s\n", log_text), failed("build", error);
    clCreateKernel(program, arguments[2], &error);
    return error ? failed("kernel", error) : 0;
  }
  return failed("devices", 0);
}
