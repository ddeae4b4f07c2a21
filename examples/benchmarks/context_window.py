"""
How a drafter fares that sees only the last tokens of a long context: acceptance by depth and window, and the time of
a draft and of a verification by the number of tokens they see.

    python examples/benchmarks/context_window.py [--conversations 10]
    python examples/benchmarks/context_window.py --times
    python examples/benchmarks/context_window.py --report

SmolLM2-135M and its drafter, which was trained on texts of up to 1,024 tokens. A conversation joins held-out requests
and the target's own greedy answers to 7,500 tokens. At several depths it is cut after an answer, and there the target
answers two other requests, greedily. Drafts never change such a text, so every window drafts the same text again; each
block starts where the accepted tokens of the previous one end, as in `generate`. A block sees the last `window` tokens
before its anchor and the first `sink` tokens of the row. The target also repeats texts of 600 tokens. Each finished
conversation or text appends its lines to `results/context_window.jsonl` and is skipped from then on.
"""

import argparse
import json
import random
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
from cells import Cells, read_json_lines
from transformers import DynamicCache

from dflash_hf.decoding import draft_context
from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.draft_context import DraftContext
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.masks import LayerMaskRule, verification_mask
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.decoding.row_lengths import RowLengths
from dflash_hf.decoding.slots import SlotCache
from dflash_hf.evaluation.measure import with_decoding_config
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.smollm2 import LoadedPair, data_folder, load_pair


RESULTS = Path(__file__).parent / "results" / "context_window.jsonl"
DEPTHS = (500, 1500, 3000, 5000, 7500)
WAYS = [(None, 0), *((window, 4) for window in (128, 256, 512, 633, 1024, 2048)), (512, 0), (1024, 0)]  # window, sink
NEW_TOKENS = 96
QUESTIONS = 2


class Windowed(DraftContext):
    """
    Shows the last `seen` context tokens and the first `sink` tokens of a row. Unlike `decoding_config.window`, a
    mask alone: other windows draft from the same cache.
    """

    seen = None
    sink = 0

    def _masks(self, block):
        masks = super()._masks(block)
        if self.seen is not None:
            key = torch.arange(self.cache.num_attended)
            hidden = (key < block[:, :1] - self.seen) & (key >= self.sink)  # [R, view]
            masks = {
                name: mask.masked_fill(hidden[:, None, None], torch.finfo(mask.dtype).min)
                for name, mask in masks.items()
            }
        return masks


def answered(pair: LoadedPair) -> list[list[dict]]:
    """Held-out conversations, each as messages that end with an answer."""
    conversations = []
    for name in ("held_out", "held_out_conversations"):
        for row in read_json_lines(data_folder() / f"{name}.jsonl.gz"):
            messages = list(row["messages"])
            if messages[-1]["role"] == "user":
                answer = pair.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
            conversations.append(messages)
    return conversations


class Conversation:
    """A long conversation, and the target's answers at several depths of it."""

    def __init__(self, pair: LoadedPair, number: int):
        rows = answered(pair)
        random.Random(number).shuffle(rows)
        self.pair = pair
        self.messages = []
        self.ends = []  # of each depth: messages and tokens before it
        for messages in rows[QUESTIONS:]:
            self.messages += messages
            size = len(self._ids(self.messages))
            while len(self.ends) < len(DEPTHS) and size >= DEPTHS[len(self.ends)]:
                self.ends.append((len(self.messages), size))
            if len(self.ends) == len(DEPTHS):
                break
        self.questions = [messages[:1] for messages in rows[:QUESTIONS]]

    def _ids(self, messages: list[dict], ask: bool = False) -> list[int]:
        text = self.pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        return self.pair.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _features(self, hidden_states) -> torch.Tensor:
        return torch.cat([hidden_states[i + 1] for i in self.pair.draft.config.target_layer_ids], dim=-1)

    def lines(self):
        """Yields a line for each depth, question and way: the tokens that each block committed."""
        target = self.pair.target
        drafter = DraftSession(self.pair.draft, self.pair.target)
        drafter.context = Windowed(self.pair.draft)
        drafter.context.prefill([0], 0, torch.zeros(1, 1, dtype=torch.long))
        cache = DynamicCache()
        for count, size in self.ends:
            # 1. Both models read the conversation up to this depth.
            begin = cache.get_seq_length()
            unread = self._ids(self.messages[:count])[begin:] if count else []
            for at in range(0, len(unread), 512):
                piece = torch.tensor([unread[at : at + 512]])
                read = target(piece, output_hidden_states=True, logits_to_keep=1, **{CACHE_NAME: cache})
                drafter.context.lengths = RowLengths([begin + at], drafter.context.device)
                drafter.context.read(self._features(read.hidden_states), Acceptance.from_counts([piece.shape[1]]))
            for number, question in enumerate(self.questions):
                # 2. The target answers a question.
                prompt = torch.tensor([self._ids(self.messages[:count] + question, ask=True)])
                answer = target.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    output_hidden_states=True,
                    return_dict_in_generate=True,
                    **{CACHE_NAME: cache},
                )
                cache.crop(size - cache.get_seq_length())
                features = torch.cat([self._features(step) for step in answer.hidden_states], dim=1)
                drafter.context.lengths = RowLengths([size], drafter.context.device)
                unread = prompt.shape[1] - size
                drafter.context.read(features[:, :unread], Acceptance.from_counts([unread]))
                # 3. Every window drafts this answer.
                for window, sink in WAYS:
                    drafter.context.seen = window
                    drafter.context.sink = sink
                    lengths = drafted(drafter, answer.sequences[0], prompt.shape[1], features, size)
                    yield {"depth": size, "question": number, "window": window, "sink": sink, "lengths": lengths}


class Copy(Conversation):
    """A request that needs a long context: to repeat a text of 600 tokens."""

    def __init__(self, pair: LoadedPair, number: int):
        rows = answered(pair)
        random.Random(number).shuffle(rows)
        self.pair = pair
        self.messages = []
        self.ends = [(0, 0)]
        text = "\n\n".join(messages[-1]["content"] for messages in rows[:30])
        text = pair.tokenizer.decode(pair.tokenizer(text)["input_ids"][:600])
        self.questions = [[{"role": "user", "content": f"Repeat the following text word for word.\n\n{text}"}]]


def drafted(drafter, text: torch.Tensor, start: int, features: torch.Tensor, first: int) -> list[int]:
    """
    The tokens that each block commits if the target writes `text` `[S]` from `start` on; `features` are those of the
    tokens from `first` on. Blocks that reach past the end of an answer that was cut off are left out.
    """
    size = drafter.draft.config.block_size
    ended = int(text[-1]) == drafter.target.generation_config.eos_token_id
    lengths = []
    drafter.context.lengths = RowLengths([start], drafter.context.device)
    while start + (1 if ended else size) < len(text):
        block = drafter.draft_block(text[start, None]).tokens[0, 1:]
        true = text[start + 1 : start + size]
        agreed = int((block[: len(true)] == true).int().cumprod(0).sum())
        lengths.append(min(agreed + 1, len(text) - 1 - start))
        accepted_features = features[:, start - first : start - first + lengths[-1]]
        drafter.context.read(accepted_features, Acceptance.from_counts([lengths[-1]]))
        start += lengths[-1]
    return lengths


def times(pair: LoadedPair, repeats: int = 30) -> None:
    """Prints milliseconds of CPU time, quartiles, of a draft and of a verification, by depth and window."""
    size = pair.draft.config.block_size
    zero = torch.zeros(1, 1, dtype=torch.long)
    drafters = {}
    for window in (None, 256, 512, 1024, 2048):
        drafters[window] = DraftSession(with_decoding_config(pair.draft, window=window), pair.target)
        drafters[window].context.prefill([0], 0, zero)
        drafters[window].context.cache.reserve(8192)
    cache = SlotCache(1, 8191)
    features = torch.randn(1, 2, pair.draft.fc.in_features, dtype=pair.target.dtype)

    def verify(slots):
        cache.reserve(int(slots[0, -1]) + 1)
        cache.set_next_indices(slots)
        mask = verification_mask(cache, slots, LayerMaskRule(), pair.target.dtype, Block(slots))
        pair.target(slots, attention_mask=mask, position_ids=slots, **{CACHE_NAME: cache})

    def draft(slots, drafter):
        drafter.context.lengths = RowLengths([int(slots[0, 0])], drafter.context.device)
        drafter.context.pending = [(features, slots[:, :2] - 2)]
        drafter.draft_block(slots[:, 0])

    work = {"verify": verify} | {
        f"draft {window}": partial(draft, drafter=drafter_of_window) for window, drafter_of_window in drafters.items()
    }
    seconds_of = {(depth, name): [] for depth in (512, 1024, 2048, 4096, 8000) for name in work}
    for _ in range(repeats):
        for (depth, name), seconds in seconds_of.items():
            slots = torch.arange(depth, depth + size)[None]
            begin = time.thread_time()
            work[name](slots)
            seconds.append(1e3 * (time.thread_time() - begin))
    for (depth, name), seconds in seconds_of.items():
        print(depth, name, *(f"{q:.1f}" for q in statistics.quantiles(seconds, n=4)), flush=True)


def report(lines: list[dict]) -> None:
    """tau by depth and way; the difference from the whole context per answer, with twice its standard error."""
    for depth, until in ((0, 1), (1, 1024), (1024, 2048), (2048, 4096), (4096, 8192)):  # 0: copies
        here = [line for line in lines if depth <= line["depth"] < until]
        full_context = {
            (answer["name"], answer["depth"], answer["question"]): answer
            for answer in here
            if answer["window"] is None
        }
        for window, sink in WAYS:
            answers = [answer for answer in here if (answer["window"], answer["sink"]) == (window, sink)]
            if not answers:
                continue
            tau = statistics.fmean(n for answer in answers for n in answer["lengths"])
            changes = [
                statistics.fmean(answer["lengths"])
                - statistics.fmean(full_context[answer["name"], answer["depth"], answer["question"]]["lengths"])
                for answer in answers
            ]
            error = 2 * statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0
            change = f"{statistics.fmean(changes):+.3f} ± {error:.3f}"
            print(f"| {depth}-{until} | {window} | {sink} | {len(answers)} | {tau:.3f} | {change} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    lines = Cells(RESULTS).rows()
    if arguments.report:
        return report(lines)
    torch.set_num_threads(1)
    draft_context.MAX_PENDING = 0  # features are read when they come: windows take turns on one cache
    pair = load_pair("bfloat16")
    pair.draft.decoding_config.window = None
    with torch.inference_mode(), packed_weights(pair.target, pair.draft):
        if arguments.times:
            return times(pair)
        for number, kind in product(range(arguments.conversations), (Copy, Conversation)):
            name = f"{kind.__name__.lower()} {number}"
            if name in {line["name"] for line in lines}:
                continue
            new = [{"name": name, **line} for line in kind(pair, number).lines()]
            with RESULTS.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in new)
            print(name, flush=True)


if __name__ == "__main__":
    main()
