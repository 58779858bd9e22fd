import math

import torch
from torch.testing import assert_close

from ddpo_pytorch.losses import ppo_clipped_loss


def loss_of(ratio, advantage, clip_range=0.1):
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, statistics = ppo_clipped_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), clip_range, 5.0)
    loss.backward()
    return loss.item(), log_prob.grad.item(), statistics


def test_inside_the_range_the_loss_is_minus_ratio_times_advantage():
    loss, gradient, statistics = loss_of(1.05, 2.0)
    assert_close(loss, -2.1)
    assert_close(gradient, -2.1)
    assert statistics["clipfrac"] == 0


def test_a_good_sample_is_made_likelier_up_to_the_range_only():
    loss, gradient, statistics = loss_of(1.3, 2.0)
    assert_close(loss, -2.2)
    assert gradient == 0
    assert statistics["clipfrac"] == 1


def test_a_bad_sample_that_became_likelier_still_pushes_back():
    loss, gradient, statistics = loss_of(1.3, -2.0)
    assert_close(loss, 2.6)
    assert_close(gradient, 2.6)
    assert statistics["clipfrac"] == 1


def test_advantages_are_clamped():
    assert_close(loss_of(1.0, 80.0)[0], -5.0)
    assert_close(loss_of(1.0, -80.0)[0], 5.0)


def test_a_step_that_failed_counts_for_nothing():
    log_prob = torch.tensor([0.1, 0.3], requires_grad=True)
    old = torch.tensor([torch.nan, 0.3])
    loss, statistics = ppo_clipped_loss(log_prob, old, torch.tensor([5.0, 2.0]), 0.15, 5.0)
    loss.backward()
    assert_close(loss.item(), -1.0)  # the other's -2, over both
    assert_close(log_prob.grad, torch.tensor([0.0, -1.0]))
    assert statistics["logp_gap"] == statistics["clipfrac"] == 0


def test_statistics_by_hand():
    log_prob, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.2, -2.9])
    _, statistics = ppo_clipped_loss(log_prob, old, torch.ones(3), 0.15, 5.0)
    assert_close(statistics["approx_kl"].item(), 0.5 * (0.0 + 0.04 + 0.01) / 3)
    assert_close(statistics["clipfrac"].item(), 1 / 3)  # e^0.2 = 1.22 is outside, e^-0.1 = 0.905 inside
    assert_close(statistics["logp_gap"].item(), 0.2)
