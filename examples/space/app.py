"""
A page that shows a target alone and with its drafter, side by side: the same text, written at two speeds.

    pip install gradio '.[demo,hub]'     # in a checkout of dflash-hf
    python examples/space/app.py         # SmolLM2-135M-Instruct; DFLASH_TARGET and DFLASH_DRAFT name another pair

It is ready to be pushed as a Space: `README.md` beside it is the Space's card.
"""

import html
import os
import threading
import time
from collections.abc import Iterator


os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: every answer is a thread, and there are many

import gradio as gr  # noqa: E402

from dflash_hf.data.prepare import load_tokenizer  # noqa: E402
from dflash_hf.data.prompts import template_kwargs  # noqa: E402
from dflash_hf.pairs import Loading, check_pair, load_draft, load_target  # noqa: E402
from dflash_hf.serving.conversation import Conversation  # noqa: E402
from dflash_hf.serving.pieces import PieceStreamer, watch_rounds  # noqa: E402
from dflash_hf.smollm2 import NAME, folder_of  # noqa: E402


AT_ONCE = 4  # visitors who are answered at the same time; the others wait
SECONDS_BETWEEN_UPDATES = 0.1
TOKENS = 160  # of an answer, at first
EXAMPLES = [
    "Write a short poem about rain.",
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a string.",
]
ABOUT = """# DFlash: the same text, sooner

A small drafter guesses a block of tokens, the target checks the block in one forward. Both columns hold the target's
own text. <span class="dflash"><i class="s1">Coloured</i> <i class="s2">tokens</i></span> were guessed and accepted,
one shade for each verification; the others are the target's own. *tau* is the number of tokens that one verification
yields. Both answers are computed at the same time, on one thread each, beside those of other visitors.
"""
STYLE = """
.dflash { white-space: pre-wrap; overflow-wrap: anywhere; }
.dflash i { font-style: normal; border-radius: 2px; }
.dflash i.s1 { background: #bbf7d0; color: #14532d; }
.dflash i.s2 { background: #bae6fd; color: #0c4a6e; }
.dflash-figures { font-size: 1.2em; font-weight: 600; min-height: 1.6em; }
.dflash-error { color: #b91c1c; }
"""


class Side:
    """
    One column: an answer in a thread of its own.

    Args:
        conversation (`Conversation`): Of this visitor and this column alone.
        prompt (`str`): What is asked.
        changed (`threading.Event`): Is set when there is more to show.
    """

    def __init__(self, conversation: Conversation, prompt: str, changed: threading.Event):
        self.pieces, self.changed, self.error = [], changed, ""
        self.gone = False  # nobody looks any more
        self.streamer = PieceStreamer(conversation.tokenizer, self._take)
        self.thread = threading.Thread(target=self._answer, args=(conversation, prompt), daemon=True)
        self.thread.start()

    def _answer(self, conversation: Conversation, prompt: str) -> None:
        try:
            conversation.answer(prompt, self.streamer)
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

    def shown(self) -> str:
        """Figures and text as HTML."""
        text = "".join(
            f'<i class="s{2 - source % 2}">{html.escape(piece)}</i>' if source else html.escape(piece)
            for piece, source in list(self.pieces)
        )
        figures = self.streamer.status() if self.pieces else ""
        wrong = f'<p class="dflash-error">{html.escape(self.error)}</p>' if self.error else ""
        return f'<div class="dflash-figures">{figures}</div><div class="dflash">{text}</div>{wrong}'


def page(target, tokenizer, draft) -> gr.Blocks:
    """
    Args:
        target (`PreTrainedModel`): Who answers.
        tokenizer (`PreTrainedTokenizerBase`): Its, with a chat template.
        draft (`DFlashDraftModel`): Its drafter.
    """
    watch_rounds(draft)
    template = template_kwargs(None, draft_config=draft.config)

    def compare(prompt: str, max_new_tokens: int) -> Iterator[tuple[str, str]]:
        """Both columns, again and again until both are complete; what a visitor has left is computed no further."""
        if not prompt.strip():
            raise gr.Error("Ask something first.")
        options = {"max_new_tokens": int(max_new_tokens), "do_sample": False}
        changed = threading.Event()
        sides = [
            Side(Conversation(target, tokenizer, one, template, dict(options)), prompt, changed)
            for one in (None, draft)
        ]
        try:
            while any(side.thread.is_alive() for side in sides):
                changed.wait(1.0)
                changed.clear()
                yield sides[0].shown(), sides[1].shown()
                time.sleep(SECONDS_BETWEEN_UPDATES)
            yield sides[0].shown(), sides[1].shown()
        finally:
            for side in sides:
                side.gone = True

    with gr.Blocks(title="DFlash") as blocks:
        gr.Markdown(ABOUT)
        prompt = gr.Textbox(label="Your question", value=EXAMPLES[0], lines=2, elem_id="prompt")
        with gr.Row():
            tokens = gr.Slider(16, 512, value=TOKENS, step=8, label="Tokens at most")
            ask = gr.Button("Ask", variant="primary", elem_id="ask")
            stop = gr.Button("Stop", elem_id="stop")
        with gr.Row():
            with gr.Column():
                gr.Markdown("### The target alone")
                alone = gr.HTML(elem_id="alone")
            with gr.Column():
                gr.Markdown("### With the drafter")
                drafted = gr.HTML(elem_id="drafted")
        gr.Examples(EXAMPLES, prompt)
        running = gr.on([ask.click, prompt.submit], compare, [prompt, tokens], [alone, drafted])
        stop.click(None, cancels=[running])
    return blocks.queue(default_concurrency_limit=AT_ONCE, max_size=32)


def main() -> None:
    """Load the pair, and serve the page."""
    folder = folder_of(os.environ.get("DFLASH_TARGET", NAME))
    drafter = folder_of(os.environ.get("DFLASH_DRAFT", NAME), drafter=True)
    loading = Loading()
    check_pair(folder, drafter, loading)
    target, draft = load_target(folder, loading), load_draft(drafter, loading)
    page(target, load_tokenizer(folder), draft).launch(css=STYLE)


if __name__ == "__main__":
    main()
