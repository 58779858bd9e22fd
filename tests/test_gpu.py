"""What only a CUDA GPU can show: pytest -m gpu, about two minutes."""

import pytest
import torch
from conftest import ROOT, launch, read_metrics, run_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("mixed_precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("use_lora", [True, False])
def test_the_embedded_model_trains_with_a_ratio_of_one(tmp_path, mixed_precision, use_lora):
    arguments = [
        "--config",
        "config/tiny.py",
        f"--config.logdir={tmp_path / 'logs'}",
        "--config.log_with=",
        f"--config.mixed_precision={mixed_precision}",
        f"--config.use_lora={use_lora}",
        f"--config.train.learning_rate={1e-2 if use_lora else 1e-5}",
        "--config.train.batch_size=48",
        "--config.num_epochs=3",
    ]
    result = launch(arguments, ROOT, ACCELERATE_USE_CPU="false")
    assert result.returncode == 0, result.stderr
    assert "cuda" in result.stdout
    gaps = [line["policy/logp_gap"] for line in read_metrics(run_folder(tmp_path)) if "policy/logp_gap" in line]
    assert len(gaps) == 3 and max(gaps) < 1e-5  # a hundredth of config/tiny.py's clip_range
