"""A byte-level tokenizer made on the fly, chat templates of several kinds, and a tiny target that goes with them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.pairs import make_draft, make_target


SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
PAD = 0
START = 1
END = 2

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does it: a thought is put before the last turn, an empty one if need be, and dropped from earlier turns.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Tools before the conversation, calls in the answers; arguments are mappings, as in most published templates.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({% for key, value in c.function.arguments.items() %}"
    "{{ key }}={{ value | tojson }};{% endfor %}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The turn begins in another way than the generation prompt says.
CROOKED = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>bot: {% endif %}")


def make_tokenizer(template: str | None = CHATML, **named: str) -> PreTrainedTokenizerFast:
    """One token for each byte, after the special ones; then those that are `named`, such as `image_token`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": SPECIAL[PAD], "eos_token": SPECIAL[END], "extra_special_tokens": [SPECIAL[START]]}
    special |= {"model_specific_special_tokens": named} if named else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def save_target(folder: Path, template: str | None = CHATML, **overrides) -> Path:
    """A random target with that tokenizer, 280 rows wide, in a folder."""
    target = make_target(vocab_size=280, **overrides)
    target.generation_config.eos_token_id = END
    target.generation_config.pad_token_id = PAD
    target.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def saved_with(tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedModel:
    """A random target with a row for each of a tokenizer's ids and one more, saved with the tokenizer."""
    target = make_target(vocab_size=len(tokenizer) + 1)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return target


def save_thinking_pair(folder: Path) -> Path:
    """A target with a thinking mode in `target`, and a drafter for it in `draft`; returns the folder."""
    target = saved_with(make_tokenizer(THINKING), folder / "target")
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder / "draft")
    return folder
