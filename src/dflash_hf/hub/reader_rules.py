"""
What readers with their own drafter model support: dflash-mlx 0.1.8, optimum-intel 2.2.0 for OpenVINO, and z-lab's
`dflash` 0.1.0. They know Qwen3-style layers and the target's head; anything else in a drafter is ignored, mostly
silently.
"""

from collections.abc import Iterator

from dflash_hf.configs import departures
from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig
from dflash_hf.modeling.selector_dflash import PathSelector


_READ_BY_Z_LAB = (*PathSelector.fields, "conv_kernel_size", "input_embedding_scale")


def unread(config: DFlashDraftConfig, engine: str) -> Iterator[tuple[str, str]]:
    """
    Keys that one of `READERS` does not read, or reads differently, each with the reason.

    Args:
        config (`DFlashDraftConfig`): The drafter's configuration.
        engine (`str`): `"mlx"`, `"openvino"` or `"z-lab"`.
    """
    for key, value, plain in departures(config):
        if not (engine == "z-lab" and key in _READ_BY_Z_LAB):
            yield key, f"{value!r} is not read; it drafts as with {plain!r}, or not at all."
    if config.hidden_act != "silu" and engine != "z-lab":
        yield "hidden_act", f"{config.hidden_act!r} is not read; it drafts as with 'silu', or not at all."
    if engine == "z-lab" and (config.head is PathSelector) != (config.conv_kernel_size is not None):
        yield "architectures", "DFlash2DraftModel has both a path selector and a convolution there; it stops."
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    causal = [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]
    if engine == "mlx" and causal != sliding:
        yield "is_causal", "is not read: sliding layers are causal inside the block, full ones are not."
    if engine == "openvino" and any(causal):
        yield "is_causal", "is not read: no layer is causal inside the block."
