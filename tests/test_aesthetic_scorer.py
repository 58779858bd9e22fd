import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from small_models import save_open_clip

from ddpo_pytorch import aesthetic_scorer, rewards
from ddpo_pytorch.aesthetic_scorer import HEAD_SHA256, AestheticHead, AestheticScorer, load_head, weights_sha256


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return f"local-dir:{save_open_clip(tmp_path_factory.mktemp('models') / 'clip', embed_dim=768)}"


@pytest.fixture
def weights():
    torch.manual_seed(1)
    return AestheticHead().state_dict()


def test_the_head_has_the_published_layers_and_is_one_affine_map(weights):
    assert {name: tuple(w.shape) for name, w in weights.items() if "weight" in name} == {
        "layers.0.weight": (1024, 768),
        "layers.2.weight": (128, 1024),
        "layers.4.weight": (64, 128),
        "layers.6.weight": (16, 64),
        "layers.7.weight": (1, 16),
    }
    embeds = torch.randn(5, 768)
    expected = embeds.double()
    for i in (0, 2, 4, 6, 7):
        expected = expected @ weights[f"layers.{i}.weight"].double().T + weights[f"layers.{i}.bias"].double()
    head = AestheticHead()
    head.load_state_dict(weights)
    torch.testing.assert_close(head(embeds).double(), expected[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["head.pth", "head.safetensors"])
def test_scores_are_the_heads_of_unit_length_embeddings(tmp_path, clip, weights, name):
    (save_file if name.endswith("safetensors") else torch.save)(weights, tmp_path / name)
    scorer = AestheticScorer(head=str(tmp_path / name), clip_model=clip, clip_pretrained="", device="cpu")
    images = torch.rand(3, 3, 40, 60)
    scores = scorer(images)
    embeds = scorer.clip.image_embeds(images)
    torch.testing.assert_close(embeds.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(scores, scorer.head(embeds))
    assert scores.shape == (3,) and scores.dtype == torch.float32 and scores.unique().numel() == 3
    reward = rewards.aesthetic_score(head=str(tmp_path / name), clip_model=clip, clip_pretrained="", device="cpu")
    torch.testing.assert_close(reward(images, ["a"] * 3, [{}] * 3)[0], scores)
    uint8 = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    torch.testing.assert_close(scorer(uint8), scores)


def test_the_digest_is_of_the_weights_and_not_of_their_file(tmp_path, weights):
    digest = weights_sha256(weights)
    torch.save(weights, tmp_path / "a.pth")
    save_file(weights, tmp_path / "b.safetensors")
    for name in ("a.pth", "b.safetensors"):
        load_head(tmp_path / name, digest)
    with pytest.raises(ValueError, match=f"sha256 {digest}, expected {HEAD_SHA256}"):
        load_head(tmp_path / "a.pth", HEAD_SHA256)
    weights["layers.7.bias"] += 1e-3
    assert weights_sha256(weights) != digest


def test_the_head_from_the_hub_is_checked(tmp_path, monkeypatch, clip, weights):
    asked = []
    torch.save(weights, tmp_path / "other.pth")
    monkeypatch.setattr(aesthetic_scorer, "hub_file", lambda *a: asked.append(a) or tmp_path / "other.pth")
    with pytest.raises(ValueError, match="expected " + HEAD_SHA256):
        AestheticScorer(clip_model=clip, clip_pretrained="", device="cpu")
    assert asked == [("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth", "main")]


class Harmful:
    def __reduce__(self):
        return os.mkdir, (os.environ["HARM"],)


def test_a_file_that_would_execute_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    (tmp_path / "head.pth").write_bytes(pickle.dumps(Harmful()))
    torch.save({"layers.0.weight": Harmful()}, tmp_path / "zipped.pth")
    for name in ("head.pth", "zipped.pth"):
        with pytest.raises(ValueError, match="is not usable"):
            load_head(tmp_path / name, None)
    assert not (tmp_path / "harm").exists()


SOMETHING_ELSE = {"empty": {}, "part": {"layers.0.weight": torch.zeros(1024, 768)}, "list": [1, 2]}


@pytest.mark.parametrize("content", SOMETHING_ELSE.values(), ids=SOMETHING_ELSE)
def test_a_file_with_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "head.pth")
    with pytest.raises(ValueError, match="is not usable"):
        load_head(tmp_path / "head.pth", None)
    with pytest.raises(ValueError, match="there is no such file"):
        load_head(tmp_path / "nowhere.pth", None)
