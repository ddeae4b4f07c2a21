"""
Training a drafter.

A training step: `objective.py`, from `anchors.py` (where blocks begin), `blocks.py` (inputs and labels),
`block_mask.py` (which keys a block sees), `block_attention.py` (dense attention in groups), `losses.py` and
`metrics.py`.

A training run: `train.py`, from its data to a saved drafter, with `start.py` (the drafter that it starts from),
`held_out.py` (rows that are not trained on), `trainer.py` and `trainer_setup.py` (what the trainer checks first),
`callbacks.py`, `time_budget.py` and `interruption.py` (what a run reports, and when it ends), `checkpoints.py`,
`saving.py`, `trainer_card.py` (facts for the model card), `muon.py`, `adapters.py` and `nodes.py` (several processes).

Stored features: `row_features.py` (those that a run stores for itself), `feature_store.py` (writing them),
`feature_manifest.py` (from what they were made) and `features.py` (the dataset, and what reads it ahead).

Settings: `recipe.py` decides each one, in an order that stands there; `arguments.py` and `training_args.py` declare
them, `presets.py` and `head_presets.py` have values for those that the user leaves out.
"""
