"""Which drafted tokens stay: the target's own choice at each position, compared with the draft."""

from typing import NamedTuple

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, logits_process

from .tree_dflash import DraftTree


# Processors that look at the scores of one position alone, so that one call serves all rows and positions.
_POSITIONWISE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
_COUNTED = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class Proposal(NamedTuple):
    """
    The distribution `q` of each slot, from which the drafter drew the tokens of a block. A drafter that takes the
    likeliest tokens has no proposal: its `q` is one-hot.
    """

    ids: torch.LongTensor  # [R, n, k]      the only tokens to which `q` gives a probability
    probabilities: torch.Tensor  # [R, n, k]

    def at(self, start: int, stop: int) -> "Proposal":
        """Only slots `start..stop - 1`."""
        return Proposal(self.ids[:, start:stop], self.probabilities[:, start:stop])


class Draft(NamedTuple):
    """What a drafter proposes: a block, which is a single path, or a tree of them."""

    tokens: torch.LongTensor  # [R, n]  the anchor first
    proposal: Proposal | None = None  # what the tokens of a block were drawn from, if they were drawn
    tree: DraftTree | None = None  # of which the tokens are the nodes

    def prefix(self, size: int) -> "Draft":
        """The first `size` tokens of a block; a tree as it is."""
        if self.tree is not None or size == self.tokens.shape[1]:
            return self
        proposal = None if self.proposal is None else self.proposal.at(0, size - 1)
        return Draft(self.tokens[:, :size], proposal)

    def walk(self, tokens: torch.LongTensor, depth: int):
        """
        How far the target agrees with the draft; `tokens` `[R, n]` are the target's own after each drafted token.

        Returns:
            The target's tokens along the accepted path `[R, n]`; the length of the path, anchor included, `[R]`; and,
            for a tree, the nodes on the path `[R, depth + 1]`.
        """
        if self.tree is None:
            agrees = tokens[:, :-1] == self.tokens[:, 1:]
            return tokens, 1 + agrees.long().cumprod(dim=1).sum(dim=1), None
        path, lengths = self.tree.walk(tokens, depth)
        return tokens.gather(1, path), lengths, path

    def child(self, node: int, token: torch.LongTensor) -> int | None:
        """The child of `node` that holds the target's `token` `[R]` in every row, if there is one."""
        if self.tree is not None:  # a single row
            return self.tree.child(node, int(token))
        return node + 1 if bool((token == self.tokens[:, node + 1]).all()) else None


class Verdict(NamedTuple):
    """What stays of a draft, in nothing but tensors, so that a compiled round can return it."""

    tokens: torch.LongTensor  # [R, n]    the target's own token after each token of the accepted path
    counts: torch.LongTensor  # [R]       how many are committed, the bonus token included; 0 for finished rows
    last: torch.LongTensor  # [R]         the last committed token, from which the next block starts
    unfinished: torch.BoolTensor  # [R]
    path: torch.LongTensor | None = None  # [R, n]  of a tree, the accepted nodes

    def along(self, features: torch.Tensor) -> torch.Tensor:
        """From the features `[R, n, F]` of all drafted tokens, those of the accepted path."""
        if self.path is None:
            return features
        return features.gather(1, self.path[..., None].expand(-1, -1, features.shape[-1]))


def draw(probabilities: torch.Tensor, generators: list[torch.Generator] | None = None) -> torch.LongTensor:
    """Draw one token `[R, n]` from each distribution `[R, n, k]`, each row by its own generator if there are any."""
    if generators is None:
        return torch.multinomial(probabilities.flatten(0, 1), num_samples=1).view(probabilities.shape[:2])
    rows = zip(probabilities, generators, strict=True)
    tokens = [torch.multinomial(row.to(g.device), num_samples=1, generator=g)[:, 0] for row, g in rows]
    return torch.stack(tokens).to(probabilities.device)


def sample_tokens(
    scores: torch.Tensor,
    drafted: torch.LongTensor | None = None,
    proposal: Proposal | None = None,
    generators: list[torch.Generator] | None = None,
) -> torch.LongTensor:
    """
    The target's own sample after each token of a block, drawn to equal the drafted token as often as possible.

    With `p = softmax(scores)` a drafted token `x ~ q` is kept with probability `min(1, p(x) / q(x))`; if it is not,
    the sample comes from `norm(max(p - q, 0))`, which gives `x` no weight. Either way it follows `p` (Leviathan
    et al., 2211.17192). Without a proposal `q` is one-hot, and the same rule is a plain sample of `p`.

    Args:
        scores (`torch.Tensor`): `[R, n, V]` processed scores of the target.
        drafted (`torch.LongTensor`, *optional*): `[R, m]`, `m <= n`, the drafted tokens, judged by scores `0..m - 1`.
        proposal (`Proposal`, *optional*): The distributions that they were drawn from.
        generators (`list[torch.Generator]`, *optional*): One for each row. Default: torch's own for all.

    Returns:
        `torch.LongTensor` `[R, n]`.
    """
    p = scores.softmax(dim=-1)  # [R, n, V]
    if proposal is None or drafted.shape[1] == 0:
        return draw(p, generators)
    judged = drafted.shape[1]
    q = proposal.probabilities.to(p.dtype)  # [R, m, k]
    p_drafted = p[:, :judged].gather(-1, drafted[..., None])[..., 0]  # [R, m]
    q_drafted = (q * (proposal.ids == drafted[..., None])).sum(dim=-1)  # [R, m]
    if generators is None:
        chance = torch.rand_like(p_drafted)
    else:
        chance = [torch.rand(judged, generator=g, device=g.device, dtype=p.dtype) for g in generators]
        chance = torch.stack(chance).to(p.device)
    keep = chance * q_drafted < p_drafted

    residual = p.clone()
    residual[:, :judged].scatter_add_(-1, proposal.ids, -q).clamp_(min=0)
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)  # p == q, where nothing is rejected
    own = draw(residual, generators)
    return torch.cat([torch.where(keep, drafted, own[:, :judged]), own[:, judged:]], dim=1)


class HostView:
    """
    What the host knows of the rows: how long they are, and which are unfinished, as of its last `sync`. One `sync`
    reads all the rounds that were committed since the one before.
    """

    def __init__(self, rows: int):
        self.lengths = [0] * rows  # generated tokens
        self.alive = [True] * rows
        self.committed = [0] * rows  # tokens of the last round
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(rows)]
        self.pending: list[tuple] = []  # (counts, unfinished, size) of each round since the last `sync`
        self.prefilled = False

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def longest_possible(self) -> int:
        """An upper bound of `longest` that includes the pending rounds."""
        return self.longest + sum(size for _, _, size in self.pending)

    def sync(self) -> None:
        """Read the pending rounds, which waits for the device once."""
        facts = torch.stack([torch.stack([counts, unfinished]) for counts, unfinished, _ in self.pending]).tolist()
        self.pending.clear()
        for counts, unfinished in facts:
            for row, alive in enumerate(self.alive):
                if alive and self.prefilled:  # no verification committed the first token
                    self.acceptance_lengths[row].append(counts[row])
            self.prefilled, self.committed, self.alive = True, counts, [bool(flag) for flag in unfinished]
            self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]


class Continuation:
    """
    The text being written: the prompt, the committed tokens, and the rule that accepts the next ones.

    Two ways of accepting give the same text. *At once*: all positions are judged in one call, and each row advances at
    its own pace. This takes processors that look at the scores of one position alone, and the standard criteria. *Step
    by step*: processors and criteria are called once for each committed token, with exactly the prefix that plain
    decoding would show them, and all rows advance together. This serves any processor and criterion, also those that
    keep state.

    Args:
        input_ids (`torch.LongTensor`): `[R, S]`, the prompt.
        logits_processor, stopping_criteria, generation_config, streamer: As in `GenerationMixin._sample`.
        block_size (`int`): The most tokens of a block, or of a path through a tree.
        look_ahead (`int`): How many rounds may be committed before the host reads them.
        generators (`list[torch.Generator]`, *optional*): One for each row, to sample with. Each committed token takes
            one draw, so that a row's text depends on its own generator alone, unless drafts are drawn too.
    """

    def __init__(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer=None,
        block_size=1,
        look_ahead=1,
        generators=None,
    ):
        rows, self.prompt_length = input_ids.shape
        self.processor, self.criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.block_size = block_size
        self.do_sample, self.generators = generation_config.do_sample, generators
        self.max_new = max(generation_config.max_length - self.prompt_length, 1)
        keep = generation_config.return_dict_in_generate
        self.scores = () if keep and generation_config.output_scores else None
        self.raw_logits = () if keep and generation_config.output_logits else None
        self.hidden_states = () if keep and generation_config.output_hidden_states else None
        self.stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.eos = next((c.eos_token_id for c in stopping_criteria if isinstance(c, EosTokenCriteria)), None)
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)

        self.device = device = input_ids.device
        self.buffer = input_ids  # grows with the text: a limit may be far away
        self.unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        self.left = torch.full((rows,), self.max_new, device=device)  # tokens that each row may still get
        self.last = None  # [R], the last committed token of each row: the anchors of the next block
        self.host = HostView(rows)
        self.done = False
        self.step_by_step = (
            any(asked is not None for asked in (self.scores, self.raw_logits, self.hidden_states))
            # One row is sampled token by token, so that a seed gives the text that it gives without a drafter.
            or (rows == 1 and self.do_sample)
            or generators is not None
            or (rows > 1 and streamer is not None)
            or not all(type(p) in _POSITIONWISE for p in logits_processor)
            or not all(type(c) in _COUNTED for c in stopping_criteria)
        )
        self.by_tensors = not (self.step_by_step or self.do_sample or len(self.processor))
        self.timed = any(isinstance(c, MaxTimeCriteria) for c in stopping_criteria)
        self.look_ahead = 1 if self.step_by_step or self.timed or streamer is not None else look_ahead

    @property
    def longest(self) -> int:
        """Generated tokens of the longest row."""
        return self.host.longest

    @property
    def longest_possible(self) -> int:
        """An upper bound of `longest` that includes the rounds that the host has not read yet."""
        return min(self.host.longest_possible, self.max_new)

    @property
    def tokens_left(self) -> int:
        """How many tokens the row with the most left may still get."""
        rows = zip(self.host.lengths, self.host.alive, strict=True)
        return self.max_new - min((length for length, alive in rows if alive), default=0)

    @property
    def sequences(self) -> torch.LongTensor:
        """`[R, S + longest]`, finished rows padded."""
        return self.buffer[:, : self.prompt_length + self.longest]

    def padded(self, draft: Draft) -> Draft:
        """Where rows advance together, finished ones go on with padding, as they do without a drafter."""
        if self.step_by_step and self.stops_at_eos and draft.tokens.shape[0] > 1:
            tokens = torch.where(self.unfinished[:, None], draft.tokens[:, 1:], self.pad)
            draft = draft._replace(tokens=torch.cat([draft.tokens[:, :1], tokens], dim=1))
        return draft

    def judge(self, draft: Draft | None, logits: torch.Tensor, hidden_states: tuple | None = None) -> Verdict:
        """
        Decide what stays of a draft: the longest path that the target agrees with, and the target's next token.

        Args:
            draft (`Draft`, *optional*): `[R, n]` tokens; `None` after the prompt.
            logits (`torch.Tensor`): `[R, n, V]`, the target's after each of these tokens.
            hidden_states (`tuple[torch.Tensor]`, *optional*): `[R, n, H]` of each layer, if the caller asks for them.
        """
        logits = logits.to(device=self.device)
        if self.step_by_step:
            return self._step_by_step(draft, logits, hidden_states)
        return self._at_once(draft, logits)

    def commit(self, verdict: Verdict) -> None:
        """Write what stays; `sync` if `look_ahead` rounds are pending or the text is nearly complete."""
        tokens, counts, self.last, self.unfinished, _ = verdict
        size = tokens.shape[1]
        self._reserve(size)
        steps = torch.arange(size, device=self.device)
        places = (self.prompt_length + self.max_new - self.left)[:, None] + steps  # [R, n]
        self.buffer.scatter_(1, places, torch.where(steps < counts[:, None], tokens, self.pad))
        self.left = self.left - counts
        self.host.pending.append((counts, self.unfinished, size))
        # Near the end of the text a needless round would cost more than a `sync`.
        if len(self.host.pending) < self.look_ahead and self.longest_possible + size <= self.max_new:
            return
        self.host.sync()
        self.done = not any(self.host.alive)
        if self.step_by_step:
            return
        if self.streamer is not None:
            for token in self.sequences[0, -self.host.committed[0] :].cpu():
                self.streamer.put(token[None])
        if self.timed:
            timers = (criterion for criterion in self.criteria if isinstance(criterion, MaxTimeCriteria))
            self.done = self.done or any(bool(timer(self.sequences, None).all()) for timer in timers)

    def _reserve(self, size: int) -> None:
        """Make room for `size` more tokens: a block is written whole, and the next one overwrites what is rejected."""
        needed = self.prompt_length + self.longest_possible + size
        if needed > self.buffer.shape[1]:
            more = max(needed, self.buffer.shape[1] * 3 // 2) - self.buffer.shape[1]
            with torch.inference_mode(False):
                room = torch.full((len(self.buffer), more), self.pad, device=self.device)
                self.buffer = torch.cat([self.buffer, room], dim=1)

    def _at_once(self, draft, logits) -> Verdict:
        rows, size, vocab_size = logits.shape
        scores = logits.reshape(rows * size, vocab_size)
        if scores.dtype == torch.float64:
            scores = scores.float()  # plain decoding rounds before it chooses
        if self.do_sample or len(self.processor):
            scores = self.processor(None, scores.float())
        if self.do_sample:
            drafted = (None, None) if draft is None else (draft.tokens[:, 1:], draft.proposal)
            tokens = sample_tokens(scores.view(rows, size, vocab_size), *drafted)
        else:
            tokens = scores.argmax(dim=-1).view(rows, size)

        counts, path = torch.ones(rows, dtype=torch.long, device=tokens.device), None
        if draft is not None:
            tokens, counts, path = draft.walk(tokens, self.block_size - 1)
        counts = counts.minimum(self.left)
        ended = counts >= self.left
        if self.eos is not None:
            is_eos = torch.isin(tokens, self.eos.to(tokens.device))
            first = torch.where(is_eos.any(dim=1), is_eos.long().argmax(dim=1) + 1, tokens.shape[1] + 1)
            ended = ended | (first <= counts)
            counts = counts.minimum(first)
        counts = torch.where(self.unfinished, counts, 0)
        last = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        last = last if self.last is None else torch.where(counts > 0, last, self.last)
        return Verdict(tokens, counts, last, self.unfinished & ~ended, path)

    def _step_by_step(self, draft, logits, hidden_states) -> Verdict:
        size, path, tokens, unfinished = logits.shape[1], [0], [], self.unfinished
        self._reserve(size)
        length = self.prompt_length + self.longest
        while True:
            node, step = path[-1], len(tokens)
            raw = logits[:, node].to(copy=True, dtype=torch.float32)
            scores = self.processor(self.buffer[:, :length], raw)
            if self.scores is not None:
                self.scores += (scores,)
            if self.raw_logits is not None:
                self.raw_logits += (raw,)
            if self.hidden_states is not None:  # for the prompt, those of all its tokens
                of_token = (layer[..., node : node + 1, :].clone() for layer in hidden_states)
                self.hidden_states += (hidden_states if draft is None else tuple(of_token),)
            if self.do_sample:
                drafted = proposal = None
                if draft is not None and draft.proposal is not None and step + 1 < size:
                    drafted, proposal = draft.tokens[:, step + 1, None], draft.proposal.at(step, step + 1)
                token = sample_tokens(scores[:, None], drafted, proposal, self.generators)[:, 0]
            else:
                token = scores.argmax(dim=-1)
            if self.stops_at_eos:
                token = torch.where(unfinished, token, self.pad)
            tokens.append(token)
            self.buffer[:, length] = token
            length += 1
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            unfinished = unfinished & ~self.criteria(self.buffer[:, :length], self.scores)
            # To go on, all rows must agree with the draft; a finished row agrees with padding.
            child = draft.child(node, token) if len(tokens) < size and bool(unfinished.any()) else None
            if child is None:
                break
            path.append(child)
        counts = torch.full_like(self.left, len(tokens))
        nodes = None
        if draft is not None and draft.tree is not None:
            nodes = torch.tensor([path + [0] * (self.block_size - len(path))], device=self.device)
        return Verdict(torch.stack(tokens, dim=1), counts, tokens[-1], unfinished, nodes)
