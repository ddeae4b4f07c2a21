"""
What readers with their own drafter model support: mlx-vlm 0.7.10, optimum-intel 2.2.0 for OpenVINO, and z-lab's
`dflash` 0.1.0. They know Qwen3-style layers and the target's head, and the first and the last some of the other parts;
anything else in a drafter is ignored, mostly silently.
"""

from collections.abc import Iterator
from itertools import pairwise

from dflash_hf.configs import departures
from dflash_hf.hub.engine_rules import DFLASH2, MUSE, Finding, error, warning
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.heads_dflash import MarkovHead, PathSelector


_DFLASH2 = (*PathSelector.fields, "conv_kernel_size", "input_embedding_scale")
_DSPARK = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
# The starts of the model types whose layers' outputs mlx-vlm gives to a drafter.
_MLX_TARGETS = (
    *("qwen3_5", "qwen4_exp", "gemma4", "lfm2", "laguna", "muse_glimmer", "nemotron_h", "minimax_m3", "glm_moe_dsa"),
    "deepseek_v4",
)


def unread(config: DFlashDraftConfig, engine: str, raw: dict, target: dict | None = None) -> Iterator[Finding]:
    """
    Keys that one of `READERS` does not read, or reads differently.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
        engine (`str`): `"mlx"`, `"openvino"` or `"z-lab"`.
        raw (`dict`): The drafter's `config.json`.
        target (`dict`, *optional*): The target's configuration.
    """
    read: tuple[str, ...] = _DFLASH2 if engine == "z-lab" else ()
    if engine == "mlx":
        read = ("attention_sink_bias", "has_embed_tokens")
        read += {PathSelector: _DFLASH2, MarkovHead: _DSPARK}.get(config.head, ())
    for key, value, plain in departures(config):
        if key not in read:
            yield error((engine,), key, f"{value!r} is not read; it drafts as with {plain!r}, or not at all.")
    if config.hidden_act != "silu" and engine != "z-lab":
        message = f"{config.hidden_act!r} is not read; it drafts as with 'silu', or not at all."
        yield error((engine,), "hidden_act", message)
    if engine != "openvino" and (config.head is PathSelector) != (config.conv_kernel_size is not None):
        message = "DFlash2DraftModel has both a path selector and a convolution there; it stops."
        yield error((engine,), "architectures", message)
    if engine == "openvino" and any(_causal(config)):
        yield error((engine,), "is_causal", "is not read: no layer is causal inside the block.")
    if engine == "mlx":
        yield from _mlx(config, raw, target)


def _causal(config: DFlashDraftConfig) -> list[bool]:
    return [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]


def _mlx(config: DFlashDraftConfig, raw: dict, target: dict | None) -> Iterator[Finding]:
    mlx, names, ids = ("mlx",), raw.get("architectures"), config.target_layer_ids
    if not raw.get("dflash_config") and names != [MUSE]:
        message = "is missing: mlx-vlm does not recognise the drafter. `dflash convert` writes it."
        yield error(mlx, "dflash_config", message)
    elif not (config.head is MarkovHead or names in ([DFLASH2], [MUSE])):
        if raw.get("model_type") not in ("qwen3", "gemma4"):
            message = f"{raw.get('model_type')!r} is unknown to mlx-vlm for a drafter; write 'qwen3'."
            yield error(mlx, "model_type", message)
    if config.attention_bias:
        yield error(mlx, "attention_bias", "mlx-vlm has no biases for q, k, v and o; it stops.")
    if min(ids) < 0 or any(one >= other for one, other in pairwise(ids)):
        yield error(mlx, "target_layer_ids", f"{ids} must increase from 0: features are read in the target's order.")
    if _causal(config) != [bool(config.is_causal)] * config.num_hidden_layers:
        message = "is missing: no layer is causal inside the block. Write true if all of them are."
        yield error(mlx, "is_causal", message)
    elif config.is_causal and config.head is PathSelector:
        yield error(mlx, "is_causal", "is true: mlx-vlm drafts bidirectionally with DFlash 2, and stops.")
    elif "sliding_attention" in config.layer_types and not config.is_causal:
        message = "is counted from the anchor for all slots of the block, by up to a block too far. Compare tau."
        yield warning(mlx, "sliding_window", message)
    if config.head is MarkovHead and config.output_multiplier != 1.0:
        yield error(mlx, "output_multiplier", f"{config.output_multiplier} is read for DFlash 2 only.")
    kind = str((target or {}).get("model_type"))
    if target is not None and not kind.startswith(_MLX_TARGETS):
        yield error(mlx, "model_type", f"mlx-vlm reads no features of a {kind} target; it stops.")
