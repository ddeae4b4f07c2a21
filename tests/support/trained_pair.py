"""Targets and drafters that are really trained, in seconds: drafts are accepted and rejected for honest reasons."""

import torch

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from support.pairs import make_draft, make_target


def walk(generator: torch.Generator, length: int) -> list[int]:
    """Mostly a fixed successor for each token; every seventh token goes on by the token before it."""
    successor = torch.randperm(94, generator=torch.Generator().manual_seed(3)).tolist()
    text = torch.randint(0, 94, (2,), generator=generator).tolist()
    while len(text) < length:
        a, b = text[-2:]
        text.append(successor[b] if b % 7 else (successor[b] + a % 3) % 94)
    return text


def fit_target(target, texts: torch.LongTensor, steps: int, generator: torch.Generator):
    """Train a target on texts `[N, S]`."""
    target.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(target.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        batch = texts[torch.randint(0, len(texts), (24,), generator=generator)]
        target(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return target.requires_grad_(False).eval()


def fit_draft(draft, target, data, folder, trainer_class=DFlashTrainer, **fields):
    """Train a drafter on examples, with these arguments among others."""
    fields |= {"per_device_train_batch_size": 16, "learning_rate": 4e-3, "num_anchors": 8, "report_to": []}
    fields |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = DFlashTrainingArguments(output_dir=str(folder), **fields)
    trainer_class(model=draft, target=target, args=arguments, train_dataset=data).train()
    return draft.eval()


def train_pair(folder, block_size: int = 6):
    """About ten seconds on one core."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.tensor([walk(generator, 40) for _ in range(1000)])
    target = make_target(tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.div_(8.0)
    fit_target(target, texts, 220, generator)
    draft = make_draft(target, block_size=block_size, target_layer_ids=[0, 1, 2])
    data = [{"input_ids": text, "loss_mask": [1] * len(text)} for text in texts.tolist()]
    return target, fit_draft(draft, target, data, folder, max_steps=150)
