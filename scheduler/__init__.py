if __name__ != "mamba_jax.scheduler":
    raise ImportError(f"this package is mamba_jax.scheduler; it was imported as {__name__!r}")
