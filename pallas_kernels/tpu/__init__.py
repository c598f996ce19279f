"""Kernels for TPUs, in Pallas's Mosaic TPU dialect."""
