"""Faults for `--config.prompt_fn=fault_injection.py:prompt_fn`, put into a run while it draws its prompts.

Prompts are drawn once on trial, by the plan, and then at the start of every epoch: that is when a fault is put in
place.
"""

import os
import random
import signal
import sys
import time

RANK = int(os.environ.get("RANK", "0"))
drawn = 0


def prompt_fn(fault="", epoch=1, rank=0, samples=4):
    """Draws an animal; at the start of `epoch`, on process `rank`, does what FAULTS says.

    Args:
        samples: drawn in each epoch.
    """
    global drawn
    drawn += 1
    if "FAULT" in os.environ:  # so that the config stays the same
        fault, epoch = os.environ["FAULT"].split(":")
        epoch = int(epoch)
    if fault and drawn == 2 + epoch * samples and rank == RANK:
        FAULTS[fault]()
    return random.choice(["cat", "dog", "fox"]), {}


def replace(module, name, make):
    """Put make(original) in the place of a function or method, wherever it was imported to."""
    owner = sys.modules[module] if isinstance(module, str) else module
    setattr(owner, name, make(getattr(owner, name)))


def prompt_error():
    raise LookupError("the prompts are gone")


def leave():
    sys.exit(0)


def training_error(error):
    def put():
        def make(original):
            def failing(*args, **kwargs):
                raise error

            return failing

        replace("ddpo_pytorch.update", "ppo_clipped_loss", make)

    return put


def out_of_memory():
    import torch

    training_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))()


def stuck_in(module, name):
    def put():
        def make(original):
            def sleeping(*args, **kwargs):
                time.sleep(3600)

            return sleeping

        replace(module, name, make)

    return put


def stuck_at_once():
    time.sleep(3600)


def full_disk_for(method, attribute):
    """The kernel's own message, from a device that is always full."""

    def put():
        from pathlib import Path

        def make(original):
            def full(self, values, **kwargs):
                if attribute in values:
                    self.metrics_file = Path("/dev/full")
                return original(self, values, **kwargs)

            return full

        replace(sys.modules["ddpo_pytorch.metrics"].RunLog, method, make)

    return put


def noise_prediction(once):
    def put():
        calls = []

        def make(original):
            def broken(*args, **kwargs):
                calls.append(1)
                prediction = original(*args, **kwargs)
                if not once or len(calls) == 1:
                    prediction = prediction.clone()
                    prediction[0] = float("nan")
                return prediction

            return broken

        replace("ddpo_pytorch.diffusers_patch.pipeline_with_logprob", "predict_noise", make)

    return put


def training_prediction(updates):
    """The prediction is not finite in the first so many micro-batches of training (two to an update)."""

    def put():
        calls = []

        def make(original):
            def broken(*args, **kwargs):
                calls.append(1)
                prediction = original(*args, **kwargs)
                return prediction * float("nan") if len(calls) <= 2 * updates else prediction

            return broken

        replace("ddpo_pytorch.policy", "predict_noise", make)

    return put


def diverging_weights():
    def make(original):
        def perturbed(accelerator, unet):
            import torch

            with torch.no_grad():
                next(p for p in unet.parameters() if p.requires_grad).add_(1e-3)
            return original(accelerator, unet)

        return perturbed

    replace("ddpo_pytorch.checkpoints", "check_weights_agree", make)


def not_finite_weights():
    def make(original):
        def perturbed(unet, *args):
            import torch

            with torch.no_grad():
                next(p for p in unet.parameters() if p.requires_grad).fill_(float("inf"))
            return original(unet, *args)

        return perturbed

    replace("ddpo_pytorch.checkpoints", "take_snapshot", make)


def no_files_beyond(size):
    """While a checkpoint is written, the kernel itself refuses files to grow beyond so many bytes."""

    def put():
        import resource

        def make(original):
            def limited(*args, **kwargs):
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
                try:
                    return original(*args, **kwargs)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, before)

            return limited

        replace("ddpo_pytorch.checkpoints", "save_checkpoint", make)

    return put


def killed_at(module, name, number=signal.SIGKILL, after=0.0):
    """A signal to this process as it enters a function, `after` seconds later."""

    def put():
        import threading

        def strike():
            time.sleep(after)
            os.kill(os.getpid(), number)

        def make(original):
            def struck(*args, **kwargs):
                if after:
                    threading.Thread(target=strike, daemon=True).start()
                else:
                    os.kill(os.getpid(), number)
                return original(*args, **kwargs)

            return struck

        replace(module, name, make)

    return put


def other_log_probs():
    def make(original):
        def moved(self, *args):
            images, trajectories = original(self, *args)
            trajectories.log_probs += 1e-3
            return images, trajectories

        return moved

    replace(sys.modules["ddpo_pytorch.policy"].Policy, "sample", make)


# Enough for the embedded model's LoRA, too little for its optimizer
DISK_FOR_WEIGHTS = 1_000_000

FAULTS = {
    "prompt-error": prompt_error,
    "leave": leave,
    "training-error": training_error(ArithmeticError("the loss is odd")),
    "out-of-memory": out_of_memory,
    "stuck-drawing": stuck_at_once,
    "stuck-sampling": stuck_in("ddpo_pytorch.diffusers_patch.pipeline_with_logprob", "predict_noise"),
    "stuck-training": stuck_in("ddpo_pytorch.update", "ppo_clipped_loss"),
    "stuck-saving": stuck_in("ddpo_pytorch.checkpoints", "take_snapshot"),
    "noise-always": noise_prediction(once=False),
    "noise-once": noise_prediction(once=True),
    "gradients-once": training_prediction(updates=1),
    "gradients-always": training_prediction(updates=1000),
    "diverging": diverging_weights,
    "not-finite-weights": not_finite_weights,
    "disk-weights": no_files_beyond(1000),
    "disk-optimizer": no_files_beyond(DISK_FOR_WEIGHTS),
    "disk-rewards": full_disk_for("log", "reward_mean"),
    "disk-losses": full_disk_for("log", "loss"),
    "kill-sampling": killed_at("ddpo_pytorch.rollout", "to_uint8"),
    "kill-training": killed_at("ddpo_pytorch.update", "ppo_clipped_loss"),
    "kill-writing": killed_at("ddpo_pytorch.checkpoints", "_digests"),
    "kill-pruning": killed_at("ddpo_pytorch.checkpoints", "delete"),
    "term-sampling": killed_at("ddpo_pytorch.rollout", "to_uint8", signal.SIGTERM),
    "term-training": killed_at("ddpo_pytorch.update", "ppo_clipped_loss", signal.SIGTERM),
    "term-writing": killed_at("ddpo_pytorch.checkpoints", "_digests", signal.SIGTERM),
    "int-training": killed_at("ddpo_pytorch.update", "ppo_clipped_loss", signal.SIGINT),
    "other-log-probs": other_log_probs,
}
