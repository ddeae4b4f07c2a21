"""
The engine: speculative decoding with a DFlash drafter, for any number of rows. Where to look:

- A call: `generate_hook` (how `generate` gets here), `call` (its models and arguments), `fallback` (why it decodes
  without the drafter), `settings` (what a user may set), `arguments` (what goes to the target's forwards).
- The loop: `loop.decode`. Draft, verify, accept, commit.
- Draft: `drafter` (blocks), `draft_context` (what the drafter has read), `trees` (draft trees).
- Draft length: `policies` (the interface, fixed lengths), `policy_choice`; `adaptive`, the default, with its `latency`
  model, `calibration` and `prompt_lookup`; `timing`.
- Verify: `session` (one forward of the target), `slots` (its cache), `masks`, `recurrent` (targets with a state),
  `probe` (what a target supports).
- Accept and commit: `acceptance`, `selection` (the caller's processors and criteria), `sampling_noise`, `state`.
- Speed: `packing` (weights laid out for the processor), `cpu_dtypes`, `graphs` (compiled forwards).

What belongs to one call. `decode` creates it, and nothing of it is shared with other calls:

- `GenerateCall` refers to the models and the caller's arguments, and owns nothing.
- `TokenSelector` owns the `SamplingNoise`: the draws that rows still need. At the end the noise rewinds the caller's
  generator to where decoding without a drafter would have left it.
- `GenerationState` owns the sequences.
- `SlotSession` owns the `SlotCache` of the target. It takes the keys and values out of the caller's cache, leaves that
  cache empty during the call, and writes them back in `close`.
- `Drafter` owns its `DraftContext`: the drafter's `SlotCache`, and features that the drafter has not read yet.
- `FeatureTap` owns its hooks on the target's layers, which do nothing outside of this call's forwards.
- `DraftPolicy` owns what it has learned in this call, until `finish`.

What outlives a call:

- `KeptContext`, the context of a finished call, lives as long as the cache that this call returned. The call that
  continues the cache takes the context over.
- Per model, as long as it lives: `TargetCapabilities` (what a probe found), `ModelGraphs` (compiled forwards), and
  what the default policy has learned: a `LatencyModel`, and `DraftStatistics` of acceptance.
"""
