"""
Training a drafter.

What a step computes: `objective.py`, from `anchors.py` (where blocks begin), `blocks.py` (inputs and labels),
`block_mask.py` (which keys a block sees), `block_attention.py` (dense attention in groups), `losses.py` and
`metrics.py`.

What a run does: `train.py`, from its data to a saved drafter, with `start.py` (the drafter that it starts from),
`trainer.py`, `callbacks.py`, `checkpoints.py`, `muon.py`, `adapters.py`, `features.py` and `held_out.py`.

What a run is told: `recipe.py` decides each setting, from `arguments.py` and `training_args.py` (the settings),
`presets.py` and `head_presets.py` (values that nobody names).
"""
