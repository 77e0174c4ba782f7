"""Kernels in Triton for GPUs. The package is imported when a CUDA tensor first needs one of them, never before."""
