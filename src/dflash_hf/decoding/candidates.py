"""A drafter as a `CandidateGenerator`: for upstream's own loop, or somebody else's that takes one."""

import torch
from transformers.generation import CandidateGenerator

from dflash_hf.modeling.accept_dflash import Verdict
from dflash_hf.modeling.drafting_dflash import Drafter, padding_of
from dflash_hf.modeling.target_dflash import first_positions, input_device


class DFlashCandidateGenerator(CandidateGenerator):
    """
    A drafter inside upstream's own loop, `_assisted_decoding`: whole blocks for one row.

    Args:
        draft (`DFlashDraftModel`): The drafter.
        target (`PreTrainedModel`): The target, for its embedding and head.
        max_length (`int`): Longest text, prompt included.
    """

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}

    def __init__(self, draft, target, max_length: int):
        self.drafter, self.max_length, self.before = Drafter(draft, target), max_length, 0

    def get_candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs):
        """The next block; the first call comes before any forward of the target and drafts nothing."""
        drafter, context, length = self.drafter, self.drafter.context, input_ids.shape[1]
        room = self.max_length - length - 1
        if is_first_iteration or room <= 0:
            return input_ids, None
        layer_ids, anchors = drafter.draft.config.target_layer_ids, input_ids[:, -1].to(input_device(drafter.target))
        layers = [model_outputs.hidden_states[i + 1].to(anchors.device) for i in layer_ids]
        if not context.lengths:  # after the prompt
            padding, positions = padding_of(model_kwargs.get("attention_mask"), 1), model_kwargs.get("position_ids")
            columns = length if positions is None else positions.shape[-1]
            context.absorb(*layers)
            context.open(padding, length - 1, first_positions(positions, columns, padding, anchors.device))
        else:
            context.read(torch.cat(layers, dim=-1), Verdict([length - self.before]))
        self.before = length
        tokens = drafter.block(anchors, context.lengths).tokens[:, 1 : 1 + room]
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to do: this loop always drafts whole blocks."""
