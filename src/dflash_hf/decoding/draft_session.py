"""The drafter's side of a call, as `session` is the target's: the forward over a block, and the tokens it drafts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dflash_hf.decoding.acceptance import Acceptance, Block, argmax_token
from dflash_hf.decoding.attention import SLOT_ATTENTION, is_replaceable
from dflash_hf.decoding.draft_context import DraftContext
from dflash_hf.decoding.sampling_noise import SamplingNoise
from dflash_hf.modeling.modeling_dflash import execution_device


class DraftSession:
    """
    The drafter in one call: its model, called `draft` everywhere, and what the model has read. Policies call
    `draft_block`, or `draft_tree` of `trees.py`; `decode` calls `read` after each round.

    Args:
        draft (`DFlashDraftModel`): The model.
        target (`PreTrainedModel`): The target, for its embedding and head.
        noise ([`SamplingNoise`], *optional*): The noise of the target's samples: drafts take it into account.
        block_tokens (`int`, *optional*): Tokens of a drafted block, anchor included. Default: the trained size.
        graph (`CompiledForward`, *optional*): Runs the drafter's forward; shapes are fixed then.
        cuda_graphs (`ModelCudaGraphs`, *optional*): Run the drafter's forward; shapes are fixed then.

    Attributes:
        context ([`DraftContext`]): What it has read of the sequences.
        token_head (`TokenHead`): Chooses the tokens of a block.
    """

    def __init__(
        self,
        draft,
        target,
        noise: SamplingNoise | None = None,
        block_tokens: int | None = None,
        graph=None,
        cuda_graphs=None,
    ):
        self.draft = draft
        self.target = target
        self.noise = noise
        self.block_tokens = block_tokens or draft.config.max_block_tokens
        self.graph = graph
        self.cuda_graphs = cuda_graphs
        self.token_head = draft.config.token_head_class(draft, partial(draft.embed, target))
        self.context = DraftContext(draft, fixed_shapes=graph is not None or cuda_graphs is not None)

    def read(self, features: torch.Tensor, acceptance: Acceptance) -> None:
        """Read the features of the accepted tokens, from those of all candidates `[R, n, L * H]`."""
        self.context.read(acceptance.select(features), acceptance)

    def draft_block(self, anchors: torch.LongTensor, num_drafted: int | None = None) -> Block:
        """
        The tokens that the drafter chooses from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
            num_drafted (`int`, *optional*): Maximum number of tokens besides the anchor. Default: a whole block.
        """

        def block(anchors: torch.LongTensor, hidden: torch.Tensor) -> Block:
            return Block(self.decode_block(anchors, hidden[:, :num_drafted]))

        return self.run(anchors, block, ("block", num_drafted))

    def run(self, anchors: torch.LongTensor, choose: Callable, settings: tuple) -> Any:
        """
        The drafter's forward over a block, and what is chosen by its hidden states; in a graph if possible.

        Args:
            anchors (`torch.LongTensor`): `[R]`.
            choose (`Callable`): Called with the anchors and hidden states `[R, block_tokens - 1, H]`. Returns a
                `Block` or a `Tree`, and neither waits for the device nor copies to it.
            settings (`tuple`): What else decides which kernels `choose` launches.
        """
        if self.cuda_graphs is None:
            return choose(anchors, self.hidden_states(anchors))
        inputs = self._take_inputs()
        num_slots = self.context.cache.num_attended
        shape = inputs[0].shape
        if self.noise is not None:  # its draws are a dictionary of the host's
            hidden = self.cuda_graphs.run(num_slots, (shape,), self._hidden_states, anchors, *inputs)
            return choose(anchors, hidden)

        def forward_and_choose(anchors: torch.LongTensor, *inputs):
            return choose(anchors, self._hidden_states(anchors, *inputs))

        return self.cuda_graphs.run(num_slots, (shape, *settings), forward_and_choose, anchors, *inputs)

    def hidden_states(self, anchors: torch.LongTensor) -> torch.Tensor:
        """`[R, block_tokens - 1, H]` after the final norm, of the slots that draft."""
        return self._hidden_states(anchors, *self._take_inputs())

    def _take_inputs(self) -> tuple:
        """What changes from block to block, besides the anchors; takes the pending features, and makes room."""
        features, pending_indices = self.context.take_pending()
        self.context.reserve(self.block_tokens)
        return pending_indices, features, self.context.lengths.starts

    def _hidden_states(
        self,
        anchors: torch.LongTensor,
        pending_indices: torch.LongTensor,
        features: torch.Tensor | None,
        start: torch.LongTensor,
    ) -> torch.Tensor:
        """[`hidden_states`] of a block for which there is room: nothing here waits for the device."""
        block = self.draft.embed_block(self.target, anchors, self.block_tokens)  # [R, B, H]
        inputs = {
            "noise_embeds": self.context.to_draft(block),
            **self.context.block_inputs(block.shape[1], pending_indices, features, start),
        }
        if self.graph is None:
            if is_replaceable(self.draft.config._attn_implementation):
                inputs["attn_implementation"] = SLOT_ATTENTION
            hidden = self.draft(**inputs).last_hidden_state
        else:
            shapes = (
                inputs["noise_embeds"].shape,
                inputs["context_hidden_states"].shape,
                self.context.cache.num_attended,
            )
            hidden = self.graph.run(shapes, inputs)
        return self.draft.states_of_drafting_slots(hidden)[:, : self.block_tokens - 1]

    def decode_block(self, anchors: torch.LongTensor, hidden: torch.Tensor) -> torch.LongTensor:
        """
        Choose the tokens of a block from left to right.

        Args:
            anchors (`torch.LongTensor`): `[R]`.
            hidden (`torch.Tensor`): `[R, n, H]`, of the slots that draft.

        Returns:
            `torch.LongTensor` `[R, n + 1]`, the anchors first.
        """
        logits = self.logits(hidden)
        if self.token_head.order == 0:  # as the token head would, with a faster argmax
            tokens = self.draft.target_ids(argmax_token(logits))
        else:
            tokens = self.token_head.decode_block(self.to_token_head(anchors), hidden, logits, self.draft.target_ids)
        return torch.cat([anchors[:, None], tokens.to(anchors.device)], dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """
        Draft logits `[R, n, V]`. If the target samples, with the noise of its next samples added: then the likeliest
        token of a slot is the one that the target would draw from the drafter's distribution.
        """
        logits = self.draft.draft_logits(hidden, self.target.get_output_embeddings())
        if self.noise is None:
            return logits
        ids: slice | torch.Tensor = slice(logits.shape[-1])
        if self.draft.config.has_own_lm_head:
            ids = self.draft.target_ids(torch.arange(logits.shape[-1])).clamp(max=self.noise.vocab_size - 1)
        gumbel = self.noise.gumbel(logits.shape[1], ids)
        return logits.float() / self.noise.temperature + gumbel.to(logits.device)

    def candidates(self, hidden: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """The target's ids of each slot's candidates, and their draft logits, both `[R, n, k]`."""
        ids, logits = self.token_head.candidates(self.logits(hidden))
        ids = self.draft.target_ids(ids).to(hidden.device)
        logits = logits.to(hidden.device)
        return ids.expand_as(logits), logits

    def to_token_head(self, token_ids: torch.LongTensor) -> torch.LongTensor:
        """Ids as the drafter's token head takes them: on its device, and clamped to the vocabulary."""
        return self.draft.clamp_to_vocabulary(token_ids.to(execution_device(self.draft.fc)))
