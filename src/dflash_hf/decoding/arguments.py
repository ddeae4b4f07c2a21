"""Which arguments of `generate` go to every forward of the target, and which only to the forward over the prompt."""

import inspect

from transformers.generation import utils as generation_utils

from dflash_hf.decoding.call import GenerateCall
from dflash_hf.modeling.candidates_dflash import CACHE_NAME


# Arguments that every round sets itself.
_SET_BY_ROUNDS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "cache_params",
    CACHE_NAME,
}
# Images and sounds, which upstream passes with the prompt only; `None` if it no longer lists them.
MULTIMODAL_ARGUMENTS = getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", None)
_PROMPT_ONLY = {"mm_token_type_ids", "logits_to_keep", "cache_position", *(MULTIMODAL_ARGUMENTS or ())}


def extra_arguments(call: GenerateCall) -> dict:
    """Arguments of `generate` that are passed to every forward of the target, such as adapter names."""
    parameters = inspect.signature(call.target.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {}
    for key, value in call.model_kwargs.items():
        if key in _SET_BY_ROUNDS | _PROMPT_ONLY or not (takes_any or key in parameters):
            continue
        if key == "token_type_ids" and value is not None:
            value = value[:, -1:]
        arguments[key] = value
    return arguments
