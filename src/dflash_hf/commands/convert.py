"""
`dflash convert`.

    dflash convert downloaded my-drafter
    dflash convert my-drafter for-transformers --to native
    dflash convert my-drafter half --dtype bfloat16 --share-head
    dflash convert my-drafter dflash-my-drafter.gguf --to gguf --target target.gguf --dtype f16
    dflash convert checkpoint.pt my-drafter --config config.json
"""

from dflash_hf.commands.shared import add_choice, add_revision
from dflash_hf.names import DTYPES, LAYOUTS, Q8
from dflash_hf.terminal import Outcome, UsageError, dtype, output_path, readable_file


def add_arguments(parser) -> None:
    parser.add_argument("draft", metavar="DRAFT", help="folder, Hub name, .gguf or .pt file of a drafter")
    parser.add_argument("output", metavar="OUTPUT", type=output_path, help="new folder, or .gguf file with --to gguf")
    add_choice(parser, "--to", LAYOUTS, "z-lab")
    parser.add_argument("--target", help="with --to gguf: the target, for its tokenizer; .gguf file, folder or name")
    known = f"{', '.join(DTYPES)}; in GGUF files {Q8} too (default: unchanged)"
    parser.add_argument("--dtype", type=dtype, choices=(*DTYPES, Q8), metavar="DTYPE", help=known)
    parser.add_argument("--share-head", action="store_true", help="replace a reduced vocabulary by the target's head")
    parser.add_argument("--config", type=readable_file, help="config.json of a .pt file (default: next to it)")
    add_revision(parser, of="the drafter's repository")


def run(arguments, echo) -> Outcome:
    import shutil
    from pathlib import Path

    from dflash_hf.configs import check_is_drafter, read_config
    from dflash_hf.convert import convert, is_file_name
    from dflash_hf.hub.card import FACTS_FILE
    from dflash_hf.repositories import check_revision

    what = f"DRAFT {arguments.draft}"
    if arguments.to == "gguf" and arguments.output.suffix != ".gguf":
        raise UsageError(f"OUTPUT {arguments.output} must end in .gguf with --to gguf.")
    if arguments.to != "gguf" and arguments.output.suffix == ".gguf":
        raise UsageError(f"OUTPUT {arguments.output} is a GGUF file: add --to gguf and --target, or name a folder.")
    if not is_file_name(arguments.draft):
        check_is_drafter(read_config(arguments.draft, what, arguments.revision), what)
    elif not Path(arguments.draft).is_file():
        raise FileNotFoundError(f"{what}: there is no such file; name a drafter's folder, repository or other file.")
    check_revision(arguments.draft, what, arguments.revision)
    if (arguments.to == "gguf") != (arguments.target is not None):
        raise UsageError("--to gguf needs --target, whose tokenizer the file contains; other layouts do not take it.")
    options = {"dtype": arguments.dtype, "share_head": arguments.share_head, "target": arguments.target}
    folder = convert(arguments.draft, arguments.output, arguments.to, arguments.config, arguments.revision, **options)
    facts = Path(arguments.draft) / FACTS_FILE
    if facts.is_file() and folder.is_dir():  # the card's facts about training
        shutil.copyfile(facts, folder / FACTS_FILE)
    echo(f"Wrote {folder} ({arguments.to}).")
    return Outcome(facts={"folder": str(folder), "layout": arguments.to})
