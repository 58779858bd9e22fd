"""Files from the Hugging Face hub, with one-line errors."""

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download


def hub_file(repo: str, filename: str, revision: str | None) -> Path:
    """A file of a hub repository, downloaded once and kept in the hub's cache.

    Raises:
        ValueError: it cannot be had: no network, no such repository, file or revision.
    """
    try:
        return Path(hf_hub_download(repo, filename, revision=revision))
    except Exception as error:
        raise ValueError(f"cannot get {filename} of {repo} from the hub: {first_line(error)}") from error


def hub_folder(repo: str, revision: str | None) -> Path:
    """A whole hub repository. Raises ValueError as `hub_file`."""
    try:
        return Path(snapshot_download(repo, revision=revision))
    except Exception as error:
        raise ValueError(f"cannot get {repo} from the hub: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says first; libraries go on for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
