"""
A page that shows a target alone and with its drafter, side by side: the same text, written at two speeds.

    pip install gradio '.[demo,hub]'     # in a checkout of dflash-hf
    python examples/space/app.py         # SmolLM2-135M-Instruct; DFLASH_TARGET and DFLASH_DRAFT name another pair

In float32, where both columns hold the same text, and with packed weights on a CPU, both columns alike.
DFLASH_DTYPE=bfloat16 is faster, but where two tokens are nearly equally likely the columns may part.

It is ready to be pushed as a Space: `README.md` beside it is the Space's card.
"""

import html
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial


os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: every answer is a thread, and there are many

import gradio as gr  # noqa: E402
import torch  # noqa: E402

from dflash_hf.data.encode import RowEncoder  # noqa: E402
from dflash_hf.data.prompts import ids_of_prompt, template_kwargs  # noqa: E402
from dflash_hf.data.template import ChatTemplate  # noqa: E402
from dflash_hf.pairs.configs import check_pair_configs  # noqa: E402
from dflash_hf.pairs.loading import Loading, load_draft, load_target  # noqa: E402
from dflash_hf.pairs.packing_choice import pack_if_chosen  # noqa: E402
from dflash_hf.pairs.tokenizers import load_tokenizer  # noqa: E402
from dflash_hf.serving.pieces import PieceStreamer  # noqa: E402
from dflash_hf.smollm2 import HUB_NAME, NAME, folder_of  # noqa: E402
from dflash_hf.targets.generation import generate_one, max_answer_tokens  # noqa: E402


NODES = 7  # of draft trees: on one CPU thread in float32 1.4x, a block of 8 1.2x, a tree of 15 1.35x
AT_ONCE = 4  # visitors who are answered at the same time; the others wait
SECONDS_BETWEEN_UPDATES = 0.1
TOKENS = 160  # of an answer, at first
EXAMPLES = [
    "Why is the sky blue?",
    "What is a cache?",
    "Write a Python function that reverses a string.",
]
ABOUT = """# DFlash: the same text, sooner

A small drafter guesses a block of tokens, the target checks the block in one forward. Both columns hold the target's
own text. <span class="dflash"><i class="s1">Coloured</i> <i class="s2">tokens</i></span> were guessed and accepted,
one shade for each verification; the others are the target's own. *tau* is the number of tokens that one verification
yields. Both answers are computed at the same time, on a thread each, next to other visitors' answers.
"""
STYLE = """
.dflash-side { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 0.8em 1em; height: 100%; }
.dflash-side h3 { margin: 0; font-size: 0.95em; color: var(--body-text-color); opacity: 0.75; }
.dflash { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 9em; line-height: 1.5; }
.dflash i { font-style: normal; border-radius: 2px; }
.dflash i.s1 { background: #bbf7d0; color: #14532d; }
.dflash i.s2 { background: #bae6fd; color: #0c4a6e; }
.dflash-figures { font-size: 1.3em; font-weight: 600; min-height: 1.7em; }
.dflash-error { color: #b91c1c; }
"""


class Side:
    """
    A column: an answer in its own thread.

    Args:
        title (`str`): The heading, as HTML.
        answer (`Callable`): Generates the answer, for a streamer.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        changed (`threading.Event`): Is set when there is more to show.
    """

    def __init__(self, title: str, answer: Callable, tokenizer, changed: threading.Event):
        self.title = title
        self.pieces = []
        self.changed = changed
        self.error = ""
        self.gone = False  # whether the visitor has left
        self.streamer = PieceStreamer(tokenizer, self._take)
        self.thread = threading.Thread(target=self._answer, args=(answer,), daemon=True)
        self.thread.start()

    def _answer(self, answer: Callable) -> None:
        try:
            answer(self.streamer)
        except InterruptedError:
            pass
        except Exception as error:
            self.error = str(error) or type(error).__name__
        self.changed.set()

    def _take(self, piece: str, source: int) -> None:
        if self.gone:
            raise InterruptedError
        self.pieces.append((piece, source))
        self.changed.set()

    def speed(self) -> float:
        """Tokens of a second so far."""
        return self.streamer.tokens / max(self.streamer.seconds, 1e-9)

    def shown(self, more: str = "") -> str:
        """Figures, and `more` behind them, and text as HTML."""
        text = "".join(
            f'<i class="s{2 - source % 2}">{html.escape(piece)}</i>' if source else html.escape(piece)
            for piece, source in list(self.pieces)
        )
        figures = self.streamer.status() + more if self.pieces else ""
        wrong = f'<p class="dflash-error">{html.escape(self.error)}</p>' if self.error else ""
        return card(self.title, f'<div class="dflash-figures">{figures}</div><div class="dflash">{text}</div>{wrong}')


def card(title: str, content: str) -> str:
    return f'<div class="dflash-side"><h3>{title}</h3>{content}</div>'


def page(target, tokenizer, draft, name: str = "The target") -> gr.Blocks:
    """
    Args:
        target (`PreTrainedModel`): Who answers.
        tokenizer (`PreTrainedTokenizerBase`): Its, with a chat template.
        draft (`DFlashDraftModel`): Its drafter.
        name (`str`): How the target is called on the page.
    """
    titles = (f"{html.escape(name)} alone", "with its drafter")
    empty = '<div class="dflash-figures"></div><div class="dflash"></div>'
    encoder = RowEncoder(ChatTemplate(tokenizer, template_kwargs(None, draft_config=draft.config)))

    def answer(ids: list[int], tokens: int, assistant, streamer: PieceStreamer) -> None:
        room = max_answer_tokens(target, len(ids), tokens)
        options = {"max_new_tokens": room, "do_sample": False, "assistant_model": assistant}
        generate_one(target, ids, streamer=streamer, **options)

    def compare(prompt: str, max_new_tokens: int) -> Iterator[tuple[str, str]]:
        """Both columns, again and again until both are complete; what a visitor has left is computed no further."""
        if not prompt.strip():
            raise gr.Error("Ask something first.")
        ids = ids_of_prompt(encoder, [{"role": "user", "content": prompt}])
        changed = threading.Event()
        sides = [
            Side(title, partial(answer, ids, int(max_new_tokens), assistant), tokenizer, changed)
            for title, assistant in zip(titles, (None, draft), strict=True)
        ]
        try:
            while any(side.thread.is_alive() for side in sides):
                changed.wait(1.0)
                changed.clear()
                yield sides[0].shown(), sides[1].shown()
                time.sleep(SECONDS_BETWEEN_UPDATES)
            alone, drafted = sides
            ratio = drafted.speed() / alone.speed() if alone.pieces else 0.0
            yield alone.shown(), drafted.shown(f", {ratio:.2f}x the speed" if ratio else "")
        finally:
            for side in sides:
                side.gone = True

    with gr.Blocks(title="DFlash") as blocks:
        gr.Markdown(ABOUT)
        with gr.Row(equal_height=True):
            with gr.Column(scale=3):
                prompt = gr.Textbox(label="Your question", value=EXAMPLES[0], lines=2, elem_id="prompt")
                gr.Examples(EXAMPLES, prompt, label="or one of these")
            with gr.Column(scale=1, min_width=200):
                tokens = gr.Slider(16, 512, value=TOKENS, step=8, label="Tokens at most")
                with gr.Row():
                    ask = gr.Button("Ask", variant="primary", elem_id="ask", min_width=80)
                    stop = gr.Button("Stop", elem_id="stop", min_width=80)
        with gr.Row(equal_height=True):
            with gr.Column():
                alone = gr.HTML(card(titles[0], empty), elem_id="alone", padding=False)
            with gr.Column():
                drafted = gr.HTML(card(titles[1], empty), elem_id="drafted", padding=False)
        running = gr.on([ask.click, prompt.submit], compare, [prompt, tokens], [alone, drafted])
        stop.click(None, cancels=[running])
    return blocks.queue(default_concurrency_limit=AT_ONCE, max_size=32)


def main() -> None:
    """Load the pair, and serve the page."""
    folder = folder_of(os.environ.get("DFLASH_TARGET", NAME))
    drafter = folder_of(os.environ.get("DFLASH_DRAFT", NAME), drafter=True)
    loading = Loading(os.environ.get("DFLASH_DTYPE", "float32"))
    check_pair_configs(folder, drafter, loading)
    target = load_target(folder, loading)
    draft = load_draft(drafter, loading)
    pack_if_chosen(target.device.type == "cpu", target, draft)  # both columns are packed
    draft.decoding_config.tree_nodes = NODES
    target.generate(torch.tensor([[0, 1]]), assistant_model=draft, max_new_tokens=4)  # the first call tries ways out
    name = os.environ.get("DFLASH_TARGET", HUB_NAME).rpartition("/")[2]
    page(target, load_tokenizer(folder), draft, name).launch(css=STYLE)


if __name__ == "__main__":
    main()
