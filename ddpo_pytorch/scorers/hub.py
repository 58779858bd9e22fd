"""Files from the Hugging Face hub, with one-line errors."""

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download

# The commits of the repositories that this package names itself. Source: their pages on the hub.
COMMITS = {
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": "1c2b8495b28150b8a4922ee1c8edee224c284c0c",
    "microsoft/deberta-xlarge-mnli": "5b07a9086c1dbb79981ff7b05b4d1ad83b3af51c",
    "openai/clip-vit-large-patch14": "32bd64288804d66eefd0ccbe215aa642df71cc41",
    "xswu/HPSv2": "697403c78157020a1ae59d23f111aa58ced35b0a",
    "yuvalkirstain/PickScore_v1": "a4e4367c6dfa7288a00c550414478f865b875800",
}


def commit_of(repo: str, revision: str) -> str | None:
    """The revision to load: the one that is given, else the commit above, else None, the hub's newest."""
    return revision or COMMITS.get(repo)


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
