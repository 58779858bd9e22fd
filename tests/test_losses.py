import math

import torch
from torch.testing import assert_close

from ddpo_pytorch.losses import ppo_clipped_loss


def loss_of(ratio, advantage, clip_range=0.1):
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, statistics = ppo_clipped_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), clip_range, 5.0, 256)
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
    loss, statistics = ppo_clipped_loss(log_prob, old, torch.tensor([5.0, 2.0]), 0.15, 5.0, 256)
    loss.backward()
    assert_close(loss.item(), -1.0)  # the other's -2, over both
    assert_close(log_prob.grad, torch.tensor([0.0, -1.0]))
    assert statistics["logp_gap"] == statistics["clipfrac"] == 0


def test_statistics_by_hand():
    log_prob, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.2, -2.9])
    _, statistics = ppo_clipped_loss(log_prob, old, torch.ones(3), 0.15, 5.0, 256)
    assert_close(statistics["approx_kl"].item(), 0.5 * (0.0 + 0.04 + 0.01) / 3)
    assert_close(statistics["clipfrac"].item(), 1 / 3)  # e^0.2 = 1.22 is outside, e^-0.1 = 0.905 inside
    assert_close(statistics["logp_gap"].item(), 0.2)


def test_kl_per_step_is_in_nats_over_all_dimensions():
    """Exact for the Gaussians that steps are: means d apart in units of the deviation have KL d^2 / 2 per dimension."""
    generator = torch.Generator().manual_seed(0)
    dims, shift = 64, 0.05
    z = torch.randn(200_000, dims, generator=generator, dtype=torch.float64)
    old = (-0.5 * z**2).mean(1)
    new = (-0.5 * (z - shift) ** 2).mean(1)
    _, statistics = ppo_clipped_loss(new, old, torch.ones(len(z)), 0.1, 5.0, num_dims=dims)
    assert_close(statistics["policy/kl_nats"].item(), dims * shift**2 / 2, rtol=0.02, atol=0)
    _, statistics = ppo_clipped_loss(old, old, torch.ones(len(z)), 0.1, 5.0, num_dims=dims)
    assert statistics["policy/kl_nats"] == 0


def test_the_clip_is_active_where_it_takes_the_gradient_away():
    """Outside the range it acts only in the direction that the advantage wants."""
    log_prob = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.05]).log().requires_grad_(True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    loss, statistics = ppo_clipped_loss(log_prob, torch.zeros(5), advantages, 0.1, 5.0, 256)
    loss.backward()
    assert_close(statistics["policy/clip_active"].item(), 2 / 5)
    assert ((log_prob.grad == 0) == torch.tensor([True, False, False, True, False])).all()
    assert_close(statistics["clipfrac"].item(), 4 / 5)


def test_the_sample_with_the_largest_gap_is_named():
    old = torch.tensor([0.0, 0.0, torch.nan, 0.0])
    log_prob = torch.tensor([0.1, -0.3, 9.0, 0.2])
    assert ppo_clipped_loss(log_prob, old, torch.ones(4), 0.1, 5.0, 256)[1]["logp_gap_index"] == 1
