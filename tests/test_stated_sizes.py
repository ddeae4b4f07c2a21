"""Sizes that guides state, against the code: how a block is counted in each place, and the memory of a call."""

import json
from collections import defaultdict
from unittest import mock

import pytest
import torch
from support.guides import ROOT, definitions_of
from support.pairs import make_draft, make_target
from transformers import GenerationConfig

from dflash_hf.decoding.slots import SlotCache
from dflash_hf.evaluation.measure import evaluate
from dflash_hf.evaluation.methods import TARGET_ALONE, WHOLE_BLOCKS
from dflash_hf.hub.launch import launch_command
from dflash_hf.training.blocks import build_blocks


GUIDES = ROOT / "examples" / "guides"
PROMPT = torch.tensor([[5, 9, 17, 33]])
SLOTS = 16


# --------------------------------------------------------------------------------------------------------- block sizes


def table_of_glossary() -> dict[tuple[str, str], list[str]]:
    """Where a block is counted, and under which name -> the numbers of a plain drafter and an anchor-first one."""
    text = (GUIDES / "glossary.md").read_text(encoding="utf-8")
    lines = text.partition("| Where | Name | Counts |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = {}
    for line in lines:
        where, name, _, *numbers = [cell.strip() for cell in line.strip("|").split("|")]
        rows[where, name] = numbers
    return rows


def option_of(command: list[str], option: str) -> str:
    """The value of an option in a command; "-" if it has none."""
    return command[command.index(option) + 1] if option in command else "-"


def largest_block(draft) -> int:
    """The largest `block_size` that `draft.decoding_config` may have."""
    size = 1
    while True:
        draft.decoding_config.block_size = size + 1
        try:
            draft.check_decoding_config()
        except ValueError:
            draft.decoding_config.block_size = size
            return size
        size += 1


def most_drafted_tokens(target, draft) -> int:
    """The most tokens that are drafted in a round, whatever `num_assistant_tokens` asks for."""
    drafted = []
    original = type(draft).forward

    def forward(self, noise_embeds, *args, **kwargs):
        output = original(self, noise_embeds, *args, **kwargs)
        drafted.append(self.states_of_drafting_slots(output.last_hidden_state[:, -noise_embeds.shape[1] :]).shape[1])
        return output

    with mock.patch.object(type(draft), "forward", forward):
        config = GenerationConfig(num_assistant_tokens=99, max_new_tokens=40, do_sample=False)
        target.generate(PROMPT, generation_config=config, assistant_model=draft)
    return max(drafted)


def largest_tau(config) -> int:
    """The tau in a training log if every token of every block is right."""
    tokens = torch.arange(40)[None]
    anchors = torch.tensor([[4]])
    blocks = build_blocks(
        tokens,
        torch.ones_like(tokens),
        anchors,
        anchors > 0,
        config.block_size,
        config.mask_token_id,
        config.sample_from_anchor,
    )
    return int(blocks.counted.sum()) + 1


def counted_sizes(target, fields: dict) -> dict[tuple[str, str], str]:
    """The rows of the glossary's table, for a drafter with these fields."""
    draft = make_draft(target, block_size=SLOTS, **fields)
    draft.decoding_config.block_size = None  # as a loaded drafter: whole blocks
    config = draft.config
    report = evaluate(target, draft, PROMPT.tolist(), max_new_tokens=2, runs=1, methods=(TARGET_ALONE, WHOLE_BLOCKS))
    vllm, sglang, llama_cpp = (
        launch_command(engine, "target", "draft", config)[1] for engine in ("vllm", "sglang", "llama.cpp")
    )
    speculative_config = json.loads(option_of(vllm, "--speculative-config"))
    sizes = {
        ("recipe, `dflash train`", "`block_size`, `--block-size`"): SLOTS,  # of `make_draft`, as of a recipe
        ("`config.json`, the configuration in Python", "`block_size`"): config.to_dict()["block_size"],
        ("the configuration in Python", "`max_block_tokens`"): config.max_block_tokens,
        ("`draft.decoding_config`", "`block_size`, at most"): largest_block(draft),
        ("`draft.decoding_config`", "`tree_nodes`"): "any",
        ("`generate`", "`num_assistant_tokens`, at most"): most_drafted_tokens(target, draft),
        ("`eval_report.json`", "`block_size`"): json.loads(report.to_json())["block_size"],
        ("reports and training logs", "tau, at most"): largest_tau(config),
        ("vLLM", "`num_speculative_tokens`"): speculative_config["num_speculative_tokens"],
        ("SGLang, DFlash", "`--speculative-num-draft-tokens`"): option_of(sglang, "--speculative-num-draft-tokens"),
        ("SGLang, DSpark", "`--speculative-dspark-block-size`"): option_of(sglang, "--speculative-dspark-block-size"),
        ("llama-server of llama.cpp", "`--spec-draft-n-max`"): option_of(llama_cpp, "--spec-draft-n-max"),
    }
    return {place: str(size) for place, size in sizes.items()}


def test_glossary_counts_blocks_as_the_code_does():
    target = make_target()
    plain = counted_sizes(target, {})
    anchor_first = counted_sizes(target, {"sample_from_anchor": True, "markov_rank": 6})
    assert table_of_glossary() == {place: [plain[place], anchor_first[place]] for place in plain}


def test_last_slot_of_anchor_first_domino_drafts_nothing():
    """The glossary says that its blocks count as those of a drafter that is not anchor-first."""
    head = {"sample_from_anchor": True, "gru_hidden_dim": 9, "emb_dim": 7}
    assert make_draft(make_target(), block_size=SLOTS, **head).config.max_block_tokens == SLOTS


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("new_tokens", [10, 150])
@pytest.mark.parametrize("rows", [1, 3])
def test_slots_take_the_memory_of_the_formula(rows, new_tokens, window):
    """Never more than the guide computes, and not much less: slots are made in steps."""
    guide = definitions_of(GUIDES / "decoding.md", "math", "max_kv_slots", "bytes_of_kv_slot")
    target = make_target()
    draft = make_draft(target)
    draft.decoding_config.window = window
    prompt = PROMPT.repeat(rows, 20)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "assistant_model": draft}
    target.generate(prompt, **options)  # the first call of a pair probes it, with caches of other sizes
    bytes_of_caches: dict[SlotCache, int] = defaultdict(int)
    original = SlotCache.set_next_indices

    def set_next_indices(cache, *indices):
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.filled_layers)
        bytes_of_caches[cache] = max(bytes_of_caches[cache], nbytes)
        original(cache, *indices)

    with mock.patch.object(SlotCache, "set_next_indices", set_next_indices):
        target.generate(prompt, **options)
    drafter_bytes, target_bytes = sorted(bytes_of_caches.values())
    for model, window_of_model, measured in ((target, None, target_bytes), (draft, window, drafter_bytes)):
        slots = guide["max_kv_slots"](prompt.shape[1] + new_tokens, draft.config.max_block_tokens, window_of_model)
        most = rows * slots * guide["bytes_of_kv_slot"](model)
        assert 0.6 * most <= measured <= most
