"""Which drafted tokens stay: the target's own choice at each position, compared with the draft."""

from typing import NamedTuple

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, logits_process

from .tree_dflash import DraftTree


# Warpers that look at one position's scores alone, so that all rows and positions can be processed in one call.
_POSITIONWISE = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
)
_COUNTED = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class Proposal(NamedTuple):
    """
    What the tokens of a block were drawn from: `q`, the drafter's distribution of each slot. A drafter that takes the
    likeliest tokens has none: its `q` is one-hot.
    """

    ids: torch.LongTensor  # [R, n, k]      tokens that `q` gives a probability; all others have none
    probabilities: torch.Tensor  # [R, n, k]

    def at(self, start: int, stop: int) -> "Proposal":
        """Slots `start..stop - 1` alone."""
        return Proposal(self.ids[:, start:stop], self.probabilities[:, start:stop])


class Verdict(NamedTuple):
    """What stays of a block, in tensors alone, so that it can be found inside a compiled round."""

    tokens: torch.LongTensor  # [R, n]    the target's own token after each token of the block, or of the way
    counts: torch.LongTensor  # [R]       committed tokens, the target's own last one included; 0 for finished rows
    last: torch.LongTensor  # [R]         the last committed token, from which the next block starts
    unfinished: torch.BoolTensor  # [R]
    way: torch.LongTensor | None = None  # [R, n]  of a tree, the nodes that the target goes through


def draw(probabilities: torch.Tensor, generators: list[torch.Generator] | None = None) -> torch.LongTensor:
    """`[R, n]`, one token of each distribution `[R, n, k]`; those of a row by its own generator, if it has one."""
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
    The target's own sample after each token of a block, drawn so that it equals the drafted token as often as can be.

    With `p = softmax(scores)` a drafted token `x ~ q` is kept with probability `min(1, p(x) / q(x))`; if it is not,
    the sample comes from `norm(max(p - q, 0))`, which gives `x` no weight. Either way it follows `p` (Leviathan
    et al., 2211.17192). Without a proposal `q` is one-hot, and the same rule is a plain sample of `p`.

    Args:
        scores (`torch.Tensor`): `[R, n, V]` processed scores of the target.
        drafted (`torch.LongTensor`, *optional*): `[R, m]`, `m <= n`, drafted tokens that scores `0..m - 1` judge.
        proposal (`Proposal`, *optional*): What they were drawn from.
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


class Continuation:
    """
    The text being written: prompt, committed tokens, and the rule that accepts the next ones.

    Two ways of accepting give the same text. *At once*: every row keeps its own number of tokens; processors that look
    at a position's scores alone, and the standard criteria, allow it. *Step by step*: processors and criteria are
    called once for each committed token with exactly the prefix that plain decoding would show them, all rows in
    step; that holds for any processor and criterion, also those that keep state.

    Args:
        input_ids (`torch.LongTensor`): `[R, S]`, the prompt.
        logits_processor, stopping_criteria, generation_config, streamer: As `GenerationMixin._sample` gets them.
        in_step (`bool`): Whether the target's cache wants all rows in step.
        block_size (`int`): Tokens of a block, or of a path through a tree, at most.
        look_ahead (`int`): How many blocks may be accepted at once before the host looks at them.
        generators (`list[torch.Generator]`, *optional*): One for each row, to sample with. Each committed token takes
            one draw, so that without drawn drafts a row's text depends on its own generator alone.
    """

    def __init__(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer=None,
        in_step=False,
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
        self.stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.eos = next((c.eos_token_id for c in stopping_criteria if isinstance(c, EosTokenCriteria)), None)
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)

        self.device = device = input_ids.device
        # A block is written whole, and the next one over what was rejected of it.
        self.buffer = torch.full((rows, self.prompt_length + self.max_new + block_size), self.pad, device=device)
        self.buffer[:, : self.prompt_length] = input_ids
        self.unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        self.alive = [True] * rows  # the same, on the host
        self.lengths = [0] * rows  # generated tokens of each row
        self.left = torch.full((rows,), self.max_new, device=device)  # tokens that each may still get
        self.unseen: list[tuple] = []  # what was committed since the host looked: counts, unfinished, block size
        self.last = None  # [R], the last committed token of each row: the anchors of the next block
        self.committed = [0] * rows  # the part of them that came last
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(rows)]
        self.prefilled = self.done = False
        self.step_by_step = (
            self.scores is not None
            or self.raw_logits is not None
            or (keep and (generation_config.output_hidden_states or generation_config.output_attentions))
            # One row is sampled token by token, so that a seed gives the text that it gives without a drafter.
            or (rows == 1 and self.do_sample)
            or generators is not None
            or (rows > 1 and (in_step or streamer is not None))
            or not all(type(p) in _POSITIONWISE for p in logits_processor)
            or not all(type(c) in _COUNTED for c in stopping_criteria)
        )
        timed = any(isinstance(c, MaxTimeCriteria) for c in stopping_criteria)
        self.look_ahead = 1 if self.step_by_step or timed or streamer is not None else look_ahead

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def reach(self) -> int:
        """What `longest` may be, with the blocks that the host has not looked at."""
        return min(self.longest + sum(size for _, _, size in self.unseen), self.max_new)

    @property
    def room(self) -> int:
        """Tokens that may still be generated by the row that has most to go."""
        return self.max_new - min((n for n, alive in zip(self.lengths, self.alive, strict=True) if alive), default=0)

    @property
    def sequences(self) -> torch.LongTensor:
        """`[R, S + longest]`, finished rows padded."""
        return self.buffer[:, : self.prompt_length + self.longest]

    def drafted(self, block: torch.LongTensor) -> torch.LongTensor:
        """Rows that are finished go on with padding, as they do without a drafter."""
        if self.step_by_step and self.stops_at_eos and block.shape[0] > 1:
            tokens = torch.where(self.unfinished[:, None], block[:, 1:], self.pad)
            return torch.cat([block[:, :1], tokens], dim=1)
        return block

    def accept(
        self,
        logits: torch.Tensor,
        block: torch.LongTensor | None = None,
        proposal: Proposal | None = None,
        verdict: Verdict | None = None,
        tree: DraftTree | None = None,
    ) -> tuple[torch.LongTensor, torch.LongTensor | None]:
        """
        Commit the longest prefix of a block, or path of a tree, that the target agrees with, and its next token.

        Args:
            logits (`torch.Tensor`): `[R, n, V]`, the target's logits after each token of the block.
            block (`torch.LongTensor`, *optional*): `[R, n]`, anchor and drafted tokens; `None` after the prompt.
            proposal (`Proposal`, *optional*): What the drafted tokens were drawn from, if they were drawn.
            verdict (`Verdict`, *optional*): What `judge` said of them, if it has been asked already.
            tree (`DraftTree`, *optional*): What the tokens of the block are the nodes of.

        Returns:
            `torch.LongTensor` `[R]`: committed tokens of each row; and of a tree the nodes that they came through,
            `[R, block_size]`.
        """
        logits = logits.to(device=self.device)
        proposal = None if proposal is None else proposal.at(0, block.shape[1] - 1)
        if not self.step_by_step:
            verdict = self._judge(logits, block, proposal, tree) if verdict is None else verdict
            return self._commit(verdict), verdict.way
        was_alive, before = self.alive, self.longest
        counts, way = self._step_by_step(logits, block, proposal, tree)
        self._note([self.longest - before] * len(was_alive), was_alive)
        return counts, way

    def judge(self, logits, block, tree=None) -> Verdict | None:
        """The verdict on a block, where it takes nothing but tensors to find it."""
        simple = not (self.step_by_step or self.do_sample or len(self.processor))
        return self._judge(logits.to(device=self.device), block, None, tree) if simple else None

    def _judge(self, logits, block, proposal, tree) -> Verdict:
        rows, size, vocab_size = logits.shape
        scores = logits.reshape(rows * size, vocab_size)
        if scores.dtype == torch.float64:
            scores = scores.float()  # plain decoding rounds before it chooses
        if self.do_sample or len(self.processor):
            scores = self.processor(None, scores.float())
        if self.do_sample:
            drafted = None if block is None else block[:, 1:]
            tokens = sample_tokens(scores.view(rows, size, vocab_size), drafted, proposal)
        else:
            tokens = scores.argmax(dim=-1).view(rows, size)

        counts = torch.ones(rows, dtype=torch.long, device=tokens.device)
        way = None
        if tree is not None:
            way, counts = tree.walk(tokens, self.block_size - 1)
            tokens, size = tokens.gather(1, way), self.block_size
        elif block is not None:
            counts = 1 + (tokens[:, :-1] == block[:, 1:]).long().cumprod(dim=1).sum(dim=1)
        counts = counts.minimum(self.left)
        ended = counts >= self.left
        if self.eos is not None:
            is_eos = torch.isin(tokens, self.eos.to(tokens.device))
            first = torch.where(is_eos.any(dim=1), is_eos.long().argmax(dim=1) + 1, size + 1)
            ended = ended | (first <= counts)
            counts = counts.minimum(first)
        counts = torch.where(self.unfinished, counts, 0)
        last = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        last = last if self.last is None else torch.where(counts > 0, last, self.last)
        return Verdict(tokens, counts, last, self.unfinished & ~ended, way)

    def _commit(self, verdict: Verdict) -> torch.LongTensor:
        tokens, counts, self.last, self.unfinished, _ = verdict
        size = tokens.shape[1]
        steps = torch.arange(size, device=self.device)
        places = (self.prompt_length + self.max_new - self.left)[:, None] + steps  # [R, n]
        self.buffer.scatter_(1, places, torch.where(steps < counts[:, None], tokens, self.pad))
        self.left = self.left - counts
        self.unseen.append((counts, self.unfinished, size))
        # Near the end of the text a block too many would cost more than a look.
        if len(self.unseen) >= self.look_ahead or self.reach + size > self.max_new:
            self._look()
        return counts

    def _look(self) -> None:
        """Bring the host up to date: the one synchronisation of so many rounds."""
        facts = torch.stack([torch.stack([counts, unfinished]) for counts, unfinished, _ in self.unseen]).tolist()
        self.unseen.clear()
        for counts, unfinished in facts:
            was_alive, self.alive = self.alive, [bool(flag) for flag in unfinished]
            self.lengths = [n + new for n, new in zip(self.lengths, counts, strict=True)]
            self._note(counts, was_alive)
        if self.streamer is not None:
            for token in self.sequences[0, -counts[0] :].cpu():
                self.streamer.put(token[None])
        timed_out = any(isinstance(c, MaxTimeCriteria) and bool(c(self.sequences, None).all()) for c in self.criteria)
        self.done = timed_out or not any(self.alive)

    def _note(self, counts: list[int], was_alive: list[bool]) -> None:
        """Remember what a round committed, and, but for the prompt's, how many tokens that were."""
        self.committed = counts
        if self.prefilled:
            for row, alive in enumerate(was_alive):
                if alive:
                    self.acceptance_lengths[row].append(counts[row])
        self.prefilled = True

    def _step_by_step(self, logits, block, proposal, tree):
        size, way = logits.shape[1], [0]
        for step in range(size):
            length = self.prompt_length + self.longest
            ids = self.buffer[:, :length]
            raw = logits[:, way[-1]].to(copy=True, dtype=torch.float32)
            scores = self.processor(ids, raw)
            if self.scores is not None:
                self.scores += (scores,)
            if self.raw_logits is not None:
                self.raw_logits += (raw,)
            if self.do_sample:
                last = proposal is None or step + 1 == size
                judged = (None, None) if last else (block[:, step + 1, None], proposal.at(step, step + 1))
                token = sample_tokens(scores[:, None], *judged, self.generators)[:, 0]
            else:
                token = scores.argmax(dim=-1)
            if self.stops_at_eos:
                token = torch.where(self.unfinished, token, self.pad)
            self.buffer[:, length] = token
            self.lengths = [n + 1 for n in self.lengths]
            self.last = token
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            self.unfinished = self.unfinished & ~self.criteria(self.sequences, self.scores)
            self.alive = self.unfinished.tolist()
            self.done = not any(self.alive)
            if self.done or step + 1 == size:
                break
            # All rows must agree with the draft to go on in step; a finished row agrees with padding.
            child = step + 1 if tree is None else tree.child(way[-1], int(token))
            if child is None or not bool((token == block[:, child]).all()):
                break
            way.append(child)
        counts = torch.full((len(self.lengths),), step + 1, device=logits.device)
        if tree is None:
            return counts, None
        way += [0] * (self.block_size - len(way))
        return counts, torch.tensor([way], device=logits.device)
