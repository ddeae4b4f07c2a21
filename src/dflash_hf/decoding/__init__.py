"""
The engine: speculative decoding with a DFlash drafter, for any number of rows.

Throughout, `draft` is the drafter's *model*, as `target` is the target's; `draft_session` is what one call does with
it. `candidates` are the tokens of a round, a `Block` or a `Tree`; a *slot's* candidates are the tokens among which a
token head chooses (`TokenHead.candidates`). `indices` number the tokens of a row, see `slots`.

Counting. A round verifies the *anchor*, which is the last committed token, and the tokens that were *drafted* after
it, by the drafter or copied from the text:

- with the anchor: the candidates (`n`, `num_candidates`, `max_candidates`, `CandidateLimits`, `Tree.first`,
  `DraftPolicy.room`), and the tokens of a block (`block_tokens`, `max_block_tokens`, `decoding_config.block_size`);
- without it: drafts and their lengths (`num_drafted`, `max_draft`, `draft_sizes`, the `length` of `draft_block`), and
  the `nodes` that a tree is asked for (`tree_nodes`, `max_nodes`, `draft_tree`);
- what a round commits, `Acceptance.counts`: the accepted drafted tokens, and the target's own (bonus) token.

Shapes: `R` rows, `n` candidates of a round, `L` layers of features, `H` hidden size, `V` vocabulary size, `K` KV slots
that attention sees.

Where to look:

- A call: `generate_hook` (how `generate` gets here), `call` (its models and arguments), `fallback` (why it decodes
  without the drafter), `settings` (what a user may set), `arguments` (what goes to the target's forwards).
- The loop: `loop.decode`. Draft, verify, accept, commit.
- Draft: `draft_session` (blocks), `draft_context` (what the drafter has read), `trees` (draft trees).
- Draft length: `policies` (the interface, fixed lengths), `policy_choice`; `adaptive`, the default, with its `latency`
  model, `calibration` and `prompt_lookup`; `timing`.
- Verify: `session` (one forward of the target), `slots` (its cache), `attention` over them, `masks`, `recurrent`
  (targets with a state), `probe` (what a target supports).
- Accept and commit: `acceptance`, `row_lengths`, `selection` (the caller's processors and criteria), `sampling_noise`,
  `state`.
- Speed: `packing` (weights laid out for the processor), `cpu_dtypes`, `graphs` (compiled forwards), `cuda_graphs`.

What belongs to one call. `decode` creates it, and nothing of it is shared with other calls:

- `GenerateCall` refers to the models and the caller's arguments, and owns nothing.
- `TokenSelector` owns the `SamplingNoise`: the draws that rows still need. At the end the noise rewinds the caller's
  generator to where decoding without a drafter would have left it.
- `GenerationState` owns the sequences.
- `SlotSession` owns the `SlotCache` of the target. It takes the keys and values out of the caller's cache, leaves that
  cache empty during the call, and moves them back in `write_back`. Its `target` is a clone that shares all weights and
  attends to slots in its own way; the caller's target is not changed.
- `DraftSession` owns its `DraftContext`: the drafter's `SlotCache`, and features that the drafter has not read yet.
- `CallCudaGraphs` owns the graphs of both models, which hold addresses of the call's slots.
- `FeatureTap` owns its hooks on the target's layers, which do nothing outside of this call's forwards.
- `DraftPolicy` owns what it has learned in this call, until `finish`.

What outlives a call:

- `KeptContext`, the context of a finished call, lives as long as the cache that this call returned. The call that
  continues the cache takes the context over.
- Per model, as long as it lives: `TargetCapabilities` (what a probe found), `ModelGraphs` (compiled forwards), and
  what the default policy has learned: a `LatencyModel`, and `DraftStatistics` of acceptance.

Threads. Any number of calls may decode at once, with the same target and drafter: none changes weights, a
configuration or the caller's arguments. Module globals that calls share, and what guards them:

- Hooks on a target's modules (`targets.features._shared_hooks`): counted under a lock, so that they stay while any
  call needs them. For whom they work is in context variables (`targets.features`, `recurrent`): every thread has its
  own.
- `recurrent._stateful`: a lock. `probe._capabilities` and `graphs._graphs` need none, since results do not depend on
  who computes them; at worst the work is done twice. Dynamo compiles under a lock of its own.
- `draft_context.KEPT_CONTEXTS`: a lock. One call takes a kept context; another one that continues the same cache does
  without.
- `packing._packs` and `_owners`: a lock, and Dynamo's, for whoever packs or restores. Forwards read without it; a
  packed copy is replaced as a whole.
- What the default policy has learned: a call works on a copy, and writes at its end. If two end at once, the later
  write wins.
- Torch's generators: samples of calls in several threads draw from the same generator, as without a drafter. A call
  rewinds it only if no other code has used it meanwhile.

Precision. Forwards run in the dtype of their model. In fp32, whatever that dtype: logits for the caller's processors,
everything that sampling uses (probabilities and noise), draft logits with noise, log-probabilities in trees, and what
`modeling_dflash` lists. Greedy choices without processors take the argmax of the logits as they are. In an fp32 model
the output is the target's own. In bf16 and fp16 a forward over several tokens may round differently than one over a
single token, so that two logits which are nearly equal may change places.
"""
