"""Which dtypes a CPU computes in hardware, and which it emulates."""

import platform

import torch
from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)

# The operator of `torch.ops.mkldnn` that says whether this processor supports a dtype; fp32 is always supported.
SUPPORT_QUERIES = {
    torch.float32: None,
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU has no instructions for products in a dtype: they take several times as long as in fp32."""
    query = SUPPORT_QUERIES.get(dtype)
    if query is None:
        return False
    is_supported = getattr(torch.ops.mkldnn, query, None)  # missing on macOS
    if is_supported is None or not is_supported():
        return True
    # On x86, oneDNN calls a processor with AVX-512 but without its bfloat16 instructions supported.
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return dtype == torch.bfloat16 and is_x86 and not torch.cpu._is_avx512_bf16_supported()


def warn_if_emulated(model: nn.Module) -> None:
    """Log once that the CPU emulates a model's dtype, and the remedy."""
    weight = next(model.parameters(), None)
    if weight is not None and weight.device.type == "cpu" and is_emulated(weight.dtype):
        logger.warning_once(
            f"This processor has no hardware support for {str(weight.dtype).removeprefix('torch.')}: several tokens "
            'at once take at least three times as long as in float32. Load target and drafter with dtype="float32".'
        )
