"""Denoising Diffusion Policy Optimization (Black et al. 2023, arXiv 2305.13301) in PyTorch, with LoRA.

Words used everywhere in this package:

* `next_latents` is x_{t-1}: next in the sampling loop, previous in t. diffusers calls it `prev_sample`.
* `log_prob` is the **mean** over C, h, w of the log-density of x_{t-1} given x_t, in nats per dimension. That is why
  `clip_range` is 1e-4: at 4x64x64 latents it bounds the whole step's log-ratio by 1.64 nats.
* `_per_process` and `_total` mark batch sizes that could mean either.
"""

import logging

# It says of 4-bit products that they are slow here, at every start; nothing here makes any.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
