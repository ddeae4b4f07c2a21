"""Targets that read more than ids, masks and positions: the drafted text is still theirs."""

import functools
import inspect
import types

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import recognising
from support.tiny_models import tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, GPTNeoConfig

from dflash_hf.decoding.recurrent import RecurrentSlots
from dflash_hf.decoding.slots import SlotCache


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])


def text(target, draft=None, prompt=PROMPT, **options):
    """Text and acceptance lengths; without a drafter, the text."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    output = target.generate(prompt, **options, assistant_model=draft, return_dict_in_generate=True)
    return output.sequences.tolist(), getattr(output, "acceptance_lengths", None)


def drafter(target):
    return recognising(target, [torch.tensor(text(target)[0][0])], 6)


def drafted(target, draft) -> None:
    """Equal texts, of drafts that are accepted."""
    written, lengths = text(target, draft)
    assert written == text(target)[0] and max(lengths[0]) > 3


def prompts(rows: int) -> dict:
    inputs = ragged_prompts(rows)[0]
    return {"prompt": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


def windowed():
    """GPT-Neo, which takes the places of queries, and of a window of 256, from the number of its keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "vocab_size": 96, "max_position_embeddings": 512}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = GPTNeoConfig(attention_types=[[["global", "local"], 2]], **sizes, **special)
    target = AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.mul_(20)
    return target, (20, 240, 300)


def tempered():
    """Llama 4, which takes positions for a temperature from the length that a cache reports."""
    scale = {"floor_scale": 4096, "attn_temperature_tuning": True, "attn_scale": 3.0}
    target = tiny_model("llama4_text", no_rope_layers=[1, 0, 1, 0], max_position_embeddings=8192, **scale).double()
    target.config._experts_implementation = "eager"
    return target, (20, 4080)


@pytest.mark.parametrize("nodes", [None, 60])
@pytest.mark.parametrize("made", [windowed, tempered])
def test_target_may_read_the_length_of_its_cache(made, nodes):
    target, lengths = made()
    draft = make_draft(target)
    draft.decoding_config.tree_nodes = nodes
    for length in lengths:
        prompt = torch.randint(2, 85, (1, length), generator=torch.Generator().manual_seed(3))
        assert text(target, draft, prompt)[0] == text(target, prompt=prompt)[0], length


class Halved:
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] // 2
        return inputs


class Shifted:
    def _update_model_kwargs_for_generation(self, *args, **kwargs):
        arguments = super()._update_model_kwargs_for_generation(*args, **kwargs)
        arguments["position_ids"] = arguments["position_ids"] + 1
        return arguments


class Encoding:
    """Its step must be told of encoders."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder, **kwargs):
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, **kwargs)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("own", [Halved, Shifted, Encoding])
def test_target_may_prepare_inputs_in_its_own_way(own, rows):
    target = make_target()
    drafted(target, drafter(target))
    target.__class__ = type("Target", (own, type(target)), {})
    assert text(target, make_draft(target), **prompts(rows))[0] == text(target, **prompts(rows))[0]


def test_method_may_be_replaced_between_calls():
    target = make_target()
    draft = drafter(target)
    upstream = target.prepare_inputs_for_generation
    drafted(target, draft)

    def doubled(self, *args, **kwargs):
        inputs = upstream(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] * 2
        return inputs

    target.prepare_inputs_for_generation = types.MethodType(doubled, target)
    assert text(target, draft)[0] == text(target)[0]
    del target.prepare_inputs_for_generation
    drafted(target, draft)


def test_virtual_tokens_come_before_padding():
    """After a call of the base model, too."""
    from peft import PromptTuningConfig, get_peft_model

    target = make_target()
    inputs = ragged_prompts(3)[0]
    draft = make_draft(target)
    text(target, draft, **prompts(3))
    tuned = get_peft_model(target, PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()

    def written(**more):
        return tuned.generate(**inputs, max_new_tokens=24, do_sample=False, **more).tolist()

    assert written(assistant_model=draft) == written()


def test_activated_lora_follows_a_plain_one():
    from peft import LoraConfig, get_peft_model

    target = make_target()
    draft = make_draft(target, block_size=8)
    more = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    tuned = get_peft_model(target, LoraConfig(**more), adapter_name="plain")
    tuned.add_adapter("activated", LoraConfig(alora_invocation_tokens=PROMPT[0, -2:].tolist(), **more))
    tuned.eval()
    for name in ("plain", "activated", "plain"):
        tuned.set_adapter(name)
        options = {"max_new_tokens": 24, "do_sample": False}
        written = [tuned.generate(PROMPT, **options, assistant_model=model).tolist() for model in (None, draft)]
        assert written[0] == written[1], name


class Forgetful(DynamicCache):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        values = values.clone()
        values[:, :, :3] = 0
        return keys, values


@pytest.mark.parametrize("rows", [1, 3])
def test_custom_cache_class_is_respected(rows):
    target = make_target()
    replaced = DynamicCache(config=target.config)
    replaced.update = functools.partial(replaced.update)
    for kind in (SlotCache, RecurrentSlots):
        assert not kind.can_adopt(replaced) and kind.can_adopt(DynamicCache(config=target.config))
    written = [
        text(target, draft, past_key_values=Forgetful(config=target.config), **prompts(rows))[0]
        for draft in (None, make_draft(target))
    ]
    assert written[0] == written[1]


@pytest.mark.parametrize("by_argument", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_router_logits_may_be_requested(family, by_argument):
    """Their loss took the masks of a block for one of padding: "The size of tensor a must match"."""
    target = make_target(family, attn=None)
    draft = drafter(target)
    expected = text(target)[0]
    drafted(target, draft)  # probed before they are requested
    target.config.output_router_logits = not by_argument
    written, lengths = text(target, draft, **({"output_router_logits": True} if by_argument else {}))
    assert written == expected and max(lengths[0]) > 3


def test_gradients_through_generate_are_kept():
    """`generate` without its decorator, as it is called to train on its own samples, decodes without the drafter."""
    target = make_target()
    outputs = []
    embeds = target.get_input_embeddings()(PROMPT).requires_grad_()
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for assistant in (None, drafter(target)):
        generate = inspect.unwrap(type(target).generate)
        outputs.append(generate(target, inputs_embeds=embeds, **options, assistant_model=assistant))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    gradients = [torch.autograd.grad(output.logits[-1].square().sum(), embeds)[0] for output in outputs]
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0


def test_hooks_may_use_autograd():
    """Rounds ran in inference mode, in which no hook can compute a gradient."""
    target = make_target()
    outputs = []

    def steer(module, args, output):
        with torch.enable_grad():
            inside = output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(inside.square().sum(), inside)
        outputs.append(output)
        return output + 0.01 * gradient

    target.model.layers[1].register_forward_hook(steer)
    assert text(target, make_draft(target))[0] == text(target)[0]
    torch.nn.Linear(32, 1)(outputs[-1]).sum().backward()


def test_drafter_dropout_draws_no_random_number():
    """An adapter added after `eval()` is in training mode; its dropout took numbers that samples are drawn with."""
    target = make_target()
    draft = make_draft(target, attention_dropout=0.5)
    draft.layers.train()
    assert not draft.training
    texts = []
    for assistant in (None, draft):
        torch.manual_seed(3)
        texts.append(text(target, assistant, do_sample=True)[0])
    assert texts[0] == texts[1]


def test_error_names_a_model_that_cannot_be_used():
    target = make_target()
    with pytest.raises(ValueError, match="meta device"):
        text(target, make_draft(target).to("meta"))
    target.lm_head = torch.nn.Sequential(target.lm_head, torch.nn.Identity())
    with pytest.raises(ValueError, match=r"cannot have a drafter.*Embedding\(.* and Sequential\("):
        text(target, make_draft(make_target()))
