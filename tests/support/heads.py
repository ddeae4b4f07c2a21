"""Drafters with each head, outside of a loop, and what a head says of the next token, from its parameters."""

from functools import partial

import torch

from dflash_hf.decoding.draft_session import DraftSession
from support.pairs import VOCAB, make_draft, make_draft2
from support.recurrent_head import SIZES, RecurrentHead
from support.reference import scores_after


HEAD_PARTS = ("markov_head.", "prefix_gru.", "embed_proj.", "memory.")
SURE = {"enable_confidence_head": True, "confidence_head_with_markov": True}


def with_head(target, trained=True, **fields):
    """A drafter with these fields; `trained` makes its head matter."""
    draft = make_draft(target, **fields)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if trained and name.startswith(HEAD_PARTS):
                parameter += 0.5 * torch.randn(parameter.shape, generator=random)
    return draft


recurrent = partial(with_head, **SIZES)
vanilla = partial(with_head, markov_rank=6, sample_from_anchor=True)
gated = partial(with_head, markov_rank=6, markov_head_type="gated", **SURE)
rnn = partial(with_head, markov_rank=6, markov_head_type="rnn", **SURE)
domino = partial(with_head, gru_hidden_dim=9, emb_dim=7)
late = partial(with_head, gru_hidden_dim=9, emb_dim=7, pure_draft_prefix_len=1, sample_from_anchor=True)


def reduced(target, make=recurrent, **overrides):
    """The same over the even tokens alone."""
    draft = make(target, draft_vocab_size=VOCAB // 2, **overrides)
    with torch.no_grad():
        draft.d2t.copy_(torch.arange(VOCAB // 2))
        draft.lm_head.weight.copy_(target.lm_head.weight[::2])
    return draft


def capped(target, **overrides):
    """A DFlash 2 drafter whose logits are scaled and capped."""
    return make_draft2(target, output_multiplier=0.3, final_logit_softcapping=4.0, **overrides)


PLAIN = {"argmax": make_draft, "few tokens": partial(reduced, make=make_draft)}
SELECTORS = {"selector": capped, "selector over few": partial(reduced, make=make_draft2)}
WITH_STATES = {"recurrent": recurrent, "gated": gated, "rnn": rnn, "domino": domino, "late": late}
WITH_STATES |= {"vanilla": vanilla, "recurrent over few": reduced}
EVERY = {**PLAIN, **SELECTORS, **WITH_STATES}


def opened(draft, target, features: torch.Tensor) -> DraftSession:
    """A drafter that has read the features `[R, S, L * H]` of a prompt without padding."""
    drafter = DraftSession(draft, target)
    rows, columns, _ = features.shape
    drafter.context.append(features)
    drafter.context.prefill([0] * rows, columns, torch.zeros(rows, 1, dtype=torch.long))
    return drafter


def after_random_text(draft, target, rows: int = 2) -> tuple[DraftSession, torch.LongTensor]:
    """A drafter that has read random features, and random anchors `[R]`."""
    random = torch.Generator().manual_seed(1)
    features = torch.randn(rows, 9, draft.fc.in_features, generator=random).to(target.dtype)
    return opened(draft, target, features), torch.randint(2, 90, (rows,), generator=random)


def log_probs_after(draft, target, anchor: int, hidden: torch.Tensor, prefix: tuple[int, ...]) -> torch.Tensor:
    """`[V]`, over the target's ids: what a head says after the tokens `prefix`, from all slots' states `[n, H]`."""
    config = draft.config
    embedding = target.get_input_embeddings().weight
    tokens = (anchor, *prefix)
    scores = scores_after(draft.state_dict(), vars(config), hidden, target.lm_head.weight, embedding, tokens)
    if config.token_head_class is RecurrentHead:
        memory = draft.memory
        state = torch.zeros(1, config.memory_width, dtype=draft.dtype)
        for token in tokens:
            state = memory.cell(embedding[token][None], state)
        query = memory.query.weight @ torch.cat([hidden[len(prefix)], state[0]]) + memory.query.bias
        bias = memory.tokens.weight @ torch.nn.functional.silu(query)
        ids = draft.target_ids(torch.arange(len(bias)))
        scores = scores.index_add(0, ids, bias)
    return scores.log_softmax(-1)
