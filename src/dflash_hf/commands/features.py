"""
`dflash features`: store the target's hidden features of a dataset, to train without the target's layers.

    dflash features --target Qwen/Qwen3-8B --data responses.jsonl --output features
    dflash train --target Qwen/Qwen3-8B --output-dir my-drafter --features features
"""

from dflash_hf._io.argument_types import layer_id, output_folder, positive
from dflash_hf._io.names import DTYPES
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands import shared
from dflash_hf.commands.pair import NamedPair


RESUME_HINT = "the same command continues after the last complete shard"


def add_arguments(parser) -> None:
    parser.add_argument("--target", required=True, help="the target: a folder or Hub name")
    shared.add_data(parser)
    shared.add_output(parser, "continued if it exists", output_folder, required=True)
    ids = "layers of the target, from 0; -1 is its embedding (default: five by the paper's rule)"
    parser.add_argument("--target-layer-ids", type=layer_id, nargs="+", metavar="N", help=ids)
    states = "also store final hidden states: for losses against the target's distribution"
    parser.add_argument("--states", action="store_true", help=states)
    shared.add_encoding(parser)
    shared.add_dtype(parser, DTYPES, "bfloat16", "--store-dtype", "of the features: ")
    parser.add_argument("--batch-size", type=positive, default=8, help="rows at a time (default: %(default)s)")
    shared.add_loading(parser, draft=False)


def run(arguments, echo) -> Outcome:
    """Store the features that the output folder does not have yet."""
    from dataclasses import replace

    from dflash_hf.data.examples import DFlashCollator
    from dflash_hf.data.prepare import prepare_dataset
    from dflash_hf.layouts.target_layers import fitting_target_layer_ids
    from dflash_hf.modeling.target_dflash import num_decoder_layers
    from dflash_hf.targets.frozen import freeze
    from dflash_hf.training.feature_manifest import manifest_of
    from dflash_hf.training.feature_store import store_features

    pair = NamedPair(arguments)
    # What the arguments name is read before the target, which takes the longest.
    encoder = shared.encoder_of(pair)
    rows = shared.rows_of(arguments)
    target = freeze(pair.target())
    encoder = replace(encoder, vocab_size=target.get_input_embeddings().weight.shape[0])
    layer_ids = arguments.target_layer_ids or fitting_target_layer_ids(num_decoder_layers(target.config), 5)
    made_with = manifest_of(target, arguments.target, layer_ids, encoder, arguments.store_dtype, arguments.states)
    data_options = {"num_proc": arguments.num_proc, "source": arguments.data, "conversations": True}
    dataset, report = prepare_dataset(rows, encoder, **data_options)
    for line in report.lines():
        echo(line)
    output = arguments.output
    options = {"batch_size": arguments.batch_size, "say": echo}
    collator = DFlashCollator(0, encoder.template.reader)
    manifest = store_features(target, dataset, output, made_with, **options, collator=collator)
    number = len(manifest.shards)
    shards = f"{number} shards" if number > 1 else f"{number} shard"
    echo(f"{manifest.examples} examples in {shards} are in {output}")
    facts = {"examples": manifest.examples, "tokens": report.tokens, "shards": len(manifest.shards)}
    return Outcome(facts={**facts, "layer_ids": layer_ids, "output": str(output)})
