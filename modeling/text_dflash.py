"""The text being written: the prompt, the committed tokens, and streaming."""

import torch

from .accept_dflash import Block, Rules, Verdict


class Text:
    """
    The rows of a text, and how they grow.

    Args:
        prompt (`torch.LongTensor`): `[R, S]`.
        rules (`Rules`): How tokens are chosen, and where rows end.

    Attributes:
        lengths (`list[int]`): Tokens generated in each row.
        alive (`list[bool]`): Rows that have not ended.
        last (`torch.LongTensor`): `[R]`, the last committed token of each row: the anchors of the next draft.
        rounds (`list[list[int]]`): For each row, the tokens that each verification committed.
        listed (`dict[str, list]`): The outputs of each token that were requested.
        interrupted (`Verdict`, *optional*): The accepted part of a round that an error of the caller's code ended, as
            far as the cache of plain decoding would hold it.
    """

    def __init__(self, prompt: torch.LongTensor, rules: Rules):
        rows, self.rules, self.buffer = len(prompt), rules, prompt  # which grows: the limit may be far away
        self.lengths, self.alive, self.last = [0] * rows, [True] * rows, prompt.new_zeros(rows)
        self.rounds: list[list[int]] = [[] for _ in range(rows)]
        self.listed: dict[str, list[torch.Tensor]] = {name: [] for name in rules.listed}
        self.interrupted: Verdict | None = None

    @property
    def done(self) -> bool:
        return not any(self.alive)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row that has not ended."""
        return min((n for n, alive in zip(self.lengths, self.alive) if alive), default=0)

    @property
    def left(self) -> int:
        """Maximum number of tokens that any row may still generate."""
        return self.rules.max_new - self.shortest

    @property
    def sequences(self) -> torch.LongTensor:
        """`[R, S + longest]`, finished rows padded."""
        return self.buffer[:, : self.rules.prompt_length + self.longest].contiguous()

    @property
    def next_draws(self) -> list[int]:
        """The number of each row's next sample; ended rows repeat the shortest active row's."""
        return [n if alive else self.shortest for n, alive in zip(self.lengths, self.alive)]

    def begin(self, logits: torch.Tensor) -> None:
        """Choose the first token of each row, from the logits `[R, 1, V]` after the prompt."""
        self._judge(Block(self.last[:, None]), logits, [[] for _ in self.lengths])

    def accept(self, draft, logits: torch.Tensor) -> Verdict:
        """
        Write the longest path of a draft that the target agrees with, and the target's next token.

        Args:
            draft (`Block` or the like): `[R, n]` tokens.
            logits (`torch.Tensor`): `[R, n, V]`, the target's logits after each of these tokens.
        """
        if hasattr(self.rules.streamer, "next_round"):  # for streamers that mark drafted tokens
            self.rules.streamer.next_round(draft.tokens.shape[1] - 1)
        paths: list[list[int]] = [[] for _ in self.lengths]
        try:
            verdict = self._judge(draft, logits, paths)
        except BaseException:
            self.interrupted = _verdict(paths, self.buffer.device)
            raise
        for rounds, count in zip(self.rounds, verdict.counts):
            if count:
                rounds.append(count)
        return verdict

    def _judge(self, draft, logits: torch.Tensor, paths: list[list[int]]) -> Verdict:
        logits = logits.to(self.buffer.device)
        self._reserve(self.longest + logits.shape[1])
        if self.rules.tokenwise:
            verdict = self._token_by_token(draft, logits, paths)
        else:
            verdict = self._at_once(draft, logits)
        if self.rules.noise is not None:
            self.rules.noise.forget(min(self.next_draws))
        return verdict

    def _at_once(self, draft, logits: torch.Tensor) -> Verdict:
        rules, device = self.rules, self.buffer.device
        # 1. The target's own token after each drafted one, and how far the draft agrees.
        numbers = torch.arange(logits.shape[1], device=device).expand(logits.shape[:2])
        chosen = rules.chosen(logits, numbers if draft.depths is None else draft.depths, self.next_draws)
        counts, path = draft.agree(chosen)
        tokens = chosen if path is None else chosen.gather(1, path)  # [R, m]
        # 2. Where rows end on that path.
        lengths, alive = torch.tensor([self.lengths, self.alive], device=device)
        left = (rules.max_new - lengths) * alive
        counts = counts.minimum(left)
        ended = counts >= left
        if rules.eos is not None:
            is_eos = torch.isin(tokens, rules.eos.to(device))
            first = torch.where(is_eos.any(dim=1), is_eos.long().argmax(dim=1) + 1, tokens.shape[1] + 1)
            ended, counts = ended | (first <= counts), counts.minimum(first)
        # 3. Write them; what the next draft rejects is overwritten.
        places = torch.arange(tokens.shape[1], device=device)
        tokens = torch.where(places < counts[:, None], tokens, rules.pad)
        self.buffer.scatter_(1, (rules.prompt_length + lengths)[:, None] + places, tokens)
        last = tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        self.last = torch.where(counts > 0, last, self.last)
        taken, over = torch.stack([counts, ended.long()]).tolist()  # the host waits for the device
        self.lengths = [length + count for length, count in zip(self.lengths, taken)]
        self.alive = [alive and not end for alive, end in zip(self.alive, over)]
        return Verdict(taken, path)

    def _token_by_token(self, draft, logits: torch.Tensor, paths: list[list[int]]) -> Verdict:
        """Each row by itself: its tokens go on as long as they agree with the draft; extends their `paths`."""
        for row, alive in enumerate(self.alive):
            if alive:
                self._follow(row, draft.children(row), logits[row], paths[row])
        self.last = self.buffer[range(len(paths)), [self.rules.prompt_length + n - 1 for n in self.lengths]]
        return _verdict(paths, self.buffer.device)

    def _follow(self, row: int, children: dict, logits: torch.Tensor, path: list[int]) -> None:
        """Choose, write and stream one token of a row after another, from logits `[n, V]`; extends `path`."""
        rules, place = self.rules, 0
        while place is not None:
            path.append(place)
            end = rules.prompt_length + self.lengths[row]
            raw = logits[place, None].to(torch.float32, copy=True)  # processors may write to it
            token, scores = rules.next_token(row, self.buffer[row : row + 1, :end], raw)
            self.buffer[row, end] = token
            new = {"scores": scores, "logits": raw}
            for name, listed in self.listed.items():
                listed.append(new[name])
            self.lengths[row] += 1
            if rules.streamer is not None:
                rules.streamer.put(self.buffer[row, end : end + 1].cpu())
            text = self.buffer[row : row + 1, : end + 1]
            ended = bool(rules.criteria(text, self.listed.get("scores"))) or self.lengths[row] >= rules.max_new
            self.alive[row] = not ended
            # Read again: a criterion may have written another token.
            place = None if ended else children.get((place, int(self.buffer[row, end])))

    def _reserve(self, generated: int) -> None:
        """Make room for `generated` tokens after the prompt."""
        more = self.rules.prompt_length + generated - self.buffer.shape[1]
        if more > 0:
            with torch.inference_mode(False):
                room = self.buffer.new_full((len(self.buffer), max(more, self.buffer.shape[1] // 2)), self.rules.pad)
                self.buffer = torch.cat([self.buffer, room], dim=1)


def _verdict(paths: list[list[int]], device: torch.device) -> Verdict:
    """From the places of the tokens that were accepted in each row."""
    longest = max(map(len, paths))
    straight = all(path == [*range(len(path))] for path in paths)
    path = None if straight else torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=device)
    return Verdict([len(path) for path in paths], path)
