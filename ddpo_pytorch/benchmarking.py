"""What measuring needs: clocks, peak memory, counted bytes and FLOPs, and Stable Diffusion's architectures at random.

Knows nothing of configs or of training; scripts/benchmark.py does.
"""

import contextlib
import gc
import math
import platform
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

GB = 1e9
_aten = torch.ops.aten
EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny_sd"

# --- architectures, as their published configs have them

_CROSS = ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
ARCHITECTURES: dict[str, dict[str, dict[str, Any]]] = {
    "sd15": {
        "unet": {"sample_size": 64, "cross_attention_dim": 768},  # the rest are diffusers' defaults
        "text": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        "vae": {},
        "scheduler": {},
    },
    "sd21": {
        "unet": {
            "sample_size": 96,
            "cross_attention_dim": 1024,
            "attention_head_dim": (5, 10, 20, 20),
            "use_linear_projection": True,
            "upcast_attention": True,
        },
        "text": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 23,
            "num_attention_heads": 16,
            "hidden_act": "gelu",
        },
        "vae": {"sample_size": 768},
        "scheduler": {"prediction_type": "v_prediction"},
    },
    # Its UNet and VAE; one layer stands in for its two text encoders, and zeros for their pooled embeddings.
    "sdxl": {
        "unet": {
            "sample_size": 128,
            "cross_attention_dim": 2048,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": (_CROSS[1], _CROSS[0], _CROSS[0]),
            "up_block_types": (_CROSS[2], _CROSS[2], _CROSS[3]),
            "attention_head_dim": (5, 10, 20),
            "transformer_layers_per_block": (1, 2, 10),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        "text": {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 32},
        "vae": {"sample_size": 1024, "scaling_factor": 0.13025},
        "scheduler": {},
    },
}


@torch.no_grad()
def _at_random(make: Callable[[], torch.nn.Module], device: str) -> Any:
    """A frozen module whose weights keep activations finite: N(0, 1/fan_in), norms 1, biases 0."""
    with torch.device("meta"):
        module = make()
    module.requires_grad_(False).eval()
    if device == "meta":
        return module
    module.to_empty(device=device)
    noise = torch.randn(1_000_003)  # a prime, so that no two rows of a weight are alike
    for p in module.parameters():
        if p.ndim < 2:
            continue
        for part in p.view(-1).split(len(noise)):
            torch.mul(noise[: len(part)], p[0].numel() ** -0.5, out=part)
    for name, p in module.named_parameters():
        if p.ndim < 2:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
    for name, buffer in module.named_buffers():
        assert name.endswith("position_ids"), name
        buffer.copy_(torch.arange(buffer.shape[-1]))
    return module


def _with_sdxls_conditions(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    x = args[0]
    added = {"text_embeds": x.new_zeros(len(x), 1280), "time_ids": x.new_zeros(len(x), 6)}
    return args, {**kwargs, "added_cond_kwargs": added}


def random_pipeline(name: str, scheduler: DDIMScheduler, device: str = "cpu") -> StableDiffusionPipeline:
    """A pipeline of one of `ARCHITECTURES` with random weights, as `policy.load_pipeline` gives a real one.

    Its tokenizer is the embedded model's, padded to 77 tokens.

    Args:
        device: "cpu", or "meta" for shapes without numbers.
    """
    parts = ARCHITECTURES[name]
    tokenizer = CLIPTokenizer.from_pretrained(EMBEDDED_MODEL / "tokenizer", model_max_length=77)
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    text_config = CLIPTextConfig(**parts["text"], **ids, vocab_size=49408, max_position_embeddings=77)
    levels = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    }
    pipeline = StableDiffusionPipeline(
        vae=_at_random(lambda: AutoencoderKL(**levels, **{"sample_size": 512, **parts["vae"]}), device),
        text_encoder=_at_random(lambda: CLIPTextModel(text_config), device),
        tokenizer=tokenizer,
        unet=_at_random(lambda: UNet2DConditionModel(**parts["unet"]), device),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    if name == "sdxl":
        pipeline.unet.register_forward_pre_hook(_with_sdxls_conditions, with_kwargs=True)
    scheduler.register_to_config(**parts["scheduler"])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# --- counted bytes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside it while they live, whatever device they are on or pretend to be on.

    Attributes:
        live: bytes now.
        peak: the most since `reset`. What kernels hold for themselves is not in it.
    """

    def __init__(self, granularity: int = 1) -> None:
        """
        Args:
            granularity: bytes to whose multiples storages are rounded up, 512 in CUDA's allocator.
        """
        super().__init__()
        self.granularity = granularity
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def reset(self) -> None:
        gc.collect()
        self.peak = self.live

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # its address, which a later storage may get when this one is gone
        if key in self._sizes:
            return
        self._sizes[key] = size = math.ceil(storage.nbytes() / self.granularity) * self.granularity
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class PretendedGpu(TorchFunctionMode):
    """Lets tensors on the meta device be counted as they would be on a GPU: attention matrices are never made, and a
    UNet's activations have the types that CUDA's autocast gives them.

    Attributes:
        autocast: the type for products; None: no autocast.
    """

    LOWER = {F.linear, F.conv2d, F.scaled_dot_product_attention, torch.matmul, torch.bmm, torch.addmm, torch.baddbmm}
    FLOAT32 = {F.layer_norm, F.group_norm, F.softmax}

    def __init__(self) -> None:
        super().__init__()
        self.autocast: torch.dtype | None = None
        self._is_autocast_enabled = torch.is_autocast_enabled

    def __enter__(self) -> "PretendedGpu":
        torch.is_autocast_enabled = lambda *_: False  # type: ignore[assignment]  # it knows no meta device
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.is_autocast_enabled = self._is_autocast_enabled  # type: ignore[assignment]
        super().__exit__(*error)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.autocast is not None and (func in self.LOWER or func in self.FLOAT32):
            dtype = self.autocast if func in self.LOWER else torch.float32

            def cast(value: Any) -> Any:
                is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
                return value.to(dtype) if is_real else value

            args, kwargs = tree_map(cast, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            # Of the CPU, for which the meta device has no rule of its own; it keeps what CUDA's keep.
            query, key, value = args[:3] if len(args) > 2 else (kwargs[name] for name in ("query", "key", "value"))
            return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
        return func(*args, **kwargs)


def backward(loss: torch.Tensor) -> None:
    """As loss.backward(), under which `PretendedGpu` would not see what checkpointing computes again."""
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss))


# --- FLOPs

# What torch's counter lacks: attention on a CPU, and `lora_forward`'s product in place
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
    _aten.addmm_: _aten.addmm,
}
for _missing, _known in _COUNTED_AS.items():
    flop_counter.flop_registry.setdefault(_missing, flop_counter.flop_registry[_known])


def count_flops(call: Callable[[], Any]) -> int:
    """FLOPs of matrix products, convolutions and attentions in a call, those of what is computed again included."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The device's FLOP/s in a large square product, the best of ten, on the threads that torch has now."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / min(timed(lambda: a @ b, 10, device)[1:])


# --- time and memory


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` calls."""
    seconds = []
    for _ in range(count):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds


class PeakMemory:
    """The most memory held since it was made: of the device's allocator, or this process's resident set."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sampled = 0
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        self.before = psutil.Process().memory_info().rss
        try:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        except OSError:
            self._stop = threading.Event()
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self._sampled = max(self._sampled, psutil.Process().memory_info().rss)

    def read(self) -> dict[str, float]:
        """Bytes before and at the peak, in GB."""
        if self.device.type == "cuda":
            synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        elif hasattr(self, "_stop"):
            self._stop.set()
            peak = max(self._sampled, psutil.Process().memory_info().rss)
        else:
            status = Path("/proc/self/status").read_text()
            peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
        return {"before_gb": self.before / GB, "peak_gb": max(peak, self.before) / GB}


def phase(
    seconds: Sequence[float], memory: Mapping[str, float], samples: float, flops: int = 0, peak_flops: float = math.inf
) -> dict[str, Any]:
    """What a phase's calls came to.

    Args:
        seconds: of each call, the first of which is not in the median.
        samples: whole samples that one call does; a call that does one of 50 steps of 8 samples does 0.16.
        peak_flops: FLOP/s of the device.
    """
    median = statistics.median(seconds[1:])
    result = {"first_s": seconds[0], "median_s": median, "all_s": list(seconds), "samples_per_s": samples / median}
    if flops:
        result |= {"flops": flops, "peak_share": flops / median / peak_flops}
    return {**result, **memory}


def hardware_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    return platform.processor() or platform.machine()
