"""Compiled forwards: as many graphs as models and cache buckets; else eager decoding, with its reason."""

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target, shallow_pair
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from torch._dynamo.utils import counters

from dflash_hf import packed_weights


@pytest.fixture
def pair():
    torch._dynamo.reset()
    target, draft = shallow_pair(block_size=6)
    draft.decoding_config.compile = "aot_eager"
    yield target, draft
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def prompt(length: int) -> torch.Tensor:
    return (torch.arange(length) * 7 % 90 + 2)[None]


def check(target, draft, inputs, new=24, **options):
    """The text of a drafter that is often right is the target's own, and drafts are accepted."""
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, **inputs, **options}
    torch.manual_seed(0)
    expected = target.generate(**options).sequences
    draft = scripted(draft, expected, error_rate=0.2, ranks=2)
    torch.manual_seed(0)
    output = target.generate(**options, assistant_model=draft)
    assert torch.equal(output.sequences, expected)
    assert max(max(lengths) for lengths in output.acceptance_lengths) > 1
    return output


def test_graphs_are_made_per_model_and_cache_bucket(pair):
    target, draft = pair
    counters.clear()
    target.generate(prompt(5), max_new_tokens=12, do_sample=False, assistant_model=draft)
    for length, new in ((9, 30), (40, 7), (70, 25)):
        target.generate(prompt(length), max_new_tokens=new, do_sample=False, assistant_model=draft)
        assert graphs() == 2
    for length, new in ((220, 24), (20, 9)):  # the target needs the second bucket, and the first again
        target.generate(prompt(length), max_new_tokens=new, do_sample=False, assistant_model=draft)
    assert graphs() == 3


@torch._dynamo.config.patch(recompile_limit=1)
def test_graphs_may_exceed_dynamos_recompile_limit(pair):
    target, draft = pair
    counters.clear()
    for rows in (1, 2):
        target.generate(prompt(5).repeat(rows, 1), max_new_tokens=7, do_sample=False, assistant_model=draft)
    assert graphs() == 4


SAMPLED = {"do_sample": True, "top_k": 9}
PENALTY = {"repetition_penalty": 1.3}
CASES = [(None, 1, {}), (9, 3, {}), (None, 3, SAMPLED), (9, 1, SAMPLED), (None, 3, PENALTY), (9, 1, PENALTY)]


@pytest.mark.parametrize(("nodes", "rows", "rules"), CASES, ids=str)
def test_compiled_text_is_the_targets_own(pair, nodes, rows, rules):
    target, draft = pair
    draft.decoding_config.tree_nodes = nodes
    draft.decoding_config.window = 5 if rows > 1 else None
    check(target, draft, ragged_prompts(rows)[0], **rules)


def test_selector_runs_after_its_graph():
    target, draft = shallow_pair(make_draft2, block_size=6)
    draft.decoding_config.compile = "aot_eager"
    check(target, draft, ragged_prompts(2)[0])


def test_packing_changes_no_compiled_text(pair, packs_of_any_size):
    target, draft = pair
    for _ in range(2):
        with packed_weights(target, draft):
            check(target, draft, {"input_ids": prompt(9)})
        check(target, draft, {"input_ids": prompt(9)})


def test_failed_compilation_decodes_eagerly(pair, caplog):
    target, draft = pair

    @torch._dynamo.register_backend(name="raising")
    def raising(graph, inputs):
        raise RuntimeError("no compiler here")

    draft.decoding_config.compile = "raising"
    for _ in range(2):
        check(target, draft, {"input_ids": prompt(8)})
    assert caplog.text.count("Qwen3ForCausalLM cannot be compiled") == 1 and "no compiler here" in caplog.text


def test_unknown_backend_is_an_error(pair):
    target, draft = pair
    draft.decoding_config.compile = "fastest"
    with pytest.raises(ValueError, match="compile='fastest' must be True, a mode of torch.compile"):
        target.generate(prompt(8), max_new_tokens=4, assistant_model=draft)


@pytest.mark.parametrize(("family", "reason"), [("qwen3_next", "recurrent"), ("gpt2", "may exceed its 256 positions")])
def test_eager_decoding_names_its_reason(family, reason, caplog):
    target = make_target(family, torch.float64, attn=None)
    draft = make_draft(target, block_size=6)
    draft.decoding_config.compile = "aot_eager"
    counters.clear()
    new = 24 if family == "qwen3_next" else 245
    check(
        target,
        draft,
        {"input_ids": prompt(9)},
        new,
        stopping_criteria=[lambda ids, _: torch.tensor([ids.shape[1] > 40])],
    )
    assert reason in caplog.text and graphs() == 0


def test_callers_inference_mode_is_kept(pair):
    target, draft = pair
    recurrent = make_target("qwen3_next", torch.float64)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            check(target, draft, {"input_ids": prompt(8)})
            check(recurrent, make_draft(recurrent, block_size=6), {"input_ids": prompt(8)})
