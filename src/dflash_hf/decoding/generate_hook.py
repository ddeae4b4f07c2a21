"""The hook into `generate` with the package: the drafter's own, and a note of what the caller asked for."""

import functools

from dflash_hf.modeling import hook_dflash


ASKED = "_dflash_num_assistant_tokens"  # noted on the configuration of a call
_ARGUMENT = "num_assistant_tokens"


def install_hook() -> None:
    """Let `target.generate(assistant_model=draft)` decode with a drafter. Installing twice is a no-op."""
    hook_dflash.install_hook()
    hook_dflash.wrap_methods(_WRAPPERS)  # where it is missing, drafts are as long as by default


def remove_hook() -> None:
    """Put upstream's methods back."""
    hook_dflash.remove_hook()
    hook_dflash.unwrap_methods(_WRAPPERS)


def _note_asked_tokens(original):
    """Note the number of drafted tokens that is asked for: later it cannot be told from upstream's default."""

    @functools.wraps(original)
    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        prepared = original(self, generation_config, *args, **kwargs)
        settings = (generation_config, self.generation_config)
        asked = [kwargs.get(_ARGUMENT), *(getattr(config, _ARGUMENT, None) for config in settings)]
        setattr(prepared[0], ASKED, next((number for number in asked if number is not None), None))
        return prepared

    return _prepare_generation_config


_WRAPPERS = {"_prepare_generation_config": _note_asked_tokens}
