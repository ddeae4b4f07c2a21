"""The list of layouts that can be read. To add a layout, add its `SourceLayout` to `SOURCE_LAYOUTS`."""

from dflash_hf.layouts.automodel import AUTOMODEL
from dflash_hf.layouts.deepspec import DEEPSPEC
from dflash_hf.layouts.muse import MUSE
from dflash_hf.layouts.source_layout import SourceLayout
from dflash_hf.layouts.speculators import SPECULATORS
from dflash_hf.layouts.torchspec import TORCHSPEC


# z-lab's layout, in which drafters are saved, and whose keys and tensor names the rest of the code uses.
PUBLISHED = SourceLayout("z-lab")
# In order: a file is read by the first layout that matches it. A layout with its own `architectures` can be last.
SOURCE_LAYOUTS: list[SourceLayout] = [SPECULATORS, MUSE, TORCHSPEC, DEEPSPEC, AUTOMODEL]


def layout_of(config: dict) -> SourceLayout:
    """The layout of a drafter's `config.json`: the first that matches it, else the published one."""
    for layout in SOURCE_LAYOUTS:
        if layout.matches(config):
            return layout
    return PUBLISHED


def layout_named(name: str) -> SourceLayout:
    """
    A layout by its name.

    Raises:
        `ValueError`: there is none of that name.
    """
    layouts = {layout.name: layout for layout in (PUBLISHED, *SOURCE_LAYOUTS)}
    if name not in layouts:
        raise ValueError(f"source_layout={name!r} must be one of {', '.join(layouts)}.")
    return layouts[name]
