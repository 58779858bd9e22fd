import json
import math

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image

from ddpo_pytorch import metrics
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.metrics import RunLog, _wrap, flatten, image_grid, wandb_offline_reason


def run_log(folder, first_epoch=0):
    return RunLog(Accelerator(cpu=True), folder, first_epoch)


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_log_call_is_a_line_of_strict_json(tmp_path):
    log = run_log(tmp_path)
    log.log({"epoch": 0, "reward": np.array([1.5, np.nan]), "reward_max": np.float64(1.5), "x": math.inf}, step=3)
    assert read(tmp_path) == [{"step": 3, "epoch": 0, "reward": [1.5, None], "reward_max": 1.5, "x": None}]


def test_a_resumed_log_drops_what_came_after_the_checkpoint(tmp_path):
    log = run_log(tmp_path)
    for epoch in range(4):
        log.log({"epoch": epoch, "reward_mean": epoch, "reward_std": 1.0}, step=epoch)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "epo')  # torn
    resumed = run_log(tmp_path, first_epoch=2)
    assert [line["epoch"] for line in read(tmp_path)] == [0, 1]
    assert resumed.curve == [(0, 0, 1.0), (1, 1, 1.0)]


def test_dashboards_get_no_step_again_that_they_have(tmp_path):
    def sent(first_epoch):
        log = run_log(tmp_path, first_epoch)
        steps = []
        log.accelerator.log = lambda values, step, **_: steps.append(step)
        for epoch in range(first_epoch, 3):
            log.log({"epoch": epoch}, step=epoch)
        return steps

    assert sent(0) == [0, 1, 2]
    # Of the last step they may have only a part; the file has each line once.
    assert sent(1) == [2] and [line["epoch"] for line in read(tmp_path)] == [0, 1, 2]
    assert sent(3) == []
    # Killed before anything new was logged: what dashboards have is known still.
    run_log(tmp_path, first_epoch=1)
    assert sent(1) == [2] and not run_log(tmp_path, first_epoch=2).needs_new_run
    assert RunLog(Accelerator(cpu=True), tmp_path, 2, goes_another_way=True).needs_new_run
    assert sent(1) == [1, 2]


def test_a_run_that_goes_on_from_its_end_needs_no_new_one_on_the_dashboard(tmp_path):
    log = run_log(tmp_path)
    log.log({"epoch": 0}, step=0)
    assert not RunLog(Accelerator(cpu=True), tmp_path, 1, goes_another_way=True).needs_new_run


def test_equal_rewards_have_no_spread_at_all():
    equal = metrics.reward_metrics(0, np.array([0.1] * 7 + [np.nan]), {})
    assert np.std([0.1] * 7) > 0 and equal["reward_std"] == 0.0


def test_the_curve_is_drawn(tmp_path):
    log = run_log(tmp_path)
    log.draw_curve()
    log.wait()
    assert not (tmp_path / "reward.png").exists()
    for epoch in range(3):
        log.log({"epoch": epoch, "reward_mean": epoch, "reward_std": math.nan if epoch == 1 else 1.0}, step=epoch)
    log.draw_curve()
    log.wait()
    assert Image.open(tmp_path / "reward.png").size == (840, 480)


def test_pictures_are_drawn_with_whole_captions(tmp_path):
    log = run_log(tmp_path)
    images = [np.full((64, 64, 3), 40 * i, dtype=np.uint8) for i in range(5)]
    prompts = ["cat", "ü " + "long " * 40, "x" * 100, "", "dog"]
    captions = [metrics.caption(prompt, 1.0, {}, {}, None) for prompt in prompts]
    log.log_images(images, captions, epoch=7, step=0)
    log.wait()
    grid = Image.open(tmp_path / "images" / "epoch_007.jpg")
    assert grid.width == 3 * 128 and grid.height > 2 * 128
    assert np.abs(np.asarray(grid)[64, 128 + 64].astype(int) - 40).max() < 10  # the second picture's grey


def test_a_picture_that_cannot_be_written_is_said_at_the_end_of_the_epoch(tmp_path):
    log = run_log(tmp_path)
    (tmp_path / "images").write_text("")
    log.log_images([np.zeros((8, 8, 3), dtype=np.uint8)], ["cat"], epoch=0, step=0)
    with pytest.raises(RunFailure, match="cannot write .*epoch_000.jpg"):
        log.log({"epoch": 0}, step=0, is_last=True)


def test_a_caption_is_broken_into_lines_that_fit_and_lose_nothing():
    from PIL import ImageFont

    font = ImageFont.load_default(size=11)
    text = "a cat " * 10 + "x" * 60
    lines = _wrap(text, font, 124)
    assert all(font.getlength(line) <= 124 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_captions_have_letters_of_other_scripts():
    """Of Pillow's own font these would all be the same box."""
    shown = {
        image_grid([np.zeros((128, 128, 3), np.uint8)], [letter]).crop((0, 128, 20, 145)).tobytes()
        for letter in "жßλčx"
    }
    assert len(shown) == 5


def test_an_evaluation_is_told_in_a_line():
    values = {"eval/epoch": 4, "eval/a/reward_mean": 1.5, "eval/a/reward_se": 0.1, "eval/b/reward_mean": math.nan}
    values |= {"eval/a/reward_change": 0.25, "eval/a/reward_change_se": 0.05, "eval/a/diversity": 0.2}
    assert metrics.evaluation_summary(values) == "evaluation after 4 epochs: a/reward 1.5 (+0.25 +- 0.05), b/reward nan"


def test_pictures_of_epochs_that_are_run_again_are_forgotten(tmp_path):
    log = run_log(tmp_path)
    for epoch in range(3):
        picture = (np.full((8, 8, 3), 9, np.uint8), "cat", float(epoch))
        log.log_extremes(picture, picture, epoch)
        log.log({"epoch": epoch, "reward_queries": 4 * (epoch + 1)}, step=epoch, is_last=True)
    assert json.loads((tmp_path / "images" / "epoch_002.json").read_text())["best"] == {
        "prompt": "cat",
        "reward": 2.0,
        "file": "epoch_002_best.jpg",
    }
    assert run_log(tmp_path, first_epoch=1).reward_queries == 4
    assert [path.name for path in (tmp_path / "images").glob("*.json")] == ["epoch_000.json"]


def test_grids_take_any_size():
    grid = image_grid([np.zeros((512, 512, 3), dtype=np.uint8)] * 2, ["a", "b"], columns=1)
    assert grid.width == 512 and grid.height > 1024


def test_flatten_names_sections():
    assert flatten({"a": {"b": {"c": 1}}, "d": (2,)}) == {"a.b.c": 1, "d": (2,)}


@pytest.mark.parametrize(
    "environment, offline",
    [({}, True), ({"WANDB_API_KEY": "x" * 40}, False), ({"WANDB_MODE": "disabled"}, False)],
)
def test_wandb_goes_offline_where_nobody_is_logged_in(tmp_path, monkeypatch, environment, offline):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    reason = wandb_offline_reason()
    assert ("wandb login" in reason) if offline else reason is None


def test_a_netrc_entry_is_a_login(tmp_path, monkeypatch):
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    host = metrics.urlparse(wandb.setup().settings.base_url).hostname
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'x' * 40}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_offline_reason() is None


def test_versions_name_what_a_run_depends_on():
    versions = metrics.package_versions()
    assert {"python", "torch", "diffusers", "accelerate", "peft"} <= set(versions)


def test_a_caption_says_all_that_the_reward_function_said():
    text = metrics.caption("a cat", 0.5, {"sharpness": 2.0}, {"reply": "A cat\non a mat.", "read": ""}, None)
    assert text == "a cat | 0.50 | sharpness 2 | reply: A cat on a mat."
    failed = metrics.caption("a cat", math.nan, {}, {}, "no answer in time" * 20)
    assert failed.startswith("a cat | nan | failed: no answer in time") and len(failed) < 160


def test_reward_metrics_leave_failed_samples_out():
    rewards = np.array([1.0, np.nan, 3.0, 5.0])
    details = {
        "clip": np.array([np.nan, np.nan, 1.0, 2.0]),
        "none": np.full(4, np.nan),
        "failed_fraction": np.ones(4),
        "a_mean": np.ones(4),
    }
    values = metrics.reward_metrics(2, rewards, details)
    assert (values["epoch"], values["reward_mean"], values["reward/failed_fraction"]) == (2, 3.0, 0.25)
    assert values["reward_std"] == pytest.approx(np.std([1, 3, 5]))
    assert values["reward/failed_fraction"] == 0.25  # though a detail has this name
    assert values["reward/clip_mean"] == 1.5 and math.isnan(values["reward/none_mean"])
    extra = {"policy/logp_gap": 0.0, "policy/skipped_steps": 0, "time/epoch_s": 1.0}
    more = {"policy/kl_nats": 0.123, "policy/clip_active": 0.25}
    told = metrics.summary({**values, **extra, **more}, start=2.5, seconds_left=600.0, num_epochs=9)
    assert told.startswith("epoch 2/8: reward 3 +- 1.63 (+0.5 since the start)")
    assert "KL 0.12 nats, 25% clipped" in told and told.endswith("1.0 s, 10 min left")
    line = metrics.summary({**values, **extra})
    assert line.startswith("epoch 2: reward 3 +- 1.63 (clip 1.5, none nan, failed_fraction 1, a_mean 1), 25.0% failed")
