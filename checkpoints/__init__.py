if __name__ != "mamba_jax.checkpoints":
    raise ImportError(f"this package is mamba_jax.checkpoints; it was imported as {__name__!r}")
