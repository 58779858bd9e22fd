"""CLIP's two towers, from open_clip or transformers: frozen, on one device, embeddings of unit length."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ddpo_pytorch.images import to_pil
from ddpo_pytorch.scorers.devices import own_device, own_dtype
from ddpo_pytorch.scorers.hub import commit_of, first_line, hub_file, hub_folder

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class OpenClip(torch.nn.Module):
    """A CLIP model of open_clip, with its own preprocessing and tokenizer."""

    def __init__(
        self,
        model: str,
        pretrained: str = "",
        revision: str = "",
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            model: architecture, as "ViT-L-14-quickgelu"; or "hf-hub:ORG/REPO"; or "local-dir:PATH" of a folder with
                open_clip_config.json and weights.
            pretrained: for an architecture: a tag that open_clip knows, or a file of weights.
            revision: commit, tag or branch on the hub, for a tag or an "hf-hub:" model.

        Raises:
            ValueError: no such model, tag or file, or weights that do not fit.
        """
        super().__init__()
        import open_clip

        self.device, self.dtype = own_device(device), own_dtype(dtype)
        name, weights, options = _resolve(model, pretrained, revision)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                towers, _, self.preprocess = open_clip.create_model_and_transforms(
                    name,
                    pretrained=weights,
                    precision=PRECISIONS[self.dtype],
                    device=self.device,
                    require_pretrained=True,
                    **options,
                )
                self.tokenizer = open_clip.get_tokenizer(name)
        except Exception as error:
            reason = first_line(error)
            raise ValueError(f'cannot load the CLIP model "{model}" (weights "{pretrained}"): {reason}') from error
        self.towers = towers.eval().requires_grad_(False)

    def preprocessed(self, images: Any) -> torch.Tensor:
        """Float32 (B, 3, h, w) as the image tower takes it, by the pipeline that it was evaluated with.

        Args:
            images: float (B, 3, H, W) in [0, 1] or uint8 (B, H, W, 3); quantised to uint8 first, as files are.
        """
        return torch.stack([self.preprocess(image) for image in to_pil(images)])

    @torch.no_grad()
    def image_embeds(self, images: Any) -> torch.Tensor:
        """Float32 (B, D), unit length."""
        pixels = self.preprocessed(images).to(self.device, self.dtype)
        return F.normalize(self.towers.encode_image(pixels).float(), dim=-1)

    @torch.no_grad()
    def text_embeds(self, prompts: Sequence[str]) -> torch.Tensor:
        """Float32 (B, D), unit length. What is beyond the context of 77 tokens is cut off."""
        tokens = self.tokenizer(list(prompts)).to(self.device)
        return F.normalize(self.towers.encode_text(tokens).float(), dim=-1)

    def cosine(self, images: Any, prompts: Sequence[str]) -> torch.Tensor:
        """Cosine between each image and its own prompt: float32 (B,), -1 to 1."""
        return (self.image_embeds(images) * self.text_embeds(prompts)).sum(-1)


def _resolve(model: str, pretrained: str, revision: str) -> tuple[str, str | None, dict[str, Any]]:
    """What open_clip is to be called with: model, weights, and further options."""
    import open_clip

    if model.startswith("hf-hub:") and revision:
        return f"local-dir:{hub_folder(model.removeprefix('hf-hub:'), revision)}", None, {}
    if ":" in model:
        return model, None, {}
    tag = open_clip.get_pretrained_cfg(model, pretrained)
    if not tag:
        if not Path(pretrained).is_file():
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(model)) or "none: open_clip has no such model"
            raise ValueError(f'CLIP weights "{pretrained}" are no file; tags of "{model}": {tags}')
        return model, pretrained, {}
    # open_clip itself builds a model with the wrong activation, and only warns.
    options: dict[str, Any] = {"force_quick_gelu": bool(tag.get("quick_gelu", False))}
    if not revision:
        return model, pretrained, options
    repo, _, filename = tag.get("hf_hub", "").rpartition("/")
    if not repo:
        raise ValueError(f'the weights "{pretrained}" of "{model}" are not on the hub, so they have no revision')
    preprocessing = {k: tag[k] for k in ("mean", "std", "interpolation", "resize_mode") if k in tag}
    weights = hub_file(repo, filename or "open_clip_model.safetensors", revision)
    return model, str(weights), options | {"force_preprocess_cfg": preprocessing}


class PickScore(torch.nn.Module):
    """A CLIP model of transformers with its learned temperature, as PickScore is published.

    Source: Kirstain et al. 2023 (arXiv 2305.01569), equation 1.
    """

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        revision: str = "",
        processor_revision: str = "",
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            model: a CLIPModel: hub id or folder.
            processor: its image processor and tokenizer: hub id or folder.

        Raises:
            ValueError: they cannot be loaded.
        """
        super().__init__()
        from transformers import CLIPModel, CLIPProcessor

        self.device, self.dtype = own_device(device), own_dtype(dtype)
        try:
            towers = CLIPModel.from_pretrained(model, revision=commit_of(model, revision))
            self.processor = CLIPProcessor.from_pretrained(processor, revision=commit_of(processor, processor_revision))
        except Exception as error:
            reason = first_line(error)
            raise ValueError(f'cannot load "{model}" with the processor "{processor}": {reason}') from error
        self.towers = towers.to(self.device, self.dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str]) -> torch.Tensor:
        """exp(logit_scale) x cosine: float32 (B,), around 20."""
        pixels = self.processor(images=to_pil(images), return_tensors="pt").pixel_values
        tokens = self.processor(text=list(prompts), padding=True, truncation=True, max_length=77, return_tensors="pt")
        images_out = self.towers.get_image_features(pixels.to(self.device, self.dtype))
        text_out = self.towers.get_text_features(**tokens.to(self.device))
        # transformers 5 wraps the embeddings; 4 returned them bare.
        image_embeds, text_embeds = (
            F.normalize(getattr(out, "pooler_output", out).float(), dim=-1) for out in (images_out, text_out)
        )
        return self.towers.logit_scale.float().exp() * (image_embeds * text_embeds).sum(-1)


def load_hps(
    weights: str, revision: str, dtype: torch.dtype | str, device: torch.device | str | None, model: str = "ViT-H-14"
) -> OpenClip:
    """The human preference model HPSv2.1: its weights on open_clip's ViT-H-14.

    Source: Wu et al. 2023 (arXiv 2306.09341).

    Args:
        weights: a file, or "" for HPS_v2.1_compressed.pt of xswu/HPSv2 on the hub.

    Raises:
        ValueError: they cannot be had or do not fit.
    """
    if weights and not Path(weights).is_file():
        raise ValueError(f'HPS weights "{weights}": there is no such file')
    path = weights or str(hub_file("xswu/HPSv2", "HPS_v2.1_compressed.pt", commit_of("xswu/HPSv2", revision)))
    return OpenClip(model, pretrained=path, dtype=dtype, device=device)
