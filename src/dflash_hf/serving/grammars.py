"""Answers that follow a JSON schema."""

import json

from transformers import LogitsProcessor


class GrammarCompiler:
    """
    Compiles JSON schemas with XGrammar, if that is installed.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
    """

    def __init__(self, target, tokenizer):
        self.target = target
        self.tokenizer = tokenizer
        self.compiler = None  # made with the first schema

    def processor(self, schema: dict) -> LogitsProcessor:
        """
        A processor for one answer.

        Raises:
            `ValueError`: XGrammar is not installed, or does not take the schema.
        """
        try:
            import xgrammar
            from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor
        except ImportError as error:
            message = "response_format and a forced tool_choice are not supported without xgrammar; install it: "
            raise ValueError(f"{message}`pip install xgrammar`, or leave them out.") from error
        if self.compiler is None:
            ends = self.target.generation_config.eos_token_id
            vocab_size = self.target.config.get_text_config(decoder=True).vocab_size
            stops = {"stop_token_ids": ends} if ends is not None else {}
            tokenizer_info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=vocab_size, **stops)
            self.compiler = xgrammar.GrammarCompiler(tokenizer_info)
        try:
            return GrammarProcessor(self.compiler.compile_json_schema(json.dumps(schema)))
        except RuntimeError as error:
            raise ValueError(f"The JSON schema cannot be followed: {error}") from error
