"""Kernels for NVIDIA GPUs, in Pallas's Mosaic GPU dialect."""
