"""
Text that a target writes itself: prompts, responses, whole data sets. Where to look:

- `regenerate` (`dflash regenerate`): responses to the prompts of a dataset. `tasks` makes a task of each row and a row
  of its responses; `chat_client` asks a server; `response_file` is the output, which survives a kill.
- `magpie` (`dflash prompts`): prompts that a chat model writes itself, or a base model begins. `beginnings`: those of
  given texts.
- `responses`: responses to prompts that are ids, for both. `continuous_batch` decodes them in rows that come and go,
  `prompt_queue` holds the prompts that wait, `sampling` chooses tokens.
"""
