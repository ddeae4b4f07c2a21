"""Texts of three tokens over eight, whose distribution can be written down."""

import torch
from scipy.stats import chisquare

from support.pairs import make_target


VOCAB = 8
STEPS = 3


def small_target():
    """A target over 8 tokens, whose distribution over three-token texts can be written down."""
    target = make_target(vocab_size=VOCAB, bos_token_id=None, pad_token_id=0, num_hidden_layers=2)
    with torch.no_grad():
        for parameter in target.lm_head.parameters():
            parameter.mul_(0.6)
    return target


def exact_distribution(target, prompt, temperature, top_p):
    """Probability of each of the `VOCAB ** STEPS` continuations, one forward for each length."""
    probabilities = {(): 1.0}
    for _ in range(STEPS):
        longer = {}
        ids = torch.tensor([[*prompt, *prefix] for prefix in probabilities])
        rows = (target(ids).logits[:, -1].float() / temperature).softmax(-1)  # [B, V]
        for (prefix, p), q in zip(probabilities.items(), rows, strict=True):
            if top_p < 1:
                order = q.argsort()
                drop = order[q[order].cumsum(0) <= 1 - top_p]
                q[drop] = 0
                q = q / q.sum()
            longer.update({(*prefix, t): p * float(q[t]) for t in range(VOCAB)})
        probabilities = longer
    return probabilities


def sample(small, draft, prompt, rows, temperature, top_p):
    """`STEPS` tokens for each of so many rows of one prompt."""
    return small.generate(
        torch.tensor([prompt] * rows),
        max_new_tokens=STEPS,
        do_sample=True,
        temperature=temperature,
        top_p=top_p,
        top_k=0,
        assistant_model=draft,
        return_dict_in_generate=True,
    )


def assert_follows(counts, expected):
    """Chi-square of counted texts; rare ones count as one, impossible ones never occur."""
    draws = sum(counts.values())
    assert all(counts[text] == 0 for text, p in expected.items() if p == 0)
    common = [text for text, p in expected.items() if p * draws >= 5]
    observed = [counts[text] for text in common]
    wanted = [expected[text] * draws for text in common]
    rest = draws - sum(wanted)
    if rest > 1e-3 * draws:
        observed = [*observed, draws - sum(observed)]
        wanted = [*wanted, rest]
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 0.001
