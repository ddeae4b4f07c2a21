"""What upstream's answers lack: log-probabilities, details of usage, why an answer was cut, the echoed prompt."""

import json
from collections.abc import AsyncIterator, Sequence

from fastapi.responses import JSONResponse, Response, StreamingResponse

from dflash_hf.serving.choices import merge_answers, merge_streams
from dflash_hf.serving.logprobs import LogProbs
from dflash_hf.serving.options import Options
from dflash_hf.serving.request import Request, RequestStatus
from dflash_hf.serving.stop_strings import text_before_stop


# An event of upstream's streams that contains one of these is completed here; others pass unchanged.
_COMPLETED_EVENTS = ('"usage":', 'data: {"error":')


class AnswerCompleter:
    """
    Completes upstream's answer for one choice, or the pieces of its stream.

    Args:
        request (`Request`): The request that is answered; it is finished when the last piece is completed.
        options (`Options`): What the body asks for.
        logprobs (`LogProbs`, *optional*): Has the log-probabilities of the answer, if they are asked for.
        echo (`str`): Text of the prompt that comes before the answer.
        is_responses (`bool`): Whether the answer is one of `/v1/responses`, whose streams end without `[DONE]`.
    """

    def __init__(
        self,
        request: Request,
        options: Options,
        logprobs: LogProbs | None = None,
        echo: str = "",
        is_responses: bool = False,
    ):
        self.request = request
        self.options = options
        self.logprobs = logprobs
        self.echo = echo
        self.is_responses = is_responses

    def complete_answer(self, answer: dict) -> dict:
        """An answer that is not streamed, with all details and without the stop string."""
        self._add_details(answer)
        choice = _first_choice(answer)
        texts = [(choice, "text"), (choice.get("message", {}), "content")]
        for item in answer.get("output", []):
            texts += [(part, "text") for part in item.get("content", [])]
        for holder, field in texts:
            if field in holder:
                holder[field] = text_before_stop(holder[field] or "", self.request.stop_strings)
        if self.echo:
            choice["text"] = self.echo + choice["text"]
        return answer

    async def complete_stream(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Upstream's stream, completed, with errors and the end as OpenAI's clients expect them."""
        async for text in events:
            if self.logprobs is None and not self.echo and not any(word in text for word in _COMPLETED_EVENTS):
                yield text
                continue
            for event in text.removesuffix("\n\n").split("\n\n"):
                for piece in self.complete_piece(json.loads(event.removeprefix("data: "))):
                    yield f"data: {json.dumps(piece)}\n\n"
        if not self.is_responses:
            yield "data: [DONE]\n\n"

    def complete_piece(self, piece: dict) -> list[dict]:
        """A piece of a stream, completed. If asked for, the usage is a piece of its own."""
        if isinstance(piece.get("error"), str):
            return [{"error": {"message": piece["error"], "type": "server_error"}}]
        self._add_details(piece)
        choice = _first_choice(piece)
        if self.echo and choice:  # before the first piece of text
            choice["text"] = self.echo + choice["text"]
            self.echo = ""
        wants_usage = bool((self.options.stream_options or {}).get("include_usage"))
        if choice and "usage" in piece and wants_usage:
            return [{**piece, "usage": None}, {**piece, "choices": []}]
        return [piece]

    def _add_details(self, answer: dict) -> None:
        """Add, in place, what an answer of upstream or a piece of its stream lacks."""
        response = answer.get("response", answer)  # an event of `/v1/responses` holds the response
        choice = _first_choice(response)
        if choice and self.logprobs is not None:
            entries = self.logprobs.pop_entries(is_chat="text" not in choice)
            if entries:
                choice["logprobs"] = entries
        if not response.get("usage"):  # only the last piece has one
            return
        self._add_usage_details(response["usage"])
        if self.request.status is RequestStatus.FINISHED_STOPPED:
            return
        if choice and self.options.forces_call:
            choice["finish_reason"] = "length"
        elif "output" in response:
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            if response is not answer:
                answer["type"] = "response.incomplete"

    def _add_usage_details(self, usage: dict) -> None:
        """Add how many tokens of the prompt were cached, and how many drafted ones were accepted."""
        request = self.request
        details = {
            "accepted_prediction_tokens": request.accepted,
            "rejected_prediction_tokens": request.drafted - request.accepted,
            "verifications": request.rounds,  # this and the next are not OpenAI's
            "verified_tokens": request.committed,
        }
        if "input_tokens" in usage:  # an answer of `/v1/responses`
            usage["input_tokens_details"] = {"cached_tokens": request.cached_tokens}
            usage["output_tokens_details"] = {**details, "reasoning_tokens": 0}
        else:
            usage["prompt_tokens_details"] = {"cached_tokens": request.cached_tokens}
            usage["completion_tokens_details"] = details


def _first_choice(answer: dict) -> dict:
    """The only choice of an answer of upstream; empty if it has none: a response, or a piece with usage only."""
    choices = answer.get("choices")
    return choices[0] if choices else {}


def merged_response(completers: Sequence[AnswerCompleter], responses: Sequence[Response], per_prompt: int) -> Response:
    """
    The completed answers of all choices, as one response.

    Args:
        completers (`Sequence[AnswerCompleter]`): One for each choice.
        responses (`Sequence[Response]`): Upstream's responses, in the same order: all streams, or none.
        per_prompt (`int`): Choices for each prompt.
    """
    is_single = len(completers) == 1
    pairs = list(zip(completers, responses, strict=True))
    if not isinstance(responses[0], StreamingResponse):
        answers = [completer.complete_answer(json.loads(response.body)) for completer, response in pairs]
        return JSONResponse(answers[0] if is_single else merge_answers(answers, per_prompt))
    streams = [completer.complete_stream(response.body_iterator) for completer, response in pairs]
    include_usage = bool((completers[0].options.stream_options or {}).get("include_usage"))
    responses[0].body_iterator = streams[0] if is_single else merge_streams(streams, per_prompt, include_usage)
    return responses[0]
