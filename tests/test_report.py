"""The report page, its numbers by hand and its looks in a real browser."""

import base64
import io
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image, ImageDraw

from ddpo_pytorch import report
from ddpo_pytorch.named_functions import ConfigError
from ddpo_pytorch.report import read_metrics, read_run, write_report

HOSTILE = '<script>alert(1)</script> </script> <img src=x onerror=alert(2)> <!-- & "\u2028'
BASE = {"num_epochs": 100, "run_name": "", "sample": {"num_steps": 50}, "train": {"max_grad_norm": 1.0, "t": (1, 2)}}


def picture(file, number, size=64):
    """A disc whose place and colour are the number's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (size, size), (40 + 13 * number % 160, 90, 140))
    left = number * 7 % (size // 2)
    ImageDraw.Draw(image).ellipse([left, left // 2, left + size // 2, left // 2 + size // 2], fill=(230, 180, 60))
    image.save(file, quality=95)


def epoch_lines(epoch, start=-2.4, slope=0.12, samples=8, updates=2):
    """What an epoch logs, in the order of scripts/train.py."""
    mean = start + slope * epoch
    rewards = [mean + 0.3 * math.sin(2.4 * i + epoch) for i in range(samples)]
    rewards[0] = None if epoch == 1 else rewards[0]
    scored = [reward for reward in rewards if reward is not None]
    yield {
        "reward": rewards,
        "reward_mean": sum(scored) / len(scored),
        "reward_std": 0.21,
        "reward/failed_fraction": (samples - len(scored)) / samples,
        "reward/std_within_prompts": 0.2 - 0.008 * epoch,
        "reward/std_between_prompts": 0.1 + 0.01 * math.cos(epoch),
        "reward/size": rewards,
        "reward/size_mean": mean / 2,
        "reward_queries": samples * (epoch + 1),
    }
    for update in range(updates):
        yield {
            "loss": 0.01 * math.sin(epoch + update),
            "clipfrac": 0.3,
            "policy/clip_active": 0.1 + 0.2 * update,
            "policy/kl_nats": 1.5 + epoch * 0.4,
            "grad_norm": None if epoch == 2 and update == 0 else 0.8 + 0.1 * math.sin(epoch),
            "learning_rate": 1e-2,
            "inner_epoch": 0,
        }
    times = {"time/sample_s": 6.0 + math.sin(epoch), "time/reward_s": 0.5, "time/train_s": 11.0, "time/epoch_s": 19.0}
    yield {"policy/logp_gap": 2e-7 * (1 + epoch % 3), "policy/updates": 2, "policy/skipped_steps": 0, **times}


def write_run(folder, epochs=6, every=2, planned=None, prompts=("a cat", HOSTILE), seeds=2, size=64, **series):
    """A run's folder as scripts/train.py leaves it.

    Args:
        every: epochs between evaluations; 0: none.
    """
    config = {
        "num_epochs": planned or epochs,
        "run_name": folder.name,
        "pretrained": {"model": "/somewhere/tiny_sd"},
        "use_lora": True,
        "lora": {"rank": 8},
        "prompt_fn": "from_file",
        "reward_fn": "jpeg_compressibility",
        "sample": {"num_steps": 50.0},
        "train": {"max_grad_norm": 1.0, "clip_range": 1e-4, "t": [1, 2]},
        "reward_fn_kwargs": {"question": HOSTILE},
    }
    document = {"config": config, "num_processes": 1, "hardware": "cpu, 2 threads", "versions": {"torch": "2.6"}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    lines = []

    def evaluate(after):
        values, sets = {"eval/epoch": after, "time/eval_s": 3.0}, {}
        for name, gain in (("train", 0.12), ("unseen_animals", 0.12 - 0.011 * after)):
            for label, mean in (("reward", -2.4 + gain * after), ("colorfulness", 30 - after)):
                values |= {f"eval/{name}/{label}_mean": mean, f"eval/{name}/{label}_se": 0.06}
                values |= {f"eval/{name}/{label}_change": gain * after, f"eval/{name}/{label}_change_se": 0.04}
            values[f"eval/{name}/diversity"] = 0.3 - 0.01 * after
            pictures = []
            for i, (prompt, seed) in enumerate((prompt, seed) for prompt in prompts for seed in range(seeds)):
                file = f"after_{after:03d}/{name}_{i:03d}.jpg"
                picture(folder / "eval" / file, i + 5 * after + len(name), size)
                scores = {"reward": -2.4 + gain * after + 0.1 * i, "colorfulness": None if i == 1 else 30.0 - after}
                failure = "TimeoutError: 5 s" if i == 1 else None
                pictures.append({"prompt": prompt, "seed": seed, "file": file, "scores": scores, "failure": failure})
            sets[name] = {"diversity": values[f"eval/{name}/diversity"], "pictures": pictures}
        (folder / "eval" / f"after_{after:03d}.json").write_text(json.dumps({"epochs": after, "sets": sets}))
        lines.append({"step": 2 * after, "epoch": max(0, after - 1), **values})

    if every:
        evaluate(0)
    for epoch in range(epochs):
        start, *updates, end = epoch_lines(epoch, **series)
        lines += [{"step": 2 * epoch, "epoch": epoch, **values} for values in (start, *updates)]
        if every and ((epoch + 1) % every == 0 or epoch + 1 == epochs):
            evaluate(epoch + 1)
        lines.append({"step": 2 * epoch + 1, "epoch": epoch, **end})
        images = folder / "images"
        picture(images / f"epoch_{epoch:03d}.jpg", epoch, 512)
        extremes = {}
        for name, reward in (("best", -1.5 + 0.1 * epoch), ("worst", -4 + 0.1 * epoch)):
            picture(images / f"epoch_{epoch:03d}_{name}.jpg", epoch + len(name), size)
            extremes[name] = {"prompt": prompts[-1], "reward": reward, "file": f"epoch_{epoch:03d}_{name}.jpg"}
        (images / f"epoch_{epoch:03d}.json").write_text(json.dumps({"epoch": epoch, **extremes}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def page_of(file):
    """The page's data, and what HTML's own rules make of the rest: (tag, attributes) each."""
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    text = file.read_text(encoding="utf-8")
    parser.feed(text)
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(embedded[1]), tags


def lines_of(*entries):
    return "".join(json.dumps(entry) + "\n" for entry in entries)


# --- metrics.jsonl


def test_an_epoch_has_the_mean_of_its_updates():
    found = read_metrics(
        lines_of(
            {"step": 0, "epoch": 0, "reward": [1.0, None, 3.0], "reward_mean": 2.0},
            {"step": 0, "epoch": 0, "loss": 1.0, "grad_norm": None},
            {"step": 1, "epoch": 0, "loss": 2.0, "grad_norm": 0.5},
            {"step": 1, "epoch": 0, "time/epoch_s": 9.0},
        )
    )
    row = found.epochs[0]
    assert (row["loss"], row["grad_norm"], row["time/epoch_s"]) == (1.5, 0.5, 9.0)
    # Of 1 and 3: standard deviation sqrt(2), of a mean of two sqrt(2) / sqrt(2). A failed sample was asked for too.
    assert row["reward_se"] == pytest.approx(1.0) and row["reward_queries"] == 3


def test_queries_add_up_unless_they_are_logged():
    rewards = [{"step": i, "epoch": i, "reward": [0.0] * 4, "reward_mean": 0.0} for i in range(3)]
    rewards[1]["reward_queries"] = 100
    evaluations = [{"step": 2, "epoch": max(0, n - 1), "eval/epoch": n, "eval/train/reward_mean": 1.0} for n in (0, 2)]
    found = read_metrics(lines_of(evaluations[0], *rewards, evaluations[1]))
    assert [row["reward_queries"] for row in found.epochs.values()] == [4, 100, 104]
    assert [row["reward_queries"] for row in found.evaluations.values()] == [0, 100]


def test_lines_that_cannot_be_read_are_counted_and_left_out():
    text = lines_of({"step": 0, "epoch": 0, "loss": 1.0}) + 'null\n5\n{"step": 1}\n\n{"epoch": NaN}\n{"step": 9, "epo'
    found = read_metrics(text)
    assert found.num_unreadable == 5 and list(found.epochs) == [0]


def test_an_epoch_that_was_run_again_counts_once():
    def epoch(number, reward):
        return [
            {"step": 0, "epoch": number, "reward": [reward] * 2, "reward_mean": reward},
            {"step": 0, "epoch": number, "loss": reward},
            {"step": 0, "epoch": number, "eval/epoch": number + 1, "eval/train/reward_mean": reward},
        ]

    before = {"step": 0, "epoch": 0, "eval/epoch": 0, "eval/train/reward_mean": 0.0}
    resumed = [*epoch(1, 5.0)[:1], *epoch(1, 6.0)]  # killed in the middle of it once more
    found = read_metrics(lines_of(before, *epoch(0, 1.0), *epoch(1, 2.0), *epoch(2, 3.0), *resumed))
    assert {n: row["reward_mean"] for n, row in found.epochs.items()} == {0: 1.0, 1: 6.0}
    assert {n: row["loss"] for n, row in found.epochs.items()} == {0: 1.0, 1: 6.0}
    assert {n: row["eval/train/reward_mean"] for n, row in found.evaluations.items()} == {0: 0.0, 1: 1.0, 2: 6.0}


# --- what is on the page


def test_the_key_numbers(tmp_path):
    run = write_run(tmp_path / "run", epochs=2, every=1, planned=9)
    (run / "metrics.jsonl").write_text(
        lines_of(
            {"step": 0, "epoch": 0, "eval/epoch": 0, "eval/a/reward_mean": 1.0, "eval/a/diversity": 0.5}
            | {"eval/a/reward_se": 0.5, "time/eval_s": 40.0},
            {"step": 0, "epoch": 0, "reward": [1.0, 3.0], "reward_mean": 2.0},
            {"step": 0, "epoch": 0, "time/epoch_s": 60.0},
            {"step": 1, "epoch": 1, "reward": [3.0, 9.0], "reward_mean": 6.0},
            {"step": 1, "epoch": 1, "eval/epoch": 2, "eval/a/reward_mean": 3.0, "eval/a/diversity": 0.4}
            | {"eval/a/reward_se": 0.5, "eval/a/reward_change": 2.0, "eval/a/reward_change_se": 0.25},
            {"step": 1, "epoch": 1, "time/epoch_s": 80.0},
        )
    )
    found = {name: (value, more) for name, value, more in report.facts(read_run(run))}
    assert found["Reward"] == ("2.0 → 6.0", "± 1.0 ± 3.0 (standard error), first and last epoch")
    assert found["Change"] == ("+4.0", "+1.3 standard errors")  # 4 / sqrt(1 + 9)
    assert found["Epochs"] == ("2 of 9", "so far, or ended before")
    assert found["Reward queries"] == ("4", "2 images an epoch")
    assert found["Time"] == ("3 min", "70 s an epoch")  # 60 + 80 + 40
    assert found["Model"] == ("tiny_sd", "LoRA of rank 8")
    assert report.evaluation_rows(read_run(run)) == [
        ["a", "reward", "+2.00 ± 0.25", "1.00 ± 0.50", "3.00 ± 0.50"],
        ["a", "diversity", "-0.1", "0.5", "0.4"],
    ]


def test_every_curve_of_a_run_is_there(tmp_path):
    data, _ = page_of(write_report([write_run(tmp_path / "run")], tmp_path / "x.html", BASE))
    titles = [chart["title"] for group in data["groups"] for chart in group["charts"]]
    assert titles == [
        *("Reward", "Reward: size", "Spread of rewards", "Failed rewards"),
        *("Evaluation: reward", "Evaluation: colorfulness", "Diversity"),
        *("KL per step (nats)", "Clip share", "Gradient norm", "Loss", "Gap of log-probabilities"),
        "Seconds per epoch",
    ]
    charts = {chart["title"]: chart for group in data["groups"] for chart in group["charts"]}
    [reward] = charts["Reward"]["lines"]
    assert reward["epoch"] == [0, 1, 2, 3, 4, 5] and reward["queries"] == [8, 16, 24, 32, 40, 48]
    assert reward["band"] == [0.21] * 6
    assert [(line["name"], line["epoch"]) for line in charts["Evaluation: reward"]["lines"]] == [
        ("train", [0, 2, 4, 6]),
        ("unseen_animals", [0, 2, 4, 6]),
    ]
    assert [line["name"] for line in charts["Seconds per epoch"]["lines"]] == [
        "sampling",
        "rewards",
        "training",
        "rest",
    ]
    # 6 + sin 0 sampling, 0.5 rewards and 11 training leave 1.5 of 19 s
    assert charts["Seconds per epoch"]["lines"][3]["y"][0] == pytest.approx(1.5)
    assert charts["Gradient norm"]["marks"] == {"train.max_grad_norm 1": 1.0}


def test_pictures_are_those_of_the_evaluations_with_what_was_said_of_them(tmp_path):
    data, _ = page_of(write_report([write_run(tmp_path / "run")], tmp_path / "x.html", None))
    [run] = data["runs"]
    assert [slider["name"] for slider in run["sliders"]] == ["train", "unseen_animals"]
    frames = run["sliders"][0]["frames"]
    assert [frame["label"] for frame in frames] == [
        "before training",
        "after 2 epochs",
        "after 4 epochs",
        "after 6 epochs",
    ]
    shown = frames[1]["pictures"][1]
    assert (shown["prompt"], shown["seed"], shown["failure"]) == ("a cat", 1, "TimeoutError: 5 s")
    assert shown["scores"] == {"reward": pytest.approx(-2.06), "colorfulness": None}
    # Small enough to be the very file
    original = (tmp_path / "run" / "eval" / "after_002" / "train_001.jpg").read_bytes()
    assert base64.b64decode(shown["src"].partition(",")[2]) == original
    assert [sample["epoch"] for sample in run["extremes"]["best"]] == [5, 4, 3, 2]
    assert [sample["epoch"] for sample in run["extremes"]["worst"]] == [0, 1, 2, 3]


def test_without_evaluations_the_training_samples_are_shown(tmp_path):
    data, _ = page_of(write_report([write_run(tmp_path / "run", epochs=3, every=0)], tmp_path / "x.html", None))
    [slider] = data["runs"][0]["sliders"]
    assert slider["name"] == "training samples" and slider["is_grid"]
    assert [frame["label"] for frame in slider["frames"]] == ["epoch 0", "epoch 1", "epoch 2"]
    assert any("no evaluations" in note for note in data["runs"][0]["notes"])


def test_options_are_compared_with_base_and_with_each_other():
    base = {"a": {"x": (1, 2), "y": 3.0}, "kwargs": {}, "same": "s"}
    runs = [{"a": {"x": [1, 2], "y": 4}, "kwargs": {"k": 1}, "same": "s"}, {"a": {"x": [1], "y": 3}, "same": "s"}]
    rows = {row["key"]: row for row in report.option_rows(runs, base)}
    assert list(rows) == ["a.x", "a.y", "kwargs.k", "same"]
    assert rows["a.x"] == {
        "key": "a.x", "base": "[1, 2]", "values": ["[1, 2]", "[1]"], "differs": [False, True], "varies": True
    }  # fmt: skip
    assert rows["a.y"]["differs"] == [True, False]
    assert rows["kwargs.k"]["values"] == ["1", None] and rows["kwargs.k"]["base"] is None
    assert rows["same"]["differs"] == [False, False] and not rows["same"]["varies"]


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / parent / "run", epochs=1, every=0) for parent in "ab"]
    data, _ = page_of(write_report(folders, tmp_path / "x.html", None))
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]


def test_a_key_in_an_old_config_is_not_shown(tmp_path):
    run = write_run(tmp_path / "run", epochs=1, every=0)
    document = json.loads((run / "config.json").read_text())
    document["config"]["reward_fn_kwargs"]["api_key"] = "hush-hush-hush"
    (run / "config.json").write_text(json.dumps(document))
    assert "hush" not in write_report([run], tmp_path / "x.html", BASE).read_text()


# --- runs that were cut off


def _tear(name):
    def damage(run):
        text = (run / name).read_bytes()
        (run / name).write_bytes(text[: len(text) * 2 // 3])

    return damage


def _remove(*names):
    def damage(run):
        for name in names:
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return damage


def _keep_lines(count):
    def damage(run):
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:count]))

    return damage


def _nothing_but_null(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keep = ("step", "epoch", "eval/epoch")
    nulls = [{k: v if k in keep else [None] if isinstance(v, list) else None for k, v in e.items()} for e in lines]
    (run / "metrics.jsonl").write_text(lines_of(*nulls))


def _write(name, text):
    return lambda run: (run / name).write_text(text)


@pytest.mark.parametrize(
    "damage, note",
    [
        (_tear("config.json"), "config.json is missing or torn"),
        (_remove("config.json"), "config.json is missing or torn"),
        (_write("config.json", '{"config": 3, "versions": null}'), ""),
        (_write("config.json", '{"config": {"train": 3, "num_epochs": 1}}'), ""),
        (_tear("metrics.jsonl"), "1 line of metrics.jsonl cannot be read"),
        (_remove("metrics.jsonl"), "no epoch has its rewards yet"),
        (_keep_lines(0), "no epoch has its rewards yet"),
        (_keep_lines(1), "no epoch has its rewards yet"),  # killed in epoch 0, after the first evaluation
        (_keep_lines(2), "epoch 0 is not complete"),
        (_nothing_but_null, "no epoch has its rewards yet"),
        (_remove("eval"), "training samples' grids are shown instead"),
        (_remove("eval", "images"), "and no pictures"),
        (_remove("images"), ""),
        (_tear("eval/after_002.json"), ""),
        (_write("eval/after_002.json", '{"sets": {"train": {"pictures": [3, {}, {"file": 4}]}, "b": []}}'), ""),
        (_tear("eval/after_002/train_001.jpg"), ""),
        (_remove("eval/after_002/train_001.jpg"), ""),
        (_write("images/epoch_001_best.jpg", "no picture"), ""),
        (_write("images/epoch_001.json", '{"best": {"reward": null}, "worst": 3}'), ""),
        (_remove("images/epoch_001_best.jpg"), ""),
    ],
)
def test_a_run_that_was_cut_off_has_a_page_all_the_same(tmp_path, damage, note):
    run = write_run(tmp_path / "run", epochs=2, size=32)
    damage(run)
    data, _ = page_of(write_report([run], tmp_path / "x.html", BASE))
    notes = data["runs"][0]["notes"]
    assert any(note in said for said in notes) if note else not notes
    whole = write_run(tmp_path / "whole", epochs=2, size=32)
    write_report([run, whole], tmp_path / "x.html", BASE)


def test_a_torn_picture_is_none(tmp_path):
    run = write_run(tmp_path / "run", epochs=1, every=1)
    _tear("eval/after_001/train_001.jpg")(run)
    data, _ = page_of(write_report([run], tmp_path / "x.html", None))
    shown = data["runs"][0]["sliders"][0]["frames"][1]["pictures"]
    assert [picture["src"] is None for picture in shown] == [False, True, False, False]


def test_a_picture_outside_the_folder_is_left_alone(tmp_path):
    run = write_run(tmp_path / "run", epochs=1, every=1)
    picture(tmp_path / "private.jpg", 1)
    file = run / "eval" / "after_001.json"
    file.write_text(file.read_text().replace("after_001/train_000.jpg", "../../private.jpg"))
    data, _ = page_of(write_report([run], tmp_path / "x.html", None))
    assert data["runs"][0]["sliders"][0]["frames"][1]["pictures"][0]["src"] is None


# --- one file, safe and small


def test_text_is_shown_and_never_run(tmp_path):
    run = write_run(tmp_path / '<script>alert("name")<', epochs=2)
    data, tags = page_of(write_report([run], tmp_path / "x.html", BASE))
    assert [attributes.get("type") for tag, attributes in tags if tag == "script"] == ["application/json", None]
    assert "img" not in {tag for tag, _ in tags}
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text and "<img" not in text and "onerror=alert(2)>" not in text
    assert data["runs"][0]["sliders"][0]["frames"][0]["pictures"][2]["prompt"] == HOSTILE
    assert data["runs"][0]["name"] == run.name


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path):
    _, tags = page_of(write_report([write_run(tmp_path / "run")], tmp_path / "x.html", BASE))
    for tag, attributes in tags:
        assert "src" not in attributes and attributes.get("href", "data:").startswith("data:"), (tag, attributes)
    template = report.TEMPLATE.read_text()
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|innerHTML|insertAdjacentHTML", template)
    # An SVG element's namespace is a name, not an address.
    assert set(re.findall(r"https?://[^\s\"'<]+", template)) == {"http://www.w3.org/2000/svg"}


def _many_evaluations(folder, kind):
    """11 evaluations of 48 pictures of 512 pixels, all one file."""
    run = write_run(folder, epochs=1, every=0)
    levels = np.linspace(0, 255, 512)[:, None, None] * [1.0, 0.7, 0.3]
    noise = np.random.default_rng(0).normal(0, {"photograph": 12, "noise": 120}[kind], (512, 512, 3))
    (run / "eval").mkdir()
    Image.fromarray((levels + noise).clip(0, 255).astype(np.uint8)).save(run / "eval" / "one.jpg", quality=95)
    for after in range(11):
        shown = [{"prompt": f"p{i}", "seed": 0, "file": "one.jpg", "scores": {"reward": 1.0}} for i in range(48)]
        document = {"epochs": after, "sets": {"train": {"diversity": 0.1, "pictures": shown}}}
        (run / "eval" / f"after_{after:03d}.json").write_text(json.dumps(document))
    return run


@pytest.mark.parametrize("kind, is_whole", [("photograph", True), ("noise", False)])
def test_eleven_evaluations_of_48_pictures_stay_below_10_mb(tmp_path, kind, is_whole):
    file = write_report([_many_evaluations(tmp_path / "run", kind)], tmp_path / "x.html", None)
    [run] = page_of(file)[0]["runs"]
    frames = run["sliders"][0]["frames"]
    assert file.stat().st_size < 10e6
    assert frames[0]["label"] == "before training" and frames[-1]["label"] == "after 10 epochs"
    assert (len(frames) == 11 and run["left_out"] is None) if is_whole else f"{len(frames)} of 11" in run["left_out"]
    with Image.open(io.BytesIO(base64.b64decode(frames[0]["pictures"][0]["src"].partition(",")[2]))) as shown:
        assert shown.size == (256, 256)


@pytest.mark.parametrize(
    "num_frames, size, budget, kept, num_pictures",
    [
        (5, 10, 1000, [0, 1, 2, 3, 4], 10),
        (5, 10, 310, [0, 2, 4], 10),
        (5, 10, 100, [0, 4], 5),
        (1, 10, 50, [0], 5),
        (0, 10, 50, [], 0),
        (2, 10, 0, [0, 1], 1),
    ],
)
def test_what_does_not_fit_is_left_out_evenly(num_frames, size, budget, kept, num_pictures):
    frames = [report.Frame(str(i), {"a": [report.Picture(None)] * 10}) for i in range(num_frames)]
    found, left_out = report.fitting_frames(frames, budget, lambda _: size)
    assert [int(frame.label) for frame in found] == kept
    assert {len(frame.sets["a"]) for frame in found} <= {num_pictures}
    assert (left_out is None) == (len(kept) == num_frames and num_pictures in (0, 10))


def test_large_pictures_are_shrunk_and_others_are_not(tmp_path):
    for size in (64, 256, 700):
        picture(tmp_path / f"{size}.jpg", 3, size)
        with Image.open(
            io.BytesIO(base64.b64decode(report.PictureCache().data_uri(tmp_path / f"{size}.jpg").partition(",")[2]))
        ) as shown:
            assert shown.size == (min(size, 256),) * 2


def test_a_picture_is_shrunk_once_for_all_pages_of_a_run_unless_it_changes(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", epochs=1, size=300)
    shrunk = []
    shrink = report._shrunk
    monkeypatch.setattr(report, "_shrunk", lambda file, width: shrunk.append(file.name) or shrink(file, width))
    first = write_report([run], tmp_path / "x.html", None).read_bytes()
    assert len(shrunk) == len(set(run.rglob("*_0*.jpg")) - {run / "images" / "epoch_000.jpg"}) == 18
    shrunk.clear()
    write_report([run], tmp_path / "x.html", None)
    assert shrunk == []
    picture(run / "eval" / "after_001" / "train_002.jpg", 77, 300)
    assert write_report([run], tmp_path / "x.html", None).read_bytes() != first and shrunk == ["train_002.jpg"]


def test_the_page_is_written_without_torch(tmp_path):
    run = write_run(tmp_path / "run", epochs=1)
    code = (
        "import sys; from pathlib import Path; from ddpo_pytorch.report import write_report\n"
        f"write_report([Path({str(run)!r})], Path({str(tmp_path / 'x.html')!r}), None)\n"
        "print(sorted({'torch', 'accelerate', 'diffusers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- the command


def run_script(cwd, *arguments):
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_script_writes_into_the_run_or_here(tmp_path):
    runs = [write_run(tmp_path / name, epochs=1) for name in ("one", "two")]
    assert run_script(tmp_path, "one").returncode == 0
    data, _ = page_of(tmp_path / "one" / "report.html")
    assert data["has_base"] and any(row["key"] == "train.learning_rate" for row in data["options"])
    done = run_script(tmp_path, *runs, runs[0])
    assert (done.returncode, done.stdout, done.stderr) == (0, "report.html\n", "")
    assert len(page_of(tmp_path / "report.html")[0]["runs"]) == 2
    assert run_script(tmp_path, "one", "two", "--output", "both.html").returncode == 0
    assert (tmp_path / "both.html").is_file() and not list(tmp_path.rglob("*.writing"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["logs/nowhere"], 'there is no folder "logs/nowhere" here'),
        (["."], '"." is no run\'s folder: it has neither config.json nor metrics.jsonl; runs in it: run'),
        (["run/images"], '"run/images" is no run\'s folder'),
        (["run/config.json"], 'there is no folder "run/config.json"'),
        (["run", "--output", "run"], '"run" is a folder'),
        (["run", "--output", "no/x.html"], 'cannot write the report "no/x.html"'),
        ([], "the following arguments are required: RUN"),
        (["run", "--colour", "red"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_input_gives_one_line(tmp_path, arguments, message):
    write_run(tmp_path / "run", epochs=1, every=0)
    done = run_script(tmp_path, *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_an_earlier_page_stays_whole_when_a_run_is_gone(tmp_path):
    run = write_run(tmp_path / "run", epochs=1, every=0)
    before = write_report([run], tmp_path / "x.html", None).read_bytes()
    with pytest.raises(ConfigError):
        write_report([run, tmp_path / "gone"], tmp_path / "x.html", None)
    assert (tmp_path / "x.html").read_bytes() == before


# --- in a browser

DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser():
    """A real one, headless, that cannot reach any network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):  # as root, in containers
        options.add_argument(f"--{switch}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Files by name: of whole runs, of some that were cut off, and of several side by side."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = ("a cat", "a dog on a very long red sofa in the rain", HOSTILE)
    first = write_run(folder / "clip_1e-4", epochs=12, every=4, prompts=prompts)
    second = write_run(folder / "clip_3e-4_2026.12.04", epochs=9, every=4, planned=12, samples=12, slope=0.08, start=-2)
    plain = write_run(folder / "no_evaluations", epochs=3, every=0)
    # Killed in epoch 0, and a run with no numbers at all, beside others
    cut = write_run(folder / "killed", epochs=2, every=0)
    _keep_lines(1)(cut)
    empty = write_run(folder / "empty", epochs=1, every=0)
    _remove("metrics.jsonl", "images")(empty)
    runs = {"one": [first], "two": [first, second], "plain": [plain], "mixed": [plain, cut, first, empty]}
    runs |= {"killed": [cut], "empty": [empty]}
    return {name: write_report(folders, folder / f"{name}.html", BASE) for name, folders in runs.items()}


def show(browser, file, size=DESKTOP, scheme="light"):
    """Open a page; nothing may go wrong on it, and it may ask for nothing but itself."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("performance")
    browser.get(file.as_uri())
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]


def element(browser, css):
    return browser.find_element("css selector", css)


def cards(browser):
    """Curves' cards by title."""
    found = browser.find_elements("css selector", "#curves figure")
    return {card.find_element("css selector", "h4").text: card for card in found}


def choose(browser, name):
    """Press the round button of this name."""
    browser.execute_script(
        "[...document.querySelectorAll('fieldset label')].find(l => l.textContent === arguments[0]).click()",
        name,
    )


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["one", "two", "plain", "mixed", "killed", "empty"])
def test_the_page_fits_the_window_and_says_nothing_in_the_console(browser, pages, name, size):
    show(browser, pages[name], size)
    assert browser.execute_script("return innerWidth") == size[0]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    for path in browser.execute_script(
        "return [...document.querySelectorAll('#curves .plot path')].map(p => p.getAttribute('d'))"
    ):
        assert re.fullmatch(r"M[-\d. L]+Z?", path), path
    inside = "const box = s.getBoundingClientRect(); return box.width > 200 && box.right <= innerWidth"
    assert browser.execute_script(f"return [...document.querySelectorAll('.plot > svg')].every(s => {{ {inside} }})")


def test_hostile_text_is_shown_as_text(browser, pages):
    show(browser, pages["one"])  # an alert would be an error from here on
    captions = browser.execute_script("return [...document.querySelectorAll('#pictures b')].map(b => b.textContent)")
    assert HOSTILE in captions
    assert browser.execute_script("return document.querySelectorAll('img[onerror], img[src=x]').length") == 0


def test_the_slider_changes_the_pictures(browser, pages):
    show(browser, pages["one"])

    def shown():
        sources = browser.execute_script("return [...document.querySelectorAll('#pictures img')].map(i => i.src)")
        return element(browser, "#pictures output").text, sources, element(browser, "#pictures .pictures").text

    def key(name):
        element(browser, "#slider").send_keys(name)
        return shown()

    from selenium.webdriver.common.keys import Keys

    last, last_sources, last_text = shown()
    assert last == "after 12 epochs" and len(set(last_sources)) == 6
    assert "reward -0.96 (+1.44)" in last_text and "seed 1" in last_text and "TimeoutError" in last_text
    label, sources, _ = key(Keys.ARROW_LEFT)
    assert label == "after 8 epochs" and not set(sources) & set(last_sources)
    label, _, text = key(Keys.HOME)
    assert label == "before training" and "reward -2.4\n" in text and "(+" not in text
    assert element(browser, "#slider").get_attribute("aria-valuetext") == label
    element(browser, "#pictures button:last-of-type").click()
    assert shown()[0] == "after 4 epochs"
    choose(browser, "unseen_animals")
    other_label, other_sources, _ = shown()
    assert other_label == "after 4 epochs" and len(set(other_sources)) == 6
    # They are pictures, and small ones are enlarged without a blur.
    states = browser.execute_script(
        "return [...document.querySelectorAll('#pictures img')].map(i => [i.naturalWidth, i.className])"
    )
    assert states == [[64, "small"]] * 6


def test_training_samples_stand_in_for_evaluations(browser, pages):
    show(browser, pages["plain"])
    assert element(browser, "#pictures output").text == "epoch 2"
    [source] = browser.execute_script("return [...document.querySelectorAll('#pictures img')].map(i => i.src)")
    element(browser, "#pictures button").click()
    assert element(browser, "#pictures img").get_attribute("src") != source


def test_the_axis_can_be_epochs_or_queries(browser, pages):
    show(browser, pages["one"])
    labels = "[...plot.querySelectorAll('.xtick')].map(tick => tick.textContent)"
    ticks = f"return [...document.querySelectorAll('.plot')].map(plot => {labels})"
    of_epochs = browser.execute_script(ticks)
    choose(browser, "reward queries")
    of_queries = browser.execute_script(ticks)
    assert of_epochs[0][0] == "0" and of_epochs[0][-1] == "12" and len(of_epochs[0]) > 4
    assert of_queries[0][0] == "0" and 80 <= int(of_queries[0][-1]) <= 96
    assert all(a != b for a, b in zip(of_epochs, of_queries, strict=True))


def test_values_are_shown_under_the_pointer_and_by_keys(browser, pages):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(browser, pages["one"])
    card = cards(browser)["Reward"]
    plot, tip = card.find_element("css selector", ".plot > svg"), card.find_element("css selector", ".tip")
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser, duration=0).move_to_element(plot).perform()
    assert re.fullmatch(r"epoch 6 · 56 queries\nmean -1\.\d+ ± 0\.21", tip.text)
    ActionChains(browser, duration=0).move_to_element(element(browser, "h1")).perform()
    assert not tip.is_displayed()
    plot.send_keys(Keys.HOME)
    assert tip.text.startswith("epoch 0 · 8 queries")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("epoch 1 · 16 queries")
    assert plot.get_attribute("aria-label").startswith("Reward: mean from -2.")


def test_two_runs_have_a_line_each_in_colours_of_their_own(browser, pages):
    from selenium.webdriver.common.keys import Keys

    show(browser, pages["two"])
    code = (
        "return [...arguments[0].querySelectorAll('.plot path.line')]"
        ".map(p => [p.dataset.run, getComputedStyle(p).stroke, getComputedStyle(p).strokeDasharray])"
    )
    lines = browser.execute_script(code, cards(browser)["Reward"])
    assert [run for run, *_ in lines] == ["0", "1"] and lines[0][1] != lines[1][1]
    # Of a run that has ended before, nothing is said; 8 and 12 samples an epoch make other numbers of queries.
    plot = cards(browser)["Reward"].find_element("css selector", ".plot > svg")
    tip = cards(browser)["Reward"].find_element("css selector", ".tip")
    plot.send_keys(Keys.HOME)
    assert re.fullmatch(r"epoch 0\nclip_1e-4 -2\.\d+ ± 0\.21\nclip_3e-4_2026\.12\.04 -\d\.\d+ ± 0\.21", tip.text)
    plot.send_keys(Keys.END)
    assert re.fullmatch(r"epoch 11\nclip_1e-4 -1\.\d+ ± 0\.21", tip.text)
    choose(browser, "reward queries")
    cards(browser)["Reward"].find_element("css selector", ".plot > svg").send_keys(Keys.END)
    assert tip.text.startswith("108 queries\n") and tip.text.endswith(" (epoch 8)")
    # Prompt sets of one run share its colour, and differ in their dashes.
    lines = browser.execute_script(code, cards(browser)["Evaluation: reward"])
    assert len(lines) == 4 and len({colour for _, colour, _ in lines}) == 2 and len(set(map(tuple, lines))) == 4
    choose(browser, "clip_3e-4_2026.12.04")
    assert element(browser, "#pictures output").text == "after 9 epochs"
    assert browser.execute_script("return document.querySelectorAll('#pictures figure').length") == 4
    assert browser.execute_script("return document.querySelectorAll('#options tr.varies').length") > 0


def test_dark_and_light_differ_and_can_be_read(browser, pages):
    def contrast(one, other):
        def luminance(colour):
            parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
            linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    backgrounds = set()
    for scheme in ("light", "dark"):
        show(browser, pages["two"], scheme=scheme)
        card = browser.execute_script(style, ".card", "backgroundColor")
        backgrounds.add(card)
        assert contrast(browser.execute_script(style, "h4", "color"), card) > 7
        assert contrast(browser.execute_script(style, "figcaption.soft", "color"), card) > 4.5
        for colour in range(6):  # WCAG asks 3 of what is drawn
            stroke = browser.execute_script(
                "const p = document.querySelector('.plot path.line'); p.setAttribute('class', `line c${arguments[0]}`);"
                "return getComputedStyle(p).stroke",
                colour,
            )
            assert contrast(stroke, card) > 3, (scheme, colour)
    assert len(backgrounds) == 2


def test_all_options_can_be_shown(browser, pages):
    show(browser, pages["one"])
    rows = "return document.querySelectorAll('#options .card:first-of-type tbody tr').length"
    few = browser.execute_script(rows)
    browser.execute_script("document.querySelectorAll('#options fieldset label')[1].click()")
    assert browser.execute_script(rows) > few > 0
