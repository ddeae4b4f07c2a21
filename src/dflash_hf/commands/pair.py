"""The target and drafter named on the command line: names are checked first, models are loaded when needed."""

from argparse import Namespace
from functools import cached_property

from dflash_hf._io.argument_types import template_arguments
from dflash_hf._io.errors import UsageError
from dflash_hf._io.terminal import note


DECODING_OPTIONS = ("compile", "cuda_graphs", "tree_nodes")  # options that are fields of a drafter's `decoding_config`


def take_default(arguments) -> None:
    """
    Use SmolLM2-135M-Instruct with its drafter if no pair is named.

    Raises:
        `UsageError`: a drafter without its target.
    """
    if arguments.target is not None:
        return
    if arguments.draft is not None:
        raise UsageError("--draft needs --target, the model that it drafts for.")
    from dflash_hf.smollm2 import drafter_folder, smollm2_folder

    arguments.target_name = "smollm2"
    arguments.target = str(smollm2_folder())
    arguments.draft = str(drafter_folder())
    note("SmolLM2-135M-Instruct with its drafter; choose another pair with --target and --draft.")


class NamedPair:
    """
    A target and its drafter from `--target` and `--draft`, with the devices, dtypes, revisions and template arguments
    given with them.

    Args:
        arguments (`argparse.Namespace`): From a command with [`~dflash_hf.commands.shared.add_loading`]; it may lack
            `draft`, `threads` and `chat_template`.

    Attributes:
        packed (`bool`): Whether `ready` has packed the weights.

    Raises:
        `ValueError`, `OSError`: as [`~dflash_hf.pairs.configs.check_pair_configs`]; also for a missing device.
    """

    def __init__(self, arguments):
        from dflash_hf.pairs.configs import check_pair_configs
        from dflash_hf.pairs.devices import available_device
        from dflash_hf.pairs.loading import Loading

        absent = {"draft": None, "threads": None, "chat_template": None, "target_name": None}
        self.arguments = arguments = Namespace(**{**absent, **vars(arguments)})
        self.packed = False
        self.loading = Loading.from_arguments(arguments)
        self.config = check_pair_configs(arguments.target, arguments.draft, self.loading)
        self.device = available_device(self.loading.device)
        if arguments.threads:
            import torch

            torch.set_num_threads(arguments.threads)

    @cached_property
    def tokenizer(self):
        from dflash_hf.pairs.tokenizers import load_tokenizer

        return load_tokenizer(
            self.arguments.target,
            self.arguments.chat_template,
            self.loading.revision,
            self.loading.trust_remote_code,
        )

    @cached_property
    def draft_config(self):
        """The drafter's configuration, without its weights; `None` if there is no drafter."""
        from dflash_hf.pairs.loading import load_draft_config

        return None if self.arguments.draft is None else load_draft_config(self.arguments.draft, self.loading)

    def template(self, default: dict | None = None) -> dict:
        """The arguments of the chat template: as given, else `default`, else those the drafter was trained with."""
        from dflash_hf.data.prompts import template_kwargs

        kwargs = template_arguments(self.arguments.template_args)
        return template_kwargs(default if kwargs is None else kwargs, draft_config=self.draft_config, say=note)

    @cached_property
    def image_reader(self):
        """Reads images as the target does; `None` for a target without images."""
        from dflash_hf.data.images import load_image_reader

        return load_image_reader(self.arguments.target, self.config, self.tokenizer, self.loading)

    def encoder(self, template: dict, mask_token_id: int | None = None):
        """Encodes rows for the target; rows that contain this mask token are left out."""
        from dflash_hf.data.encode import RowEncoder
        from dflash_hf.data.template import ChatTemplate
        from dflash_hf.targets.config_fields import stated_context_length

        options = {"context_length": stated_context_length(self.config), "mask_token_id": mask_token_id}
        return RowEncoder(ChatTemplate(self.tokenizer, template, self.image_reader), **options)

    def draft(self):
        """
        The drafter, with those [`DECODING_OPTIONS`] that the command has; `None` if none is named.

        Raises:
            `UsageError`: these options are given without a drafter.
            `ValueError`: it does not support them.
        """
        from dflash_hf.pairs.loading import load_draft

        settings = {name: value for name, value in vars(self.arguments).items() if name in DECODING_OPTIONS}
        if self.arguments.draft is None:
            if any(settings.values()):
                raise UsageError("--compile, --cuda-graphs and --tree-nodes need a drafter; pass --draft.")
            return None
        draft = load_draft(self.arguments.draft, self.loading, self.device)
        for name, value in settings.items():
            setattr(draft.decoding_config, name, value)
        draft.decoding_config.check(draft.config.max_block_tokens)
        return draft

    def target(self):
        """The target, in evaluation mode. A note says that it is being loaded, which may take minutes."""
        from dflash_hf.pairs.loading import load_target

        note(f"loading {self.arguments.target_name or self.arguments.target}")
        return load_target(self.arguments.target, self.loading, self.device)

    def ready(self) -> tuple:
        """
        Target and drafter, packed according to `--packed`. The target's capabilities are probed here, so that this is
        not part of an answer's time.
        """
        from dflash_hf.decoding.probe import capabilities_of
        from dflash_hf.pairs.packing_choice import pack_if_chosen

        draft = self.draft()
        target = self.target()
        self.packed = pack_if_chosen(self.arguments.packed, target, draft)
        if draft is not None:
            capabilities_of(target)
        return target, draft
