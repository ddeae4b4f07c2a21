"""Numbers that are none: training and storing stop there, and say why."""

import pytest
import torch
from safetensors.torch import load_file
from support.pairs import make_target
from support.rows import counting_rows
from support.runs import history, make_trainer

from dflash_hf._io.weights import check_finite, is_finite
from dflash_hf.data.encode import RowEncoder
from dflash_hf.training import feature_store
from dflash_hf.training.feature_manifest import manifest_of
from dflash_hf.training.feature_store import store_features
from dflash_hf.training.trainer import NotFiniteError


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_infinite_features_stop_the_training(accumulation, tmp_path):
    """It logged a loss of 0 and a gradient of nan, ended well, and saved 14 of 14 tensors as NaN."""
    target = make_target()
    rows = counting_rows(8)
    options = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": accumulation, **CHECKPOINTS}
    rows[5]["input_ids"][3] = 93  # occurs nowhere else
    with torch.no_grad():
        target.get_input_embeddings().weight[93] = float("inf")
    trainer = make_trainer(tmp_path, target, rows, **options)
    micro_batches = []
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: micro_batches.append(1) or compute(*args, **kwargs)
    step = 3 if accumulation == 1 else 2
    with pytest.raises(NotFiniteError) as error:
        trainer.train()
    assert len(micro_batches) == step * accumulation  # no process raises before the gradient is reduced
    text = str(error.value)
    assert text.startswith(f"Step {step}: the loss is nan. ")
    assert f"The last good checkpoint is {tmp_path / f'checkpoint-{step - 1}'}." in text
    assert "If the target is in fp16, load it in bfloat16 or float32" in text
    assert len(history(trainer, "loss")) == step - 1
    check_finite(load_file(tmp_path / f"checkpoint-{step - 1}" / "model.safetensors").items())

    with torch.no_grad():  # once the cause is mended, the same trainer goes on
        target.get_input_embeddings().weight[93] = 0.1
    trainer.train()
    assert trainer.state.global_step == 6


def test_diverging_run_names_its_learning_rate(tmp_path):
    trainer = make_trainer(
        tmp_path, make_target(), counting_rows(8), optim="sgd", learning_rate=1e30, warmup_steps=0, **CHECKPOINTS
    )
    with pytest.raises(NotFiniteError, match="Step [23]: .* is nan.*lower learning_rate=1e[+]30, warm up longer"):
        trainer.train()


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_infinite_gradient_stops_before_the_step(max_grad_norm, tmp_path):
    trainer = make_trainer(tmp_path, make_target(), counting_rows(8), max_grad_norm=max_grad_norm, **CHECKPOINTS)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.model.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
    message = "Step 1: the norm of the gradient is (inf|nan).* There is no checkpoint before it"
    with pytest.raises(NotFiniteError, match=message):
        trainer.train()
    assert all(
        torch.equal(start, parameter) for start, parameter in zip(before, trainer.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("wrong", ["features", "states"])
def test_stored_tensor_that_is_not_finite_is_named(wrong, tmp_path, monkeypatch):
    """With one layer, features and final states are of one width, and states were said to be the features."""
    target = make_target()
    forward = feature_store.target_forward

    def forward_with_inf(*args, **kwargs):
        output = forward(*args, **kwargs)
        tensor = output.features if wrong == "features" else output.last_hidden_state
        tensor[..., 1] = float("inf")
        return output

    monkeypatch.setattr(feature_store, "target_forward", forward_with_inf)
    manifest = manifest_of(target, "some/target", [2], RowEncoder(), "float32", states=True)
    message = "Example 0: features of layer 2 of" if wrong == "features" else "Example 0: final states of"
    with pytest.raises(ValueError, match=message):
        store_features(target, counting_rows(2), tmp_path / "features", manifest)


def test_drafter_that_is_not_finite_is_not_saved(tmp_path):
    trainer = make_trainer(tmp_path, make_target(), counting_rows(4))
    trainer.save_model()
    saved = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("nan")
    with pytest.raises(NotFiniteError, match="the drafter's weights are not finite, and are not saved"):
        trainer.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() == saved


@pytest.mark.parametrize(("factor", "dtype"), [(1e7, "float16"), (float("inf"), "bfloat16")])
def test_features_that_are_not_finite_are_not_stored(factor, dtype, tmp_path):
    """1,974 of 75,776 stored numbers were inf or nan."""
    target = make_target()
    encoder = RowEncoder(max_length=64)
    with torch.no_grad():
        target.model.layers[2].mlp.down_proj.weight.mul_(factor)
    with pytest.raises(ValueError, match=rf"Example \d: features of layer 2 .* as {dtype}; .* --store-dtype bfloat16"):
        store_features(target, counting_rows(3), tmp_path, manifest_of(target, "some/target", [0, 2], encoder, dtype))
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_finite_weights_of_any_dtype_pass(dtype):
    """torch has no `isfinite` for float8: a training of such weights would have ended in an error of torch."""
    weights = torch.tensor([1.0, 2.0]).to(dtype)
    assert is_finite([weights]) and is_finite([])
    check_finite([("fc.weight", weights)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_that_are_not_finite_are_counted(dtype):
    weights = torch.tensor([[1.0, float("nan")], [float("nan"), 2.0]]).to(dtype)
    assert not is_finite([torch.ones(3), weights])
    with pytest.raises(ValueError, match="^2 of 4 weights are not finite .*, in fc.weight: it cannot draft"):
        check_finite([("norm.weight", torch.ones(3)), ("fc.weight", weights)])
