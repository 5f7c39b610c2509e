// As much of libcuda as is asked for when torch's libraries are loaded.
extern "C" {
int simulated_nothing(...) { return 0; }

int cuInit(unsigned) { return 0; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(1);
  return 0;
}

int cuGetErrorString(int, const char** text) {
  *text = "simulated";
  return 0;
}

int cuGetErrorName(int, const char** text) { return cuGetErrorString(0, text); }

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

int cuGetProcAddress_v2(const char*, void** function, int, unsigned long long, void*) {
  *function = reinterpret_cast<void*>(simulated_nothing);
  return 0;
}
}
