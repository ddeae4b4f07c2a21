"""What llama.cpp b11549 cannot run, in a drafter or of its target (`src/models/dflash.cpp`)."""

from collections.abc import Iterator

from dflash_hf.conversion.gguf_names import EXPOSED_TARGETS, TARGETS_WITH_LAST_LAYER
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.heads_dflash import MarkovHead, PathSelector, TokenHead
from dflash_hf.pairs.configs import incompatibilities, resized_vocabulary
from dflash_hf.targets.config_fields import num_layers_of


_SUPPORTED_HEADS = (TokenHead, PathSelector, MarkovHead)


def llama_cpp_limits(config: DFlashDraftConfig, target: dict | None = None) -> Iterator[tuple[str, str]]:
    """
    Why llama.cpp cannot run a drafter, or not with that target: a key of the configuration, and the reason.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
        target (`dict`, *optional*): From [`~dflash_hf.conversion.gguf_read.target_config`].
    """
    hidden = config.hidden_size
    rope = config.rope_parameters
    if config.attention_bias:
        yield "attention_bias", "llama.cpp has no biases for q, k, v and o."
    if len({config.layer_is_causal(i) for i in range(config.num_hidden_layers)}) > 1:
        yield "is_causal", "some layers are causal inside the block, some not; llama.cpp has one value for all."
    if config.v_head_dim != config.head_dim:
        yield "v_head_dim", f"{config.v_head_dim} is not head_dim={config.head_dim}; llama.cpp has one size for both."
    if config.target_hidden_size != hidden:
        yield "target_hidden_size", f"{config.target_hidden_size} must equal hidden_size={hidden} in llama.cpp."
    if config.backbone_rotary_base not in (None, rope["rope_theta"]):
        yield "backbone_rotary_base", "llama.cpp rotates the keys of context and block with one base."
    if config.hidden_act not in ("silu", "gelu_pytorch_tanh"):
        yield "hidden_act", f"{config.hidden_act!r} is neither 'silu' nor 'gelu_pytorch_tanh'."
    if rope["rope_type"] in ("dynamic", "longrope"):
        yield "rope_parameters", f"{rope['rope_type']!r} changes with the length; a GGUF file holds one table."
    if config.token_head_class not in _SUPPORTED_HEADS:
        yield next(iter(config.token_head_class.fields)), f"llama.cpp has no {config.token_head_class.name}."
    elif config.token_head_class is MarkovHead and not (config.markov_rank and config.markov_head_type == "vanilla"):
        kind = f"{config.markov_head_type!r} with markov_rank={config.markov_rank}"
        yield "markov_head_type", f"{kind}: llama.cpp only has the 'vanilla' Markov head, with a rank."
    elif config.sample_from_anchor and config.token_head_class is not MarkovHead:
        yield "sample_from_anchor", "llama.cpp reads it only for drafters with a Markov head."
    if config.enable_confidence_head and not config.confidence_head_with_markov:
        yield "confidence_head_with_markov", "llama.cpp's confidence head also reads the previous token."
    top_k = config.selector_top_k
    if top_k is not None and hidden < top_k * (top_k + 1):
        yield "selector_top_k", f"{top_k} needs a hidden_size of {top_k * (top_k + 1)} in llama.cpp, not {hidden}."
    if getattr(config, "quantization_config", None) is not None:
        yield "quantization_config", "the drafter is quantised: convert the unquantised drafter, with `dtype='q8_0'`."
    if target is not None:
        yield from _limits_of_target(config, target)


def _limits_of_target(config: DFlashDraftConfig, target: dict) -> Iterator[tuple[str, str]]:
    """What llama.cpp does not expose of a target, and where drafter and target do not fit each other."""
    model_type = str(target.get("model_type"))
    architecture = "".join(character for character in model_type.removesuffix("_text") if character.isalnum())
    num_layers = num_layers_of(target)
    reads_last_layer = num_layers is not None and max(config.target_layer_ids) + 1 == num_layers
    if architecture not in EXPOSED_TARGETS:
        yield "model_type", f"llama.cpp (b11549) exposes no features of a {model_type} target, and exits."
    elif reads_last_layer and architecture not in TARGETS_WITH_LAST_LAYER:
        yield "target_layer_ids", f"{num_layers - 1} is the last layer, whose output llama.cpp does not expose."
    yield from incompatibilities(config, target)
    resized = resized_vocabulary(config, target)
    if resized is not None:
        yield "vocab_size", f"{resized}; a GGUF file has one vocabulary, for the drafter and its tokenizer."
