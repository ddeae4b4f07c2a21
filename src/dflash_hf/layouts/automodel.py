"""NeMo Automodel: the published keys, but for a rotary factor that its model ignores."""

from dflash_hf.layouts.rotary import without_partial_rotary
from dflash_hf.layouts.source_layout import SourceLayout


def _detect(config: dict) -> bool:
    return "Qwen3DFlash" in str(config.get("architectures"))


AUTOMODEL = SourceLayout("automodel", detect=_detect, read=without_partial_rotary)
