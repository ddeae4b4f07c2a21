"""
Answering requests with a pair, for an OpenAI-compatible server and for a chat in the terminal.

The way of a request to the server. Each line is a step, with the object that does it; every choice (one of `n`, for
one of the prompts) has its own manager, handler, request, streamer and completer.

    HTTP body
      |  Server._answer             server.py     the model's name; the response, or an error with its status
      |  BodyChecker                bodies.py     checks the body, and takes out what upstream would misread ...
      |    -> Options               options.py    ... which is kept here
      |  ChatHandler, ...           upstream.py   upstream's handler: from body to `input_ids` and GenerationConfig
      |    read_messages            messages.py   rejects parts of messages that the model cannot read
      |  ChoiceManager              upstream.py   completes these with the options, and submits the request
      v
    Request                         request.py    status, tokens, counts; the streamer of `generate`
      |  Decoder.submit             decoder.py    from here on in the thread that decodes
      |    _decode_single                         `generate`, with the drafter and a cache of PrefixCaches
      |    _decode_batch                          or continuous batching, together with other requests
      v
    tokens, one by one
      |  Request.put                request.py    ends at a stop string, or when it is aborted
      |  CompleteTextStreamer       upstream.py   a streamed answer: text for the queue of the handler
      |  Request.future             request.py    another answer: done when the request is finished
      v
    the handler's response
      |  AnswerCompleter            answers.py    log-probabilities, usage, the echoed prompt
      |  merged_response            answers.py    one response, of all choices with `choices.py`
      v
    HTTP response

The other files: `prefix_caches.py` has the caches of earlier answers; `logprobs.py`, `grammars.py`, `stop_strings.py`
and `token_bytes.py` are what a request may add to decoding.

`chat.py` and `pieces.py` are the chat, which submits its requests to a decoder of its own.
"""
