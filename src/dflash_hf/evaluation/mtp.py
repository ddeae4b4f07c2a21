"""Multi-token prediction: whether transformers can run a target's own heads, `generate(use_mtp=True)`."""

import time

import torch
import transformers

from dflash_hf._io.errors import one_line
from dflash_hf._io.progress import without_bars


def seconds_to_load_heads(target) -> float:
    """
    The time that each call takes to read the heads from disk, where transformers leaves them between calls.

    Raises:
        `ValueError`: there are no such heads, or this version of transformers cannot run them; says what to do.
    """
    class_name = type(target).__name__
    version = f"transformers {transformers.__version__}"
    if not hasattr(transformers.GenerationConfig(), "use_mtp"):
        raise ValueError(f"mtp=True: {version} has no `use_mtp`: install a newer one, or leave out mtp=True.")
    if not getattr(target.config.get_text_config(), "num_mtp_layers", None):
        raise ValueError(
            f"mtp=True: {version} knows no multi-token prediction heads of this {class_name} (no `num_mtp_layers` in "
            "its configuration): leave out mtp=True, or evaluate a target with such heads, as GLM-4.5 has."
        )
    from transformers.modeling_layers import MtpModel

    ids = target.get_input_embeddings().weight.new_ones((1, 4)).long()
    try:
        with without_bars():
            for _ in range(2):  # the second time from a warm cache, as in each call
                start = time.perf_counter()
                MtpModel.from_pretrained(target, device_map={"": target.device})
                seconds = time.perf_counter() - start
            target.generate(ids, attention_mask=ids, use_mtp=True, do_sample=False, max_new_tokens=4)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # upstream checks little: what does not fit fails anywhere
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise ValueError(
            f"mtp=True: {version} cannot run the heads of this {class_name} ({reason}): leave out mtp=True."
        ) from error
    return seconds
