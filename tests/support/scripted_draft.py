"""A drafter that knows texts: right on purpose, wrong at one place in ten, and in any number of calls at once."""

from collections.abc import Sequence

import torch
from torch import nn

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.modeling.target_dflash import decoder_layers, raw_embedding
from support.pairs import make_draft


ANCHORS_AT_ONCE = 128


def features_of(target, text: torch.LongTensor, layer_ids: Sequence[int]) -> torch.Tensor:
    """`[1, S, L * H]`, what a drafter reads of a text `[S]`."""
    taken = {}

    def keep(layer_id):
        return lambda module, args, output: taken.update(
            {layer_id: output if isinstance(output, torch.Tensor) else output[0]}
        )

    handles = [decoder_layers(target)[i].register_forward_hook(keep(i)) for i in layer_ids]
    target(text[None])
    for handle in handles:
        handle.remove()
    return torch.cat([taken[i] for i in layer_ids], dim=-1)


class ScriptedDraft(DFlashDraftModel):
    """
    A drafter whose final hidden states are, slot by slot, the head's own vectors of the text that is being written.
    Where it says another token, the right one comes second: a tree holds it.

    It computes everything that a drafter computes, and recognises the text by the result: its own hidden state of the
    first slot depends on the anchor, its position and the features of all tokens before it. What it would be for each
    anchor of each known text is learned once, block by block without a cache. Nothing is kept from call to call, so
    that calls in several threads, inside each other, of several rows and in compiled rounds do not meet here; and a
    call whose features, slots or positions are not its own is not recognised: its acceptance lengths are all 1.

    Build it with `of`.
    """

    def __init__(self, config: DFlashDraftConfig, num_texts: int, longest: int):
        super().__init__(config)
        size, width = longest + config.block_size, config.hidden_size
        self.right = nn.Buffer(torch.zeros(num_texts, size, dtype=torch.long), persistent=False)
        self.said = nn.Buffer(torch.zeros(num_texts, size, dtype=torch.long), persistent=False)
        self.known = nn.Buffer(torch.full((num_texts, size, width), torch.inf), persistent=False)
        self.vectors = nn.Buffer(torch.zeros(config.vocab_size, width), persistent=False)
        self.tolerance = 0.02  # of a hidden state; rounding stays below 1e-3, another text differs by more than 0.2

    @classmethod
    @torch.no_grad()
    def of(
        cls, target, texts: Sequence[torch.LongTensor], block_size: int = 6, error_rate: float = 0.1, seed: int = 0
    ):
        """
        Args:
            target (`PreTrainedModel`): Whose texts.
            texts (`Sequence[torch.LongTensor]`): `[S]` each, prompt and continuation, without padding.
            block_size (`int`): Of the drafter.
            error_rate (`float`): The part of all places at which another token is said.
            seed (`int`): Of these places.
        """
        config = make_draft(target, block_size, target_layer_ids=[0, 1, 2]).config
        torch.manual_seed(seed)
        draft = cls(config, len(texts), max(len(text) for text in texts)).to(target.dtype).eval()
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)  # or the hidden state would be little but the anchor's embedding
        draft.vectors.copy_(target.get_output_embeddings().weight[: config.vocab_size])
        random = torch.Generator().manual_seed(seed)
        for number, text in enumerate(texts):
            wrong = torch.rand(len(text), generator=random) < error_rate
            draft.right[number, : len(text)] = text
            draft.said[number, : len(text)] = torch.where(wrong, (text + 1) % config.vocab_size, text)
            draft._learn(target, number, text)
        return draft.requires_grad_(False)

    def _learn(self, target, number: int, text: torch.LongTensor) -> None:
        features = features_of(target, text, self.config.target_layer_ids)
        columns, block = torch.arange(len(text)), torch.arange(self.config.block_size)
        for anchors in columns[1:].split(ANCHORS_AT_ONCE):
            noise = torch.full((len(anchors), self.config.block_size), self.config.mask_token_id)
            noise[:, 0] = text[anchors]
            # A block sees the text before its anchor, and itself.
            seen = torch.cat([columns < anchors[:, None], torch.ones_like(noise, dtype=torch.bool)], dim=1)
            mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, torch.finfo(self.dtype).min)
            positions = torch.cat([columns.expand(len(anchors), -1), anchors[:, None] + block], dim=1)
            hidden = (
                super()
                .forward(
                    noise_embeds=raw_embedding(target, noise),
                    context_hidden_states=features.expand(len(anchors), -1, -1),
                    attention_mask=mask[:, None, None].expand(-1, -1, self.config.block_size, -1),
                    position_ids=positions,
                )
                .last_hidden_state
            )
            self.known[number, anchors] = hidden[:, 1]

    def forward(self, noise_embeds, *args, position_ids=None, **kwargs):
        output = super().forward(noise_embeds, *args, position_ids=position_ids, **kwargs)
        hidden, size = output.last_hidden_state, self.config.block_size  # [R, B, H]
        start = position_ids[:, -size].clamp(max=self.said.shape[1] - size)  # [R], of the anchors
        # 1. Which text is it?
        distances = (self.known[:, start] - hidden[:, 1]).norm(dim=-1) / hidden[:, 1].norm(dim=-1)  # [T, R]
        nearest, number = distances.min(dim=0)  # [R]
        # 2. How does it go on? Something else, where it is none of them.
        places = start[:, None] + torch.arange(1, size, device=start.device)  # [R, B - 1]
        text = number[:, None]
        tokens = torch.stack([self.said[text, places], self.right[text, places]])  # [2, R, B - 1]
        tokens = torch.where(nearest[:, None] < self.tolerance, tokens, (tokens + 2) % self.config.vocab_size)
        said, right = self.vectors[tokens]
        output.last_hidden_state = torch.cat([hidden[:, :1], said + 0.5 * right], dim=1)
        return output
