"""What a target reads besides ids, masks and positions, and when: the text is its own all the same."""

import functools
import inspect
import types

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import recognising
from support.scripted_text import PROMPT, drafted, drafter, text
from support.tiny_models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    EosTokenCriteria,
    GPTNeoConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from dflash_hf.modeling.cache_dflash import can_adopt
from dflash_hf.modeling.probe_dflash import facts_of
from dflash_hf.modeling.target_dflash import CACHE_NAME


def long_prompt(length: int) -> torch.Tensor:
    return torch.randint(2, 85, (1, length), generator=torch.Generator().manual_seed(3))


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
    return target, 300, 256


def tempered():
    """Llama 4, which takes positions for a temperature from the length that a cache reports."""
    scale = {"floor_scale": 4096, "attn_temperature_tuning": True, "attn_scale": 3.0}
    target = tiny_model("llama4_text", no_rope_layers=[1, 0, 1, 0], max_position_embeddings=8192, **scale).double()
    target.config._experts_implementation = "eager"
    return target, 4080, 1024


@pytest.mark.parametrize("made", [windowed, tempered])
def test_a_long_text_of_a_target_that_reads_the_length_of_its_cache(made):
    target, length, reach = made()
    assert facts_of(target).reach == reach
    draft, prompt = make_draft(target), long_prompt(length)
    written, lengths = text(target, draft, prompt)
    assert written == text(target, prompt=prompt)[0] and lengths == [[]]
    assert text(target, draft, prompt[:, :20])[1] != [[]]


@pytest.mark.parametrize("nodes", [60, 128])
def test_trees_do_not_outgrow_such_a_target(nodes):
    target, _, reach = windowed()
    prompt = long_prompt(reach - 75)
    expected = text(target, prompt=prompt, max_new_tokens=60)[0]
    draft = recognising(target, [torch.tensor(expected[0])], 6, error_rate=1.0)
    draft.decoding_config.tree_nodes = nodes
    written, lengths = text(target, draft, prompt, max_new_tokens=60)
    assert written == expected and lengths != [[]]


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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("own", [Halved, Shifted])
def test_inputs_that_a_target_prepares_in_its_own_way(own, rows):
    target = make_target()
    drafted(target, drafter(target))
    target.__class__ = type("Target", (own, type(target)), {})
    prompt = ragged_prompts(rows)[0]
    options = {"prompt": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    assert text(target, make_draft(target), **options)[0] == text(target, **options)[0]


def test_a_method_of_the_target_alone_replaced_between_two_calls():
    target = make_target()
    draft, upstream = drafter(target), target.prepare_inputs_for_generation
    drafted(target, draft)

    def doubled(self, *args, **kwargs):
        inputs = upstream(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] * 2
        return inputs

    target.prepare_inputs_for_generation = types.MethodType(doubled, target)
    assert text(target, draft)[0] == text(target)[0]
    del target.prepare_inputs_for_generation
    drafted(target, draft)


def test_virtual_tokens_before_padding_after_a_call_of_the_base():
    from peft import PromptTuningConfig, get_peft_model

    target, prompts = make_target(), ragged_prompts(3)[0]
    options = {"prompt": prompts["input_ids"], "attention_mask": prompts["attention_mask"]}
    draft = make_draft(target)
    text(target, draft, **options)
    tuned = get_peft_model(target, PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()

    def written(**more):
        return tuned.generate(**prompts, max_new_tokens=24, do_sample=False, **more).tolist()

    assert written(assistant_model=draft) == written()


def test_an_activated_lora_after_a_plain_one():
    from peft import LoraConfig, get_peft_model

    target = make_target()
    draft, more = make_draft(target, block_size=8), {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    tuned = get_peft_model(target, LoraConfig(**more), adapter_name="plain")
    tuned.add_adapter("activated", LoraConfig(alora_invocation_tokens=PROMPT[0, -2:].tolist(), **more))
    tuned.eval()
    for name in ("plain", "activated", "plain"):
        tuned.set_adapter(name)
        written = [
            tuned.generate(PROMPT, max_new_tokens=24, do_sample=False, assistant_model=one).tolist()
            for one in (None, draft)
        ]
        assert written[0] == written[1], name


class Forgetful(DynamicCache):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        values = values.clone()
        values[:, :, :3] = 0
        return keys, values


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_that_does_more_than_hold(rows):
    target, prompt = make_target(), ragged_prompts(rows)[0]
    options = {"prompt": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    replaced = DynamicCache(config=target.config)
    replaced.update = functools.partial(replaced.update)
    assert not can_adopt(replaced) and can_adopt(DynamicCache(config=target.config))
    expected = text(target, **{CACHE_NAME: Forgetful(config=target.config)}, **options)[0]
    assert text(target, make_draft(target), **{CACHE_NAME: Forgetful(config=target.config)}, **options)[0] == expected


class SoftLimit(MaxLengthCriteria):
    """Ends a text later than it says."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids[:, 30:], scores, **kwargs)


@pytest.mark.parametrize("settings", [{}, {"block_size": 3}, {"tree_nodes": 10}])
def test_a_limit_that_does_not_end_every_text(settings):
    target = make_target()
    draft = make_draft(target, block_size=6)
    for name, value in {"block_size": None, **settings}.items():
        setattr(draft.decoding_config, name, value)
    options = {"max_new_tokens": 60, "stopping_criteria": StoppingCriteriaList([SoftLimit(20)])}
    written = text(target, **options)[0]
    assert text(target, draft, **options)[0] == written


class Counting(MaxTimeCriteria):
    """Ends a text after so many calls."""

    def __init__(self):
        super().__init__(1e6)
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 12)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_criterion_is_called_as_often_as_without_a_drafter(rows):
    target, prompt = make_target(), ragged_prompts(rows)[0]
    options = {"prompt": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    expected = text(target, **options, stopping_criteria=StoppingCriteriaList([Counting()]))[0]
    written = text(target, make_draft(target), **options, stopping_criteria=StoppingCriteriaList([Counting()]))[0]
    assert written == expected and len(written[0]) == prompt["input_ids"].shape[1] + 12


def test_a_target_whose_step_needs_to_be_told_of_encoders():
    target = make_target()

    class Own(type(target)):
        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder, **kwargs):
            return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, **kwargs)

    target.__class__ = Own
    drafted(target, drafter(target))


class Writes(StoppingCriteria):
    """Ends nothing, and replaces a token."""

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == 18:
            input_ids[:, -1] = 7
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_criterion_that_writes_a_token(rows):
    target, prompt = make_target(), ragged_prompts(rows)[0]
    options = {"prompt": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    options["stopping_criteria"] = StoppingCriteriaList([Writes()])
    written = text(target, **options)[0]
    assert written != text(target, **{**options, "stopping_criteria": None})[0]
    assert text(target, make_draft(target), **options)[0] == written


def test_what_cannot_be_used_is_named():
    target = make_target()
    draft = make_draft(target)
    for name, value in (("generators", 3), ("costs", 5)):
        setattr(draft.decoding_config, name, value)
        with pytest.raises(ValueError, match=f"decoding_config.{name}={value} must be"):
            text(target, draft, do_sample=True)
        setattr(draft.decoding_config, name, None)
    draft.decoding_config = {"block_size": 4}
    with pytest.raises(ValueError, match="must be a DFlashDecodingConfig"):
        text(target, draft)
    with pytest.raises(ValueError, match="meta device"):
        text(target, make_draft(target).to("meta"))
    target.lm_head = torch.nn.Sequential(target.lm_head, torch.nn.Identity())
    with pytest.raises(ValueError, match="The head of target .* is a Sequential without a weight"):
        text(target, make_draft(make_target()))


@pytest.mark.parametrize("by_argument", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_logits_of_routers(family, by_argument):
    """Their loss took the masks of a block for one of padding: "The size of tensor a must match"."""
    target = make_target(family, attn=None)
    draft, expected = drafter(target), text(target)[0]
    drafted(target, draft)  # probed before they are asked for
    more = {"output_router_logits": True} if by_argument else {}
    target.config.output_router_logits = not by_argument
    written, lengths = text(target, draft, **more)
    assert written == expected and max(lengths[0]) > 3


def test_an_end_token_of_no_dimension():
    target = make_target()
    ends = [EosTokenCriteria(torch.tensor(text(target)[0][0][-8]))]
    assert text(target, drafter(target), stopping_criteria=ends)[0] == text(target, stopping_criteria=ends)[0]


def test_hooks_that_use_autograd():
    """Rounds ran in inference mode, in which no hook can compute a gradient, nor keep what may be trained on."""
    target, kept = make_target(), []

    def steer(module, args, output):
        with torch.enable_grad():
            inside = output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(inside.square().sum(), inside)
        kept.append(output)
        return output + 0.01 * gradient

    target.model.layers[1].register_forward_hook(steer)
    drafted(target, drafter(target))
    torch.nn.Linear(32, 1)(kept[-1]).sum().backward()


def test_gradients_through_a_text_are_kept():
    """`generate` without its decorator, as it is called to train on its own samples, decodes without the drafter."""
    target, outputs = make_target(), []
    embeds = target.get_input_embeddings()(PROMPT).requires_grad_()
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for assistant in (None, drafter(target)):
        generate = inspect.unwrap(type(target).generate)
        outputs.append(generate(target, inputs_embeds=embeds, **options, assistant_model=assistant))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    gradients = [torch.autograd.grad(output.logits[-1].square().sum(), embeds)[0] for output in outputs]
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0


def test_dropout_inside_a_drafter_in_evaluation_draws_no_number():
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
