"""JAX's persistent compilation cache: a second process loads the programs that the first one compiled."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk, the small ones too, from the next compilation on.

    A cached program is machine code that later processes run, so a folder made here belongs to the user alone.

    Args:
        directory: where to keep them. None takes $MAMBA_JAX_CACHE, else the folder that JAX is already set to, else
            $XDG_CACHE_HOME/mamba_jax, else ~/.cache/mamba_jax.

    Returns:
        The folder, which exists.

    Raises:
        OSError: if it cannot be made.
    """
    folder = Path(directory or _default_folder()).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # else a process that compiled before stays with the folder it had, or with none
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def own_folder() -> Path:
    """Where things are kept for the user: $MAMBA_JAX_CACHE, $XDG_CACHE_HOME/mamba_jax or ~/.cache/mamba_jax."""
    own = os.environ.get("MAMBA_JAX_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mamba_jax").expanduser()


def _default_folder() -> str | Path:
    if not os.environ.get("MAMBA_JAX_CACHE") and jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return own_folder()
