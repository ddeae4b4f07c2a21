"""Chooses the planner of a call's rounds, from its settings."""

import weakref

from transformers.utils import logging

from .cost_dflash import adapters_of, table_of
from .few_plans_dflash import FewPlans
from .plan_dflash import SCHEDULES, AssistantPlan, FastestPlan, FixedPlan, Plan


logger = logging.get_logger(__name__)

# For each drafter and target, statistics of the pair, by rows and decoding mode.
_paces: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()

# Values of a `GenerationConfig` that does not set them.
_DEFAULT_ASSISTANT_TOKENS, _DEFAULT_THRESHOLD = 20, 0.4
_OF_ASSISTANTS = ("assistant_confidence_threshold", "num_assistant_tokens_schedule")


def planner_of(call, pair):
    """
    The planner of a call: for the sizes in its settings, or for the fastest sizes.

    Args:
        call (`Call`): The call; `draft.decoding_config` holds the settings. `num_assistant_tokens`,
            `num_assistant_tokens_schedule` and `assistant_confidence_threshold` of its generation configuration set
            the block size too.
        pair (`Pair`): Its parts.
    """
    target, draft, drafter, text = call.target, call.draft, pair.drafter, pair.continuation
    generation_config = call.generation_config
    config, trained, rows = draft.decoding_config, draft.config.block_tokens, len(text.host.alive)
    asked = generation_config.num_assistant_tokens
    unset = asked in (None, _DEFAULT_ASSISTANT_TOKENS)
    limit = trained if unset else max(int(asked), 0) + 1
    # Rows that advance together agree on one path.
    trees = call.facts.trees and (rows == 1 or text.rules.pace != "together")
    paces = _paces.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(target, {})
    threshold, schedule = (getattr(generation_config, name) for name in _OF_ASSISTANTS)
    threshold = 0.0 if threshold in (None, _DEFAULT_THRESHOLD) else threshold
    if threshold or schedule in SCHEDULES:
        if not call.of_one_shape and config.tree_nodes is None:
            if threshold:
                drafter.foresight = None  # its noise would be part of the probabilities
            plan, drawn = drafter.plan(config.block_size or trained), bool(drafter.temperature)
            return AssistantPlan(plan, limit - 1, threshold, schedule, paces, drawn)
        logger.warning_once(
            f"A DFlash drafter ignores {' and '.join(_OF_ASSISTANTS)} with tree_nodes and in rounds that are compiled "
            "or run ahead of the host (compile, look_ahead)."
        )
    on_cpu = target.device.type == "cpu"
    if config.is_open and unset and (on_cpu or not call.of_one_shape):  # `FewPlans` has only been measured on a CPU
        sampled = generation_config.do_sample, drafter.foresight is not None
        place, key = (rows, pair.columns), (rows, sampled, call.of_one_shape, adapters_of(draft))
        table = table_of(target, draft, call.compile, text.look_ahead, pair.session.target)
        copies = text.look_ahead == 1 and (rows == 1 or text.rules.pace != "together")
        vocab_size = target.config.get_text_config(decoder=True).vocab_size if copies else None
        if call.of_one_shape:
            plans = _few(drafter, trained, rows, trees)
            return FewPlans(plans, table, paces, key, place, bool(call.compile), vocab_size)
        nodes = widest_tree(rows, on_cpu)
        plan = drafter.plan(trained, nodes) if trees else drafter.plan(trained, trained - 1, top_k=1)
        return FastestPlan(plan, table, paces, key, place, vocab_size)
    nodes = (config.tree_nodes or 0) if trees else 0
    return FixedPlan(drafter.plan(min(config.block_size or trained, limit), nodes), call.of_one_shape)


def _few(drafter, trained: int, rows: int, trees: bool) -> list[Plan]:
    """No draft, the whole block, its first half, and trees of the sizes that forwards handle well on a CPU."""
    plans = [Plan(1), drafter.plan(trained), *([Plan((trained + 1) // 2)] if trained > 3 else [])]
    sizes = sorted({max(most // rows, 3) for most in (7, 15)}) if trees and trained > 2 else []
    return [*plans, *(drafter.plan(trained, nodes) for nodes in sizes)]


def widest_tree(rows: int, on_cpu: bool) -> int:
    """Maximum drafted tokens considered per row: fewer in a batch, more on devices where wide forwards are cheap."""
    return max(min(16, 32 // rows), 2) if on_cpu else max(min(64, 512 // rows), 15)
