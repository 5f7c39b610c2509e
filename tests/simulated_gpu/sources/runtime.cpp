// A CUDA runtime without a GPU, loaded before torch's. The memory of a device is memory of the
// host. The default stream is carried out at once; what is put into another stream is carried out
// as late as its order allows: when somebody waits for it. Code that forgets to wait sees old bytes.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace {

constexpr int kMostDevices = 8;

struct Stream {
  std::deque<std::function<void()>> waiting;
  unsigned long long issued = 0, done = 0;
  unsigned long long known = 0;  // of what the host has been told that it is done
  bool late = false;
  int priority = 0;
};

struct Event {
  Stream* stream = nullptr;  // where it was recorded, if it was
  unsigned long long position = 0;
};

struct Block {
  size_t bytes;
  int device;
};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

size_t memory_bytes = size_t{4} << 30;
bool host_runs_ahead = false;
size_t used_bytes[kMostDevices];
std::map<char*, Block> on_device, pinned;
Stream default_streams[kMostDevices];
std::deque<Stream> other_streams;
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last_error = error; }

Stream* stream_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return &default_streams[current_device];
  return reinterpret_cast<Stream*>(stream);
}

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void carry_out(Stream* stream, unsigned long long until) {
  while (stream->done < until && !stream->waiting.empty()) {
    auto task = std::move(stream->waiting.front());
    stream->waiting.pop_front();
    stream->done++;
    task();
  }
}

void issue(Stream* stream, std::function<void()> task) {
  stream->issued++;
  if (stream->late) {
    stream->waiting.push_back(std::move(task));
  } else {
    stream->done++;
    task();
  }
}

void wait_for(Stream* stream) {
  carry_out(stream, stream->issued);
  stream->known = stream->issued;
}

void wait_for_all() {
  for (auto& stream : default_streams) wait_for(&stream);
  for (auto& stream : other_streams) wait_for(&stream);
}

const Block* block_of(const std::map<char*, Block>& blocks, const void* pointer) {
  auto next = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (next == blocks.begin()) return nullptr;
  const auto& [start, block] = *--next;
  return pointer < start + block.bytes ? &block : nullptr;
}

bool is_pageable(const void* pointer) {
  return !block_of(on_device, pointer) && !block_of(pinned, pointer);
}

cudaError_t launch() {
  fputs("simulated GPU: nothing stands in for this kernel\n", stderr);
  return failed(cudaErrorNotSupported);
}

cudaError_t make_stream(cudaStream_t* stream, int priority) {
  Lock lock(mutex);
  auto& made = other_streams.emplace_back();
  made.late = true;
  made.priority = priority;
  *stream = reinterpret_cast<cudaStream_t>(&made);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- what tests set

void simulated_set_memory(size_t bytes) { memory_bytes = bytes; }

void simulated_set_host_runs_ahead(int ahead) { host_runs_ahead = ahead; }

void simulated_carry_out(void* stream) {
  Lock lock(mutex);
  auto* known = stream_of(static_cast<cudaStream_t>(stream));
  carry_out(known, known->issued);
}

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = 1;
  if (visible != nullptr) {
    *count = *visible ? 1 : 0;
    for (; *visible; visible++) *count += *visible == ',';
  }
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "Simulated GPU");
  properties->totalGlobalMem = memory_bytes;
  properties->major = 8;
  properties->multiProcessorCount = 108;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 166912;
  properties->sharedMemPerMultiprocessor = 167936;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->l2CacheSize = 40 << 20;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 8},         {cudaDevAttrMultiProcessorCount, 108},
      {cudaDevAttrMaxThreadsPerBlock, 1024},          {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 166912},
  };
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  snprintf(text, size, "0000:00:00.0");
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Lock lock(mutex);
  wait_for_all();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

// ---- memory

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(mutex);
  auto used = used_bytes[current_device];
  *total = memory_bytes;
  *free = used > memory_bytes ? 0 : memory_bytes - used;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Lock lock(mutex);
  if (used_bytes[current_device] + bytes > memory_bytes) return failed(cudaErrorMemoryAllocation);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  used_bytes[current_device] += bytes;
  on_device[static_cast<char*>(memory)] = {bytes, current_device};
  *pointer = memory;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  Lock lock(mutex);
  wait_for_all();
  auto found = on_device.find(static_cast<char*>(pointer));
  if (found == on_device.end()) return failed(cudaErrorInvalidValue);
  used_bytes[found->second.device] -= found->second.bytes;
  munmap(pointer, found->second.bytes);
  on_device.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Lock lock(mutex);
  pinned[static_cast<char*>(pointer)] = {bytes, current_device};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(mutex);
  pinned.erase(static_cast<char*>(pointer));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  *pointer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return cudaHostRegister(*pointer, bytes, flags);
}

cudaError_t cudaFreeHost(void* pointer) {
  Lock lock(mutex);
  wait_for_all();
  pinned.erase(static_cast<char*>(pointer));
  free(pointer);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Lock lock(mutex);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  if (const auto* block = block_of(on_device, pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = block->device;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (block_of(pinned, pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  Lock lock(mutex);
  auto* queue = stream_of(stream);
  issue(queue, [=] { memcpy(to, from, bytes); });
  if (is_pageable(to) || is_pageable(from)) carry_out(queue, queue->issued);  // passed on at once
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  Lock lock(mutex);
  wait_for_all();
  memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  Lock lock(mutex);
  issue(stream_of(stream), [=] { memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  Lock lock(mutex);
  wait_for_all();
  memset(to, value, bytes);
  return cudaSuccess;
}

// ---- streams

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make_stream(stream, 0); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return make_stream(stream, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  return make_stream(stream, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(mutex);
  wait_for(stream_of(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(mutex);
  const auto* queue = stream_of(stream);
  auto position = host_runs_ahead ? queue->known : queue->done;
  return position >= queue->issued ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(mutex);
  wait_for(stream_of(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(mutex);
  auto [source, position] = *event_of(event);
  if (source != nullptr)
    issue(stream_of(stream), [source = source, position = position] { carry_out(source, position); });
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  Lock lock(mutex);
  issue(stream_of(stream), [=] { callback(stream, cudaSuccess, data); });
  return cudaSuccess;
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  Lock lock(mutex);
  auto* queue = stream_of(stream);
  issue(queue, [] {});
  *event_of(event) = {queue, queue->issued};
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(mutex);
  const auto [stream, position] = *event_of(event);
  if (stream == nullptr) return cudaSuccess;
  auto reached = host_runs_ahead ? stream->known : stream->done;
  return reached >= position ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(mutex);
  const auto [stream, position] = *event_of(event);
  if (stream == nullptr) return cudaSuccess;
  carry_out(stream, position);
  if (stream->known < position) stream->known = position;
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;  // there is no time here
  return cudaSuccess;
}

// ---- kernels: those that something stands in for are never launched

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (driver && *function == nullptr) *function = dlsym(driver, "simulated_nothing");
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch();
}

cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch();
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return launch();
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int,
                                                                   size_t, unsigned) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }

cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
