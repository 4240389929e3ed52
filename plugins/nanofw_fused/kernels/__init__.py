"""Triton kernels of the fused model, one idea a file."""
