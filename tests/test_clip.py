"""CLIP scorers on small models, loaded from disk by the code that loads the real ones."""

import json
import re

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from small_models import OPEN_CLIP_CONFIG, save_open_clip, save_transformers_clip

from ddpo_pytorch import rewards
from ddpo_pytorch.scorers import clip, hub
from ddpo_pytorch.scorers.clip import OpenClip, PickScore, load_hps
from ddpo_pytorch.scorers.devices import own_dtype

PROMPTS = ["a cat", "a very long prompt " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_open_clip(tmp_path_factory.mktemp("models") / "open_clip")


@pytest.fixture(scope="module")
def architecture(tmp_path_factory):
    """The same small model as one of open_clip's architectures."""
    path = tmp_path_factory.mktemp("configs") / "small-quickgelu.json"
    path.write_text(json.dumps({**OPEN_CLIP_CONFIG, "quick_gelu": True}))
    open_clip.add_model_config(path)
    return path.stem


def images(height=48, width=48, count=2):
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("height, width", [(512, 512), (64, 64), (32, 32), (333, 500), (512, 256)])
def test_preprocessing_equals_the_pil_pipeline(folder, height, width):
    scorer = OpenClip(f"local-dir:{folder}", device="cpu")
    batch = images(height, width)
    # Smooth, as pictures are: averaged over 8 x 8 pixels
    batch = torch.nn.functional.avg_pool2d(batch, 9, stride=1, padding=4)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))
    for image, prepared in zip(batch, scorer.preprocessed(batch), strict=True):
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        scale = 32 / min(height, width)
        picture = picture.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
        left, top = round((picture.width - 32) / 2), round((picture.height - 32) / 2)
        levels = torch.from_numpy(np.array(picture.crop((left, top, left + 32, top + 32)))).permute(2, 0, 1)
        assert ((prepared * std + mean) * 255 - levels).abs().max() <= 1 + 1e-4


def test_the_cosine_is_open_clips_own(folder):
    scorer = OpenClip(f"local-dir:{folder}", device="cpu")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    batch = images()
    pixels = torch.stack(
        [preprocess(Image.fromarray((i * 255).round().byte().permute(1, 2, 0).numpy())) for i in batch]
    )
    with torch.no_grad():
        image_embeds, text_embeds, _ = model.eval()(pixels, open_clip.get_tokenizer("ViT-L-14")(PROMPTS))
    expected = (image_embeds * text_embeds).sum(-1)
    torch.testing.assert_close(scorer.cosine(batch, PROMPTS), expected)
    score, info = rewards.clip_score(f"local-dir:{folder}", device="cpu")(batch, PROMPTS, [{}] * 2)
    torch.testing.assert_close(score, 100 * expected)
    uint8 = (batch * 255).round().byte().permute(0, 2, 3, 1).numpy()
    torch.testing.assert_close(scorer.cosine(uint8, PROMPTS), expected)
    assert info == {} and not any(p.requires_grad for p in scorer.parameters())


def test_half_precision_is_close(folder):
    full, half = (OpenClip(f"local-dir:{folder}", dtype=d, device="cpu") for d in ("float32", "bfloat16"))
    assert torch.bfloat16 in {p.dtype for p in half.parameters()}  # norms stay float32
    a, b = full.cosine(images(), PROMPTS), half.cosine(images(), PROMPTS)
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    torch.testing.assert_close(a, b, atol=0.05, rtol=0)  # bfloat16 keeps 8 bits
    with pytest.raises(ValueError, match='dtype must be one of float32, bfloat16, float16; got "int8"'):
        own_dtype("int8")


def test_quick_gelu_follows_the_weights():
    """open_clip builds ViT-L-14 with GELU for OpenAI's weights, and only warns."""
    assert clip._resolve("ViT-L-14", "openai", "")[2]["force_quick_gelu"] is True
    assert clip._resolve("ViT-L-14-quickgelu", "openai", "")[2]["force_quick_gelu"] is True
    assert clip._resolve("ViT-H-14", "laion2b_s32b_b79k", "")[2]["force_quick_gelu"] is False


def test_a_revision_is_asked_of_the_hub(monkeypatch, folder):
    asked = []
    monkeypatch.setattr(clip, "hub_file", lambda *a: asked.append(a) or "weights")
    monkeypatch.setattr(clip, "hub_folder", lambda *a: asked.append(a) or folder)
    model, weights, options = clip._resolve("ViT-L-14-quickgelu", "openai", "abc")
    assert weights == "weights" and options["force_quick_gelu"] is True
    assert clip._resolve("hf-hub:me/mine", "", "def")[0] == f"local-dir:{folder}"
    of_openai = ("timm/vit_large_patch14_clip_224.openai", "open_clip_model.safetensors", "abc")
    assert asked == [of_openai, ("me/mine", "def")]


def test_repositories_that_the_package_names_are_asked_for_at_a_commit(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(clip, "hub_file", lambda *a: asked.append(a) or tmp_path)
    monkeypatch.setattr(clip, "OpenClip", lambda *args, **kwargs: None)
    for revision in ("", "mine"):
        clip.load_hps("", revision, "", "cpu")
    assert [revision for *_, revision in asked] == [hub.COMMITS["xswu/HPSv2"], "mine"]
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in hub.COMMITS.values())
    assert hub.commit_of("somebody/else", "") is None


@pytest.mark.parametrize(
    "model, pretrained, says",
    [
        ("ViT-L-14", "opnai", 'CLIP weights "opnai" are no file; tags of "ViT-L-14": openai, laion400m_e31'),
        ("ViT-L-41", "openai", "open_clip has no such model"),
        ("local-dir:nowhere", "", 'cannot load the CLIP model "local-dir:nowhere"'),
    ],
)
def test_a_model_that_is_not_there_is_named(model, pretrained, says):
    with pytest.raises(ValueError, match=says):
        OpenClip(model, pretrained, device="cpu")


def test_hps_is_the_cosine_with_the_weights_of_a_training_checkpoint(tmp_path, architecture, folder):
    from safetensors.torch import load_file

    weights = load_file(folder / "open_clip_model.safetensors")
    torch.save({"epoch": 3, "name": "hps", "state_dict": weights}, tmp_path / "hps.pt")
    reward = rewards.hps_score(str(tmp_path / "hps.pt"), model=architecture, device="cpu")
    score, _ = reward(images(), PROMPTS, [{}] * 2)
    torch.testing.assert_close(score, OpenClip(f"local-dir:{folder}", device="cpu").cosine(images(), PROMPTS))
    with pytest.raises(ValueError, match='HPS weights "nowhere.pt": there is no such file'):
        load_hps("nowhere.pt", "", "float32", "cpu")


def test_pick_score_is_the_logit_of_transformers_clip(tmp_path):
    folder = save_transformers_clip(tmp_path / "clip")
    scorer = PickScore(str(folder), str(folder), device="cpu")
    batch = images()
    pictures = [Image.fromarray((i * 255).round().byte().permute(1, 2, 0).numpy()) for i in batch]
    limits = {"padding": True, "truncation": True, "max_length": 77}
    inputs = scorer.processor(text=PROMPTS, images=pictures, return_tensors="pt", **limits)
    with torch.no_grad():
        expected = scorer.towers(**inputs).logits_per_image.diagonal()
    torch.testing.assert_close(scorer.score(batch, PROMPTS), expected)
    reward = rewards.pick_score(str(folder), str(folder), device="cpu")
    torch.testing.assert_close(reward(batch, PROMPTS, [{}] * 2)[0], expected)
    with pytest.raises(ValueError, match='cannot load "./nowhere"'):
        PickScore("./nowhere", str(folder), device="cpu")
