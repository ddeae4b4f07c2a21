"""
Actions that run once another module is imported: `import dflash_hf` must be fast, but the modules of transformers that
it patches take seconds to import, and may never be needed.
"""

import sys
from collections.abc import Callable


_actions: dict[str, list[Callable[[], object]]] = {}  # module name -> actions


def when_imported(name: str, action: Callable[[], object]) -> None:
    """
    Run `action` as soon as module `name` has been executed, or immediately if it already has.

    Args:
        name (`str`): Full name of a module.
        action (`callable`): Called once, without arguments, after the actions that were registered earlier; it may
            import the module.
    """
    if name in sys.modules:
        action()
        return
    _actions.setdefault(name, []).append(action)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """A meta path finder that leaves the search to the other finders, and adds the actions to the module's loader."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _actions:
            return None
        spec = _spec_of_others(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            # They wait until here: a module may be found and not imported, or its first import may fail.
            for action in _actions.pop(name, ()):
                action()

        spec.loader.exec_module = exec_module
        return spec


def _spec_of_others(name: str, path, target):
    """What the other finders find, the first that finds anything."""
    for finder in sys.meta_path:
        if finder is _Finder:
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
