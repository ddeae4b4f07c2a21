"""Several choices in one answer, to one prompt or to several."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence


def total_usage(usages: Sequence[dict], per_prompt: int) -> dict:
    """The sum of the usages of all choices. `per_prompt` consecutive ones share a prompt, which is counted once."""
    total: dict = {}
    for index, usage in enumerate(usages):
        for name, value in usage.items():
            # Only the first choice for a prompt counts its tokens.
            is_counted = index % per_prompt == 0 or not name.startswith(("prompt", "total"))
            if isinstance(value, dict):
                details = total.setdefault(name, dict.fromkeys(value, 0))
                for detail, count in value.items():
                    details[detail] += count if is_counted else 0
            else:
                total[name] = total.get(name, 0) + (value if is_counted else 0)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return total


def merge_answers(answers: Sequence[dict], per_prompt: int) -> dict:
    """One answer with the choices of all answers and the sum of their usage; it has the id and time of the first."""
    choices = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    usage = total_usage([answer["usage"] for answer in answers], per_prompt)
    return {**answers[0], "choices": choices, "usage": usage}


async def merge_streams(
    streams: Sequence[AsyncIterator[str]], per_prompt: int, include_usage: bool
) -> AsyncIterator[str]:
    """
    The events of several streams as they come, with the index of their choice; all end when one fails, or when nobody
    listens any more.
    """
    events: asyncio.Queue = asyncio.Queue()
    usages: list[dict] = [{} for _ in streams]

    async def read(index: int, stream: AsyncIterator[str]) -> None:
        try:
            async for text in stream:
                for event in text.removesuffix("\n\n").split("\n\n"):
                    await events.put((index, event.removeprefix("data: ")))
        except Exception as error:
            await events.put((index, json.dumps({"error": {"message": str(error), "type": "server_error"}})))
        await events.put((index, None))

    readers = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    open_streams = len(readers)
    piece: dict = {}
    try:
        while open_streams and "error" not in piece:
            index, event = await events.get()
            if event is None:
                open_streams -= 1
            elif event != "[DONE]":
                piece = json.loads(event)
                usages[index] = piece.pop("usage", None) or usages[index]
                for choice in piece.get("choices", ()):
                    choice["index"] = index
                if piece.get("choices") != []:
                    yield f"data: {json.dumps(piece)}\n\n"
        if include_usage and "error" not in piece:
            yield f"data: {json.dumps({**piece, 'choices': [], 'usage': total_usage(usages, per_prompt)})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        for reader in readers:
            reader.cancel()
