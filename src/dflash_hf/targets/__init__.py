"""
A target, without its drafter. Where to look:

- Its outputs: `features` (outputs of its layers, collected by hooks), `frozen` (forwards in training), `logits`,
  `generation` (single answers).
- What it is: `config_fields` (before it is loaded), `digests` (whether two models are the same), `mask_token`.
- Its modules: `clones` (models that share weights), `unsafe_hooks` (hooks of other code).
- `memory`: what is free on its device.
"""
