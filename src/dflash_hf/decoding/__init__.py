"""
The engine: speculative decoding with a DFlash drafter, for any number of rows. Where to look:

- A call: `generate_hook` (how `generate` gets here), `call` (what its caller asked for), `fallback` (why it decodes
  without the drafter), `settings` (what a user may set), `arguments` (what goes to the target's forwards).
- The loop: `loop.decode`. Draft, verify, accept, commit.
- Draft: `drafter` (the drafter's context and its blocks), `trees` (draft trees).
- Draft length: `policies` (the interface, fixed lengths), `adaptive` (the default), `policy_choice`.
- Verify: `session` (one forward of the target), `slots` (its cache), `masks`, `recurrent` (targets with a state),
  `probe` (what a target can do).
- Accept and commit: `acceptance`, `selection` (the caller's processors and criteria), `sampling_noise`, `state`.
- Speed: `packing` (weights laid out for the processor), `graphs` (compiled forwards).
"""
