"""
Actions that wait for a module: `import dflash_hf` must be free, but the modules that it changes take seconds to import
and may never be needed.
"""

import importlib.util
import sys
from collections.abc import Callable


_actions: dict[str, list[Callable[[], object]]] = {}  # by the module that they wait for


def when_imported(name: str, action: Callable[[], object]) -> None:
    """
    Run `action` as soon as module `name` has been executed, or immediately if it already has.

    Args:
        name (`str`): Full name of a module.
        action (`callable`): Called once, without arguments, after those that waited earlier; it may import the module.
    """
    if name in sys.modules:
        action()
        return
    _actions.setdefault(name, []).append(action)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds nothing itself: it lets the other finders find an awaited module, and adds the actions to its loader."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        actions = _actions.pop(name, None)  # first, so that the search below does not come back here
        if actions is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for action in actions:
                action()

        spec.loader.exec_module = exec_module
        return spec
