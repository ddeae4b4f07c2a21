"""
Answering requests with a pair, for an OpenAI-compatible server and for a chat in the terminal.

In the order of a request to the server:

- `server.py`: HTTP, and the steps from a body to a response.
- `bodies.py`, `options.py`, `messages.py`: what a body may ask for, and the checks that upstream does not make.
- `upstream.py`: from upstream's handlers to the decoder.
- `request.py`: a request, its states, and the answer to it so far.
- `decoder.py`: the thread that decodes; `prefix_caches.py`: the caches of earlier answers.
- `logprobs.py`, `grammars.py`, `stop_strings.py`, `token_bytes.py`: what a request may add to decoding.
- `answers.py`, `choices.py`: what upstream's answers lack.

`chat.py` and `pieces.py` are the chat, which submits its requests to a decoder of its own.
"""
