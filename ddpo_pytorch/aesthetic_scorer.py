"""LAION's aesthetic predictor: how much people would like a picture, about 1 to 10, from its CLIP embedding."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ddpo_pytorch.scorers.clip import OpenClip
from ddpo_pytorch.scorers.hub import hub_file

# improved-aesthetic-predictor's "sac+logos+ava1-l14-linearMSE", under the name that it has on the hub.
HEAD_REPO = "trl-lib/ddpo-aesthetic-predictor"
HEAD_FILE = "aesthetic-model.pth"
# Of its ten tensors (`weights_sha256`): files of other formats and names hold the same weights.
HEAD_SHA256 = "da17f86f2c73edeff23b5beb5335ced5a4356fbf8f6c51fdf146accd39b9243f"


def weights_sha256(weights: dict[str, torch.Tensor]) -> str:
    """A digest of tensors and their names that does not depend on the file they came in."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].float().contiguous().numpy().tobytes())
    return digest.hexdigest()


class AestheticHead(torch.nn.Module):
    """Maps unit-length embeddings of CLIP ViT-L/14, (B, D), to scores (B,). Linear throughout, as it was trained."""

    def __init__(self, embed_dim: int = 768) -> None:
        super().__init__()
        # The dropout between the layers has no weights, but a place in their numbering.
        sizes = [(embed_dim, 1024), (1024, 128), (128, 64), (64, 16), (16, 1)]
        names = ["0", "2", "4", "6", "7"]
        self.layers = torch.nn.ModuleDict(
            {name: torch.nn.Linear(*size) for name, size in zip(names, sizes, strict=True)}
        )

    def forward(self, embeds: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            embeds = layer(embeds)
        return embeds.squeeze(-1)


def load_head(path: Path | str, sha256: str | None) -> AestheticHead:
    """Read a head's weights, from .safetensors or a torch file of plain tensors; nothing is unpickled.

    Args:
        sha256: what `weights_sha256` must give; None: not checked.

    Raises:
        ValueError: no such file, or it holds something else.
    """
    if not Path(path).is_file():
        raise ValueError(f'aesthetic head "{path}": there is no such file')
    try:
        if str(path).endswith(".safetensors"):
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        if sha256 is not None and weights_sha256(weights) != sha256:
            raise ValueError(f"its weights have sha256 {weights_sha256(weights)}, expected {sha256}")
        head = AestheticHead(weights["layers.0.weight"].shape[1])
        head.load_state_dict(weights)
    except Exception as error:
        raise ValueError(f'aesthetic head "{path}" is not usable: {error}') from error
    return head.float().eval().requires_grad_(False)


class AestheticScorer(torch.nn.Module):
    """CLIP ViT-L/14 with LAION's aesthetic head.

    Source: github.com/christophschuhmann/improved-aesthetic-predictor (Apache-2.0).
    """

    def __init__(
        self,
        dtype: torch.dtype | str = torch.float32,
        head: str = "",
        head_revision: str = "main",
        head_sha256: str | None = None,
        clip_model: str = "ViT-L-14-quickgelu",
        clip_pretrained: str = "openai",
        clip_revision: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            dtype: of the CLIP tower; the head is float32.
            head: a file with the head's weights; "": LAION's, from the hub, checked against its sha256.
            head_revision: of the head on the hub.
            head_sha256: check the weights of a file of your own.
            clip_model, clip_pretrained, clip_revision: as `scorers.clip.OpenClip` takes them.

        Raises:
            ValueError: something cannot be had, or is not what it should be.
        """
        super().__init__()
        if head:
            self.head = load_head(head, head_sha256)
        else:
            self.head = load_head(hub_file(HEAD_REPO, HEAD_FILE, head_revision), head_sha256 or HEAD_SHA256)
        self.clip = OpenClip(clip_model, clip_pretrained, clip_revision, dtype, device)
        self.head.to(self.clip.device)

    @torch.no_grad()
    def forward(self, images: Any) -> torch.Tensor:
        """Scores, float32 (B,).

        Args:
            images: float (B, 3, H, W) in [0, 1], or uint8 (B, H, W, 3).
        """
        return self.head(self.clip.image_embeds(images))
