"""A trained pair: the published loop's trace, and what training measured against what decoding does."""

import pytest
import torch
from support.reference import published_loop
from support.trained_pair import train_pair, walk

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.data.examples import make_example
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.training.metrics import Statistics


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = train_pair(tmp_path_factory.mktemp("pair"))
    draft.decoding_config.window = (
        None  # the texts are longer than those of training; the published loop has no window
    )
    return target, draft


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(99)
    return torch.tensor([walk(generator, 8) for _ in range(12)])


def test_text_and_trace_equal_the_published_loop(pair, prompts):
    """Also in a batch, where each row keeps its own pace."""
    target, draft = pair
    names = ("target_layer_ids", "block_size", "mask_token_id")
    config = {name: getattr(draft.config, name) for name in names}

    def draft_hidden(features, block):
        return draft(noise_embeds=block[None], context_hidden_states=features[None]).last_hidden_state[0]

    options = {"max_new_tokens": 60, "do_sample": False}
    inputs = prompts.clone()
    mask = torch.ones_like(prompts)
    lengths_seen = set()
    for row, pad in enumerate([0, 3, 1, 5, 2, 0] * 2):
        inputs[row, :pad] = mask[row, :pad] = 0
    drafted = {**options, "assistant_model": draft, "return_dict_in_generate": True}
    batch = target.generate(inputs, attention_mask=mask, **drafted)
    for row in range(len(prompts)):
        prompt = inputs[row : row + 1, mask[row].bool()]
        ones = torch.ones_like(prompt)  # without a mask, `generate` would take a 0 in the prompt for padding
        text, trace = published_loop(draft_hidden, target, config, prompt, 60, [])
        alone = target.generate(prompt, attention_mask=ones, **drafted)
        target_only = target.generate(prompt, attention_mask=ones, **options)
        assert alone.sequences[0].tolist() == text == target_only[0].tolist()
        assert batch.sequences[row, 8:].tolist() == text[prompt.shape[1] :]
        committed = alone.acceptance_lengths[0]
        assert batch.acceptance_lengths[row] == committed and committed[:-1] == trace[: len(committed) - 1]
        lengths_seen.update(committed)
    assert len(lengths_seen) >= 4, lengths_seen


def test_training_accuracy_equals_decoding_accuracy(pair, prompts, tmp_path, monkeypatch):
    """
    Counted by the trainer's own step at the anchors that decoding stopped at: counted, right, reached and accepted
    tokens of every slot are those of the drafts that decoding made, and the prefixes those that verification accepted.
    """
    target, draft = pair
    size = draft.config.block_size
    original = DraftSession.draft_block
    drafted = []

    def record(self, anchors, num_drafted):
        draft = original(self, anchors)
        drafted.append((self.context.lengths.longest, draft.tokens[0].tolist()))
        return draft._replace(tokens=draft.tokens[:, : 1 + num_drafted])

    monkeypatch.setattr(DraftSession, "draft_block", record)
    arguments = DFlashTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = DFlashTrainer(draft, target, arguments)
    options = {"max_new_tokens": 60, "do_sample": False, "assistant_model": draft, "return_dict_in_generate": True}
    sums = Statistics.zeros(torch.device("cpu"))
    expected = torch.zeros(4, size - 1)
    draft.eval()
    for prompt in prompts[:6]:
        drafted.clear()
        output = target.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)
        text = output.sequences[0].tolist()
        committed = []
        for start, block in drafted:
            hits = [text[start + k] == block[k] for k in range(1, size) if start + k < len(text)]
            prefix = hits.index(False) if False in hits else len(hits)
            committed.append(prefix + 1)
            for k, hit in enumerate(hits):
                expected[:, k] += torch.tensor([1, hit, k <= prefix, k < prefix])
        # The last verification is cut short by the end of the text, or has nothing left to draft.
        assert committed[:-1] == output.acceptance_lengths[0][: len(committed) - 1]
        assert len(output.acceptance_lengths[0]) - len(committed) in (0, 1)
        batch = trainer.data_collator([make_example(text[: len(prompt)], text[len(prompt) :])])
        batch["anchors"] = torch.tensor([[start for start, _ in drafted]])
        batch["valid"] = torch.ones_like(batch["anchors"], dtype=torch.bool)
        with torch.no_grad():
            _, outputs = trainer.compute_loss(draft, batch, return_outputs=True)
        sums = sums.add(outputs["statistics"])
    assert torch.equal(torch.stack([sums.counted, sums.correct, sums.reached, sums.accepted]), expected)
    counted = expected[0].sum()
    correct = expected[1].sum()
    assert 0.2 * counted < correct < 0.95 * counted  # neither is empty
