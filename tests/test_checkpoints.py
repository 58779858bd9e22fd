import dataclasses
import json
import pickle
import re
import resource

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from torch.testing import assert_close

from ddpo_pytorch import checkpoints, policy
from ddpo_pytorch.checkpoints import (
    LORA_FILE,
    OPTIMIZER_FILE,
    ModelIdentity,
    TrainingState,
    check_identity,
    clean_up,
    find_checkpoint,
    find_resumed,
    find_run,
    list_checkpoints,
    nothing_left,
    problem_of,
    read_state,
    restore_optimizer,
    restore_weights,
    save_checkpoint,
    set_aside_newer,
    take_snapshot,
)
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.named_functions import ConfigError

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
LORA = ModelIdentity("a/model", "0123", False, True, 4, ATTENTION)
FULL = ModelIdentity("a/model", "0123", False, False, None, None)


def trained(random_sd, use_lora=True, use_8bit_adam=False, targets=ATTENTION):
    """A pipeline whose trained weights have moved, and its optimizer."""
    pipeline = StableDiffusionPipeline.from_pretrained(random_sd, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    unet = pipeline.unet.requires_grad_(False)
    torch.manual_seed(1)
    policy.make_trainable(unet, use_lora, 4, targets, torch.float32)
    parameters = policy.trainable_parameters(unet)
    optimizer = policy.make_optimizer(parameters, 0.05, (0.9, 0.999), 1e-4, 1e-8, use_8bit_adam)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return pipeline, optimizer


def state(epoch=1, model=LORA):
    return TrainingState(epoch=epoch, global_step=7, log_step=8, run_name="run", model=model, stat_tracker={"a": [0.1]})


def save_now(folder, pipeline, optimizer, training_state, limit=5):
    return save_checkpoint(folder, take_snapshot(pipeline.unet, optimizer, training_state), limit)


def save(tmp_path, random_sd, epochs=(1,), limit=5, use_lora=True, targets=ATTENTION):
    pipeline, optimizer = trained(random_sd, use_lora, targets=targets)
    for epoch in epochs:
        save_now(tmp_path, pipeline, optimizer, state(epoch, LORA if use_lora else FULL), limit)
    return pipeline, optimizer


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize("use_8bit_adam", [True, False])
def test_weights_and_optimizer_come_back_bit_for_bit(tmp_path, random_sd, use_lora, use_8bit_adam):
    if use_8bit_adam:
        pytest.importorskip("bitsandbytes")
    pipeline, optimizer = trained(random_sd, use_lora, use_8bit_adam)
    checkpoint = save_now(tmp_path, pipeline, optimizer, state(model=LORA if use_lora else FULL))
    assert checkpoint == tmp_path / "checkpoint_1"
    assert read_state(checkpoint) == state(model=LORA if use_lora else FULL)

    fresh = StableDiffusionPipeline.from_pretrained(random_sd, safety_checker=None).unet.requires_grad_(False)
    policy.make_trainable(fresh, use_lora, 4, ATTENTION, torch.float32)
    fresh_optimizer = policy.make_optimizer(
        policy.trainable_parameters(fresh), 0.05, (0.9, 0.999), 1e-4, 1e-8, use_8bit_adam
    )
    restore_weights(checkpoint, fresh, use_lora)
    restore_optimizer(checkpoint, fresh_optimizer)
    for unet, opt in ((pipeline.unet, optimizer), (fresh, fresh_optimizer)):
        torch.manual_seed(2)
        for parameter in policy.trainable_parameters(unet):
            parameter.grad = torch.randn_like(parameter)
        opt.step()
    for a, b in zip(pipeline.unet.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1])


def picture(pipeline):
    generator = torch.Generator().manual_seed(5)
    return pipeline("cat", num_inference_steps=3, eta=1.0, generator=generator, output_type="pt").images


EVERYWHERE = [*ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1", "conv2"]


@pytest.mark.filterwarnings("error:.*PEFT:RuntimeWarning")
@pytest.mark.parametrize("targets", [ATTENTION, EVERYWHERE, ["conv1"]], ids=["attention", "everywhere", "convolutions"])
def test_stock_diffusers_loads_the_lora_and_draws_what_the_trainer_draws(tmp_path, random_sd, targets):
    pipeline, _ = save(tmp_path, random_sd, targets=targets)
    stock = StableDiffusionPipeline.from_pretrained(random_sd, safety_checker=None)
    stock.set_progress_bar_config(disable=True)
    untrained = picture(stock)
    stock.load_lora_weights(tmp_path / "checkpoint_1")
    loaded = {name for name, _ in stock.unet.named_parameters() if "lora" in name}
    assert len(loaded) == len(policy.trainable_parameters(pipeline.unet))
    assert_close(picture(stock), picture(pipeline))
    assert (picture(stock) - untrained).abs().max() > 0.01


def test_stock_diffusers_loads_the_whole_unet(tmp_path, random_sd):
    pipeline, _ = save(tmp_path, random_sd, use_lora=False)
    unet = UNet2DConditionModel.from_pretrained(tmp_path / "checkpoint_1" / "unet")
    stock = StableDiffusionPipeline.from_pretrained(random_sd, unet=unet, safety_checker=None)
    stock.set_progress_bar_config(disable=True)
    assert torch.equal(picture(stock), picture(pipeline))


def test_the_oldest_are_pruned_by_number_and_foreign_files_left_alone(tmp_path, random_sd):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint_best").mkdir()
    (tmp_path / "checkpoint_99").mkdir()  # no state in it: not one of ours
    save(tmp_path, random_sd, epochs=(8, 9, 10, 11), limit=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint_10", "checkpoint_11", "checkpoint_99"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes.txt", "checkpoint_best", "checkpoint_99", "checkpoint_10", "checkpoint_11"}


def test_the_newest_is_found_from_itself_its_parent_or_the_run(tmp_path, random_sd):
    folder = tmp_path / "run" / "checkpoints"
    save(folder, random_sd, epochs=(2, 10))
    (folder / "checkpoint_11").mkdir()
    (folder / "checkpoint_x").write_text("")
    newest = folder / "checkpoint_10"
    assert find_checkpoint(str(newest)) == (newest, [])
    for path in (folder, tmp_path / "run"):
        checkpoint, [skipped] = find_checkpoint(str(path))
        assert checkpoint == newest and "checkpoint_11 is not whole: state.json is not readable" in skipped
    assert find_checkpoint(str(folder / "checkpoint_2")) == (folder / "checkpoint_2", [])
    for nothing in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="no checkpoint there"):
            find_checkpoint(str(nothing))
    with pytest.raises(
        ConfigError, match="is not a whole checkpoint: state.json is not readable.*checkpoint_10 is whole"
    ):
        find_checkpoint(str(folder / "checkpoint_11"))


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(checkpoint, **values):
    """A state file as another version of this program might write it."""
    path = checkpoint / "state.json"
    document = {**json.loads(path.read_text()), **values}
    document.pop("digest")
    path.write_text(json.dumps(document))


def count_one_more(path):
    changed = path.read_text().replace('"global_step": ', '"global_step": 1')
    assert changed != path.read_text()
    path.write_text(changed)


def loop(path):
    path.unlink()
    path.symlink_to(path)


DAMAGE = {
    "weights-cut": (lambda c: cut(c / "pytorch_lora_weights.safetensors"), r"safetensors has \d+ bytes of \d+"),
    "weights-changed": (lambda c: flip(c / "pytorch_lora_weights.safetensors"), "safetensors has changed"),
    "optimizer-missing": (lambda c: (c / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "optimizer-empty": (lambda c: (c / "optimizer.pt").write_bytes(b""), "optimizer.pt has 0 bytes of"),
    "state-cut": (lambda c: cut(c / "state.json"), "state.json is not readable"),
    "state-missing": (lambda c: (c / "state.json").unlink(), "state.json is not readable"),
    "state-foreign": (lambda c: (c / "state.json").write_text('{"epoch": 9}'), "state.json is not readable"),
    "state-a-digit": (lambda c: count_one_more(c / "state.json"), "state.json has changed"),
    "no-files": (lambda c: rewrite(c, files={}), "lists no weights or no optimizer.pt"),
    "no-weights": (lambda c: rewrite(c, files={"optimizer.pt": [1, ""]}), "lists no weights or no optimizer.pt"),
    "files-a-list": (lambda c: rewrite(c, files=[]), "state.json is not readable"),
    "files-numbers": (lambda c: rewrite(c, files={"x": 3}), "state.json is not readable"),
    "epoch-a-word": (lambda c: rewrite(c, epoch="three"), "its epoch or steps are no numbers"),
    "optimizer-a-loop": (lambda c: loop(c / "optimizer.pt"), "optimizer.pt is missing"),
}


@pytest.mark.parametrize("damage, says", DAMAGE.values(), ids=DAMAGE)
def test_a_torn_checkpoint_is_never_chosen_and_what_was_skipped_is_said(tmp_path, random_sd, damage, says):
    save(tmp_path, random_sd, epochs=(1, 2, 3))
    damage(tmp_path / "checkpoint_3")
    checkpoint, skipped = find_checkpoint(str(tmp_path))
    assert checkpoint.name == "checkpoint_2" and len(skipped) == 1
    assert re.search(f"checkpoint_3 is not whole: .*{says}", skipped[0])
    with pytest.raises(ConfigError, match=f"not a whole checkpoint: .*{says}.*checkpoint_2 is whole"):
        find_checkpoint(str(tmp_path / "checkpoint_3"))
    for epoch in (1, 2):
        damage(tmp_path / f"checkpoint_{epoch}")
    with pytest.raises(ConfigError, match="no checkpoint there.*checkpoint_3 is not whole.*checkpoint_1 is not whole"):
        find_checkpoint(str(tmp_path))


def test_a_whole_checkpoint_under_another_number_is_passed_over(tmp_path, random_sd):
    save(tmp_path, random_sd, epochs=(1, 3))
    (tmp_path / "checkpoint_3").rename(tmp_path / "checkpoint_99")
    checkpoint, [skipped] = find_checkpoint(str(tmp_path))
    assert checkpoint.name == "checkpoint_1"
    assert "checkpoint_99 is another one under this name: it holds the state after 3 epochs" in skipped


def test_the_optimizers_options_are_the_configs_also_after_a_resume(tmp_path, random_sd):
    save(tmp_path, random_sd)
    pipeline, _ = trained(random_sd)
    optimizer = policy.make_optimizer(policy.trainable_parameters(pipeline.unet), 0.1, (0.8, 0.9), 0.0, 1e-6, False)
    restore_optimizer(tmp_path / "checkpoint_1", optimizer)
    [group] = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.1, (0.8, 0.9), 0.0, 1e-6)
    assert optimizer.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_goes_on_as_another_kernel_of_its_kind(tmp_path, random_sd, fused):
    """As when fp16, whose gradient scaler allows no fused one, is given up for bf16."""
    save(tmp_path, random_sd)
    pipeline, _ = trained(random_sd)
    parameters = policy.trainable_parameters(pipeline.unet)
    optimizer = policy.make_optimizer(parameters, 0.1, (0.8, 0.9), 0.0, 1e-6, False, fused)
    loaded = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: loaded.append(state["param_groups"][0]["fused"]))
    restore_optimizer(tmp_path / "checkpoint_1", optimizer)
    assert loaded == [fused] and optimizer.param_groups[0]["fused"] is fused
    optimizer.step()


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path, random_sd):
    save(tmp_path, random_sd)
    for name in (".writing_checkpoint_2_123", ".deleting_checkpoint_1", ".writing_notes", "mine"):
        (tmp_path / name).mkdir()
    clean_up(tmp_path)
    clean_up(tmp_path / "nowhere")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_1", ".writing_notes", "mine"}


def test_a_run_is_found_by_its_name_if_it_can_be_gone_on_with(tmp_path, random_sd):
    for date, epochs in (("2026.01.02_03.04.05", (1,)), ("2026.01.03_03.04.05", (2,)), ("2026.01.04_03.04.05", ())):
        save(tmp_path / f"mine_{date}" / "checkpoints", random_sd, epochs=epochs)
    save(tmp_path / "mine_other_2026.01.09_03.04.05" / "checkpoints", random_sd)
    newest = tmp_path / "mine_2026.01.03_03.04.05"
    assert find_run(str(tmp_path), "mine") == (newest / "checkpoints" / "checkpoint_2", [])
    assert find_run(str(tmp_path), "min") == find_run(str(tmp_path / "nowhere"), "mine") == (None, [])
    cut(newest / "checkpoints" / "checkpoint_2" / "optimizer.pt")
    checkpoint, [skipped] = find_run(str(tmp_path), "mine")
    assert checkpoint == tmp_path / "mine_2026.01.02_03.04.05" / "checkpoints" / "checkpoint_1"
    assert "2026.01.03_03.04.05/checkpoints/checkpoint_2 is not whole: optimizer.pt has" in skipped
    cut(checkpoint / "optimizer.pt")
    checkpoint, skipped = find_run(str(tmp_path), "mine")
    assert checkpoint is None and len(skipped) == 2


def test_a_snapshot_is_not_changed_by_later_training(tmp_path, random_sd):
    pipeline, optimizer = trained(random_sd)
    snapshot = take_snapshot(pipeline.unet, optimizer, state())
    weights = {name: tensor.clone() for name, tensor in snapshot.weights.items()}
    first = snapshot.optimizer["state"][0]["exp_avg"].clone()
    for parameter in policy.trainable_parameters(pipeline.unet):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(weights[name], tensor) for name, tensor in snapshot.weights.items())
    assert torch.equal(first, snapshot.optimizer["state"][0]["exp_avg"])


def test_a_run_that_has_all_its_epochs_is_not_resumed(tmp_path, random_sd):
    save(tmp_path, random_sd, epochs=(3,))
    assert find_resumed("", "", "logs", "", 3) == (None, None, [])
    assert find_resumed(str(tmp_path), "", "logs", "", 4) == (tmp_path / "checkpoint_3", state(3), [])
    with pytest.raises(ConfigError, match="checkpoint_3 has 3 epochs already, and config.num_epochs is 3"):
        find_resumed(str(tmp_path), "", "logs", "", 3)


def test_resuming_by_name_starts_goes_on_and_says_that_it_is_complete(tmp_path, random_sd):
    logs = tmp_path / "logs"
    assert find_resumed("", "auto", str(logs), "mine", 3) == (None, None, [])
    folder = logs / "mine_2026.01.02_03.04.05" / "checkpoints"
    save(folder, random_sd, epochs=(2,))
    assert find_resumed("", "auto", str(logs), "mine", 3) == (folder / "checkpoint_2", state(2), [])
    checkpoint, found, _ = find_resumed("", "auto", str(logs), "mine", 2)  # complete, which the caller says
    assert "checkpoint_2 has 2 epochs already" in nothing_left(checkpoint, found, 2)


@pytest.mark.parametrize("limit", [0, 1000, 20_000], ids=lambda limit: f"{limit} bytes")
def test_a_write_that_fails_leaves_the_older_checkpoints(tmp_path, random_sd, limit):
    """The kernel itself refuses files beyond a size: the weights', the optimizer's."""
    pipeline, optimizer = save(tmp_path, random_sd)
    sizes = [(tmp_path / "checkpoint_1" / name).stat().st_size for name in (LORA_FILE, OPTIMIZER_FILE)]
    assert sizes[0] > 1000 and sizes[1] > 20_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(RunFailure, match=r"cannot write the checkpoint .*checkpoint_2: .* MB free there\); older"):
            save_now(tmp_path, pipeline, optimizer, state(2), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]
    assert find_checkpoint(str(tmp_path))[0].name == "checkpoint_1"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, random_sd, value):
    pipeline, optimizer = save(tmp_path, random_sd)
    policy.trainable_parameters(pipeline.unet)[3].data[0, 0] = value
    with pytest.raises(RunFailure, match="1 trained tensors are not finite"):
        save_now(tmp_path, pipeline, optimizer, state(2), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"base_unet": "4567", "pretrained_model": "b/model"}, 'trained on "a/model".*"b/model" has another UNet'),
        ({"lora_rank": 8}, "LoRA rank 4, but config.lora.rank is 8; set it to 4"),
        ({"lora_target_modules": ["to_q"]}, "lora.target_modules is"),
        ({"use_8bit_adam": True}, "trained with train.use_8bit_adam False.*set it False"),
        ({"use_lora": False}, "holds a LoRA, but config.use_lora is False; set it True"),
    ],
)
def test_another_model_than_the_checkpoints_is_refused(tmp_path, change, says):
    with pytest.raises(ConfigError, match=says):
        check_identity(LORA, dataclasses.replace(LORA, **change), tmp_path)
    check_identity(LORA, dataclasses.replace(LORA, pretrained_model="/elsewhere/model"), tmp_path)
    check_identity(LORA, dataclasses.replace(LORA, base_unet=None), tmp_path)  # not loaded yet


def test_what_cannot_be_deleted_does_not_spoil_a_save(tmp_path, random_sd, monkeypatch):
    pipeline, optimizer = save(tmp_path, random_sd, epochs=(1, 2))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints, "delete", refuse)
    assert save_now(tmp_path, pipeline, optimizer, state(3), 1).name == "checkpoint_3"
    assert find_checkpoint(str(tmp_path))[0].name == "checkpoint_3"


def test_a_torn_checkpoint_of_the_same_epoch_is_replaced(tmp_path, random_sd):
    pipeline, optimizer = save(tmp_path, random_sd, epochs=(1, 2))
    flip(tmp_path / "checkpoint_2" / "optimizer.pt")
    save_now(tmp_path, pipeline, optimizer, state(2))
    assert problem_of(tmp_path / "checkpoint_2") is None
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_1", "checkpoint_2"}


def test_a_state_file_that_is_not_ours_is_refused(tmp_path):
    for text in ("{", "[]", '{"epoch": 1}'):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(ConfigError, match="not a training state"):
            read_state(tmp_path)


def test_nothing_that_is_read_can_execute_code(tmp_path, random_sd):
    _, optimizer = save(tmp_path, random_sd)

    class Payload:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"state": Payload(), "param_groups": []}, tmp_path / "checkpoint_1" / "optimizer.pt")
    with pytest.raises(pickle.UnpicklingError):
        restore_optimizer(tmp_path / "checkpoint_1", optimizer)
    names = {path.name for path in (tmp_path / "checkpoint_1").iterdir()}
    assert names == {"pytorch_lora_weights.safetensors", "optimizer.pt", "state.json"}
    json.loads((tmp_path / "checkpoint_1" / "state.json").read_text())


def test_going_back_sets_newer_checkpoints_aside(tmp_path, random_sd):
    save(tmp_path, random_sd, epochs=(1, 2, 3))
    set_aside_newer(tmp_path, 1)
    assert find_checkpoint(str(tmp_path))[0].name == "checkpoint_1"
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint_1",
        "superseded_checkpoint_2",
        "superseded_checkpoint_3",
    }
