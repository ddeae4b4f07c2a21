"""Which policy decides what a call verifies."""

from transformers.utils import logging

from dflash_hf.decoding.adaptive import AdaptiveLength
from dflash_hf.decoding.call import GenerateCall
from dflash_hf.decoding.cpu_dtypes import warn_if_emulated
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.policies import DraftPolicy, FixedTree


logger = logging.get_logger(__name__)

# Settings of other kinds of assistants, and their values if the user does not set them.
_OTHER_ASSISTANTS = {
    "assistant_lookbehind": 10,
    "assistant_ensemble_weight": None,
    "assistant_early_exit": None,
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
    "prompt_lookup_num_tokens": None,
    "use_mtp": None,
}


def policy_for(call: GenerateCall, draft_session: DraftSession) -> DraftPolicy:
    """The policy of a call: the user's own, the one for the sizes in its settings, or the adaptive one."""
    warn_if_emulated(call.target)
    warn_if_emulated(call.draft)
    _warn_about_ignored_settings(call.config)
    config = call.draft.decoding_config
    if config.policy is not None:
        return config.policy(call, draft_session)
    if config.tree_nodes is not None:
        return FixedTree(call, draft_session)
    if config.block_size is not None or call.requested_tokens is not None or config.compile:
        return DraftPolicy(call, draft_session)
    return AdaptiveLength(call, draft_session)


def _warn_about_ignored_settings(generation_config) -> None:
    """Warn once about settings that only other kinds of assistants support."""
    ignored = []
    for name, default in _OTHER_ASSISTANTS.items():
        value = getattr(generation_config, name, None)
        if value is not None and value != default:
            ignored.append(f"{name}={value!r}")
    if ignored:
        settings = ", ".join(ignored)
        logger.warning_once(f"A DFlash drafter ignores {settings}; see `draft.decoding_config` for its own settings.")
