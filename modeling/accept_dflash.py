"""
Which drafted tokens are accepted: the target's own choice at each position, compared with the draft. Writes nothing.
"""

import copy
import math
from typing import NamedTuple

import torch
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
    logits_process,
)

from .noise_dflash import Noise
from .tree_dflash import DraftTree


CHUNK, SMALLEST_CHUNK = 256, 32  # ids whose scores are compared at once; see `likeliest`

# Processors that read the scores of one position only, so that one call serves all rows and positions.
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
# Stateless processors and criteria that judge each row by its own text only: called with one row that is ahead of the
# others, they return what they would return for it within the batch.
_ROWWISE = (
    *_POSITIONWISE,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
)
_COUNTED = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class Proposal(NamedTuple):
    """
    The distribution `q` of each slot, from which the drafter drew the tokens of a block. A greedy drafter has no
    proposal: its `q` is one-hot.
    """

    ids: torch.LongTensor  # [R, n, k]      the only tokens to which `q` gives a probability
    probabilities: torch.Tensor  # [R, n, k]

    def at(self, start: int, stop: int, rows: slice = slice(None)) -> "Proposal":
        """Only slots `start..stop - 1` of some rows."""
        return Proposal(self.ids[rows, start:stop], self.probabilities[rows, start:stop])


class Draft(NamedTuple):
    """What a drafter proposes: a block, which is a single path, or a tree of them."""

    tokens: torch.LongTensor  # [R, n]  the anchor first
    proposal: Proposal | None = None  # what the tokens of a block were drawn from, if they were drawn
    tree: DraftTree | None = None  # whose nodes are the tokens

    def prefix(self, size: int) -> "Draft":
        """The first `size` tokens of a block."""
        proposal = None if self.proposal is None else self.proposal.at(0, size - 1)
        return Draft(self.tokens[:, :size], proposal)

    @property
    def depth(self) -> int:
        """Drafted tokens of the longest path."""
        return self.tokens.shape[1] - 1 if self.tree is None else self.tree.depth

    def walk(self, tokens: torch.LongTensor):
        """
        How far the target agrees with the draft; `tokens` `[R, n]` are its own tokens after each drafted one.

        Returns:
            The target's tokens along the accepted path `[R, n]`; the length of the path, anchor included, `[R]`; and,
            for a tree, the nodes on the path `[R, depth + 1]`.
        """
        if self.tree is None:
            agrees = tokens[:, :-1] == self.tokens[:, 1:]
            return tokens, 1 + agrees.long().cumprod(dim=1).sum(dim=1), None
        path, lengths = self.tree.walk(tokens)
        return tokens.gather(1, path), lengths, path

    def children(self, rows: list[int], nodes: list[int], tokens: torch.LongTensor) -> list[int | None]:
        """For each of some rows, the child of its node that holds the target's token, if there is one."""
        if self.tree is not None:
            return [self.tree.child(node, token, row) for row, node, token in zip(rows, nodes, tokens.tolist())]
        if min(nodes) + 1 == self.tokens.shape[1]:  # the nodes of a block are in step
            return [None] * len(rows)
        drafted = self.tokens[rows, [node + 1 for node in nodes]]
        return [node + 1 if same else None for node, same in zip(nodes, (drafted == tokens).tolist(), strict=True)]


class Verdict(NamedTuple):
    """The accepted part of a draft, as tensors only, so that a compiled round can return it."""

    tokens: torch.LongTensor  # [R, n]    the target's own token after each token of the accepted path
    counts: torch.LongTensor  # [R]       number of tokens committed, bonus token included; 0 for finished rows
    last: torch.LongTensor  # [R]         the last committed token, from which the next block starts
    unfinished: torch.BoolTensor  # [R]
    path: torch.LongTensor | None = None  # [R, n]  the accepted nodes of a tree

    def along(self, features: torch.Tensor) -> torch.Tensor:
        """The features of the accepted path, from the features `[R, n, F]` of all drafted tokens."""
        if self.path is None:
            return features
        return features[torch.arange(len(features), device=features.device)[:, None], self.path]


def likeliest(scores: torch.Tensor) -> torch.LongTensor:
    """
    As `argmax` over the vocabulary, the first of ties.

    On a CPU `amax` alone is vectorised: it finds the chunk with the likeliest token, five to nine times as fast in
    fp32. `argmax` takes four times as long as `max` in bfloat16.
    """
    chunk = math.gcd(scores.shape[-1], CHUNK)
    if scores.device.type != "cpu" or chunk < SMALLEST_CHUNK:
        return scores.max(dim=-1).indices
    chunks = scores.unflatten(-1, (-1, chunk))  # [..., C, chunk]
    best = chunks.amax(dim=-1).max(dim=-1, keepdim=True).indices  # [..., 1]
    inside = chunks.take_along_dim(best[..., None], dim=-2)[..., 0, :]  # [..., chunk]
    return best[..., 0] * chunk + inside.max(dim=-1).indices


def draw(probabilities: torch.Tensor, generators: list[torch.Generator] | None = None) -> torch.LongTensor:
    """Draw one token `[R, n]` from each distribution `[R, n, k]`; each row has its own generator, if any."""
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
    The target's own sample after each token of a block, drawn so that it equals the drafted token as often as
    possible.

    With `p = softmax(scores)`, a drafted token `x ~ q` is kept with probability `min(1, p(x) / q(x))`; otherwise the
    sample comes from `norm(max(p - q, 0))`, which gives `x` no weight. Either way it follows `p` (Leviathan et al.,
    2211.17192). Without a proposal `q` is one-hot, and the rule reduces to a plain sample of `p`.

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
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)  # where p == q nothing is rejected
    own = draw(residual, generators)
    return torch.cat([torch.where(keep, drafted, own[:, :judged]), own[:, judged:]], dim=1)


class RowState(NamedTuple):
    """The state of the rows of a text."""

    unfinished: torch.BoolTensor  # [R]
    left: torch.LongTensor  # [R]  tokens that each row may still generate
    last: torch.LongTensor | None  # [R]  last committed token, where the next block starts; initially `None`

    def last_after(self, tokens: torch.LongTensor, counts: torch.LongTensor) -> torch.LongTensor:
        """The last committed tokens once `counts` `[R]` of these `tokens` `[R, n]` are."""
        last = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        return last if self.last is None else torch.where(counts > 0, last, self.last)


def _of_row(processor, row: int):
    """A row-wise processor, restricted to one row of the batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if torch.is_tensor(ignored):  # [R], the padding of each row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    return processor


def _draws_nothing(streamer) -> bool:
    """Whether a streamer is known not to use torch's generators between two tokens: upstream's, and this package's."""
    code = [] if streamer is None else [type(streamer), getattr(streamer, "write", type(streamer))]
    return all(one.__module__.partition(".")[0] in ("transformers", "dflash_hf") for one in code)


def pads_ended_rows(stopping_criteria) -> bool:
    """Whether rows that have ended are filled with padding: upstream does so if there is an end-of-sequence token."""
    return any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)


def listed_outputs(generation_config) -> list[str]:
    """What `generate` is to return of each token, by the names in its output."""
    names = ("scores", "logits", "hidden_states") if generation_config.return_dict_in_generate else ()
    return [name for name in names if getattr(generation_config, f"output_{name}")]


def pace_of(rows: int, logits_processor, stopping_criteria, generation_config, streamer=None) -> tuple[str, bool]:
    """
    How the rows of a batch advance; the text is the same.

    *At once*: all positions are judged in one call, and each row advances at its own pace. Needs processors that read
    the scores of one position only, and standard criteria. *Row by row*: processors and criteria are called for each
    committed token of each row, with exactly the prefix of plain decoding. Needs processors and criteria that judge
    each row by itself. *Together*: they are called once per committed token for all rows, which advance together.
    Serves any processor and criterion, even with state.

    Returns:
        The pace, and whether the noise of the samples may be drawn before they are: rows then get the samples that
        they get without a drafter. Not if code of the caller's runs between two tokens: it could draw too.
    """
    if listed_outputs(generation_config) or streamer is not None and rows > 1:
        return "together", False
    # Without an end-of-sequence token, rows ended by a stop string go on being written until all have ended.
    of_row = (*_COUNTED, StopStringCriteria) if pads_ended_rows(stopping_criteria) else _COUNTED
    rowwise = all(type(p) in _ROWWISE for p in logits_processor) and all(type(c) in of_row for c in stopping_criteria)
    foreseen = rowwise and _draws_nothing(streamer)
    if all(type(p) in _POSITIONWISE for p in logits_processor) and all(type(c) in _COUNTED for c in stopping_criteria):
        return "at once", foreseen
    return "row by row" if rowwise or rows == 1 else "together", foreseen


class Judge:
    """
    The rules of one call: which token the target chooses after each token, and where a row ends. Stateless, but for
    the noise of its samples.

    Args:
        rows (`int`): Rows of the batch.
        rules (`tuple`): `logits_processor`, `stopping_criteria` and `generation_config` of `GenerationMixin._sample`.
        pace (`str`): How rows advance, see [`pace_of`].
        generators (`list[torch.Generator]`, *optional*): One per row, to sample with. Each committed token takes one
            draw, so that a row's text depends on its own generator only, unless drafts are drawn too.
        noise ([`Noise`], *optional*): Of the samples.
    """

    def __init__(self, rows: int, rules: tuple, pace="at once", generators=None, noise: Noise | None = None):
        logits_processor, stopping_criteria, generation_config = rules
        self.processor, self.criteria, self.pace = logits_processor, stopping_criteria, pace
        self.do_sample, self.generators, self.noise = generation_config.do_sample, generators, noise
        ends = [c.eos_token_id.flatten() for c in stopping_criteria if isinstance(c, EosTokenCriteria)]
        self.eos = torch.cat(ends) if ends else None
        self.pads_ended = pads_ended_rows(stopping_criteria)
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        # Whether tokens are judged one by one: by rules that read the text; and samples, which are worth a sync each.
        self.by_steps = pace != "at once" or noise is not None
        timed = pace == "at once"  # else they are called for each token
        self.timers = [one for one in stopping_criteria if timed and isinstance(one, MaxTimeCriteria)]
        # The processors of each group of rows, by the group's first row.
        self.processors = [logits_processor] * rows
        if pace == "row by row" and rows > 1:
            of_rows = [[_of_row(p, row) for p in logits_processor] for row in range(rows)]
            self.processors = [logits_process.LogitsProcessorList(processors) for processors in of_rows]
        self.by_tensors = pace == "at once" and not (self.do_sample or len(logits_processor))

    def at_once(
        self, draft: Draft | None, logits: torch.Tensor, state: RowState, most: torch.LongTensor | None = None
    ) -> Verdict:
        """
        Args:
            draft (`Draft`, *optional*): `[R, n]` tokens; `None` after the prompt.
            logits (`torch.Tensor`): `[R, n, V]`, the target's logits after each of these tokens.
            state (`RowState`): The rows' state before these tokens.
            most (`torch.LongTensor`, *optional*): `[R]`, maximum number of tokens to accept.
        """
        rows, size, vocab_size = logits.shape
        # 1. The target's own token after each drafted one.
        scores = logits.reshape(rows * size, vocab_size)
        if scores.dtype == torch.float64:
            scores = scores.float()  # plain decoding rounds before choosing
        if self.do_sample or len(self.processor):
            scores = self.processor(None, scores.float())
        if self.do_sample:
            drafted = (None, None) if draft is None else (draft.tokens[:, 1:], draft.proposal)
            tokens = sample_tokens(scores.view(rows, size, vocab_size), *drafted)
        else:
            tokens = likeliest(scores).view(rows, size)
        # 2. The longest path that agrees with them, and where the row ends on it.
        counts, path = torch.ones(rows, dtype=torch.long, device=tokens.device), None
        if draft is not None:
            tokens, counts, path = draft.walk(tokens)
        counts = counts.minimum(state.left if most is None else state.left.minimum(most))
        ended = counts >= state.left
        if self.eos is not None:
            is_eos = torch.isin(tokens, self.eos.to(tokens.device))
            first = torch.where(is_eos.any(dim=1), is_eos.long().argmax(dim=1) + 1, tokens.shape[1] + 1)
            ended = ended | (first <= counts)
            counts = counts.minimum(first)
        counts = torch.where(state.unfinished, counts, 0)
        return Verdict(tokens, counts, state.last_after(tokens, counts), state.unfinished & ~ended, path)

    def next_tokens(self, text: torch.LongTensor, columns: list[int], logits, draft: Draft | None, step: int, rows):
        """
        The target's next token of some rows.

        Args:
            text (`torch.LongTensor`): `[R, S]`, the text of all rows, prompt included.
            columns (`list[int]`): The length of the text of these rows.
            logits (`torch.Tensor`): `[r, V]`, in fp32.
            draft (`Draft`, *optional*): The draft of all rows; if it was drawn, its token `step + 1` is judged.
            step (`int`): Tokens judged before in this round.
            rows (`list[int]`): The indices of these rows.

        Returns:
            The tokens `[r]`, and the processed scores `[r, V]`.
        """
        if self.pace == "at once":
            scores = self.processor(None, logits)
        else:
            prefixes = self._prefixes(text, columns, rows)
            each = zip(rows, prefixes, logits.chunk(len(prefixes)))  # together: the first row stands for all
            scores = torch.cat([self.processors[row](prefix, some) for row, prefix, some in each])
        if not self.do_sample:
            return likeliest(scores), scores
        if self.noise is not None:
            return self.noise.sample(scores.softmax(dim=-1), rows, step), scores
        drafted = proposal = None
        if draft is not None and draft.proposal is not None and step < draft.depth:
            drafted, proposal = draft.tokens[rows, step + 1, None], draft.proposal.at(step, step + 1, rows)
        generators = None if self.generators is None else [self.generators[row] for row in rows]
        return sample_tokens(scores[:, None], drafted, proposal, generators)[:, 0], scores

    def ended(self, text: torch.LongTensor, columns: list[int], tokens: torch.LongTensor, scores, rows) -> list[bool]:
        """Whether some rows end with their newest `tokens` `[r]`, which stand in `text`; see [`next_tokens`]."""
        if self.pace != "at once":
            prefixes = self._prefixes(text, columns, rows)
            return torch.cat([self.criteria(prefix, scores) for prefix in prefixes]).tolist()
        return [False] * len(rows) if self.eos is None else torch.isin(tokens, self.eos.to(tokens.device)).tolist()

    def _prefixes(self, text: torch.LongTensor, columns: list[int], rows: list[int]) -> list[torch.LongTensor]:
        """The text of all rows, which are in step if they advance together, or of each of some rows."""
        if self.pace == "together":
            return [text[:, : columns[0]]]
        return [text[row : row + 1, :length] for row, length in zip(rows, columns, strict=True)]
