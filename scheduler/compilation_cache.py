"""JAX's persistent compilation cache: a second process loads the programs that the first one compiled."""

import os
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from mamba_jax.arguments import as_path


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk, the small ones too, from the next compilation on.

    A cached program is machine code that later processes run, so a folder made here belongs to the user alone. What it
    holds serves wherever it is moved or copied to, for the same device and versions of JAX.

    Args:
        directory: where to keep them. None takes $MAMBA_JAX_CACHE, else the folder that JAX is already set to, else
            $XDG_CACHE_HOME/mamba_jax, else ~/.cache/mamba_jax.

    Returns:
        The folder, which exists, as an absolute path.

    Raises:
        ValueError: if the argument is no path.
        OSError: if the folder cannot be made, or nothing was named and the user has no home folder.
    """
    folder = (_default_folder() if directory is None else as_path("directory", directory)).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # else a process that compiled before stays with the folder it had, or with none
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX would have XLA keep the results of a GPU's autotuning in the folder too, by passing its path as an option of
    # the compiler, which is part of each program's key: another spelling or a copy of the folder would find nothing.
    # Without it, what compiles anew measures its kernels anew, even those that another program holds as well.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return folder


def own_folder() -> Path:
    """Where things are kept for the user: $MAMBA_JAX_CACHE, $XDG_CACHE_HOME/mamba_jax or ~/.cache/mamba_jax.

    Raises:
        OSError: if it lies in a home folder that nobody knows; the message names the variable.
    """
    own, base = os.environ.get("MAMBA_JAX_CACHE"), os.environ.get("XDG_CACHE_HOME")
    name = "MAMBA_JAX_CACHE" if own else "XDG_CACHE_HOME" if base else "the user's cache folder"
    try:
        return as_path(name, own or f"{base or '~/.cache'}/mamba_jax")
    except ValueError as error:
        raise OSError(f"{error} MAMBA_JAX_CACHE may name another folder") from error


def make_folder(folder: Path) -> Path:
    """Make a folder of the user's own if it is not there, and try whether files can be written into it.

    Raises:
        OSError: if it cannot be made or written to; the message names the path.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        return folder


def _default_folder() -> Path:
    if not os.environ.get("MAMBA_JAX_CACHE") and jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return as_path("jax_compilation_cache_dir", jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    return own_folder()
