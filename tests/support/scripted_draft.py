"""Drafters that know texts: right on purpose, and wrong on purpose at some places."""

from collections.abc import Sequence

import torch
from torch import nn

from dflash_hf import DFlashDraftModel
from dflash_hf.evaluation.scripted_draft import ScriptedDraft
from dflash_hf.modeling.modeling_dflash import raw_embedding
from dflash_hf.modeling.target_dflash import decoder_layers
from support.pairs import make_draft


ANCHORS_AT_ONCE = 128


def scripted(
    draft: DFlashDraftModel, texts: torch.LongTensor, error_rate: float = 0.3, ranks: int = 1, seed: int = 0
) -> ScriptedDraft:
    """
    A drafter that drafts what `generate` returned.

    Args:
        draft (`DFlashDraftModel`): Whose forwards are computed.
        texts (`torch.LongTensor`): `[R, columns]`.
        error_rate (`float`): The part of all places at which the right token is not among the likely ones.
        ranks (`int`): Elsewhere it is one of so many likeliest, more often near the top; with 1, it is the first.
        seed (`int`): Of both.
    """
    random = torch.Generator().manual_seed(seed)
    wrong = (torch.rand(texts.shape, generator=random) < error_rate).to(texts.device)
    rank = torch.randint(ranks, (2, *texts.shape), generator=random).amin(dim=0).to(texts.device)
    likely = torch.where(wrong, texts + 1, texts - rank)[..., None] + torch.arange(3, device=texts.device)
    return ScriptedDraft.of(draft, texts, likely % draft.config.vocab_size, certainty=0.95)


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


class RecognisingDraft(ScriptedDraft):
    """
    A scripted drafter that does not go by rows and columns, but knows what it reads. Where it says another token, the
    right one comes second: a tree holds it.

    It recognises the text that is being written by what it computes itself: its own hidden state of the first slot
    depends on the anchor, its position and the features of all tokens before it. What it would be for each anchor of
    each known text is learned once, block by block without a cache. Nothing is looked up that was kept from call to
    call, so that calls in several threads, inside each other, of several rows and in compiled rounds do not meet here;
    and a call whose features, slots or positions are not its own is not recognised: its acceptance lengths are all 1.
    """

    tolerance = 0.02  # of a hidden state; rounding stays below 1e-3, another text differs by more than 0.2

    def places(self, position_ids, hidden_states):
        size = hidden_states.shape[1]
        texts, width = self.texts.shape
        if size not in self.first_states:  # a block that is smaller than in training
            self.learn(size)
        start = position_ids[:, -size].clamp(max=width - size)  # [R], of the anchors
        first = hidden_states[:, 1]  # [R, H]
        distances = (self.first_states[size][:, start] - first).norm(dim=-1) / first.norm(dim=-1)  # [T, R]
        nearest, number = distances.min(dim=0)  # [R]
        is_known = nearest < self.tolerance
        number = torch.where(is_known, number, number + texts // 2)  # it is none of them: something else
        return number[:, None] * width + start[:, None] + torch.arange(1, size, device=start.device)

    def learn(self, slots: int) -> None:
        """Compute the hidden states by which texts are recognised in blocks of so many slots."""
        draft, target = self.pair
        width = self.texts.shape[1]
        states = torch.full((len(self.features), width, draft.config.hidden_size), torch.inf, dtype=target.dtype)
        for number, (text, features) in enumerate(self.features):
            states[number, 1 : len(text)] = _first_hidden_states(draft, target, text, features, slots)
        self.first_states = {**self.first_states, slots: states}


@torch.no_grad()
def recognising(
    target,
    texts: Sequence[torch.LongTensor],
    block_size: int = 6,
    error_rate: float = 0.1,
    seed: int = 0,
    window: int | None = None,
    **overrides,
) -> RecognisingDraft:
    """
    Args:
        target (`PreTrainedModel`): Whose texts.
        texts (`Sequence[torch.LongTensor]`): `[S]` each, prompt and continuation, without padding.
        block_size (`int`): Of the drafter.
        error_rate (`float`): The part of all places at which another token is said.
        seed (`int`): Of these places, and of the drafter.
        window (`int`, *optional*): The drafter's `decoding_config.window`.
        overrides: Fields of the drafter's configuration.
    """
    draft = make_draft(target, block_size, seed, **{"target_layer_ids": [0, 1, 2], **overrides})
    draft.decoding_config.window = window
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.mul_(10.0)  # or the hidden state would be little but the anchor's embedding
    random = torch.Generator().manual_seed(seed)
    vocab_size = draft.config.vocab_size
    likely = []
    for text in texts:
        wrong = torch.rand(len(text), generator=random) < error_rate
        other = (text + 1) % vocab_size
        first, second = torch.where(wrong, torch.stack([other, text]), torch.stack([text, other]))
        likely.append(nn.functional.pad(torch.stack([first, second], dim=-1), (0, 0, 0, block_size)))
    likely += [(tokens + 2) % vocab_size for tokens in likely]
    texts = [nn.functional.pad(text, (0, block_size)) for text in texts]
    recognising = RecognisingDraft.of(draft.requires_grad_(False), texts * 2, likely)
    recognising.pair = (draft, target)
    recognising.features = [
        (text[:-block_size], features_of(target, text[:-block_size], draft.config.target_layer_ids)) for text in texts
    ]
    recognising.first_states = {}
    recognising.learn(draft.config.block_size)
    return recognising


def _first_hidden_states(
    draft: DFlashDraftModel, target, text: torch.LongTensor, features: torch.Tensor, slots: int
) -> torch.Tensor:
    """`[S - 1, H]`: those of the first slot of the block at each anchor but the first token."""
    config = draft.config
    hidden = []
    columns = torch.arange(len(text))
    block = torch.arange(slots)
    for anchors in columns[1:].split(ANCHORS_AT_ONCE):
        noise = torch.full((len(anchors), slots), config.mask_token_id)
        noise[:, 0] = text[anchors]
        # A block sees the text before its anchor, or the window and the first tokens of it, and itself.
        before = columns < anchors[:, None]
        if draft.decoding_config.window is not None:
            before &= (columns >= anchors[:, None] - draft.decoding_config.window) | (columns < 4)
        seen = torch.cat([before, torch.ones_like(noise, dtype=torch.bool)], dim=1)[:, None]  # [A, 1, S + B]
        positions = torch.cat([columns.expand(len(anchors), -1), anchors[:, None] + block], dim=1)
        distances = positions[:, -slots:, None] - positions[:, None]  # [A, B, S + B]

        def mask(sliding_window, causal, seen=seen, distances=distances):
            seen = seen & (distances >= 0) if causal else seen.expand_as(distances)
            seen = seen if sliding_window is None else seen & (distances < sliding_window)
            hidden = ~seen[:, None]
            return torch.zeros(hidden.shape, dtype=draft.dtype).masked_fill_(hidden, torch.finfo(draft.dtype).min)

        output = draft(
            noise_embeds=raw_embedding(target, noise),
            context_hidden_states=features.expand(len(anchors), -1, -1),
            attention_mask=config.map_layer_types(mask),
            position_ids=positions,
        )
        hidden.append(output.last_hidden_state[:, 1])
    return torch.cat(hidden)
