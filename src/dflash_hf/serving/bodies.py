"""The endpoints that answer, and the checks of a body that upstream's handlers do not make."""

from dataclasses import dataclass

from dflash_hf.serving.messages import check_items, check_length, check_strings, template_arguments_of
from dflash_hf.serving.options import Options
from dflash_hf.serving.upstream import ChatHandler, PairHandler, ResponsesHandler, TextHandler
from dflash_hf.targets.generation import context_length_of


@dataclass(frozen=True)
class Endpoint:
    """
    An endpoint of OpenAI's API.

    Args:
        path (`str`): Its path.
        input_field (`str`): The field of a body that it answers.
        handler (`type[PairHandler]`): The class of its handler.
    """

    path: str
    input_field: str
    handler: type[PairHandler]


CHAT = Endpoint("/v1/chat/completions", "messages", ChatHandler)
COMPLETIONS = Endpoint("/v1/completions", "prompt", TextHandler)
RESPONSES = Endpoint("/v1/responses", "input", ResponsesHandler)
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES)


class BodyChecker:
    """
    Checks the bodies of requests for one model.

    Args:
        target (`PreTrainedModel`): The model.
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Its tokenizer or processor.
        name (`str`): The model's id in the API.
    """

    def __init__(self, target, processor, name: str):
        self.processor = processor
        self.name = name
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.context_length: int | None = context_length_of(target)  # tokens
        self.num_embeddings: int = target.get_input_embeddings().weight.shape[0]

    def check_and_rewrite(self, endpoint: Endpoint, body: dict) -> Options:
        """
        Check a body, and rewrite it in place for upstream's handler: without the fields that upstream would misread,
        and without arguments that the chat template does not read; a limit of -1 becomes all that is left.

        Returns:
            [`~dflash_hf.serving.options.Options`]: The options of the body.

        Raises:
            `ValueError`: a field is missing, has a wrong value, or is not supported here.
        """
        check_strings(body)
        options = Options.from_body(body)
        if endpoint.input_field not in body:
            raise ValueError(f"The body has no {endpoint.input_field!r}, which {endpoint.path} answers.")
        if endpoint is RESPONSES and not isinstance(body["input"], str):
            check_items(body["input"])
        if endpoint is RESPONSES and (options.n or 1) > 1:
            raise ValueError(f"n={options.n} is not supported by /v1/responses; use a chat.")
        if options.echo and endpoint is not COMPLETIONS:
            raise ValueError("echo=True is for /v1/completions; leave it out.")
        if body.get("tools") and "tools" not in str(getattr(self.processor, "chat_template", None)):
            raise ValueError(f"The chat template of {self.name} does not support tools; leave `tools` out.")
        self._replace_open_limits(endpoint, body)
        self._check_token_ids(options)
        template_arguments = body.get("chat_template_kwargs")
        if template_arguments:
            body["chat_template_kwargs"] = template_arguments_of(self.processor, template_arguments)
        return options

    def check_length(self, endpoint: Endpoint, body: dict, options: Options) -> None:
        """
        Tokenizes what is long, which may take a while.

        Raises:
            `ValueError`: what upstream would read is much too long for the model.
        """
        prompts: list = []
        if endpoint is COMPLETIONS:
            prompts += [prompt for prompt in options.prompts if isinstance(prompt, str)]
        else:
            prompts.append([body.get(name) for name in ("messages", "input", "instructions", "tools")])
        for prompt in prompts:
            check_length(self.tokenizer, prompt, self.context_length)

    def _replace_open_limits(self, endpoint: Endpoint, body: dict) -> None:
        """
        Replace a limit of -1 by the context length. A limit of 0 is for completions, whose prompt can be scored.

        Raises:
            `ValueError`: a limit of 0 for another endpoint.
        """
        for name in ("max_tokens", "max_output_tokens"):
            limit = body.get(name)
            if limit == 0 and endpoint is not COMPLETIONS:
                raise ValueError(
                    f"{name}=0 leaves no room for an answer; give at least 1, or -1 for all that is left."
                )
            if limit == -1:
                del body[name]
                if self.context_length is not None:
                    body[name] = self.context_length

    def _check_token_ids(self, options: Options) -> None:
        """
        Raises:
            `ValueError`: an id of the prompt or of `logit_bias` is not the model's.
        """
        prompts = options.prompts if isinstance(options.prompt, list) else []
        ids_of_prompts: set[int] = set()
        for prompt in prompts:
            if isinstance(prompt, list):
                ids_of_prompts.update(prompt)
        for name, ids in (("prompt", ids_of_prompts), ("logit_bias", options.logit_bias or {})):
            unknown = [token for token in ids if not 0 <= token < self.num_embeddings]
            if unknown:
                raise ValueError(f"{name} has the token {unknown[0]}; the model's are 0 to {self.num_embeddings - 1}.")
