"""The same prompts and noise every time, statistics against scipy and by hand, and what ends or keeps a run."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import read_metrics, train
from PIL import Image
from safetensors.torch import load_file
from scipy import stats

from ddpo_pytorch import evaluation, policy
from ddpo_pytorch.checkpoints import read_state
from ddpo_pytorch.evaluation import Evaluations, Picture, Progress
from ddpo_pytorch.prompts import PromptSet
from ddpo_pytorch.rewards import colorfulness, jpeg_compressibility
from ddpo_pytorch.scoring import RewardWorkers
from ddpo_pytorch.weighted_sum import Component, WeightedSum

ANIMALS = PromptSet("animals", ("cat", "dog", "fox"), ({}, {}, {}))


@pytest.fixture
def model(pipeline):
    pipeline.scheduler.set_timesteps(2)
    return policy.make_policy(pipeline, pipeline.unet.eval(), pipeline.scheduler, 5.0, 1.0)


def workers_for(**reward_fns):
    return {
        label: RewardWorkers(function, label, torch.device("cpu"), 1, 60.0, 1, math.inf)
        for label, function in reward_fns.items()
    }


def pictures_of(model, batch_size=4, share=(0, 1), **reward_fns):
    workers = workers_for(**(reward_fns or {"reward": jpeg_compressibility()}))
    return evaluation.draw_and_score(model, [ANIMALS], range(2), batch_size, workers, share)


# --- pictures


def test_a_picture_is_a_function_of_its_prompt_and_seed_alone(model):
    whole = pictures_of(model)
    assert [(i, p.prompt, p.seed) for i, p in whole] == [
        (0, "cat", 0),
        (1, "cat", 1),
        (2, "dog", 0),
        (3, "dog", 1),
        (4, "fox", 0),
        (5, "fox", 1),
    ]
    torch.randn(7)  # nor of what was drawn before
    alone = pictures_of(model, batch_size=1)
    parts = sorted(pictures_of(model, share=(0, 2)) + pictures_of(model, share=(1, 2)), key=lambda entry: entry[0])
    for others in (alone, parts):
        for (_, a), (_, b) in zip(whole, others, strict=True):
            assert a.key == b.key and np.abs(a.image.astype(int) - b.image).max() <= 1  # rounding alone
    assert len({p.image.tobytes() for _, p in whole}) == 6


def test_drawing_leaves_no_trace_in_random_state_or_in_the_policy(model):
    state, embeds = torch.get_rng_state(), dict(model._embeds)
    pictures_of(model)
    assert torch.equal(torch.get_rng_state(), state) and model._embeds == embeds


def test_a_weighted_sum_is_seen_by_its_components_whose_scales_do_not_move(model):
    mixed = WeightedSum(
        [Component("size", 1.0, True, jpeg_compressibility()), Component("colour", 1.0, True, colorfulness())]
    )
    pictures = pictures_of(model, reward=mixed, other=jpeg_compressibility())
    assert {frozenset(p.scores) for _, p in pictures} == {frozenset({"size", "colour", "other"})}
    assert all(p.scores["size"] == p.scores["other"] for _, p in pictures)
    assert mixed.moments["size"].count == 0


def test_a_reward_that_fails_is_nan_with_its_reason_and_ends_nothing(model):
    def failing(images, prompts, metadata):
        return [math.nan] * len(prompts), {"failures": ["no answer"] * len(prompts)}

    pictures = [picture for _, picture in pictures_of(model, reward=failing, size=jpeg_compressibility())]
    assert all(math.isnan(p.scores["reward"]) and math.isfinite(p.scores["size"]) for p in pictures)
    assert {p.failure for p in pictures} == {"no answer"}
    values = evaluation.eval_metrics(3, pictures, {})
    assert math.isnan(values["eval/animals/reward_mean"]) and math.isfinite(values["eval/animals/size_mean"])


# --- statistics


def test_an_estimate_is_scipys():
    numbers = [1.0, 2.5, -0.5, 4.0, math.nan]
    found = evaluation.estimate(numbers)
    scored = np.array(numbers[:4])
    interval = stats.ttest_1samp(scored, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(scored.mean()) and found.count == 4
    assert found.standard_error == pytest.approx(stats.sem(scored))
    assert found.interval == pytest.approx((interval.low, interval.high))
    assert math.isnan(evaluation.estimate([1.0]).standard_error) and evaluation.estimate([]).count == 0


def picture(prompt, seed, score, level=0, set_name="animals"):
    return Picture(set_name, prompt, seed, np.full((2, 2, 3), level, dtype=np.uint8), {"reward": score})


def test_differences_are_between_pictures_of_the_same_prompt_and_seed():
    before = [picture("cat", 0, 1.0), picture("cat", 1, 2.0), picture("dog", 0, 10.0), picture("dog", 1, 20.0)]
    after = [picture("dog", 1, 21.0), picture("cat", 0, 3.0), picture("cat", 1, 2.0), picture("dog", 0, 14.0)]
    found = evaluation.compared(after, before)["rewards"]["reward"]
    assert found["mean"] == 10.0
    paired = stats.ttest_rel([21, 3, 2, 14], [20, 1, 2, 10])
    interval = paired.confidence_interval(0.95)
    assert found["change"]["mean"] == pytest.approx(1.75)
    assert found["change"]["ci95"] == pytest.approx([interval.low, interval.high])
    # Over prompts there are two numbers: cat's 1.0 and dog's 2.5.
    over_prompts = found["change_over_prompts"]
    assert (over_prompts["mean"], over_prompts["count"]) == (1.75, 2)
    assert over_prompts["standard_error"] == pytest.approx(stats.sem([1.0, 2.5]))
    assert "change" not in evaluation.compared(before, [])["rewards"]["reward"]


def test_diversity_is_the_mean_distance_within_a_prompt_by_hand():
    # cat: levels 0, 51, 102 are 0, 0.2 and 0.4, so pairs are 0.2, 0.4 and 0.2 apart; dog: 0.6; fox has no pair
    levels = {"cat": [0, 51, 102], "dog": [0, 153], "fox": [7]}
    pictures = [picture(prompt, i, 0.0, level) for prompt, own in levels.items() for i, level in enumerate(own)]
    assert evaluation.diversity(pictures) == pytest.approx(((0.2 + 0.4 + 0.2) / 3 + 0.6) / 2)
    assert math.isnan(evaluation.diversity([picture("cat", 0, 0.0)]))
    assert evaluation.diversity([picture("cat", i, 0.0) for i in range(2)]) == 0


def test_metrics_compare_with_the_start(tmp_path):
    evaluations = Evaluations(tmp_path / "eval")
    evaluations.write(0, [picture("cat", 0, 1.0), picture("cat", 1, math.nan), picture("dog", 0, 5.0)])
    after = [picture("cat", 0, 2.0), picture("cat", 1, 9.0), picture("dog", 0, 8.0)]
    values = evaluation.eval_metrics(4, after, evaluations.read_scores(0))
    assert values["eval/epoch"] == 4 and values["eval/animals/reward_mean"] == pytest.approx(19 / 3)
    assert values["eval/animals/reward_change"] == 2.0  # of 1 and 3; what failed before has no difference
    assert values["eval/animals/reward_change_se"] == pytest.approx(1.0)
    assert "eval/animals/reward_change" not in evaluation.eval_metrics(0, after, {})
    document = json.loads((tmp_path / "eval" / "after_000.json").read_text())
    [_, failed, _] = document["sets"]["animals"]["pictures"]
    assert failed["scores"] == {"reward": None}
    assert Image.open(tmp_path / "eval" / failed["file"]).size == (2, 2)


def test_evaluations_of_a_future_that_is_not_this_runs_are_forgotten(tmp_path):
    evaluations = Evaluations(tmp_path)
    for epochs in (0, 2, 4, 1000):
        evaluations.write(epochs, [picture("cat", 0, float(epochs))])
    evaluations.forget_later(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "after_000",
        "after_000.json",
        "after_002",
        "after_002.json",
    ]
    assert evaluations.read_scores(4) == {}
    (tmp_path / "after_002.json").write_text('{"sets": {"animals":')
    assert evaluations.read_scores(2) == {}


# --- best states, and the end


@pytest.mark.parametrize(
    "metric, wanted", [("eval/a/reward_mean", [True, True, False]), ("-eval/a/reward_mean", [True, False, True])]
)
def test_the_best_is_the_highest_or_with_a_minus_the_lowest(metric, wanted):
    progress = Progress()
    values = [{"eval/epoch": i, "eval/a/reward_mean": mean} for i, mean in enumerate([2.0, 3.0, 1.0])]
    assert [evaluation.is_best(progress, v, metric) for v in values] == wanted
    assert not evaluation.is_best(progress, {"eval/epoch": 3, "eval/a/reward_mean": math.nan}, metric)
    assert not evaluation.is_best(progress, values[1 if wanted[1] else 2], metric)  # as good is no better
    taken_up = Progress()
    taken_up.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert taken_up == progress


def drops(means, patience, metric="eval/animals/reward_mean", noise=0.1):
    """For each of several evaluations whether the run would end there."""
    progress, kept, ends = Progress(), {}, []
    for epochs, mean in enumerate(means):
        generator = np.random.default_rng(epochs)
        pictures = [picture("cat", i, mean + noise * generator.uniform(-1, 1)) for i in range(8)]
        values = evaluation.eval_metrics(epochs, pictures, {})
        at_best = kept.get(progress.stop_best_epochs, {})
        ends.append(evaluation.has_dropped(progress, pictures, values, metric, at_best, patience))
        kept[epochs] = evaluation.scores_of(pictures, "animals", "reward")
    return ends


def test_a_clear_drop_for_long_enough_ends_a_run():
    assert drops([1, 2, 1, 1, 1], patience=2) == [False, False, False, True, True]
    assert drops([1, 2, 1, 3, 2, 2], patience=2) == [False] * 5 + [True]
    assert drops([1, 2, 1, 1.99, 1, 1], patience=2) == [False] * 5 + [True]
    assert drops([3, 2, 3, 3], patience=1, metric="-eval/animals/reward_mean") == [False, False, True, True]


def test_a_drop_within_the_noise_ends_nothing():
    assert drops([2, 1.95, 1.95, 1.95], patience=1, noise=1.0) == [False] * 4
    # Of a single picture there is no noise to be told.
    assert drops([2, 1.9], patience=1, noise=0.0) == [False, True]


# --- in a run

EVALUATED = [
    "--config.num_epochs=4",
    "--config.save_freq=2",
    "--config.eval.every=2",
    "--config.eval.prompts=train,other=simple_animals.txt[40:45]",
    "--config.eval.num_prompts=3",
    "--config.eval.rewards=colorfulness",
]


def weights_of(folder, name="checkpoints/checkpoint_4"):
    return load_file(folder / name / "pytorch_lora_weights.safetensors")


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_is_the_same_to_the_last_bit_with_and_without_evaluations(tmp_path, random_sd, num_processes):
    folders = []
    for name, options in (("with", EVALUATED), ("without", ["--config.num_epochs=4", "--config.save_freq=2"])):
        (tmp_path / name).mkdir()
        folders.append(train(random_sd, tmp_path / name, *options, num_processes=num_processes))
    a, b = map(weights_of, folders)
    assert all(torch.equal(a[key], b[key]) for key in a) and a.keys() == b.keys()
    told, untold = map(read_metrics, folders)
    assert [line for line in told if "eval/epoch" not in line] == untold
    evaluated = [line for line in told if "eval/epoch" in line]
    assert [line["eval/epoch"] for line in evaluated] == [0, 2, 4]
    for line in evaluated:
        for set_name in ("train", "other"):
            for label in ("reward", "colorfulness"):
                assert math.isfinite(line[f"eval/{set_name}/{label}_mean"]) and line[f"eval/{set_name}/{label}_se"] > 0
    assert evaluated[0]["eval/other/reward_change"] == 0 != evaluated[2]["eval/other/reward_change"]
    document = json.loads((folders[0] / "eval" / "after_004.json").read_text())
    assert [len(document["sets"][name]["pictures"]) for name in ("train", "other")] == [6, 6]
    assert [p["prompt"] for p in document["sets"]["other"]["pictures"]] == [
        animal for animal in ("camel", "bat", "gorilla") for _ in range(2)
    ]


@pytest.mark.slow
def test_a_resumed_run_has_the_evaluations_and_the_best_state_of_one_that_was_not_stopped(tmp_path, random_sd):
    best = ["--config.save_best=eval/train/colorfulness_change", "--config.early_stop=eval/train/reward_mean"]
    folders = []
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
        if name == "resumed":
            folder = train(random_sd, tmp_path / name, *EVALUATED, *best, "--config.num_epochs=2")
            best = [*best, f"--config.resume_from={folder}"]
        folders.append(train(random_sd, tmp_path / name, *EVALUATED, *best))
    assert read_metrics(folders[0]) == read_metrics(folders[1])
    states = [read_state(folder / "checkpoints" / "checkpoint_4") for folder in folders]
    assert states[0].evaluation == states[1].evaluation
    [kept] = {tuple(p.name for p in (folder / "best").glob("checkpoint_*")) for folder in folders}
    evaluated = [line for line in read_metrics(folders[0]) if "eval/epoch" in line]
    at_best = max(evaluated[1:], key=lambda line: line["eval/train/colorfulness_change"])
    if at_best["eval/train/colorfulness_change"] > 0:  # else the start was best, of which there is no checkpoint
        assert kept == (f"checkpoint_{at_best['eval/epoch']}",)
        assert states[0].evaluation["best"] == at_best["eval/train/colorfulness_change"]
        a, b = (weights_of(folder, f"best/{kept[0]}") for folder in folders)
        assert all(torch.equal(a[key], b[key]) for key in a)


FALLING = """
calls = 0
def falling():
    def reward(images, prompts, metadata):
        global calls
        calls += 1
        return [-calls * 10 + i for i in range(len(prompts))]
    return reward
"""


def test_a_run_whose_held_out_reward_falls_ends_early_with_its_state_saved_and_says_so_again(tmp_path, random_sd):
    from conftest import ROOT, SMALL_RUN, launch

    (tmp_path / "mine.py").write_text(FALLING)
    arguments = ["--config", str(ROOT / "config" / "base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN]
    arguments += ["--config.num_epochs=9", "--config.save_freq=0", "--config.resume=auto", "--config.eval.every=1"]
    arguments += ["--config.eval.prompts=train", "--config.eval.rewards=mine.py:falling"]
    arguments += ["--config.early_stop=eval/train/falling_mean"]
    result = launch(arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "stopped early: eval/train/falling_mean was clearly worse in 2 evaluations in a row" in result.stdout
    [folder] = (tmp_path / "logs").glob("[!.]*")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_2"]
    again = launch(arguments, tmp_path)
    assert again.returncode == 0 and "was stopped early after 2 epochs" in again.stdout
    further = launch([*arguments[:-1], "--config.num_epochs=3"], tmp_path)
    assert further.returncode == 0 and (folder / "checkpoints" / "checkpoint_3").is_dir(), further.stderr


DEADLY = """
import os, signal
calls = 0
def deadly():
    def reward(images, prompts, metadata):
        global calls
        calls += 1
        if calls == int(os.environ.get("DIES_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return [float(images[i].mean()) for i in range(len(prompts))]
    return reward
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_evaluates_continues_bit_for_bit(tmp_path, random_sd):
    from conftest import ROOT, SMALL_RUN, launch

    best = ["--config.save_best=eval/train/deadly_mean", "--config.eval.rewards=mine.py:deadly"]
    arguments = ["--config", str(ROOT / "config" / "base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN]
    arguments += [*EVALUATED[:-1], *best, "--config.resume=auto", "--config.save_freq=1"]
    folders = []
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(DEADLY)
        if name == "killed":  # each evaluation is of six batches: in the second one, after two epochs
            assert launch(arguments, tmp_path / name, DIES_AT="8").returncode == -9
        result = launch(arguments, tmp_path / name)
        assert result.returncode == 0, result.stderr
        [folder] = (tmp_path / name / "logs").glob("[!.]*")
        folders.append(folder)
    assert "resumed:           after 1 epochs" in result.stdout
    a, b = map(weights_of, folders)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert read_metrics(folders[0]) == read_metrics(folders[1])
    names = [sorted(p.relative_to(folder) for p in folder.rglob("*") if "eval" in str(p)) for folder in folders]
    assert names[0] == names[1]
