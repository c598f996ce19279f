"""From a name to a folder: a local one, or a snapshot of a Hugging Face repository in the local cache."""

import os
import re
from pathlib import Path

from mamba_jax.arguments import as_path
from mamba_jax.checkpoints.files import (
    CONFIG_FILES,
    GENERATION_CONFIG,
    INDEX_SUFFIX,
    TOKENIZER_FILES,
    choose_weights,
    read_index,
)
from mamba_jax.messages import reason, shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TIMEOUT = 10.0  # seconds, as huggingface_hub waits for what a file is


def find_folder(name: str | os.PathLike[str], revision: str | None, progress: bool) -> Path:
    """The folder a checkpoint lies in, after a download if `name` is a hub id.

    Args:
        name: a folder, or a hub id such as "state-spaces/mamba2-130m".
        revision: branch, tag or commit of a hub id.
        progress: show progress of a download on stderr.

    Returns:
        A local folder. Of a hub repository it holds the config, the tokenizer and the preferred kind of weights only.

    Raises:
        ValueError: if there is no such folder or repository; the message says what was tried.
        OSError: if the hub cannot be reached and the cache does not hold the repository.
    """
    path = as_path("path_or_hub_id", name, "a folder, or a hub id such as 'owner/name'")
    text = os.fspath(name)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision: got {revision!r:.80} for the local folder {path}, wanted None")
        return path
    if path.is_file():
        raise ValueError(f"{path}: is a file, wanted the folder that holds config.json and the weights")
    if not isinstance(name, str) or not _HUB_ID.fullmatch(text) or ".." in text:
        raise ValueError(f"{shown(text)}: no such folder, and no hub id, which would read 'owner/name'")
    return _snapshot(text, revision, progress)


def find_tokenizer(repository: str) -> Path:
    """The folder of a snapshot with a repository's tokenizer, after a download where the cache lacks it.

    Raises:
        ValueError: if there is no such repository; the message says what was tried.
        OSError: if the hub cannot be reached and the cache does not hold it.
    """
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError

    tried = f"no such folder (tried {Path(repository).absolute()})"
    if not _HUB_ID.fullmatch(repository) or ".." in repository:
        raise ValueError(f"{repository!r}: {tried}, and no hub id, which would read 'owner/name'")
    try:
        return download(repository, [*TOKENIZER_FILES, CONFIG_FILES[0]], None, progress=False)
    except RepositoryNotFoundError as error:
        raise ValueError(f"{repository!r}: {tried}, and no hub repository (tried {_endpoint()})") from error
    except (HTTPError, OSError) as error:
        raise OSError(f"{repository!r}: {tried}; {_unreached()}: {reason(error)}") from error


def download(repository: str, files: list[str], revision: str | None, progress: bool) -> Path:
    """Fetch those files of a repository that exist, and are not in the cache, and give the folder of the snapshot.

    Raises:
        OSError: if the hub cannot be reached and the cache does not hold the files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))

    bars = None if progress else Silent
    return Path(snapshot_download(repository, revision=revision, allow_patterns=files, tqdm_class=bars))


def _snapshot(repository: str, revision: str | None, progress: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

    place = f"hub repository {repository!r}" + (f" at revision {revision!r}" if revision else "")
    files = [*CONFIG_FILES, GENERATION_CONFIG, *TOKENIZER_FILES]
    try:
        siblings = HfApi().model_info(repository, revision=revision, timeout=_TIMEOUT).siblings
        weights = choose_weights([sibling.rfilename for sibling in siblings or []], place)
        files.append(weights)
        if weights.endswith(INDEX_SUFFIX):
            index = hf_hub_download(repository, weights, revision=revision)
            files += sorted(set(read_index(Path(index)).values()))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(
            f"{repository!r}: no such folder (tried {Path(repository).absolute()}), and no {place}, or no access to it "
            f"(tried {_endpoint()})"
        ) from error
    except (HTTPError, OfflineModeIsEnabled):
        pass  # the cache may hold what an earlier call downloaded
    try:
        return download(repository, files, revision, progress)
    except (HTTPError, OSError) as error:
        raise OSError(
            f"{repository!r}: no such folder (tried {Path(repository).absolute()}); {_unreached()}: {reason(error)}"
        ) from error


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _unreached() -> str:
    from huggingface_hub import constants

    offline = "offline mode (HF_HUB_OFFLINE) keeps the hub from being asked"
    hub = offline if constants.HF_HUB_OFFLINE else f"the hub could not be reached (tried {_endpoint()})"
    return f"{hub}, and the cache does not hold it (tried {constants.HF_HUB_CACHE})"
