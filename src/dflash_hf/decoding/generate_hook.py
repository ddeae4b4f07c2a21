"""The hook into `generate` with the package: the drafter's own, and a record of how many tokens were requested."""

import functools

from dflash_hf.modeling import hook_dflash


# Attribute of a call's `GenerationConfig`: `num_assistant_tokens` as requested, `None` if nobody set it.
REQUESTED_TOKENS = "_dflash_num_assistant_tokens"
_ARGUMENT = "num_assistant_tokens"


def install_hook() -> None:
    """Let `target.generate(assistant_model=draft)` decode with a drafter. Installing twice is a no-op."""
    hook_dflash.wrap_generation()
    hook_dflash.wrap_methods(_WRAPPERS)  # if upstream has no such method, drafts have their default length


def remove_hook() -> None:
    """Put upstream's methods back."""
    hook_dflash.unwrap_generation()
    hook_dflash.unwrap_methods(_WRAPPERS)


def _record_requested_tokens(original):
    """Record the requested number of drafted tokens, which upstream then fills in with its default."""

    @functools.wraps(original)
    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        prepared = original(self, generation_config, *args, **kwargs)
        # The argument of the call wins over the configuration that it passes, and that over the target's.
        requests = [kwargs.get(_ARGUMENT)]
        requests += [getattr(config, _ARGUMENT, None) for config in (generation_config, self.generation_config)]
        setattr(prepared[0], REQUESTED_TOKENS, next((number for number in requests if number is not None), None))
        return prepared

    return _prepare_generation_config


_WRAPPERS = {"_prepare_generation_config": _record_requested_tokens}
