"""
What a run leaves in its `output_dir`: the drafter, merged with its adapter, and in half precision if the run trains in
it. A sharded drafter without an adapter stays in float32, in which its shards are gathered.
"""

from pathlib import Path

import torch

from dflash_hf._io.names import FACTS_FILE
from dflash_hf._io.progress import without_bars
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.pairs.draft_vocabulary import with_shared_head
from dflash_hf.training.adapters import gather_merged
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.trainer_card import save_facts


def save(trainer: DFlashTrainer, adapted: bool) -> None:
    """
    Save the drafter; with its adapter merged, which engines serve, and the adapter alone next to it.

    Every process calls it: the weights of a sharded drafter are gathered from all.
    """
    folder = Path(trainer.args.output_dir)
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if not adapted:
        if not is_sharded:
            _to_half_precision(trainer.draft, trainer.args)
        trainer.save_drafter(folder, trainer.trained_steps)
        return
    trainer.save_drafter(folder / "adapter", trainer.trained_steps)
    merged_draft = gather_merged(trainer)
    if merged_draft is not None:
        _to_half_precision(merged_draft, trainer.args).save_pretrained(folder)
        (folder / FACTS_FILE).unlink(missing_ok=True)  # of the weights that were here before
        save_facts(trainer, folder, trainer.trained_steps, trainer.args.hub_card)


def save_with_shared_head(folder: Path, say) -> None:
    """
    Replace the drafter of a folder, whose vocabulary is reduced, by the same one with the target's head. Training did
    not change its rows of that head, so it drafts the same tokens, and rarely one of the others.
    """
    with without_bars():
        draft = DFlashDraftModel.from_pretrained(folder)
        with_shared_head(draft).save_pretrained(folder)
    say(
        f"shared head       all tokens are drafted, with the target's head; --share-head false keeps the "
        f"{draft.config.draft_vocab_size:,} of training, which SGLang does not serve"
    )


def _to_half_precision(draft, args):
    """A drafter, converted to half precision if a run trains in half precision."""
    if args.bf16:
        return draft.to(torch.bfloat16)
    if args.fp16:
        return draft.to(torch.float16)
    return draft
