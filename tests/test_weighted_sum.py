import numpy as np
import pytest

from ddpo_pytorch.named_functions import ConfigError
from ddpo_pytorch.rewards import resolve_components, weighted_sum
from ddpo_pytorch.weighted_sum import Component, RunningMoments, WeightedSum


def test_running_moments_equal_those_of_all_numbers_at_once():
    generator = np.random.default_rng(0)
    batches = [generator.normal(1e6, 3.0, size) for size in (1, 7, 100, 2)]
    moments = RunningMoments()
    for batch in batches:
        moments.update(np.append(batch, np.nan))
    everything = np.concatenate(batches)
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(everything.mean(), rel=1e-14)
    assert moments.std == pytest.approx(everything.std(), rel=1e-9)


def two(normalize=True):
    return WeightedSum(
        [
            Component("big", 2.0, normalize, lambda images, prompts, metadata: images * 100),
            Component("small", -1.0, True, lambda images, prompts, metadata: (images, {"half": images / 2})),
        ]
    )


def test_components_are_weighted_on_scales_of_their_own():
    mixed = two()
    own = {"big": np.array([100.0, 300.0]), "small": np.array([1.0, 3.0])}
    # Both are -1 and 1 on their own scales.
    np.testing.assert_allclose(mixed.update(own), [-1, 1])
    # Seen so far: 1, 3, 5, 7, mean 4, deviation sqrt(5); the older samples keep their part in it.
    own = {"big": np.array([500.0, 700.0]), "small": np.array([5.0, 7.0])}
    np.testing.assert_allclose(mixed.update(own), np.array([1, 3]) / np.sqrt(5))


def test_a_component_may_be_added_as_it_is():
    own = {"big": np.array([100.0, 300.0]), "small": np.array([1.0, 3.0])}
    np.testing.assert_allclose(two(normalize=False).update(own), [200 + 1, 600 - 1])


def test_a_component_without_spread_adds_nothing_and_a_failed_one_fails_the_sample():
    mixed = two()
    own = {"big": np.full(3, 0.1), "small": np.array([1.0, 3.0, np.nan])}
    np.testing.assert_array_equal(mixed.update(own), [1, -1, np.nan])
    assert np.isnan(mixed.update({"big": np.array([0.1]), "small": np.array([np.nan])})).all()


def test_a_call_returns_every_component_and_what_it_said():
    images = np.array([1.0, np.nan])
    rewards, info = two()(images, ["a", "b"], [{}, {}])
    assert rewards[0] == 200 - 1 and np.isnan(rewards[1])
    assert {"big", "small", "small/half", "failures"} == set(info)
    assert info["failures"] == [None, "big: it returned nan"]
    np.testing.assert_array_equal(info["small/half"], [0.5, np.nan])


def test_scales_are_saved_and_taken_up_exactly():
    mixed, again = two(), two()
    mixed.update({"big": np.array([0.1, 0.7, 1 / 3]), "small": np.array([1.0, 2.0, 4.0])})
    again.load_state_dict(mixed.state_dict())
    own = {"big": np.array([0.3]), "small": np.array([0.2])}
    assert again.update(own).tolist() == mixed.update(own).tolist()


def test_the_config_names_components_with_their_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def redness(strength, device=None):\n"
        "    return lambda images, prompts, metadata: [strength if device == 'here' else 0.0] * len(prompts)\n"
    )
    components = [
        {"reward_fn": "jpeg_compressibility"},
        {"reward_fn": "mine.py:redness", "weight": 3, "kwargs": {"strength": 5.0}, "normalize": False},
    ]
    mixed = weighted_sum(components, device="here")
    assert [(c.label, c.weight, c.normalize) for c in mixed.components] == [
        ("jpeg_compressibility", 1.0, True),
        ("redness", 3.0, False),
    ]
    _, info = mixed(np.zeros((2, 8, 8, 3), dtype=np.uint8), ["a", "b"], [{}, {}])
    assert info["redness"].tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    "components, says",
    [
        ([], "must be a list"),
        ({"reward_fn": "colorfulness"}, "must be a list"),
        ([{"weight": 1}], "an entry has reward_fn"),
        ([{"reward_fn": "colorfulness", "wieght": 1}], "may have kwargs, label, normalize, weight; got wieght"),
        ([{"reward_fn": "colorfulness", "weight": "much"}], "the weight of colorfulness must be a number; got 'much'"),
        ([{"reward_fn": "colorfulness", "weight": float("inf")}], "must be a number; got inf"),
        ([{"reward_fn": 5}], "reward_fn is a name"),
        ([{"reward_fn": "colorfulness", "kwargs": None}], "kwargs a dictionary"),
        ([{"reward_fn": "colorfulness", "label": "failures"}], "failures is taken"),
        (5, "must be a list"),
        ([{"reward_fn": "weighted_sum"}], "cannot hold another one"),
        ([{"reward_fn": "colourfulness"}], '"colourfulness" is no function of'),
        ([{"reward_fn": "colorfulness"}] * 2, 'colorfulness twice; give each a "label"'),
        ([{"reward_fn": "colorfulness", "kwargs": {"x": 1}}], "do not fit colorfulness"),
    ],
    ids=repr,
)
def test_components_that_cannot_work_are_refused_before_anything_is_loaded(components, says):
    with pytest.raises(ConfigError, match=says):
        resolve_components(components)
        weighted_sum.check("a prompt", {}, components=components)


def test_a_component_that_raises_is_named():
    def broken(images, prompts, metadata):
        raise KeyError("x")

    mixed = WeightedSum([Component("mine", 1.0, True, broken)])
    with pytest.raises(RuntimeError, match="mine failed with KeyError: 'x'"):
        mixed(np.zeros(1), ["a"], [{}])


def test_a_component_that_is_no_function_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(): pass")
    with pytest.raises(ValueError, match="component reward must return a function, not NoneType"):
        weighted_sum([{"reward_fn": "mine.py:reward"}])
