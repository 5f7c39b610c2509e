"""A CUDA device without a GPU, for tests; ``docs/simulated_gpu.md`` says what it can see."""
