"""
A chat target and its drafter that really know their tiny language, in half a minute; it has a mode that the drafter
was not trained in.

A user says four letters, and the answer goes on with them: each letter has a successor, moved on by as many places as
the letter before it says. With thinking on the successors are others. So a draft needs more than its anchor.
"""

import string

import torch
from transformers import PreTrainedTokenizerFast

from dflash_hf import DFlashTrainer, make_example
from support.pairs import make_draft, make_target
from support.tiny_chat import END, START, make_tokenizer
from support.trained_pair import fit_draft, fit_target


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '!' if enable_thinking is defined and not enable_thinking else '?' }}{% endif %}"
)
OFF = {"enable_thinking": False}
LETTERS = string.ascii_letters[:48]
LENGTH = 40


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte; the last sign of a prompt says whether to think."""
    return make_tokenizer(TEMPLATE)


def requests(count: int, seed: int) -> list[str]:
    """What users say: four letters each."""
    letters = torch.randint(len(LETTERS), (count, 4), generator=torch.Generator().manual_seed(seed)).tolist()
    return ["".join(LETTERS[i] for i in row) for row in letters]


def answer(request: str, thinking: bool) -> str:
    """The `LENGTH` letters that follow a request."""
    order = torch.randperm(len(LETTERS), generator=torch.Generator().manual_seed(7 + thinking)).tolist()
    before = LETTERS.index(request[-2])
    letter = LETTERS.index(request[-1])
    text = ""
    for _ in range(LENGTH):
        following = (order[letter] + (0 if letter % 3 else before % 3)) % len(LETTERS)
        before = letter
        letter = following
        text += LETTERS[letter]
    return text


def conversations(tokenizer, count: int, thinking: bool, seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers as ids."""
    pairs = []
    for request in requests(count, seed):
        prompt = [START, *tokenizer(request)["input_ids"], END, *tokenizer("?" if thinking else "!")["input_ids"]]
        pairs.append((prompt, [*tokenizer(answer(request, thinking))["input_ids"], END]))
    return pairs


def train_chat_target(tokenizer, steps: int = 300):
    """A target trained on the conversations of both modes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 5}
    target = make_target(vocab_size=264, tie_word_embeddings=True, **sizes)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1:  # each layer changes much, so that the next one's output is another
                parameter.div_(3.0 if "o_proj" in name or "down_proj" in name else 8.0)
    texts = [conversations(tokenizer, 600, thinking, seed) for thinking, seed in ((False, 1), (True, 2))]
    rows = torch.tensor([prompt + reply for modes in zip(*texts, strict=True) for prompt, reply in modes])
    fit_target(target, rows, steps, torch.Generator().manual_seed(0))
    target.generation_config.eos_token_id = END
    target.generation_config.bos_token_id = START
    return target


def train_chat_draft(target, tokenizer, folder, trainer_class=DFlashTrainer, steps: int = 60):
    """Trained with thinking off, which its configuration says."""
    draft = make_draft(target, block_size=6, target_layer_ids=[1, 2, 3], intermediate_size=128)
    draft.config.mask_token_id = len(tokenizer)
    draft.config.dflash_config = {**draft.config.dflash_config, "chat_template_kwargs": OFF}
    data = [make_example(prompt, reply) for prompt, reply in conversations(tokenizer, 600, False, 1)]
    return fit_draft(draft, target, data, folder, trainer_class, loss_type="dpace", max_steps=steps)
