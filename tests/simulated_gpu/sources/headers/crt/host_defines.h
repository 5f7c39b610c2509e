// What the runtime's headers take from the CUDA compiler's, which torch's wheels leave out, for a
// compiler that knows nothing of devices.
#pragma once

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __no_return__ __attribute__((noreturn))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __CUDA_ARCH_HAS_FEATURE__(feature) 0
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
