"""
`dflash convert`: convert a drafter to another layout, or to and from GGUF.

    dflash convert downloaded my-drafter
    dflash convert my-drafter for-transformers --to native
    dflash convert my-drafter half --dtype bfloat16 --share-head
    dflash convert my-drafter dflash-my-drafter.gguf --target target.gguf --dtype f16
"""

from dflash_hf._io.argument_types import dtype, output_path
from dflash_hf._io.names import DTYPES, OUTPUT_LAYOUTS, Q8
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands.shared import add_revision


def add_arguments(parser) -> None:
    parser.add_argument("draft", metavar="DRAFT", help="folder, Hub name or .gguf file of a drafter")
    parser.add_argument("output", metavar="OUTPUT", type=output_path, help="new folder, or a file that ends in .gguf")
    layouts = f"{', '.join(OUTPUT_LAYOUTS)} (default: gguf if OUTPUT ends in .gguf, else z-lab)"
    parser.add_argument("--to", choices=OUTPUT_LAYOUTS, metavar="TO", help=layouts)
    parser.add_argument("--target", help="for a .gguf file: the target, for its tokenizer; .gguf file, folder or name")
    dtypes = f"{', '.join(DTYPES)}; in GGUF files {Q8} too (default: unchanged)"
    parser.add_argument("--dtype", type=dtype, choices=(*DTYPES, Q8), metavar="DTYPE", help=dtypes)
    parser.add_argument("--share-head", action="store_true", help="replace a reduced vocabulary by the target's head")
    add_revision(parser, repository="the drafter's repository")


def run(arguments, echo) -> Outcome:
    import shutil
    from pathlib import Path

    from dflash_hf._io.names import FACTS_FILE
    from dflash_hf._io.repositories import check_revision, is_gguf
    from dflash_hf.conversion.convert import convert
    from dflash_hf.pairs.configs import check_is_drafter, read_config

    what = f"DRAFT {arguments.draft}"
    check_revision(arguments.draft, what, arguments.revision)
    if not is_gguf(arguments.draft):
        check_is_drafter(read_config(arguments.draft, what, arguments.revision), what)
    options = {"dtype": arguments.dtype, "share_head": arguments.share_head, "target": arguments.target}
    layout = arguments.to or ("gguf" if arguments.output.suffix == ".gguf" else "z-lab")
    folder = convert(arguments.draft, arguments.output, layout, arguments.revision, **options)
    facts = Path(arguments.draft) / FACTS_FILE
    if facts.is_file() and folder.is_dir():  # the card's facts about training
        shutil.copyfile(facts, folder / FACTS_FILE)
    echo(f"Wrote {folder} ({layout}).")
    return Outcome(facts={"folder": str(folder), "layout": layout})
