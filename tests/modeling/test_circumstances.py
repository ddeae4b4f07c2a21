"""What was found out about a target in training, under autocast or with adapters for each row holds there alone."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.runs import CHECKPOINTING
from support.scripted_text import PROMPT, drafted, drafter, text


@pytest.mark.filterwarnings("error:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_targets_in_training_decode_plainly(checkpoints, caplog):
    """With dropout a seed gives the text that it gives alone; afterwards they are drafted for."""
    target = make_target(attention_dropout=0.3).train()
    if checkpoints:
        getattr(target, f"{CHECKPOINTING}_enable")()
    draft = drafter(target.eval())
    with torch.enable_grad():
        for do_sample in (False, True):
            torch.manual_seed(5)
            expected = text(target.train(), do_sample=do_sample)[0]
            torch.manual_seed(5)
            assert text(target, draft, do_sample=do_sample) == (expected, [[]])
    assert "training mode; call its `eval()`" in caplog.text
    drafted(target.eval(), draft)


def test_support_under_autocast_holds_there_alone():
    target = make_target("qwen3_5_text", dtype=torch.float32)
    draft = drafter(target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text(target, draft)
    drafted(target, draft)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "__base__"]])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_adapters_for_each_row(family, names):
    """Named in the first call already, for another number of rows than a target is tried out on."""
    from peft import LoraConfig, get_peft_model

    target = make_target(family, dtype=torch.float64)
    config = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False, r=4)
    draft, prompt = make_draft(target), PROMPT.expand(len(names), -1)
    tuned = get_peft_model(target, config, adapter_name="a")
    tuned.add_adapter("b", config)
    tuned.eval()
    expected = text(tuned, prompt=prompt, adapter_names=names)[0]
    assert text(tuned, draft, prompt, adapter_names=names)[0] == expected
    written, lengths = text(tuned, draft)
    assert written == text(tuned)[0] and lengths[0], "remembered as a target that cannot be drafted for"
    written, lengths = text(tuned, draft, prompt, adapter_names=names)
    assert written == expected and lengths[0]
