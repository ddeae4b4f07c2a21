"""The text being written: the prompt, the committed tokens, the host's view of them, and streaming."""

import torch

from .accept_dflash import Draft, Judge, RowState, Verdict, listed_outputs
from .cost_dflash import clock


class HostView:
    """
    The host's view of the rows at its last `sync`: their lengths, and which are unfinished. A `sync` reads all rounds
    committed since the previous `sync`.
    """

    def __init__(self, rows: int):
        self.lengths = [0] * rows  # generated tokens
        self.alive = [True] * rows
        self.committed = [0] * rows  # tokens of the last round
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(rows)]
        self.pending: list[tuple] = []  # (counts, unfinished, size) of each round since the last `sync`
        self.looked_at: list[tuple] = []  # (counts, unfinished) of the rounds read by the last `sync`
        self.prefilled = False

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def sync(self) -> None:
        """Read the pending rounds, which waits for the device once."""
        facts = torch.stack([torch.stack([counts, unfinished]) for counts, unfinished, _ in self.pending]).tolist()
        self.pending.clear()
        self.looked_at = facts if self.prefilled else facts[1:]
        for counts, unfinished in facts:
            for row, alive in enumerate(self.alive):
                if alive and self.prefilled:  # the first token comes from the prompt, not from a verification
                    self.acceptance_lengths[row].append(counts[row])
            self.prefilled, self.committed, self.alive = True, counts, [bool(flag) for flag in unfinished]
            self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]


class Writer:
    """
    The tokens of the text and, if requested, the scores, logits and hidden states of each token.

    Args:
        input_ids (`torch.LongTensor`): `[R, S]`, the prompt.
        pad (`int`): Id that fills a row past its end.
        generation_config (`GenerationConfig`): Says which outputs are requested.
        streamer (`BaseStreamer`, *optional*): Receives each token.
    """

    def __init__(self, input_ids: torch.LongTensor, pad: int, generation_config, streamer=None):
        self.prompt_length, self.pad, self.streamer = input_ids.shape[1], pad, streamer
        self.next_round = getattr(streamer, "next_round", lambda: None)  # for streamers that mark drafted tokens
        self.streaming = 0.0  # seconds spent in the streamer, which are not a cost of rounds
        self.shown = 0  # tokens of a row that the streamer has taken
        self.buffer = input_ids  # grows with the text: the limit may be far away
        # By the names of the output; an entry for each token.
        self.listed: dict = dict.fromkeys(listed_outputs(generation_config), ())

    def reserve(self, generated: int) -> None:
        """Make room for `generated` tokens after the prompt."""
        needed = self.prompt_length + generated
        if needed > self.buffer.shape[1]:
            more = max(needed, self.buffer.shape[1] * 3 // 2) - self.buffer.shape[1]
            with torch.inference_mode(False):
                room = torch.full((len(self.buffer), more), self.pad, device=self.buffer.device)
                self.buffer = torch.cat([self.buffer, room], dim=1)

    def write(self, generated: torch.LongTensor, verdict: Verdict) -> None:
        """Write a whole block after `generated` `[R]` tokens; the next block overwrites rejected tokens."""
        steps = torch.arange(verdict.tokens.shape[1], device=self.buffer.device)
        places = (self.prompt_length + generated)[:, None] + steps  # [R, n]
        self.buffer.scatter_(1, places, torch.where(steps < verdict.counts[:, None], verdict.tokens, self.pad))

    def append(self, rows: list[int], columns: list[int], tokens: torch.LongTensor) -> None:
        """Write and stream one token of each of some rows, into these columns."""
        self.buffer[rows, columns] = tokens
        self._stream(tokens, size=len(tokens))

    def note(self, **of_token) -> None:
        """Keep a token's `scores`, `logits` and `hidden_states`, if requested."""
        self.listed = {name: (*listed, of_token[name]) for name, listed in self.listed.items()}

    def show(self, tokens: torch.LongTensor, verified: bool) -> None:
        """Stream committed tokens of the only row one by one; `verified`: they come from a round, not the prompt."""
        if verified:
            self.next_round()
        self._stream(tokens, size=1)

    def _stream(self, tokens: torch.LongTensor, size: int) -> None:
        """Give tokens to the streamer, `size` at a time."""
        if self.streamer is None:
            return
        tokens = tokens.cpu()
        began = clock(self.buffer.device)
        for some in tokens.split(size):
            self.streamer.put(some)
            self.shown += 1
        self.streaming += clock(self.buffer.device) - began


class Continuation:
    """
    The text being written, and the rules that accept its next tokens; see [`Judge`].

    Args:
        input_ids (`torch.LongTensor`): `[R, S]`, the prompt.
        judge (`Judge`): The rules.
        writer (`Writer`): Where the text goes.
        max_new (`int`): Maximum number of new tokens per row.
        look_ahead (`int`): Number of rounds that may be committed before the host reads them.
    """

    def __init__(self, input_ids: torch.LongTensor, judge: Judge, writer: Writer, max_new: int, look_ahead: int = 1):
        rows, self.device = len(input_ids), input_ids.device
        self.rules, self.writer, self.max_new = judge, writer, max_new
        self.state = RowState(
            torch.ones(rows, dtype=torch.bool, device=self.device),
            torch.full((rows,), max_new, device=self.device),
            None,
        )
        self.host = HostView(rows)
        self.done = False
        self.look_ahead = look_ahead
        self.judging: torch.LongTensor | None = None  # [R, n], the nodes judged so far if rows are in step

    @property
    def last(self) -> torch.LongTensor:
        """`[R]`, the last committed token of each row: the anchors of the next block."""
        return self.state.last

    @property
    def longest_possible(self) -> int:
        """An upper bound of `longest` that includes rounds the host has not read yet."""
        return min(self.host.longest + sum(size for _, _, size in self.host.pending), self.max_new)

    @property
    def tokens_left(self) -> int:
        """Maximum number of tokens that any row may still generate."""
        rows = zip(self.host.lengths, self.host.alive, strict=True)
        return self.max_new - min((length for length, alive in rows if alive), default=0)

    @property
    def seconds(self) -> float:
        """A clock that stands still while tokens are streamed."""
        return clock(self.device) - self.writer.streaming

    @property
    def sequences(self) -> torch.LongTensor:
        """`[R, S + longest]`, finished rows padded."""
        return self.writer.buffer[:, : self.writer.prompt_length + self.host.longest]

    def padded(self, draft: Draft) -> Draft:
        """The draft in which, if rows advance together, finished rows continue with padding, as without a drafter."""
        if self.rules.pace == "together" and self.rules.pads_ended and draft.tokens.shape[0] > 1:
            tokens = torch.where(self.state.unfinished[:, None], draft.tokens[:, 1:], self.rules.pad)
            draft = draft._replace(tokens=torch.cat([draft.tokens[:, :1], tokens], dim=1))
        return draft

    def judge(
        self,
        draft: Draft | None,
        logits: torch.Tensor,
        hidden_states: tuple | None = None,
        most: torch.LongTensor | None = None,
    ) -> Verdict:
        """
        Decide which part of a draft to accept: the longest path that the target agrees with, plus its next token.

        Args:
            draft (`Draft`, *optional*): `[R, n]` tokens; `None` after the prompt.
            logits (`torch.Tensor`): `[R, n, V]`, the target's logits after each of these tokens.
            hidden_states (`tuple[torch.Tensor]`, *optional*): `[R, n, H]` of each layer, if requested.
            most (`torch.LongTensor`, *optional*): `[R]`, maximum number of tokens to accept.
        """
        logits = logits.to(device=self.device)
        if self.rules.by_steps:
            return self._token_by_token(draft, logits, hidden_states, most)
        return self.rules.at_once(draft, logits, self.state, most)

    @property
    def cached(self) -> int:
        """Tokens that a cache holds without a drafter: all but the last, and none that a failed streamer never got."""
        longest = max(self.host.longest - 1, 0)
        return longest if self.writer.streamer is None else min(longest, self.writer.shown)

    @property
    def interrupted(self) -> Verdict | None:
        """The part of a draft that was accepted before an error of the caller's code, if there was one."""
        if self.judging is None or not self.host.prefilled:
            return None
        rows, size = self.judging.shape
        counts = torch.full((rows,), size, device=self.device)
        return Verdict(self.judging, counts, self.state.last, self.state.unfinished, self.judging)

    def commit(self, verdict: Verdict) -> None:
        """Keep the accepted tokens; `sync` if `look_ahead` rounds are pending or the text is nearly complete."""
        size, verified = verdict.tokens.shape[1], self.host.prefilled
        if not self.rules.by_steps:  # else it is written already
            self.writer.reserve(self.longest_possible + size)
            self.writer.write(self.max_new - self.state.left, verdict)
        self.state = RowState(verdict.unfinished, self.state.left - verdict.counts, verdict.last)
        self.host.pending.append((verdict.counts, verdict.unfinished, size))
        # Near the end of the text a wasted round would cost more than a `sync`.
        if len(self.host.pending) < self.look_ahead and self.longest_possible + size <= self.max_new:
            return
        self.host.sync()
        if self.rules.noise is not None:
            self.rules.noise.advance(self.host.lengths, self.host.alive)
        if not self.rules.by_steps:
            self.writer.show(self.sequences[0, -self.host.committed[0] :], verified)
        timed_out = any(bool(timer(self.sequences, None).all()) for timer in self.rules.timers)
        self.done = timed_out or not any(self.host.alive)

    def _token_by_token(self, draft: Draft | None, logits: torch.Tensor, hidden_states: tuple | None, most) -> Verdict:
        """
        Judge, write and stream a token of each row before the next: rows go on as far as they agree with the draft,
        all of them or none if they advance together.
        """
        rules, writer, alive = self.rules, self.writer, [*self.host.alive]
        together, depth = rules.pace == "together", 0 if draft is None else draft.depth
        rows = [row for row, goes_on in enumerate(alive) if goes_on or together]
        nodes, counts, left = [0] * len(rows), [0] * len(alive), self.state.left.tolist()
        most = [depth + 1] * len(alive) if most is None else most.tolist()
        tokens = torch.full((len(alive), depth + 1), rules.pad, device=self.device)
        path = torch.zeros_like(tokens)
        writer.reserve(self.host.longest + logits.shape[1])
        if draft is not None:
            writer.next_round()
        for step in range(depth + 1):
            path[rows, step] = torch.tensor(nodes, device=self.device)
            if together or len(alive) == 1:
                self.judging = path[:, : step + 1]
            columns = [writer.prompt_length + self.host.lengths[row] + step for row in rows]
            raw = logits[rows, nodes].float()
            chosen, scores = rules.next_tokens(writer.buffer, columns, raw, draft, step, rows)
            if together and rules.pads_ended:
                chosen = torch.where(torch.tensor(alive, device=self.device), chosen, rules.pad)
            of_token = hidden_states  # for the prompt, the hidden states of all its tokens
            if draft is not None and hidden_states is not None:
                of_token = tuple(layer[..., nodes[0] : nodes[0] + 1, :].clone() for layer in hidden_states)
            writer.note(scores=scores, logits=raw, hidden_states=of_token)
            writer.append(rows, columns, chosen)
            so_far = writer.listed.get("scores")
            ended = rules.ended(writer.buffer, [column + 1 for column in columns], chosen, so_far, rows)
            chosen = writer.buffer[rows, columns]  # a criterion may have written another token
            tokens[rows, step] = chosen
            for row, end in zip(rows, ended, strict=True):
                counts[row], alive[row] = step + 1, alive[row] and not end and step + 1 < left[row]
            if step == depth or not any(alive[row] for row in rows):
                break
            # A finished row among rows that advance together agrees with padding.
            found = draft.children(rows, nodes, chosen)
            going = [(r, node) for r, node in zip(rows, found) if node is not None and (together or alive[r])]
            going = [(row, node) for row, node in going if step + 1 < most[row]]
            if rules.noise is not None:
                going = [(row, node) for row, node in going if rules.noise.goes_on(row, step + 1)]
            if len(going) < (len(rows) if together else 1):
                break
            rows, nodes = map(list, zip(*going, strict=True))
        self.judging = None
        taken, unfinished = torch.tensor(counts, device=self.device), torch.tensor(alive, device=self.device)
        along = path if draft is not None and draft.tree is not None else None
        return Verdict(tokens, taken, self.state.last_after(tokens, taken), unfinished, along)
