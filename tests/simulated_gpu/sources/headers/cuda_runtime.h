// The runtime's functions without what is for the CUDA compiler.
#pragma once
#include <cuda_runtime_api.h>
