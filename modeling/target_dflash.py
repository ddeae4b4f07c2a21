"""What a drafter needs from a frozen target: its layers' outputs, its raw embedding table, its head."""

import contextlib
import inspect
from types import FunctionType

import torch
from torch import nn
from transformers import DynamicCache, masking_utils


# The name of a cache in forwards, outputs and masks; transformers 5.24 renamed `past_key_values`.
CACHE_NAME = (
    "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
)


def text_depth(target_config) -> int:
    """Decoder layers of a target's text stack; LongCat counts the two attentions of a layer as `num_hidden_layers`."""
    text = target_config.get_text_config()
    return getattr(text, "num_layers", None) or text.num_hidden_layers


def decoder_layers(target) -> nn.ModuleList:
    """
    The decoder layers of a target's text stack (of a multimodal wrapper too).

    Raises:
        `ValueError`: no list with as many layers as the configuration counts is found.
    """
    depth = text_depth(target.config)
    for stack in (target.get_decoder(), target.base_model):  # ModernBERT's decoder is part of its head
        for module in stack.modules():
            if isinstance(module, nn.ModuleList) and len(module) == depth:
                return module
    raise ValueError(
        f"{type(target).__name__} has no list of {depth} decoder layers, so its features cannot be read; use a "
        "decoder-only transformer as the target."
    )


def methods_of(target) -> set[FunctionType]:
    """The methods of the classes of a target's modules, and of those that they inherit from."""
    classes = {base for kind in {type(module) for module in target.modules()} for base in kind.__mro__}
    return {value for base in classes for value in vars(base).values() if isinstance(value, FunctionType)}


def running_device(module: nn.Module) -> torch.device:
    """The device of a module's weight, or, where accelerate has offloaded it, the one it is fetched to."""
    device = module.weight.device
    if device.type != "meta":
        return device
    if not hasattr(module, "_hf_hook"):
        raise ValueError(f"A {type(module).__name__} is on the meta device, without values: load the model first.")
    return torch.device(module._hf_hook.execution_device)


def input_device(target) -> torch.device:
    """The device on which a target expects token ids."""
    return running_device(target.get_input_embeddings())


def cache_argument(target) -> str:
    """The name under which `generate` keeps a target's cache and passes it to the forward."""
    accepted = inspect.signature(target.forward).parameters
    if CACHE_NAME in accepted or CACHE_NAME == "cache":  # upstream translates `cache` for forwards that say otherwise
        return CACHE_NAME
    return "cache_params" if "cache_params" in accepted else CACHE_NAME


def empty_cache(target) -> DynamicCache:
    """The cache that `generate` makes by default."""
    return DynamicCache(config=target.config.get_text_config(decoder=True))


@torch.no_grad()
def try_out(target, cache=None) -> None:
    """Run a short forward, to observe what happens in it."""
    ids = torch.ones(2, 3, dtype=torch.long, device=input_device(target))
    target(input_ids=ids, use_cache=True, **{cache_argument(target): empty_cache(target) if cache is None else cache})


def raw_embedding(target, input_ids: torch.LongTensor) -> torch.Tensor:
    """`[..., H]` rows of the target's embedding table, without the scale or norm that its embedding module may add."""
    module = target.get_input_embeddings()
    if module.weight.device.type != "meta":
        return nn.functional.embedding(input_ids, module.weight)
    module._hf_hook.pre_forward(module)  # offloaded: fetch the weights, as before any forward
    try:
        return nn.functional.embedding(input_ids, module.weight)
    finally:
        module._hf_hook.post_forward(module, None)


class FeatureTap:
    """
    Captures the outputs of a target's decoder layers while it is open.

    Forward hooks see the same tensor in every version of transformers; the meaning of `output_hidden_states=[i]`
    changed in 5.23, and its last entry is taken after the final norm. Hooks see every forward of the target: if it is
    shared, open the tap on an [`isolated`] copy.

    Args:
        target (`PreTrainedModel`): The target.
        layer_ids (`list[int]`): Id `i` is the output of decoder layer `i`, -1 the input of the first one.
        consume (`callable`, *optional*): Called with the layers' outputs, `[N, S, H]` each, as soon as a forward has
            produced the last of them; they are not kept.
    """

    def __init__(self, target, layer_ids: list[int], consume=None):
        self.layers = decoder_layers(target)
        self.layer_ids = layer_ids
        self.consume = consume
        self.captured: dict[int, torch.Tensor] = {}
        self.opened = contextlib.ExitStack()

    def __enter__(self):
        for layer_id in self.layer_ids:
            self.opened.callback(self._hook(layer_id).remove)
        return self

    def __exit__(self, *exc):
        self.opened.close()
        self.captured.clear()

    def _hook(self, layer_id: int):
        def after(layer, args, output):
            self.captured[layer_id] = output if isinstance(output, torch.Tensor) else output[0]
            if self.consume is not None and len(self.captured) == len(self.layer_ids):
                self.consume(*self._layers())

        def before(layer, args, kwargs):
            if (states := (*args, kwargs.get("hidden_states"))[0]) is not None:  # remote code may name it differently
                after(layer, args, states)

        if layer_id < 0:
            return self.layers[0].register_forward_pre_hook(before, with_kwargs=True)
        return self.layers[layer_id].register_forward_hook(after)

    def take(self) -> torch.Tensor:
        """Return the features of the last forward, `[N, S, L * H]`, in the order of `layer_ids`, and drop them."""
        layers = self._layers()
        return torch.cat([layer.to(layers[0].device) for layer in layers], dim=-1)

    def _layers(self) -> list[torch.Tensor]:
        captured, self.captured = self.captured, {}
        return [captured[i] for i in self.layer_ids]


def check_pair(target, draft_config) -> None:
    """
    Check that a drafter fits a target, as far as shapes show.

    Raises:
        `ValueError`: names the mismatch, both values and the remedy.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; DFlash drafts for decoder-only targets. Call "
            "`generate` without `assistant_model`."
        )
    text = target.config.get_text_config()
    name = f"target {type(target).__name__}"
    if draft_config.target_hidden_size != text.hidden_size:
        raise ValueError(
            f"The drafter reads features of width target_hidden_size={draft_config.target_hidden_size}, but {name} "
            f"has hidden_size={text.hidden_size}: load the drafter that was trained for this target."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no language-model head, which the drafter needs; load it with `AutoModelForCausalLM`."
        )
    for part, module in (("embedding", target.get_input_embeddings()), ("head", target.get_output_embeddings())):
        if not hasattr(module, "weight"):
            raise ValueError(
                f"The {part} of {name} is a {type(module).__name__} without a weight, but a drafter shares it: put a "
                "single layer in its place, or call `generate` without `assistant_model`."
            )
    rows, width = target.get_input_embeddings().weight.shape
    head_width = getattr(target.get_output_embeddings(), "in_features", width)
    if head_width != width:
        raise ValueError(
            f"The embedding of {name} has width {width} and its head {head_width}, but a drafter shares both: this "
            "target cannot have a drafter. Call `generate` without `assistant_model`."
        )
    if draft_config.hidden_size != width:
        raise ValueError(
            f"The drafter has hidden_size={draft_config.hidden_size}, but the embedding of {name}, which it shares, "
            f"has width {width}: load the drafter that was trained for this target."
        )
    # A target whose embedding has grown or shrunk by a few rows is still the same target: its drafter drafts the
    # tokens that both know.
    known = draft_config.vocab_size
    if known not in (None, text.vocab_size) and abs(known - rows) > known * 0.1:
        raise ValueError(
            f"The drafter was trained with vocab_size={draft_config.vocab_size}, but {name} has "
            f"vocab_size={text.vocab_size}: load the drafter that was trained for this target."
        )
    if draft_config.mask_token_id >= rows:
        raise ValueError(
            f"mask_token_id={draft_config.mask_token_id} lies outside the embedding of {name} ({rows} rows): resize "
            "that embedding, or load the drafter that was trained for this target."
        )
    depth = text_depth(target.config)
    if max(draft_config.target_layer_ids) >= depth:
        raise ValueError(
            f"target_layer_ids={draft_config.target_layer_ids} reach past the {depth} layers of {name}: this drafter "
            "belongs to a deeper target."
        )
    if draft_config.num_target_layers not in (None, depth):
        raise ValueError(
            f"The drafter was trained for a target with num_target_layers={draft_config.num_target_layers}, but "
            f"{name} has {depth} layers: load the drafter that was trained for this target."
        )
