"""Using a pair: a server and a chat."""
