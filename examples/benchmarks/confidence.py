"""
What a confidence head adds to the drafter's own probabilities: how well each predicts whether the target accepts a
drafted token at temperature 0. Teacher-forced, over slots whose predecessors are right, from stored features.

    python examples/benchmarks/confidence.py --draft DRAFT --features FEATURES
"""

import argparse
from functools import partial

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from dflash_hf.data.examples import DFlashCollator
from dflash_hf.pairs.loading import load_for_training
from dflash_hf.smollm2 import smollm2_folder
from dflash_hf.targets.digests import digest_of_target
from dflash_hf.training.features import StoredFeatures, check_stored, stored_output
from dflash_hf.training.objective import Objective, forced_queries
from dflash_hf.training.training_args import DFlashTrainingArguments


class Observer(Objective):
    """Keeps for every slot reached: the drafter's probability, the confidence, whether the token is accepted."""

    def head_losses(self, hidden, labels, counted, previous_ids, teacher, progress=0.0):
        draft = self.draft
        head = draft.config.token_head_class(draft, partial(draft.embed, self.target))
        draftable = counted & (labels >= 0)
        queries = forced_queries(head, previous_ids, hidden, draftable)
        ids, logits = head.candidates(self.draft_head(hidden[draftable]))
        log_probs = head.scores(queries, ids, logits).log_softmax(-1)  # [M, V]
        target_probs = teacher.head(teacher.states[teacher.state_index[draftable]])[..., : log_probs.shape[-1]]
        chosen = log_probs.argmax(-1)
        correct = torch.zeros_like(counted).masked_scatter(draftable, chosen == labels[draftable])
        reached = torch.nn.functional.pad(correct[..., 1:-1].int().cumprod(-1), (2, 0), value=1).bool()[draftable]
        logit = torch.logit(log_probs.amax(-1).exp().clamp(1e-6, 1 - 1e-6))
        observed = torch.stack([logit, queries[:, head.rank].float(), chosen == target_probs.argmax(-1)], dim=1)
        self.seen = observed[reached]
        return super().head_losses(hidden, labels, counted, previous_ids, teacher, progress)


def foreseen(signals: torch.Tensor, accepted: torch.Tensor) -> float:
    """Cross-entropy in nats, on the second half, of a logistic regression fitted to the first half."""
    half = len(accepted) // 2
    inputs = torch.cat([signals, torch.ones(len(accepted), 1)], dim=1)
    weight = torch.zeros(inputs.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(inputs[:half] @ weight, accepted[:half])
        loss.backward()
        return loss

    optimizer.step(closure)
    return cross_entropy(inputs[half:] @ weight.detach(), accepted[half:]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", required=True, help="a drafter with a confidence head")
    parser.add_argument("--features", required=True, help="held-out features with final states")
    args = parser.parse_args()
    draft, target = load_for_training(args.draft, args.target or str(smollm2_folder()))
    rows = StoredFeatures(args.features)
    settings = DFlashTrainingArguments("unused", num_anchors=48, use_cpu=True, loss_type="kl", report_to=[])
    check_stored(rows, True, digest_of_target(target), layer_ids=draft.config.target_layer_ids)
    read = partial(stored_output, states=True)
    collate = DFlashCollator()
    recorded = []
    observer = Observer(draft.float().eval(), target, settings, read)
    with torch.no_grad():
        for row in rows:
            batch = collate([row])
            observer.draw_anchors(batch, step=0)
            observer(draft, batch)
            recorded.append(observer.seen)
    observed = torch.cat(recorded)
    signals = observed[:, :2]  # probability and confidence
    accepted = observed[:, 2]
    print(f"{len(accepted)} tokens, {accepted.mean():.1%} accepted; cross-entropy of the prediction, in nats:")
    print(f"neither     {foreseen(signals[:, :0], accepted):.4f}")
    print(f"probability {foreseen(signals[:, :1], accepted):.4f}")
    print(f"confidence  {foreseen(signals[:, 1:], accepted):.4f}")
    print(f"both        {foreseen(signals, accepted):.4f}")


if __name__ == "__main__":
    main()
