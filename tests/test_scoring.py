import math
import threading
import time

import numpy as np
import pytest
import torch

from ddpo_pytorch.scoring import RewardFailure, RewardWorkers, Scores, checked_scores


@pytest.mark.parametrize(
    "result",
    [
        [1, 2.5],
        np.array([1, 2.5], dtype=np.float32),
        torch.tensor([1, 2.5], requires_grad=True),
        torch.tensor([1, 2.5], dtype=torch.bfloat16),
        ([1, 2.5], {"info": 1}),
        [torch.tensor(1), torch.tensor(2.5)],
        [torch.tensor(1.0, requires_grad=True), torch.tensor(2.5, dtype=torch.bfloat16)],
        (np.float32(1), 2.5),
    ],
    ids=repr,
)
def test_rewards_may_come_in_many_forms(result):
    rewards = checked_scores(result, 2, "f").rewards
    assert rewards.dtype == np.float64 and rewards.tolist() == [1, 2.5]


def test_a_reward_whose_square_overflows_is_a_failed_sample():
    scores = checked_scores([1e100, -1e308], 2, "f")
    np.testing.assert_array_equal(scores.rewards, [1e100, math.nan])
    assert scores.failures == [None, "it returned -1e+308"]


def test_a_reward_that_is_no_finite_number_is_a_failed_sample():
    scores = checked_scores(([1, None, math.inf, math.nan], {"failures": [None, "no face", None, None]}), 4, "f")
    np.testing.assert_array_equal(scores.rewards, [1, *[math.nan] * 3])
    assert scores.failures == [None, "no face", "it returned inf", "it returned nan"]


@pytest.mark.parametrize(
    "result, says",
    [
        ([1.0], r"shape \(1,\)"),
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
        (3.0, r"shape \(\)"),
        (["good", "bad"], "not numbers"),
        ([[1], [1, 2]], "not numbers"),
        (None, "returned None"),
        (torch.zeros(2, dtype=torch.complex64), "not numbers"),
    ],
    ids=repr,
)
def test_a_wrong_result_is_refused_with_the_functions_name(result, says):
    with pytest.raises(ValueError, match=rf"reward function mine\.py:f .*{says}.*shape \(2,\)"):
        checked_scores(result, 2, "mine.py:f")


def test_of_the_info_what_has_one_entry_per_image_is_kept():
    info = {
        "sharpness": torch.tensor([0.5, 2.0], requires_grad=True),
        "count": [3, None],
        "reply": ["a cat", ""],
        "scale": 3.0,
        "histogram": np.zeros(7),
        "embeds": np.zeros((2, 5)),
        "word": "ab",
        "mixed": ["a", 1],
        "mean": np.array(1.5),
        "tensor mean": torch.tensor(1.5),
        "failures": None,
    }
    scores = checked_scores(([1.0, 2.0], info), 2, "f")
    assert set(scores.details) == {"sharpness", "count"} and scores.notes == {"reply": ["a cat", ""]}
    np.testing.assert_array_equal(scores.details["sharpness"], [0.5, 2.0])
    np.testing.assert_array_equal(scores.details["count"], [3, np.nan])
    assert scores.details["count"].dtype == np.float64 and scores.failures == [None, None]


@pytest.mark.parametrize("failures", [["why"], "no", 3])
def test_failures_must_be_one_per_image(failures):
    with pytest.raises(ValueError, match='reward function f returned "failures".*one text or None per image, 2 in all'):
        checked_scores(([1.0, 2.0], {"failures": failures}), 2, "f")


def test_batches_are_put_together_though_some_say_less():
    parts = [
        Scores(np.array([1.0]), {"a": np.array([5.0])}, {"reply": ["yes"]}, [None]),
        Scores(np.array([np.nan, 3.0]), {}, {}, ["lost", None]),
    ]
    whole = Scores.cat(parts)
    np.testing.assert_array_equal(whole.rewards, [1, np.nan, 3])
    np.testing.assert_array_equal(whole.details["a"], [5, np.nan, np.nan])
    assert whole.notes == {"reply": ["yes", "", ""]} and whole.failures == [None, "lost", None]


def workers_for(reward_fn, timeout=60.0, samples=8, max_failed_fraction=0.1, num_workers=1):
    return RewardWorkers(reward_fn, "mine", torch.device("cpu"), num_workers, timeout, samples, max_failed_fraction)


def submit(workers, prompts):
    workers.submit(torch.rand(len(prompts), 3, 4, 4), list(prompts), [{}] * len(prompts))


def test_scores_come_in_the_order_of_submission_and_only_once():
    def slow_first(images, prompts, metadata):
        time.sleep(0.3 if "a" in prompts else 0)
        return [float(ord(p)) for p in prompts]

    workers = workers_for(slow_first, num_workers=2)
    submit(workers, "ab")
    submit(workers, "cd")
    batches = []
    assert len(workers) == 2
    scores = workers.collect(on_batch=lambda: batches.append(1))
    assert scores.rewards.tolist() == [97, 98, 99, 100] and len(batches) == 2 and len(workers) == 0
    submit(workers, "e")
    assert workers.collect(on_batch=lambda: None).rewards.tolist() == [101]


@pytest.mark.parametrize("sampling, hidden", [(0.6, 1.0), (0.0, 0.0), (0.15, 0.5)])
def test_the_share_of_the_reward_that_sampling_hid_is_known(sampling, hidden):
    workers = workers_for(lambda images, prompts, metadata: time.sleep(0.3) or [1.0] * len(prompts))
    workers.submit(torch.zeros(2, 3, 8, 8), ["a", "b"], [{}, {}])
    time.sleep(sampling)
    workers.collect(lambda: None)
    assert workers.hidden_share == pytest.approx(hidden, abs=0.3)


def test_on_a_cpu_rewards_keep_to_one_thread_and_leave_the_trainers_alone():
    """Two pools of OpenMP threads on the same cores slow each other down, also when one has nothing to do."""
    torch.set_num_threads(2)
    workers = workers_for(lambda images, prompts, metadata: [float(torch.get_num_threads())] * len(prompts))
    submit(workers, "ab")
    assert workers.collect(on_batch=lambda: None).rewards.tolist() == [1, 1]
    assert torch.get_num_threads() == 2


def test_a_reward_that_sleeps_for_ever_hits_the_timeout():
    released = threading.Event()
    workers = workers_for(lambda images, prompts, metadata: released.wait() and [0.0], timeout=0.5)
    submit(workers, "a")
    submit(workers, "b")  # waits for the only thread: its own time has not begun
    started = time.monotonic()
    with pytest.raises(RewardFailure, match=r"reward function mine took longer than config.reward_timeout, 0.5 s"):
        workers.collect(on_batch=lambda: None)
    assert time.monotonic() - started < 5
    workers.close()
    released.set()


def test_waiting_can_be_ended_from_outside():
    released = threading.Event()
    workers = workers_for(lambda images, prompts, metadata: released.wait() and [0.0])
    submit(workers, "a")

    def give_up():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.collect(on_batch=lambda: None, on_wait=give_up)
    released.set()


def test_too_many_failures_are_told_while_sampling_goes_on_with_their_reasons():
    def half(images, prompts, metadata):
        reasons = ["HTTP 503 from http://there"] * (len(prompts) - 1) + ["no reply"]
        return [math.nan] * len(prompts), {"failures": reasons}

    workers = workers_for(half, samples=30, max_failed_fraction=0.1)
    submit(workers, "abc")
    deadline = time.monotonic() + 30
    while not workers._jobs[0].future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    workers.check()  # 3 of 30 are allowed
    submit(workers, "d")
    says = (
        r"reward function mine failed for 4 of 30 samples.*max_failed_fraction 0.1: "
        r"2 x HTTP 503 from http://there; 2 x no reply"
    )
    with pytest.raises(RewardFailure, match=says):
        workers.collect(on_batch=lambda: None)


def test_a_reward_that_raises_is_told_while_sampling_goes_on():
    def broken(images, prompts, metadata):
        raise KeyError("answers")

    workers = workers_for(broken)
    submit(workers, "ab")
    workers._jobs[0].future.exception(timeout=30)
    with pytest.raises(RewardFailure, match="reward function mine failed with KeyError: 'answers'"):
        workers.check()


def test_a_reward_that_would_end_the_program_is_a_failure_of_the_run():
    def leaving(images, prompts, metadata):
        raise SystemExit(0)

    workers = workers_for(leaving)
    submit(workers, "a")
    with pytest.raises(RewardFailure, match="reward function mine failed with SystemExit: 0"):
        workers.collect(on_batch=lambda: None)


def test_failures_of_all_processes_are_counted_together():
    """Another process has three failures already; 10 % of 40 are four."""
    counters = {"failed_samples/1": 3}

    def count_together(name, amount):
        counters[name] = counters.get(name, 0) + amount
        return counters[name]

    workers = RewardWorkers(
        lambda images, prompts, metadata: [math.nan if p == "x" else 0.0 for p in prompts],
        *("mine", torch.device("cpu"), 1, 60.0, 40, 0.1, count_together),
    )
    submit(workers, "xxaa")
    workers.collect(on_batch=lambda: None)
    assert counters == {"failed_samples/1": 3, "failed_samples/0": 2}
    submit(workers, "xaaa")
    workers.collect(on_batch=lambda: None)
    counters["failed_samples/2"] = 4
    submit(workers, "xaaa")
    with pytest.raises(RewardFailure, match="failed for 5 of 40 samples"):
        workers.collect(on_batch=lambda: None)


@pytest.mark.parametrize("device, index", [("cuda", 3), ("cuda:1", 1)])
def test_threads_work_on_the_gpu_of_their_process(monkeypatch, device, index):
    """A single process has the device "cuda" without a number."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    workers = RewardWorkers(lambda i, p, m: [0.0] * len(p), "mine", torch.device(device), 1, 60.0, 8, 0.1)
    submit(workers, "a")
    workers.collect(on_batch=lambda: None)
    assert chosen == [index]
