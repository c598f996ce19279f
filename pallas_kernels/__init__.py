if __name__ != "mamba_jax.pallas_kernels":
    raise ImportError(f"this package is mamba_jax.pallas_kernels; it was imported as {__name__!r}")
