"""One training step of other projects' own classes on a tiny target, and the files that they save."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch

from support.pairs import VOCAB


BLOCK = 4
LENGTH = 32
PROMPT = 6
IDS = [0, 1, 2]  # of which no project takes the final norm's output for the last layer's
GAMMA = 2.5
SIZES = {"num_hidden_layers": 3, "intermediate_size": 48}


class Batch(NamedTuple):
    """One row of training: token ids, loss mask, and what the target computes for them."""

    ids: torch.LongTensor  # [1, S]
    mask: torch.Tensor  # [1, S]
    features: torch.Tensor  # [1, S, L * H]
    states: torch.Tensor  # [1, S, H]  after the final norm
    logits: torch.Tensor  # [1, S, V]


class Step(NamedTuple):
    """A training step of another project: its drafter, and how its loss is computed."""

    draft: torch.nn.Module
    run: Callable[[], torch.Tensor]  # the loss
    anchors: tuple  # owner and name of what draws them: positions, which are valid
    divisor: Callable[[torch.BoolTensor, torch.Tensor], torch.Tensor] | None = None  # if not the slot weights


@torch.no_grad()
def make_batch(target) -> Batch:
    """A row of `LENGTH` random tokens, the first `PROMPT` without loss, and the target's outputs."""
    ids = torch.randint(2, VOCAB - 2, (1, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(1, LENGTH).index_fill_(1, torch.arange(PROMPT), 0.0)
    output = target(ids, output_hidden_states=True)
    features = torch.cat([output.hidden_states[i + 1] for i in IDS], dim=-1)
    return Batch(ids, mask, features, output.hidden_states[-1], output.logits)


def shaken(draft):
    """
    All weights away from where they start, so that every part matters; in fp64, in which only a fault makes a
    difference.
    """
    random = torch.Generator().manual_seed(7)
    draft.double()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.requires_grad and "verifier" not in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    return draft


def _qwen3(target, **more):
    fields = {**target.config.to_dict(), **SIZES, "layer_types": None, "max_window_layers": 3, **more}
    return type(target.config)(**fields)


def _step(trainer, draft, target, **more):
    """Of SpecForge's and Automodel's trainers, which are made alike."""
    models = draft, target.lm_head, target.get_input_embeddings()
    return trainer(*models, VOCAB - 1, BLOCK, attention_backend="sdpa", **more)


def speculators(target, batch, folder, kind, loss='{"kl_div": 1.0}', layers=None, selector=1.0, **fields):
    from speculators.losses import eager, resolve_loss_config
    from speculators.model import SpeculatorModel
    from speculators.models.dflash import core

    target.save_pretrained(folder / "target")
    draft = SpeculatorModel.registry[kind].from_training_args(
        _qwen3(target, **(layers or {})),
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        target_layer_ids=[i + 1 for i in IDS],
        verifier_name_or_path=str(folder / "target"),
        draft_attn_impl="eager",
        **fields,
    )
    draft = shaken(draft)
    draft.save_pretrained(folder / "draft")
    more = {} if kind == "dflash" else {"tv_loss_fn": eager.tv_loss}
    more |= {"selector_loss_alpha": selector} if kind == "dflash2" else {}

    def run():
        count = int(batch.mask[0, :-BLOCK].sum())
        norm = draft.verifier_norm
        draft.verifier_norm = torch.nn.Identity()  # the states of the batch are after it
        value = draft(
            batch.features,
            batch.ids,
            batch.mask,
            batch.states,
            torch.zeros_like(batch.ids),
            loss_config=resolve_loss_config(loss, "eager"),
            gamma=GAMMA,
            max_anchors=count,
            **more,
        )[1]
        draft.verifier_norm = norm
        return value

    return Step(draft, run, (core, "select_anchors"), lambda counted, weights: counted.sum())


def specforge(target, batch, folder, kind, layers=None, **fields):
    from specforge.algorithms.common import dflash_family_model as family
    from specforge.modeling.draft import dflash, domino, dspark

    model, trainer = {
        "dflash": (dflash.DFlashDraftModel, family.OnlineDFlashModel),
        "domino": (domino.DominoDraftModel, family.OnlineDominoModel),
        "dspark": (dspark.DSparkDraftModel, family.OnlineDSparkModel),
    }[kind]
    loss_type = fields.pop("loss_type", None)
    nested = {"target_layer_ids": IDS, "mask_token_id": VOCAB - 1, **fields}
    config = _qwen3(target, architectures=[model.__name__], block_size=BLOCK, num_target_layers=4, **(layers or {}))
    config.dflash_config = nested
    config._attn_implementation = "sdpa"
    draft = shaken(model(config))
    draft.save_pretrained(folder / "draft")
    more = {"shift_label": fields["shift_label"]} if kind == "domino" else {}
    more |= {} if loss_type is None else {"loss_type": loss_type}
    step = _step(trainer, draft, target, loss_decay_gamma=GAMMA, **more)
    last = {"dflash": (), "domino": (0.75,), "dspark": (batch.states,)}[kind]
    divisor = None if loss_type is None else (lambda counted, weights: torch.tensor(1.0))  # of the sequences
    return Step(
        draft,
        lambda: step(batch.ids, batch.features, batch.mask, *last)[0],
        (step, "_sample_anchor_positions"),
        divisor,
    )


def automodel(target, batch, folder, kind, selector=1.0, **fields):
    from nemo_automodel.components.speculative.dflash import (
        core,
        dflash2_core,
        domino_core,
        draft_qwen3,
        draft_qwen3_dflash2,
        jetspec_core,
    )

    config = draft_qwen3.build_qwen3_dflash_draft_config(
        target.config,
        num_draft_layers=3,
        num_target_layers=4,
        block_size=BLOCK,
        dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": IDS, **fields},
        attention_backend="sdpa",
    )
    model = draft_qwen3_dflash2.Qwen3DFlash2DraftModel if kind == "dflash2" else draft_qwen3.Qwen3DFlashDraftModel
    draft = shaken(model(config))
    draft.save_pretrained(folder / "draft")
    trainer, more = {
        "dflash": (core.DFlashTrainerModule, {"loss_decay_gamma": GAMMA}),
        "dflash2": (dflash2_core.DFlash2TrainerModule, {"loss_decay_gamma": GAMMA, "selector_loss_weight": selector}),
        "domino": (domino_core.DominoTrainerModule, {"loss_decay_gamma": GAMMA}),
        "jetspec": (jetspec_core.JetSpecTrainerModule, {}),
    }[kind]
    if kind == "domino":
        more = {**more, "shift_label": fields["shift_label"]}
    step = _step(trainer, draft, target, **more)
    last = {"domino": (0.75,), "jetspec": (batch.logits,)}.get(kind, ())
    run = lambda: step(batch.ids, batch.features, batch.mask, *last).loss  # noqa: E731
    return Step(draft, run, (step, "_sample_anchor_positions"))


def automodel_dspark(target, batch, folder, kind, **fields):
    from nemo_automodel.components.speculative.dspark import config as configs
    from nemo_automodel.components.speculative.dspark import core, draft_qwen3

    class Arguments(argparse.Namespace):
        def __contains__(self, name):
            return hasattr(self, name)

    arguments = {
        "num_draft_layers": 3,
        "target_layer_ids": IDS,
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "num_anchors": 64,
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        **fields,
    }
    config = configs.build_draft_config(target.config, Arguments(**arguments))
    config._attn_implementation = "sdpa"
    draft = draft_qwen3.Qwen3DSparkModel(config)
    draft.initialize_embeddings_and_head(embed_tokens=target.get_input_embeddings(), lm_head=target.lm_head)
    shaken(draft).save_pretrained(folder / "draft")
    step = core.DSparkTrainerModule(draft, loss_decay_gamma=GAMMA)
    run = lambda: step(batch.ids, batch.features, batch.mask, batch.states).loss  # noqa: E731
    return Step(draft, run, (draft_qwen3, "sample_anchor_positions"))


def modelopt(target, batch, folder, kind, loss=None, **fields):
    import copy

    import modelopt.torch.speculative as speculative
    from modelopt.torch.speculative.plugins import modeling_dflash

    architecture = {**SIZES, "target_layer_ids": IDS, "num_attention_heads": 4, "num_key_value_heads": 2}
    architecture |= {"head_dim": 8, **fields}
    if kind != "dflash":
        architecture["projector_type"] = kind
    settings = {
        "dflash_architecture_config": architecture,
        "dflash_block_size": BLOCK,
        "dflash_mask_token_id": VOCAB - 1,
        "dflash_loss_decay_factor": GAMMA,
        "dflash_loss_objective": "decay",
        "dflash_self_logit_distillation": False,
        **(loss or {}),
    }
    model = copy.deepcopy(target)
    speculative.convert(model, [("dflash", settings)])
    shaken(model.dflash_module)
    model.get_exporter().export(folder / "draft", dtype=torch.float64)
    model.train()
    rotary = modeling_dflash._ROTARY_CLS(model.dflash_config)
    model.dflash_module.rotary_emb = rotary  # built later with a `device`, which transformers 5.23 does not take
    if kind == "domino":
        model._lambda_base = 0.75

    def run():
        return model(input_ids=batch.ids, labels=torch.where(batch.mask > 0, batch.ids, -100)).loss

    return Step(model.dflash_module, run, (model, "_sample_anchor_positions"))
